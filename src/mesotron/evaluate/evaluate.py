"""Evaluation: greedy and sampled scores of a model on problems, and `mesotron eval`.

Strict means right in the requested format; lenient means right wherever the answer is found.
Torch is imported only when a model is loaded.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from mesotron.answers.facts import Facts, Judge, summarise
from mesotron.answers.formats import FORMATS
from mesotron.answers.verify import Verifier
from mesotron.config import EvalConfig, ModelConfig, RewardConfig, TaskConfig
from mesotron.config.base import from_plain
from mesotron.evaluate import scores
from mesotron.evaluate.scores import Score, Transcript, bootstrap, pass_at_k, powers_of_two, wilson
from mesotron.models.library import set_library_variables
from mesotron.models.names import check_name
from mesotron.rewards.call import Reward, check_reward, is_own, make_reward
from mesotron.runs import newest_whole
from mesotron.runs.console import SafeConsole, print_line
from mesotron.runs.files import check_writable
from mesotron.runs.process import go_offline_without_network
from mesotron.runs.resume import run_of
from mesotron.tasks.gym import regrade
from mesotron.tasks.load import check_task, load_task
from mesotron.tasks.problem import Problem, own_row
from mesotron.tasks.prompts import build_prompt, plain_text, render

if TYPE_CHECKING:
    import torch

    from mesotron.sampling.decode import Completion
    from mesotron.sampling.tools import Toolbox

SHOWN_PAIRS = 4
# Smaller differences are not worth a sentence even if they are significant.
MIN_GAP = 0.03
MANY_TRUNCATED = 0.05


@dataclass(frozen=True)
class Greedy:
    strict: Score | None  # None without gold answers
    lenient: Score | None
    by_level: dict[str, Score]  # strict accuracy by level of difficulty, where problems have one
    rates: dict[str, float]  # facts/parsed, facts/formatted and so on, as in training
    mean_tokens: float
    reward: Score | None = None  # mean of the user's own rewards


@dataclass(frozen=True)
class Sampled:
    samples: int
    temperature: float
    pass_at: dict[int, Score]  # strict pass@k for k = 1, 2, 4, ..., samples
    lenient: Score  # lenient pass@1
    majority: Score  # strict accuracy of the most frequent answer
    mixed: float  # share of problems with both right and wrong samples: those that give a gradient
    rates: dict[str, float]
    mean_tokens: float


@dataclass(frozen=True)
class EvalResult:
    model: str
    problems: int
    greedy: Greedy
    sampled: Sampled | None
    findings: list[str]  # gaps between the numbers that mislead, in words; empty if there are none
    transcripts: list[Transcript]  # the greedy completion of every problem
    measure: Literal["accuracy", "reward"] = "accuracy"  # which of the two is the result

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def evaluate(
    model: Any,
    tokenizer: Any,
    problems: Sequence[Problem],
    task: TaskConfig,
    *,
    examples: Sequence[Problem] = (),
    name: str = "model",
    max_tokens: int = 256,
    samples: int = 8,
    temperature: float = 1.0,
    batch: int | None = None,
    seed: int = 0,
    judge: Judge | None = None,
    progress: Callable[[int], None] | None = None,
    reward: Reward | None = None,
    toolbox: Toolbox | None = None,
) -> EvalResult:
    """Evaluate a model on problems.

    Args:
        model: a causal language model; set to evaluation mode and back.
        tokenizer: its tokenizer.
        problems: such as `load_task(task).eval`.
        task: format, system prompt and few-shot examples of the prompts.
        examples: `Task.examples`, if the task has few-shot examples.
        name: name of the model in the result.
        max_tokens: longest completion.
        samples: sampled completions per problem beside the greedy one; 0 for greedy only.
        temperature: of the samples.
        batch: completions generated at once; None: what fits into memory.
        seed: of the samples and the bootstrap.
        judge: checks answers; None makes one for the task's format.
        progress: called with the number of completions just finished.
        reward: also the mean of this; it is the result if there is no gold answer, or if all its
            parts are the user's own.
        toolbox: what the model may call.

    Returns:
        Scores with 95% intervals over problems, findings, and every greedy transcript.
    """
    if not problems:
        raise ValueError("there is no problem to evaluate on: raise --task.num-eval above 0")
    from mesotron.sampling.decode import generate

    has_gold = any(problem.gold is not None for problem in problems)
    by_reward = reward is not None and (not has_gold or (bool(task.data) and is_own(reward.config)))
    samples = samples if has_gold else 0
    chats = [build_prompt(p, task, FORMATS[task.format], examples) for p in problems]
    prompts = [render(chat, tokenizer) for chat in chats]
    was_training = model.training
    model.eval()

    how: dict[str, Any] = {
        "max_tokens": max_tokens,
        "batch": batch,
        "progress": progress,
    }
    if toolbox is None:
        greedy = generate(model, tokenizer, prompts, **how)
    else:
        greedy = toolbox.play(
            model,
            tokenizer,
            chats,
            [own_row(p) for p in problems],
            **how,
        )

    repeated = [prompt for prompt in prompts for _ in range(samples)]
    sampled = generate(
        model,
        tokenizer,
        repeated,
        temperature=temperature,
        seed=seed,
        **how,
    )

    model.train(was_training)
    with ExitStack() as stack:
        judge = judge or Judge(FORMATS[task.format], stack.enter_context(Verifier()))
        facts = _judge(judge, greedy, problems)
        repeated = [problem for problem in problems for _ in range(samples)]

        sampled_facts = _judge(judge, sampled, repeated)
        for k, (f, one) in enumerate(zip(sampled_facts, sampled, strict=True)):
            # A grid or a sentence is compared as text and has no key, but can have a majority.
            text = judge.format.extract(one.text, complete=not one.truncated)
            sampled_facts[k] = replace(f, answer=f.answer or (text and " ".join(text.split())))

    rewards: Sequence[float | None] = [None] * len(problems)
    if reward is not None:
        shown = chats if tokenizer.chat_template else map(plain_text, chats)
        rows = [{**own_row(p), "prompt": one} for p, one in zip(problems, shown, strict=True)]
        texts = [one.text for one in greedy]
        ids = [one.ids for one in greedy]
        truncated = [one.truncated for one in greedy]
        golds = [p.gold for p in problems]

        rewards = reward(
            texts,
            ids,
            golds,
            truncated,
            rows,
            facts,
        )

    greedy_scores = score_greedy(
        greedy,
        facts,
        problems,
        rewards,
        seed,
    )

    sampled_scores = None
    findings: list[str] = []

    strict = greedy_scores.strict.value if greedy_scores.strict else 0.0
    if greedy_scores.lenient and not by_reward:
        findings += describe_format(strict, greedy_scores.lenient.value)

    cut, bad = (greedy_scores.rates[f"facts/{x}"] for x in ("truncated", "gold_unparseable"))
    limit = f"greedy: {cut:.1%} of the completions hit the token limit: raise --max-tokens"
    broken = f"{bad:.1%} of the gold answers cannot be read and count as wrong: fix the data"
    findings += [limit] * (cut > MANY_TRUNCATED) + [broken] * (bad > 0)

    if samples:
        sampled_scores = score_sampled(
            sampled,
            sampled_facts,
            samples,
            temperature,
            seed,
        )

        # Paired by problem, so that the noise of problems cancels.
        gaps = []
        for k, one in enumerate(facts):
            group = sampled_facts[k * samples : (k + 1) * samples]
            gaps.append(float(one.correct) - sum(f.correct for f in group) / samples)

        mean = sampled_scores.pass_at[1].value
        findings += describe_temperature(bootstrap(gaps, seed), strict, mean, temperature)

    transcripts = []
    for p, completion, f, earned in zip(
        problems,
        greedy,
        facts,
        rewards,
        strict=True,
    ):
        shown = earned if by_reward else None
        verdict = (f.answer, f.correct, f.correct_unformatted, f.truncated, shown)
        transcripts.append(
            Transcript(
                p.id,
                p.question,
                p.gold,
                completion.text,
                *verdict,
            )
        )

    return EvalResult(
        name,
        len(problems),
        greedy_scores,
        sampled_scores,
        findings,
        transcripts,
        "reward" if by_reward else "accuracy",
    )


def _judge(
    judge: Judge, completions: Sequence[Completion], problems: Sequence[Problem]
) -> list[Facts]:
    texts = [completion.text for completion in completions]
    truncated = [completion.truncated for completion in completions]
    facts = judge.judge(texts, [problem.gold for problem in problems], truncated)

    return regrade(facts, texts, [problem.columns for problem in problems], judge.format)


def score_greedy(
    completions: Sequence[Completion],
    facts: Sequence[Facts],
    problems: Sequence[Problem],
    rewards: Sequence[float | None] = (),
    seed: int = 0,
) -> Greedy:
    levels: dict[str, list[bool]] = {}
    for problem, fact in zip(problems, facts, strict=True):
        if problem.level is not None:
            levels.setdefault(str(problem.level), []).append(fact.correct)

    has_gold = any(problem.gold is not None for problem in problems)
    earned = [reward for reward in rewards if reward is not None]

    return Greedy(
        strict=wilson(sum(fact.correct for fact in facts), len(facts)) if has_gold else None,
        lenient=wilson(sum(map(_lenient, facts)), len(facts)) if has_gold else None,
        by_level={level: wilson(sum(ok), len(ok)) for level, ok in sorted(levels.items())},
        rates=summarise(list(facts)),
        mean_tokens=sum(len(one.ids) for one in completions) / len(completions),
        reward=bootstrap(earned, seed) if earned else None,
    )


def score_sampled(
    completions: Sequence[Completion],
    facts: Sequence[Facts],
    samples: int,
    temperature: float,
    seed: int,
) -> Sampled:
    groups = [facts[i : i + samples] for i in range(0, len(facts), samples)]
    right = [sum(fact.correct for fact in group) for group in groups]
    majority = [scores.majority_right([(f.answer, f.correct) for f in group]) for group in groups]
    passed = {k: [pass_at_k(samples, c, k) for c in right] for k in powers_of_two(samples)}

    return Sampled(
        samples=samples,
        temperature=temperature,
        pass_at={k: bootstrap(shares, seed) for k, shares in passed.items()},
        lenient=bootstrap([sum(map(_lenient, group)) / samples for group in groups], seed),
        majority=bootstrap(majority, seed),
        mixed=sum(0 < c < samples for c in right) / len(groups),
        rates=summarise(list(facts)),
        mean_tokens=sum(len(one.ids) for one in completions) / len(completions),
    )


def _lenient(fact: Facts) -> bool:
    return fact.correct or fact.correct_unformatted


def describe_temperature(
    gap: Score, greedy: float, sampled: float, temperature: float
) -> list[str]:
    if abs(gap.value) < MIN_GAP or gap.low <= 0 <= gap.high:
        return []

    pass_1 = f"pass@1 at temperature {temperature:g} is {sampled:.1%}"
    if gap.value > 0:
        return [
            f"greedy accuracy is {greedy:.1%}, {pass_1}: compare models under one of the two only; "
            "training at this temperature optimizes the lower number"
        ]

    text = "greedy completions may repeat themselves; read a few transcripts"
    return [f"{pass_1}, greedy accuracy only {greedy:.1%}: {text}"]


def describe_format(strict: float, lenient: float) -> list[str]:
    if lenient - strict < MIN_GAP:
        return []

    return [
        f"greedy: {lenient - strict:.1%} of the answers are correct but not in the format "
        f"({strict:.1%} strict, {lenient:.1%} lenient): reward the format, or teach it first with "
        "mesotron sft"
    ]


# What is evaluated.


@dataclass(frozen=True)
class Subject:
    """A model to evaluate: a run, a checkpoint, a model folder or a model's name."""

    name: str
    model: ModelConfig
    adapter: Path | None = None  # folder with LoRA weights to merge into the model
    start: ModelConfig | None = None  # the model that the run started from; None if not a run
    template: Mapping[str, Any] = field(default_factory=dict)  # variables of the chat template

    def load(self, device: torch.device) -> tuple[Any, Any]:
        from mesotron.models.load import load_model

        # A run on a GPU may have had another precision.
        own = replace(self.model, dtype="float32") if device.type == "cpu" else self.model
        model, tokenizer = load_model(own, device)
        tokenizer.template_kwargs = self.template
        if self.adapter is None:
            return model, tokenizer
        from peft import get_peft_model

        from mesotron.models.adapters import load_adapter
        from mesotron.models.adapters import lora_config

        lora = lora_config(self.model)  # as the run made it: no other file is believed
        if lora is None:
            raise ValueError(f"{self.adapter} has LoRA weights, but the run has --model.lora 0")

        wrapped: Any = get_peft_model(model, lora)
        load_adapter(wrapped, self.adapter)

        # Merged into rounded weights, a small update would be lost.
        merged = wrapped.merge_and_unload() if self.model.load == "full" else wrapped
        return merged.eval(), tokenizer


def find_subject(name: str) -> Subject:
    """Resolve a run folder, a checkpoint in one, a model folder, or a model's name."""
    path = Path(name).expanduser()
    if name.rstrip("/") == "runs/last" and not path.exists():
        raise ValueError("there is no run in runs/last: make one with mesotron train, or name it")

    run = run_of(name)
    if run is None:
        check_name(name)
        return Subject(name, ModelConfig(name=name))

    checkpoint = path
    if not path.name.startswith("checkpoint-"):
        newest, damaged = newest_whole(run.checkpoints)
        if newest is None:
            why = "; ".join(damaged) or "none yet"
            raise ValueError(f"{name} has no complete checkpoint: {why}")

        checkpoint = newest.path

    config = run.config
    source = str(run.path / "config.json")
    if not isinstance(config.get("task"), Mapping) or not isinstance(config.get("model"), Mapping):
        raise ValueError(f"{run.path} is not a run of a language model: {source} has no task")

    start = from_plain(ModelConfig, config["model"], source)
    trl = dict(item.split("=", 1) for item in config.get("trl") or ())
    template = json.loads(trl.get("chat_template_kwargs", "{}"))
    if (checkpoint / "adapter_config.json").is_file():
        return Subject(name, start, checkpoint, start, template)

    return Subject(
        name,
        replace(start, name=str(checkpoint)),
        None,
        start,
        template,
    )


# mesotron eval


def run(config: EvalConfig) -> int:
    check_task(config.task)
    rewards = RewardConfig(parts=config.reward) if config.reward else None
    if rewards is not None:
        check_reward(rewards)

    if config.out is not None:
        check_writable(config.out, "eval.json")

    models = [config.model, *([config.against] if config.against else [])]
    set_library_variables(config.task, *models)
    go_offline_without_network()
    subject = find_subject(config.model)

    other = find_subject(config.against) if config.against else None
    if other is None and subject.start is not None:
        name = f"{subject.start.name} (start)"
        other = replace(
            subject,
            name=name,
            model=subject.start,
            adapter=None,
        )

    subjects = [subject] if other is None else [other, subject]
    from mesotron.optim.device import choose_device, use_one_thread_if_small

    device = choose_device(config.device, config.threads)
    task = load_task(config.task)
    if rewards is None and task.eval and all(one.gold is None for one in task.eval):
        raise ValueError(f"{config.task.title} has no gold answers: give the --reward to average")

    names = ("max_tokens", "samples", "temperature", "batch", "seed")
    options: dict[str, Any] = {name: getattr(config, name) for name in names}
    options["examples"], results = task.examples, []
    total = len(subjects) * len(task.eval) * (1 + config.samples)
    which = " and ".join(each.name for each in subjects)
    print(f"evaluating {which} on {len(task.eval)} problems", file=sys.stderr, flush=True)

    with Verifier() as verifier, _progress_bar(total) as advance:
        judge = Judge(task.format, verifier)
        options |= {"judge": judge, "progress": advance}

        if rewards is not None:
            options["reward"] = make_reward(rewards, judge, config.max_tokens)

        for subject in subjects:
            model, tokenizer = subject.load(device)
            use_one_thread_if_small(model, device, config.threads)
            options["name"] = subject.name

            results.append(
                evaluate(
                    model,
                    tokenizer,
                    task.eval,
                    config.task,
                    **options,
                )
            )

    show(results, SafeConsole())
    if config.out is not None:
        text = json.dumps([result.to_json() for result in results], indent=1, ensure_ascii=False)
        config.out.write_text(text + "\n", encoding="utf-8")

    return 0


@contextmanager
def _progress_bar(total: int) -> Iterator[Callable[[int], None] | None]:
    if not sys.stderr.isatty():
        yield None
        return

    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=SafeConsole(stderr=True), transient=True) as bar:
        job = bar.add_task("", total=total)
        yield lambda count: bar.advance(job, count)


def show(results: Sequence[EvalResult], console: Console) -> None:
    if len(results) == 2:
        before, after = results
        both = (before.transcripts, after.transcripts)
        names = (before.model, after.model)
        console.print(scores.side_by_side(*both, SHOWN_PAIRS, names))

    console.print(score_table(results))
    for result in results:
        for sentence in result.findings:
            line = f"{result.model}: {sentence}" if len(results) > 1 else sentence
            print_line(console, line)


def score_table(results: Sequence[EvalResult]) -> Table:
    title = f"{results[0].problems} held-out problems, 95% intervals over problems"
    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )

    table.add_column("")
    for result in results:
        table.add_column(result.model, justify="right")

    columns = [_score_column(result) for result in results]
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))

    if len(results) == 2:
        pairs = zip(*(result.transcripts for result in results), strict=True)
        changes = scores.changes_of(pairs, results[0].measure)
        table.add_section()
        table.add_row("greedy gain", "", str(bootstrap(changes)) if changes else "unknown")

    return table


def _score_column(result: EvalResult) -> dict[str, str]:
    greedy = result.greedy
    sampled = result.sampled
    means = {
        "mean reward": greedy.reward,
        "strict": greedy.strict,
        "lenient": greedy.lenient,
    }

    rows: dict[str, Any] = {
        **{f"greedy, {name}": score for name, score in means.items() if score},
        **{f"  level {level}": score for level, score in greedy.by_level.items()},
        "greedy, in the format": f"{greedy.rates['facts/formatted']:.3f}",
        "greedy, truncated": f"{greedy.rates['facts/truncated']:.3f}",
        "greedy, mean tokens": f"{greedy.mean_tokens:.1f}",
    }
    if sampled is not None:
        at = f"T={sampled.temperature:g}"
        rows |= {f"pass@{k}, {at}": score for k, score in sampled.pass_at.items()}
        rows[f"pass@1 lenient, {at}"] = sampled.lenient
        rows[f"majority@{sampled.samples}, {at}"] = sampled.majority
        rows["problems with mixed samples"] = f"{sampled.mixed:.3f}"

    return {name: str(value) for name, value in rows.items()}
