"""`mesotron eval`: one table of greedy and sampled scores, what they say in words, transcripts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from mesotron.config import EvalConfig, ModelConfig, TrainConfig
from mesotron.rlvr.tasks.load import check_task
from mesotron.rlvr.train import needs_hub, set_library_variables
from mesotron.runs.hub import go_offline_without_network
from mesotron.runs.lines import check_writable

if TYPE_CHECKING:
    from mesotron.rlvr.evaluation.measure import EvalResult
    from mesotron.rlvr.evaluation.subject import Subject

SHOWN_PAIRS = 4


def run(config: EvalConfig) -> int:
    """Evaluate a model, and what it is compared with; print, and write JSON where asked."""
    check(config)
    asked = [config.model, *([config.against] if config.against else [])]
    settings = [TrainConfig(model=ModelConfig(name=name), task=config.task) for name in asked]
    set_library_variables(max(settings, key=needs_hub))  # one that needs the hub, if any does
    go_offline_without_network()
    from mesotron.rlvr.evaluation.subject import Subject, find_subject

    subject = find_subject(config.model)
    other = find_subject(config.against) if config.against else None
    if other is None and subject.start is not None:
        other = Subject(f"{subject.start.name} (start)", subject.start)
    subjects = [subject] if other is None else [other, subject]
    results = measure_all(subjects, config)
    show(results, Console())
    if config.out is not None:
        text = json.dumps([result.to_json() for result in results], indent=1, ensure_ascii=False)
        config.out.write_text(text + "\n", encoding="utf-8")
    return 0


def check(config: EvalConfig) -> None:
    """Refuse a task or an output file that cannot be used, before anything is loaded."""
    check_task(config.task)
    if config.out is not None:
        check_writable(config.out, "eval.json")


def measure_all(subjects: Sequence[Subject], config: EvalConfig) -> list[EvalResult]:
    """Evaluate each subject on the same problems."""
    from mesotron.optim.device import choose_device
    from mesotron.rlvr.answers.facts import Judge
    from mesotron.rlvr.answers.verify import Verifier
    from mesotron.rlvr.evaluation.measure import evaluate
    from mesotron.rlvr.tasks.load import load_task

    device = choose_device(config.device, config.threads)
    task = load_task(config.task)
    results = []
    total = len(subjects) * len(task.eval) * (1 + config.samples)
    with Verifier() as verifier, progress_bar(total) as advance:
        for subject in subjects:
            model, tokenizer = subject.load(device)
            result = evaluate(
                model,
                tokenizer,
                task.eval,
                config.task,
                examples=task.examples,
                name=subject.name,
                max_tokens=config.max_tokens,
                samples=config.samples,
                temperature=config.temperature,
                batch=config.batch,
                seed=config.seed,
                judge=Judge(task.format, verifier),
                progress=advance,
            )
            results.append(result)
    return results


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[int], None] | None]:
    """A bar of finished completions on stderr; nothing where there is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        job = bar.add_task("", total=total)
        yield lambda count: bar.advance(job, count)


def show(results: Sequence[EvalResult], console: Console) -> None:
    """The table of scores, the findings, and transcripts if there are two models."""
    from mesotron.rlvr.evaluation.transcripts import side_by_side

    if len(results) == 2:
        before, after = results
        table = side_by_side(
            before.transcripts, after.transcripts, SHOWN_PAIRS, (before.model, after.model)
        )
        console.print(table)
    console.print(score_table(results))
    for result in results:
        for sentence in result.findings:
            said = f"{result.model}: {sentence}" if len(results) > 1 else sentence
            console.print(said, soft_wrap=True, highlight=False, markup=False)


def score_table(results: Sequence[EvalResult]) -> Table:
    """Scores as rows, models as columns; the last column is the difference, problem by problem."""
    title = f"{results[0].problems} held-out problems, 95 % intervals over problems"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("")
    for result in results:
        table.add_column(result.model, justify="right")
    lines = [score_lines(result) for result in results]
    for name in lines[0]:
        table.add_row(name, *(line[name] for line in lines))
    if len(results) == 2:
        table.add_section()
        table.add_row("greedy gain", "", str(gain(*results)))
    return table


def score_lines(result: EvalResult) -> dict[str, str]:
    """What the table says of one model, by name."""
    greedy, sampled = result.greedy, result.sampled
    lines: dict[str, Any] = {
        "greedy, strict": greedy.strict,
        "greedy, lenient": greedy.lenient,
        **{f"  level {level}": score for level, score in greedy.by_level.items()},
        "greedy, in the format": f"{greedy.rates['facts/formatted']:.3f}",
        "greedy, cut off": f"{greedy.rates['facts/truncated']:.3f}",
        "greedy, mean tokens": f"{greedy.mean_tokens:.1f}",
    }
    if sampled is not None:
        at = f"T={sampled.temperature:g}"
        lines |= {f"pass@{k}, {at}": score for k, score in sampled.pass_at.items()}
        lines[f"pass@1 lenient, {at}"] = sampled.lenient
        lines[f"majority@{sampled.samples}, {at}"] = sampled.majority
        lines["problems with a signal"] = f"{sampled.mixed:.3f}"
    return {name: str(value) for name, value in lines.items()}


def gain(before: EvalResult, after: EvalResult) -> Any:
    """Greedy accuracy of the second less that of the first, over paired problems."""
    from mesotron.rlvr.evaluation.scores import bootstrap

    pairs = zip(before.transcripts, after.transcripts, strict=True)
    return bootstrap([float(new.correct) - float(old.correct) for old, new in pairs])
