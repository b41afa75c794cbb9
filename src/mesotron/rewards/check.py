r"""`mesotron check`: does a reward pay for correct answers, and for nothing else?

The reward is called on the gold answers in several spellings and on cheats. What a cheat earns is a
share of what gold earns above the worst of them all.
"""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rich.table import Table

from mesotron.answers.facts import Judge
from mesotron.answers.formats import FORMATS
from mesotron.answers.verify import Verifier
from mesotron.config import RewardCheckConfig, RewardConfig
from mesotron.rewards.call import Reward, make_reward, word_ids
from mesotron.rewards.cheats import HOSTILE, Cheat, cheats, spellings
from mesotron.rewards.constant import explain_constant
from mesotron.rewards.own import MissingColumn, Scores
from mesotron.runs.console import SafeConsole, print_line
from mesotron.tasks.gym import OutOfTime, cpu_limit, regrade
from mesotron.tasks.load import load_task
from mesotron.tasks.problem import Problem, own_row, ranked

GOLD_FAILS = 0.05  # largest share of golds that may earn less than half of the reward
SLOW = 0.25  # seconds per completion
EQUAL = 1e-9  # a smaller spread inside a group is none
MORE = 0.1  # by which a wrong answer has to earn more than "shuffled gold" to be named again
GROUP = 8  # completions per prompt in the estimate of silent groups


@dataclass
class CheckResult:
    spelling: int = 0  # the number of the spelling that the reward pays best
    gold: float | None = None  # mean reward of the gold answers
    gold_failures: list[str] = field(default_factory=list)  # problems whose gold earns too little
    earned: dict[str, tuple[float, float]] = field(default_factory=dict)  # cheat: mean and share
    findings: list[str] = field(default_factory=list)  # a sentence for each problem; empty if sound
    unknown: str = ""  # why nothing can be said, if so
    seconds: float = 0.0  # per completion
    values: int = 0  # different rewards seen
    spread: float | None = None  # mean standard deviation inside groups of the model's samples
    silent: float | None = None  # share of those groups without a difference


@dataclass
class TimedReward:
    """Calls the reward within its limits and keeps count of the time."""

    reward: Reward
    limit: float
    seconds: float = 0.0
    calls: int = 0

    def __call__(
        self, texts: Sequence[str], problems: Sequence[Problem], truncated: bool = False
    ) -> Scores:
        """ValueError if the reward raises, OutOfTime if it takes too long."""
        golds = [problem.gold for problem in problems]
        cut = [truncated] * len(texts)

        # Ours, with limits of its own.
        judge = self.reward.judge
        columns = [problem.columns for problem in problems]
        facts = regrade(judge.judge(texts, golds, cut), texts, columns, judge.format)

        rows = [own_row(problem) for problem in problems]
        ids = [word_ids(text) for text in texts]
        began = time.perf_counter()
        with cpu_limit(self.limit * max(4, len(texts))):
            scores = self.reward(texts, ids, golds, cut, rows, facts)

        self.seconds += time.perf_counter() - began
        self.calls += len(texts)
        return scores


def check(
    reward: Reward,
    problems: Sequence[Problem],
    *,
    limit: float = 2.0,
    samples: Sequence[Sequence[str]] = (),
) -> CheckResult:
    """Call the reward on gold answers, cheats, hostile text and a model's samples."""
    result = CheckResult()
    call = TimedReward(reward, limit)

    try:
        check_gold(result, call, problems)
        check_cheats(result, call, problems)
    except MissingColumn:  # a mistake in the call, not in the reward
        raise
    except (ValueError, OutOfTime) as error:
        result.findings.append(describe_failure(error, "an ordinary answer", limit))
    else:
        result.findings += check_hostile(call, problems[:1])

    result.seconds = call.seconds / max(1, call.calls)
    is_known = any("CPU" in finding for finding in result.findings)
    if result.seconds > SLOW and not is_known:
        result.findings.append(f"one completion takes {result.seconds:.2g} s")

    if samples:
        check_samples(result, call, problems, samples)

    result.findings = list(dict.fromkeys(result.findings))
    return result


def check_gold(result: CheckResult, call: TimedReward, problems: Sequence[Problem]) -> None:
    """Find the spelling that the reward pays best, and the golds that earn too little in any."""
    with_gold = [problem for problem in problems if problem.gold]
    if not with_gold:
        return

    spelled = zip(*(spellings(problem.gold or "") for problem in with_gold), strict=True)
    by_spelling = [call(list(texts), with_gold) for texts in spelled]
    empty = call([""] * len(with_gold), with_gold)

    means = [mean_of(scores) for scores in by_spelling]
    result.gold = max(means)
    result.spelling = means.index(result.gold)

    enough = least_of_gold(result.gold, known_scores(empty, *by_spelling))
    for k, problem in enumerate(with_gold):
        best = max(known_scores([scores[k] for scores in by_spelling]), default=None)
        if best is None or best < enough:
            result.gold_failures.append(f"{problem.id} ({problem.gold!r:.40})")

    share = len(result.gold_failures) / len(with_gold)
    if share > GOLD_FAILS:
        first = result.gold_failures[0]
        result.findings.append(f"the gold answer earns nothing in {share:.0%} of rows: {first}")


def least_of_gold(gold: float, scores: Sequence[float]) -> float:
    """Half of the way from the lowest score to the mean of gold answers; any if there is none."""
    lowest = min(scores, default=0.0)
    return lowest + (gold - lowest) / 2 if gold > lowest else -math.inf


def check_cheats(result: CheckResult, call: TimedReward, problems: Sequence[Problem]) -> None:
    """What each cheat earns, and those that earn too much."""
    has_gold = result.gold is not None
    tried = [cheat for cheat in cheats(result.spelling) if has_gold or not cheat.needs_gold]
    other_problems = with_other_gold(problems)

    means: dict[str, float] = {}
    values = {round(result.gold, 9)} if result.gold is not None else set()
    for cheat in tried:
        texts = [cheat.write(problem, o) for problem, o in zip(problems, other_problems)]
        scores = call(texts, problems, cheat.truncated)
        means[cheat.name] = mean_of(scores)
        values.update(round(score, 9) for score in known_scores(scores))

    result.values = len(values)
    if result.values < 2:
        explain_equal_rewards(result, call, problems[0])
        return

    result.earned |= shares_earned(means, result.gold)
    if has_gold:
        result.findings += describe_cheats(tried, result.earned)
    elif means["very long"] > max(means["empty"], means["copied prompt"]):
        result.findings.append("length earns (very long beats the other texts)")


def shares_earned(means: dict[str, float], gold: float | None) -> dict[str, tuple[float, float]]:
    """Each mean, and its share of the way from the lowest to the gold answer's, or the highest."""
    worst = min(means.values())
    full = max(means.values()) if gold is None else gold

    earned = {}
    for name, mean in means.items():
        share = (mean - worst) / (full - worst) if full > worst else 1.0
        earned[name] = (mean, share)

    return earned


def explain_equal_rewards(result: CheckResult, call: TimedReward, problem: Problem) -> None:
    """Without a gold answer, equal rewards prove nothing: a right answer was never tried."""
    why = explain_constant(call, problem)
    if result.gold is None:
        result.unknown = why or ""
        return

    sentence = "it is constant: every answer gets the same"
    result.findings.append(f"{sentence}; {why}" if why else sentence)


def describe_cheats(tried: Sequence[Cheat], earned: dict[str, tuple[float, float]]) -> list[str]:
    """A sentence for each cheat that earns too much."""
    _, share_of_wrong = earned["shuffled gold"]
    findings = []
    for cheat in tried:
        _, share = earned[cheat.name]
        # What every wrong answer in the format gets is said once.

        if cheat.is_wrong:
            limit = max(cheat.limit, share_of_wrong + MORE)
        else:
            limit = cheat.limit

        if share > limit:
            findings.append(f"{cheat.about} ({cheat.name}: {share:.0%} of what gold gets)")

    return findings


def with_other_gold(problems: Sequence[Problem]) -> list[Problem]:
    """For each problem the next one with another gold; made up if all are alike."""
    found = []
    for k, problem in enumerate(problems):
        ring = (*problems[k + 1 :], *problems[:k])
        made_up = replace(problem, gold=f"{problem.gold}1")
        found.append(next((other for other in ring if other.gold != problem.gold), made_up))

    return found


def check_hostile(call: TimedReward, problems: Sequence[Problem]) -> list[str]:
    """The first failure of each kind on hostile text."""
    failures: dict[type, str] = {}
    for name, text in HOSTILE.items():
        try:
            call([text], problems)
        except (ValueError, OutOfTime) as error:
            kind = type(error.__cause__ or error)
            if kind not in failures:
                failures[kind] = describe_failure(error, f"the text of {name}", call.limit)

    return list(failures.values())


def check_samples(
    result: CheckResult,
    call: TimedReward,
    problems: Sequence[Problem],
    samples: Sequence[Sequence[str]],
) -> None:
    """The spread of the reward inside groups of a model's samples."""
    spreads = []
    for problem, texts in zip(problems, samples):
        scores = known_scores(call(texts, [problem] * len(texts)))
        spreads.append(statistics.pstdev(scores) if scores else 0.0)

    num_silent = sum(spread < EQUAL for spread in spreads)
    result.spread = statistics.fmean(spreads)
    result.silent = num_silent / len(spreads)


def describe_failure(error: BaseException, what: str, limit: float) -> str:
    if isinstance(error, OutOfTime):
        return f"it takes more than {limit:g} s of CPU time on {what}"
    return f"it fails on {what}: {error}"


def known_scores(*columns: Sequence[float | None]) -> list[float]:
    return [score for column in columns for score in column if score is not None]


def mean_of(scores: Sequence[float | None]) -> float:
    known = known_scores(scores)
    return statistics.fmean(known) if known else 0.0


def run(config: RewardCheckConfig) -> int:
    """`mesotron check`: 0 for a sound reward, 1 if a cheat earns, the reward fails or
    nothing can be said."""
    task = load_task(config.task)
    problems = ranked(task.train, config.seed)[: config.rows]
    settings = RewardConfig(parts=config.rewards, weights=config.weights)

    with Verifier() as verifier:
        judge = Judge(FORMATS[config.task.answer_format], verifier)
        reward = make_reward(settings, judge, config.max_tokens)

        if config.samples:
            samples = sample(config, problems, task.examples)
        else:
            samples = ()

        result = check(reward, problems, samples=samples)

    show(result, " + ".join(config.rewards), len(problems))
    return 1 if result.findings or result.unknown else 0


def sample(
    config: RewardCheckConfig, problems: Sequence[Problem], examples: Sequence[Problem]
) -> list[list[str]]:
    """A group of completions by the model for each problem."""
    from mesotron.config import ModelConfig
    from mesotron.models.load import load_model
    from mesotron.sampling.decode import generate
    from mesotron.tasks.prompts import render_prompts

    model, tokenizer = load_model(ModelConfig(name=config.model))
    size = config.samples
    prompts = render_prompts(problems, config.task, tokenizer, examples)
    completions = generate(
        model,
        tokenizer,
        [prompt for prompt in prompts for _ in range(size)],
        max_tokens=config.max_tokens,
        temperature=1.0,
        seed=config.seed,
    )

    texts = [completion.text for completion in completions]
    return [texts[start : start + size] for start in range(0, len(texts), size)]


def show(result: CheckResult, name: str, rows: int) -> None:
    console = SafeConsole()
    table = Table(box=None, pad_edge=False)
    table.add_column("answer", justify="left")
    table.add_column("mean reward", justify="right")
    table.add_column("of gold's", justify="right")

    if result.gold is not None and result.values > 1:
        table.add_row("gold", f"{result.gold:.3f}", "100%")

    for cheat, (mean, share) in result.earned.items():
        table.add_row(cheat, f"{mean:.3f}", f"{share:.0%}")

    if table.rows:  # else it failed at once, or is constant
        console.print(table)
        failed = len(result.gold_failures)
        milliseconds = result.seconds * 1e3
        print_line(
            console,
            f"{name} on {rows} rows: gold fails in {failed}, {milliseconds:.2g} ms a call",
        )
        print_line(console, describe_groups(result))

    for finding in result.findings:
        print_line(console, f"problem: {finding}")

    print_line(console, verdict_of(result))


def verdict_of(result: CheckResult) -> str:
    if result.findings:
        return "not sound: fix it before training"
    if result.unknown:
        return f"unknown: {result.unknown}"

    return "sound: no cheat earns"


def describe_groups(result: CheckResult) -> str:
    """How many groups give no signal: measured on samples, else expected."""
    if result.silent is not None:
        return (
            f"the model's groups: spread {result.spread:.3f}, silent {result.silent:.0%} (all "
            "rewards equal, nothing is learned from them)"
        )

    chances = [p**GROUP + (1 - p) ** GROUP for p in (0.05, 0.2, 0.5)]
    shown = ", ".join(f"{chance:.0%}" for chance in chances)
    return (
        f"silent groups of {GROUP} to expect where 5%, 20%, 50% of answers are right: {shown} "
        "(--samples measures it)"
    )
