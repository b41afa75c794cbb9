"""The greedy evaluations before and after a run, and the Markdown report that compares them."""

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mesotron.config import TrainConfig
from mesotron.evaluate.scores import Score, bootstrap
from mesotron.evaluate.transcripts import (
    Transcript,
    changes_of,
    describe_changes,
    pair_up,
    shorten,
    side_by_side,
    verdict,
)
from mesotron.rlvr import pocket
from mesotron.runs import RunFolder
from mesotron.runs.console import print_line, spell_time
from mesotron.runs.files import Row
from mesotron.runs.folder import run_name
from mesotron.runs.markdown import fill_template, make_table, training_table
from mesotron.watch.diagnosis import diagnose_run
from mesotron.watch.engine import Monitor, merge_history

PAIRS_SHOWN = 4
CURVES = ("reward", "facts/correct", "facts/formatted", "facts/correct_unformatted", "entropy")


def compare(before: Row, after: Row) -> Row:
    """What changed, over paired problems; takes two `Evaluation.to_json()`. Without gold answers
    and without a reward of the user's own there is no number."""
    measure = after.get("measure", "accuracy")
    result = {
        "problems": after["problems"],
        "measure": measure,
        "findings": after["findings"],
    }

    earlier = {one.id: one for one in transcripts(before)}
    pairs = [(earlier[one.id], one) for one in transcripts(after)]
    changes = changes_of(pairs, measure)
    first = main_score(before)
    last = main_score(after)
    if not changes or first is None or last is None:
        return result

    result |= {"before": first, "after": last, "gain": asdict(bootstrap(changes, signed=True))}
    if before["greedy"]["lenient"]:
        result |= compare_answers(before, after, pairs)

    return result


def compare_answers(before: Row, after: Row, pairs: Sequence[tuple[Transcript, Transcript]]) -> Row:
    """Lenient accuracy, and how many problems were gained and lost."""
    changes = [(old.correct, new.correct) for old, new in pairs]
    return {
        "lenient": {"before": before["greedy"]["lenient"], "after": after["greedy"]["lenient"]},
        "gained": changes.count((False, True)),
        "lost": changes.count((True, False)),
    }


def main_score(result: Row) -> Row | None:
    """Value and interval of an `Evaluation.to_json()`: its accuracy, or its mean reward."""
    is_by_reward = result.get("measure") == "reward"
    return result["greedy"]["reward" if is_by_reward else "strict"]


def show(before: Row, after: Row, result: Row, console: Console) -> None:
    old = transcripts(before)
    new = transcripts(after)
    console.print(side_by_side(old, new, PAIRS_SHOWN))

    if result["measure"] == "accuracy" and "gain" in result:
        changes = describe_changes(old, new)
        if len(old) > PAIRS_SHOWN:
            changes += f"; above, {PAIRS_SHOWN} typical problems in these proportions"

        print_line(console, changes)

    if "gain" in result:
        title = f"{headline(result)}, 95% intervals"
        table = Table("", "before", "after", "gain", title=title)
        for row in score_rows(result):
            table.add_row(*row)

        console.print(table)

    for sentence in result["findings"]:
        console.print(f"note: {sentence}", soft_wrap=True, markup=False)


def write_report(run: RunFolder, config: TrainConfig, before: Row, after: Row, result: Row) -> str:
    rows = run.rows("metrics")
    environment = run.environment
    old = transcripts(before)
    new = transcripts(after)

    seconds = sum(row.get("time/step", 0.0) for row in rows)
    formatted = [one["greedy"]["rates"].get("facts/formatted", 0.0) for one in (before, after)]

    return fill_template(
        Path(__file__).with_name("report.md.j2"),
        name=run_name(config),
        config=config,
        rollout=config.rollout,
        rate=pocket.spell_rate(config.optim.lr, run.load(pocket.NAME)),
        command=shlex.join(environment.get("command", [])),
        rows=rows,
        spent=spell_time(seconds),
        device=environment.get("device", "an unknown device"),
        headline=headline(result),
        scores=score_table(result),
        by_accuracy="gain" in result and result["measure"] == "accuracy",
        formatted=formatted,
        findings=result["findings"],
        best=best_lines(result["best"], result, config.steps) if "best" in result else [],
        curves=curve_lines(rows),
        watch=watch_lines(rows, run.rows("events")),
        changes=describe_changes(old, new),
        pairs=pair_up(old, new, PAIRS_SHOWN),
        verdict=verdict,
        shorten=shorten,
        indented=indented,
    )


def headline(result: Row) -> str:
    if "gain" not in result:
        return "No result: neither gold answers nor a reward of your own"

    if result.get("measure") == "reward":
        what = "Mean reward"
    else:
        what = "Greedy accuracy"

    number = result["problems"]
    problems = "problem" if number == 1 else "problems"
    return f"{what} on {number} held-out {problems}"


def score_rows(result: Row) -> list[list[str]]:
    """Lines of a table: the reward or strict accuracy and, where known, lenient accuracy."""
    if "gain" not in result:
        return []

    ends = [str(Score(**result[key])) for key in ("before", "after", "gain")]
    is_by_reward = result.get("measure") == "reward"
    name = "mean reward" if is_by_reward else "strict: right and in the format"
    lines = [[name, *ends]]

    if "lenient" in result:
        lenient = [str(Score(**result["lenient"][key])) for key in ("before", "after")]
        lines.append(["lenient: right anywhere", *lenient, ""])

    return lines


def score_table(result: Row) -> list[str]:
    rows = score_rows(result)
    if rows:
        return make_table(["", "before", "after", "gain"], rows)

    return []


def best_lines(best: Row, result: Row, last: int) -> list[str]:
    """A table and a sentence on the checkpoint that evaluations chose, by its record."""
    which = f"step {best['step']}, the best of {best['evaluations']}"
    rows = [[which, f"{best['problems']}, which chose it", f"{best['score']:.3f}"]]

    fresh = best.get("fresh")
    if fresh:
        score = Score(fresh["value"], fresh["low"], fresh["high"])
        rows.append([which, f"{fresh['problems']} others", str(score)])

    for name, key in ((f"step {last}, the last", "after"), ("the start", "before")):
        if key in result:
            rows.append([name, f"{result['problems']}", str(Score(**result[key]))])

    table = make_table(["model", "problems", best["measure"]], rows)
    return [*table, "", explain_best(best, result)]


def explain_best(best: Row, result: Row) -> str:
    """What the chosen score means."""
    text = "It was chosen by its score on these problems, which is therefore a little too high"
    if best["evaluations"] < 2:
        text = "It is the only one that was evaluated"
    elif best.get("fresh"):
        text += "; that on the others is not"
    else:
        text += "; there are no other held-out problems to tell by how much"

    before = result.get("before")
    if before is not None and best["score"] <= before["value"]:
        text += f". No evaluated step was better than the start ({before['value']:.3f})"

    return f"{text}. `mesotron export`, `chat` and `eval` take it."


def curve_lines(rows: list[Row]) -> list[str]:
    known = [row for row in rows if "reward" in row]
    if not known:
        return []

    # A step whose groups were all dropped has no entropy, one without readable golds no accuracy.
    names = []
    for name in CURVES:
        if any(name in row for row in known):
            names.append(name)

    return ["", "## Training", "", *training_table(known, names, ".3f")]


def watch_lines(rows: list[Row], events: list[Row]) -> list[str]:
    if not rows:
        return []

    monitor = Monitor()
    monitor.replay(merge_history(rows, events), ())
    result = diagnose_run(monitor)

    lines = ["", "## The watch", "", result.text()]
    if result.cause:
        lines += [f"\n{result.diagnosis}", f"\n{result.remedy}"]

    for action in monitor.actions:
        lines.append(f"\n{action.sentence()}")
    for event in events:
        if event.get("kind") == "forecast":
            lines.append(f"\n{event['text']}")

    return lines


def indented(text: str) -> str:
    lines = shorten(text).splitlines() or ["(nothing)"]
    return "\n".join(f"    {line}" for line in lines)


def transcripts(result: Row) -> list[Transcript]:
    return [Transcript(**one) for one in result["transcripts"]]
