"""`mesotron eval`: a model against the one it started from, or against another."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from mesotron.answers.facts import Judge
from mesotron.answers.verify import Verifier
from mesotron.config import EvalConfig, RewardConfig
from mesotron.evaluate.evaluate import evaluate
from mesotron.evaluate.result import Evaluation
from mesotron.evaluate.scores import bootstrap
from mesotron.evaluate.subject import Subject, find_subject
from mesotron.evaluate.transcripts import changes_of, side_by_side
from mesotron.models.variables import set_library_variables
from mesotron.rewards.call import check_reward, make_reward
from mesotron.runs.console import SafeConsole, print_line
from mesotron.runs.files import check_writable
from mesotron.runs.process import go_offline_without_network
from mesotron.runs.resume import environments_of, eval_defaults
from mesotron.tasks.load import check_task, load_task
from mesotron.tasks.problem import Task

PAIRS_SHOWN = 4


def run(config: EvalConfig) -> int:
    check_environments(config)
    check_task(config.task)
    parts = config.reward or (("environment",) if config.task.env else ())
    rewards = RewardConfig(parts=parts) if parts else None
    if rewards is not None:
        check_reward(rewards)

    if config.out is not None:
        check_writable(config.out, "eval.json")

    if config.against:
        models = [config.model, config.against]
    else:
        models = [config.model]

    set_library_variables(config.task, *models)
    go_offline_without_network()

    subjects = find_subjects(config)
    for subject in subjects:
        subject.say_which()
    if was_chosen_here(subjects[-1], config):
        print("these problems chose it: its score on them is a little too high", file=sys.stderr)

    results = evaluate_all(subjects, config, rewards)

    show(results, SafeConsole())
    if config.out is not None:
        write_json(results, config.out)

    return 0


def check_environments(config: EvalConfig) -> None:
    """Refuse a run of environments that are neither given nor known as the user's own."""
    names = environments_of(config.model)
    if names and not config.task.env and not config.task.data:
        raise ValueError(
            f"{config.model} names environments: {', '.join(names)}; look at them, then give --env "
            f"{' '.join(names)}"
        )


def was_chosen_here(subject: Subject, config: EvalConfig) -> bool:
    """Whether the problems are those by which the run chose this checkpoint among others."""
    record = subject.chosen.record if subject.chosen is not None else None
    if record is None or record["evaluations"] < 2:
        return False

    return config.task == eval_defaults(config.model).task


def find_subjects(config: EvalConfig) -> list[Subject]:
    """The model, after the one it is compared with: as given, or the start of the run."""
    subject = find_subject(config.model)

    if config.against:
        other = find_subject(config.against)
    else:
        other = subject.at_start("start")

    return [subject] if other is None else [other, subject]


def evaluate_all(
    subjects: Sequence[Subject], config: EvalConfig, rewards: RewardConfig | None
) -> list[Evaluation]:
    from mesotron.optim.device import choose_device, use_one_thread_if_small

    device = choose_device(config.device, config.threads)
    task = load_task(config.task)
    if rewards is None:
        check_gold(task, config)

    names = " and ".join(subject.name for subject in subjects)
    print(f"evaluating {names} on {len(task.eval)} problems", file=sys.stderr, flush=True)

    results = []
    num_completions = len(subjects) * len(task.eval) * (1 + config.samples)
    with Verifier() as verifier, progress_bar(num_completions) as progress:
        judge = Judge(task.format, verifier)
        reward = None
        if rewards is not None:
            reward = make_reward(rewards, judge, config.max_tokens)

        for subject in subjects:
            model, tokenizer = subject.load(device)
            use_one_thread_if_small(model, device, config.threads)

            with environments(config, tokenizer) as turns:
                result = evaluate(
                    model,
                    tokenizer,
                    task.eval,
                    config.task,
                    name=subject.name,
                    examples=task.examples,
                    max_tokens=config.max_tokens,
                    samples=config.samples,
                    temperature=config.temperature,
                    seed=config.seed,
                    judge=judge,
                    reward=reward,
                    toolbox=turns,
                    progress=progress,
                )

            results.append(result)

    return results


@contextmanager
def environments(config: EvalConfig, tokenizer: Any) -> Iterator[Any]:
    """What plays the environments of a config; None without one."""
    if not config.task.env:
        yield None
        return

    from mesotron.sampling.turns import TurnSampler

    with closing(TurnSampler(config.task.env, tokenizer, config.task.system)) as turns:
        yield turns


def check_gold(task: Task, config: EvalConfig) -> None:
    if task.eval and all(problem.gold is None for problem in task.eval):
        raise ValueError(f"{config.task.title} has no gold answers: give the --reward to average")


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[int], None] | None]:
    """A bar that advances by a number of completions; None where there is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return

    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=SafeConsole(stderr=True), transient=True) as bar:
        job = bar.add_task("", total=total)
        yield lambda count: bar.advance(job, count)


def write_json(results: Sequence[Evaluation], path: Path) -> None:
    plain = [result.to_json() for result in results]
    text = json.dumps(plain, indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


# What is printed


def show(results: Sequence[Evaluation], console: Console) -> None:
    if len(results) == 2:
        before, after = results
        names = (before.model, after.model)
        table = side_by_side(before.transcripts, after.transcripts, PAIRS_SHOWN, names)
        console.print(table)

    console.print(score_table(results))

    for result in results:
        for sentence in result.findings:
            if len(results) > 1:
                line = f"{result.model}: {sentence}"
            else:
                line = sentence

            print_line(console, line)


def score_table(results: Sequence[Evaluation]) -> Table:
    table = Table(
        title=f"{results[0].problems} held-out problems, 95% intervals over problems",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("")
    for result in results:
        table.add_column(result.model, justify="right")

    columns = [score_column(result) for result in results]
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))

    if len(results) == 2:
        table.add_section()
        table.add_row("greedy gain", "", greedy_gain(*results))

    return table


def greedy_gain(before: Evaluation, after: Evaluation) -> str:
    pairs = zip(before.transcripts, after.transcripts, strict=True)
    changes = changes_of(pairs, before.measure)

    return str(bootstrap(changes, signed=True)) if changes else "unknown"


def score_column(result: Evaluation) -> dict[str, str]:
    """The rows of one model, by their names."""
    greedy = result.greedy
    rows: dict[str, str] = {}

    means = {
        "mean reward": greedy.reward,
        "strict": greedy.strict,
        "lenient": greedy.lenient,
    }
    for name, score in means.items():
        if score is not None:
            rows[f"greedy, {name}"] = str(score)

    for level, score in greedy.by_level.items():
        rows[f"  level {level}"] = str(score)

    rows["greedy, in the format"] = f"{greedy.rates['facts/formatted']:.3f}"
    rows["greedy, truncated"] = f"{greedy.rates['facts/truncated']:.3f}"
    rows["greedy, mean tokens"] = f"{greedy.mean_tokens:.1f}"

    sampled = result.sampled
    if sampled is not None:
        at = f"T={sampled.temperature:g}"
        for k, score in sampled.pass_at.items():
            rows[f"pass@{k}, {at}"] = str(score)

        means = {
            "mean reward": sampled.reward,
            "pass@1 lenient": sampled.lenient,
            f"majority@{sampled.samples}": sampled.majority,
        }
        for name, score in means.items():
            if score is not None:
                rows[f"{name}, {at}"] = str(score)

        rows["problems with mixed samples"] = f"{sampled.mixed:.3f}"

    return rows
