r"""`mesotron reward check`: does a reward pay for correct answers, and for nothing else?

The reward is called on the gold answers in several spellings and on cheats: answers that any policy
could learn to give without solving the problem. What a cheat earns is a share of what gold earns
above the worst of them all.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.table import Table

from mesotron.answers.facts import Judge
from mesotron.answers.formats import FORMATS
from mesotron.answers.verify import Verifier
from mesotron.config import RewardCheckConfig, RewardConfig
from mesotron.rewards.call import MissingColumn, Reward, make_reward
from mesotron.runs.console import SafeConsole, print_line
from mesotron.tasks.gym import OutOfTime, cpu_limit, regrade
from mesotron.tasks.load import load_task
from mesotron.tasks.problem import Problem, digest, own_row

EARNS = 0.3  # a cheat earns if it gets more than this share of gold's reward
FORMAT_EARNS = 0.5  # the same for wrong answers in the format, which may pay a little
GOLD_FAILS = 0.05  # largest share of golds that may earn less than half of the reward
SLOW = 0.25  # seconds per completion
NOISE = "I cannot solve this. "
GROUP = 8  # completions per prompt in the estimate of silent groups


@dataclass(frozen=True)
class Probe:
    """One kind of completion for every problem."""

    name: str
    write: Callable[[Problem, Problem], str]  # of a problem and one with another gold
    limit: float = EARNS
    truncated: bool = False
    about: str = ""


def _spellings(gold: str) -> tuple[str, ...]:
    boxed = FORMATS["boxed"].render(gold)
    return (
        boxed,
        f"The answer is {boxed}.",
        f"<think>\nLet me see.\n</think>\n{boxed}",
        f"<think>\nLet me see.\n</think>\n<answer>{gold}</answer>",
        f"<reasoning>\nLet me see.\n</reasoning>\n<answer>\n{gold}\n</answer>\n",
        FORMATS["answer"].render(gold),
        FORMATS["hashes"].render(gold),
        f"The answer is {gold}.",
        gold,
    )


def cheats(spelling: int) -> tuple[Probe, ...]:
    """Cheats in the spelling of the gold that the reward pays best."""

    def write(gold: str) -> str:
        return _spellings(gold)[spelling]

    def first_half(problem: Problem, _: Problem) -> str:
        text = write(problem.gold or "")
        return text[: len(text) // 2]

    def spam(problem: Problem, other: Problem) -> str:
        golds = [other.gold or "", *map(str, range(20)), problem.gold or "", other.gold or ""]
        return "\n".join(write(gold) for gold in golds)

    return (
        Probe("empty", lambda p, o: "", about="an empty answer earns"),
        Probe("copied prompt", lambda p, o: p.question, about="copying the prompt earns"),
        Probe(
            "format only",
            lambda p, o: write(""),
            FORMAT_EARNS,
            about="the format without an answer earns",
        ),
        Probe(
            "shuffled gold",
            lambda p, o: write(o.gold or ""),
            FORMAT_EARNS,
            about="wrong answers in the format earn: the format is worth more than correctness",
        ),
        Probe("truncated", first_half, truncated=True, about="an answer that was cut off earns"),
        Probe(
            "number at the end",
            lambda p, o: f"{NOISE}It is on page {p.gold}",
            about="the last number of any text earns",
        ),
        Probe("answer list", spam, about="a list of many answers earns"),
        Probe(
            "list in one answer",
            lambda p, o: write(", ".join([o.gold or "", p.gold or "", "0", "1", "2", "3"])),
            about="a list of many answers earns",
        ),
        Probe("very long", lambda p, o: NOISE * 400, about="length earns"),
        Probe(
            "long and wrong",
            lambda p, o: NOISE * 400 + write(o.gold or ""),
            FORMAT_EARNS,
            about="length earns",
        ),
    )


# Text that a policy writes sooner or later: it must neither raise nor take long.
HOSTILE = {
    "Unicode": "𝟏𝟐 ½ ² ٧٢ 北京 🙂\u200d🙂 \u202eabc\u202c é \x00 \ufffd",
    "spaces": " " * 4000 + "x",
    "letters": "a" * 4000 + "!",
    "digits": "1" * 4000 + "x",
    "numbers": "1,1 " * 1000 + "x",
    "brackets": "(" * 1500 + "{" * 1500,
    "boxes": r"\boxed{" * 500,
    "tags": "<think>\n" * 500 + "<answer>" * 500,
    "lines": "a\n" * 2000,
}


@dataclass
class Outcome:
    spelling: str = ""
    gold: float | None = None  # mean reward of the gold answers
    gold_failures: list[str] = field(default_factory=list)  # problems whose gold earns too little
    earned: dict[str, tuple[float, float]] = field(default_factory=dict)  # cheat: mean and share
    findings: list[str] = field(default_factory=list)  # a sentence for each problem; empty if sound
    seconds: float = 0.0  # per completion
    values: int = 0  # different rewards seen
    spread: float | None = None  # mean standard deviation inside groups of the model's samples
    silent: float | None = None  # share of those groups without a difference


@dataclass
class Caller:
    """Calls the reward within its limits and keeps count of the time."""

    reward: Reward
    limit: float
    seconds: float = 0.0
    calls: int = 0

    def __call__(
        self, texts: Sequence[str], problems: Sequence[Problem], truncated: bool = False
    ) -> list[float | None]:
        """ValueError if the reward raises, OutOfTime if it takes too long."""
        rows = [own_row(problem) for problem in problems]
        ids = [[digest(word) % 50_000 for word in text.split()[:20_000]] for text in texts]
        golds = [problem.gold for problem in problems]
        cut = [truncated] * len(texts)
        judge = self.reward.judge
        columns = [problem.columns for problem in problems]

        # Ours, with limits of its own.
        facts = regrade(judge.judge(texts, golds, cut), texts, columns, judge.format)
        began = time.perf_counter()

        with cpu_limit(self.limit * max(4, len(texts))):
            scores = self.reward(
                texts,
                ids,
                golds,
                cut,
                rows,
                facts,
            )

        self.seconds += time.perf_counter() - began
        self.calls += len(texts)

        return scores


def check(
    reward: Reward,
    problems: Sequence[Problem],
    *,
    limit: float = 2.0,
    samples: Sequence[Sequence[str]] = (),
) -> Outcome:
    """Call the reward on gold answers, cheats, hostile text and a model's samples."""
    outcome = Outcome()
    call = Caller(reward, limit)

    found = outcome.findings
    try:
        _check_gold(outcome, call, problems)
        _check_cheats(outcome, call, problems)
    except MissingColumn:  # a mistake in the call, not in the reward
        raise
    except (ValueError, OutOfTime) as error:
        found.append(_failure(error, "an ordinary answer", limit))
    else:
        failures: dict[type, str] = {}  # of each kind one
        for name, text in HOSTILE.items():
            try:
                call([text], problems[:1])
            except (ValueError, OutOfTime) as error:
                kind = type(error.__cause__ or error)
                failures.setdefault(kind, _failure(error, f"the text of {name}", limit))

        found += failures.values()

    outcome.seconds = call.seconds / max(1, call.calls)
    if outcome.seconds > SLOW and not any("CPU" in one for one in found):
        found.append(f"one completion takes {outcome.seconds:.2g} s")

    if samples:
        groups = [call(texts, [p] * len(texts)) for p, texts in zip(problems, samples)]
        scored = [[score for score in group if score is not None] for group in groups]
        spreads = [statistics.pstdev(group) if group else 0.0 for group in scored]
        outcome.spread = statistics.fmean(spreads)
        outcome.silent = sum(spread < 1e-9 for spread in spreads) / len(spreads)

    outcome.findings = list(dict.fromkeys(found))
    return outcome


def _failure(error: BaseException, what: str, limit: float) -> str:
    if isinstance(error, OutOfTime):
        return f"it takes more than {limit:g} s of CPU time on {what}"
    return f"it fails on {what}: {error}"


def _mean(scores: Sequence[float | None]) -> float:
    known = [score for score in scores if score is not None]
    return statistics.fmean(known) if known else 0.0


def _check_gold(outcome: Outcome, call: Caller, problems: Sequence[Problem]) -> None:
    with_gold = [problem for problem in problems if problem.gold]
    if not with_gold:
        return

    spelled = zip(*(_spellings(problem.gold or "") for problem in with_gold), strict=True)
    columns = [call(list(texts), with_gold) for texts in spelled]
    best = max(range(len(columns)), key=lambda k: _mean(columns[k]))
    outcome.spelling = str(best)
    outcome.gold = _mean(columns[best])
    empty = call([""] * len(with_gold), with_gold)
    lowest = min((s for column in (*columns, empty) for s in column if s is not None), default=0.0)

    half = lowest + (outcome.gold - lowest) / 2
    for k, problem in enumerate(with_gold):
        scores = [score for column in columns if (score := column[k]) is not None]
        if not scores or (max(scores) < half and outcome.gold > lowest):
            outcome.gold_failures.append(f"{problem.id} ({problem.gold!r:.40})")

    share = len(outcome.gold_failures) / len(with_gold)
    if share > GOLD_FAILS:
        first = outcome.gold_failures[0]
        outcome.findings.append(f"the gold answer earns nothing in {share:.0%} of rows: {first}")


def _check_cheats(outcome: Outcome, call: Caller, problems: Sequence[Problem]) -> None:
    others = []  # for each problem one with another gold; made up if all are alike
    for k, problem in enumerate(problems):
        ring = (*problems[k + 1 :], *problems[:k])
        other = next((o for o in ring if o.gold != problem.gold), None)
        others.append(other or replace(problem, gold=f"{problem.gold}1"))

    probes = cheats(int(outcome.spelling or 0))
    if outcome.gold is None:  # without gold only cheats that need none
        probes = tuple(p for p in probes if p.name in ("empty", "copied prompt", "very long"))

    means: dict[str, float] = {}
    values: set[float] = set() if outcome.gold is None else {round(outcome.gold, 9)}
    for probe in probes:
        texts = [probe.write(p, o) for p, o in zip(problems, others)]
        scores = call(texts, problems, probe.truncated)
        means[probe.name] = _mean(scores)
        values |= {round(score, 9) for score in scores if score is not None}

    outcome.values = len(values)
    if outcome.values < 2:
        outcome.findings.append("it is constant: every answer gets the same")
        return

    worst = min(means.values())
    full = outcome.gold if outcome.gold is not None else max(means.values())
    for probe in probes:
        share = (means[probe.name] - worst) / (full - worst) if full > worst else 1.0
        outcome.earned[probe.name] = means[probe.name], share

        # What every wrong answer in the format gets is found once.
        known = outcome.earned.get("shuffled gold", (0.0, 0.0))[1] + 0.1
        is_known = probe.name in ("answer list", "list in one answer", "long and wrong")
        if outcome.gold is not None and share > (max(probe.limit, known * is_known)):
            found = f"{probe.about} ({probe.name}: {share:.0%} of what gold gets)"
            outcome.findings.append(found)

    if outcome.gold is None and means["very long"] > max(means["empty"], means["copied prompt"]):
        outcome.findings.append("length earns (very long beats the other texts)")


def run(config: RewardCheckConfig) -> int:
    """`mesotron reward check`: 0 for a sound reward, 1 if a cheat earns or the reward fails."""
    task = load_task(config.task)
    ranked = sorted(task.train, key=lambda problem: digest(problem.question, config.seed))
    problems = ranked[: config.rows]

    settings = RewardConfig(parts=config.rewards, weights=config.weights)
    with Verifier() as verifier:
        judge = Judge(FORMATS[config.task.format], verifier)
        reward = make_reward(settings, judge, config.max_tokens)
        samples = _sample(config, problems, task.examples) if config.samples else ()
        outcome = check(reward, problems, limit=config.limit, samples=samples)

    show(outcome, " + ".join(config.rewards), len(problems))
    return 1 if outcome.findings else 0


def _sample(
    config: RewardCheckConfig, problems: Sequence[Problem], examples: Sequence[Problem]
) -> list[list[str]]:
    from mesotron.config import ModelConfig
    from mesotron.models.load import load_model
    from mesotron.sampling.decode import generate
    from mesotron.tasks.prompts import render_prompts

    model, tokenizer = load_model(ModelConfig(name=config.model))
    prompts = render_prompts(problems, config.task, tokenizer, examples)
    repeated = [prompt for prompt in prompts for _ in range(config.samples)]
    how: dict[str, Any] = {"max_tokens": config.max_tokens, "temperature": 1.0}

    texts = [
        one.text
        for one in generate(
            model,
            tokenizer,
            repeated,
            seed=config.seed,
            **how,
        )
    ]

    n = config.samples
    return [texts[k : k + n] for k in range(0, len(texts), n)]


def show(outcome: Outcome, name: str, rows: int) -> None:
    console = SafeConsole()
    table = Table(box=None, pad_edge=False)
    for column in ("answer", "mean reward", "of gold's"):
        table.add_column(column, justify="left" if column == "answer" else "right")

    if outcome.gold is not None:
        table.add_row("gold", f"{outcome.gold:.3f}", "100%")

    for cheat, (mean, share) in outcome.earned.items():
        table.add_row(cheat, f"{mean:.3f}", f"{share:.0%}")

    lines = []
    if table.rows:  # else it failed at once
        console.print(table)
        failed = len(outcome.gold_failures)
        lines.append(
            f"{name} on {rows} rows: gold fails in {failed}, {outcome.seconds * 1e3:.2g} ms a call"
        )

    if table.rows and outcome.silent is not None:
        lines.append(
            f"the model's groups: spread {outcome.spread:.3f}, silent {outcome.silent:.0%} (all "
            "rewards equal, nothing is learned from them)"
        )
    elif table.rows:
        chances = ", ".join(f"{p**GROUP + (1 - p) ** GROUP:.0%}" for p in (0.05, 0.2, 0.5))
        lines.append(
            f"silent groups of {GROUP} to expect where 5%, 20%, 50% of answers are right: "
            f"{chances} (--samples measures it)"
        )

    lines += [f"problem: {found}" for found in outcome.findings]
    lines.append(
        "not sound: fix it before training" if outcome.findings else "sound: no cheat earns"
    )

    for line in lines:
        print_line(console, line)
