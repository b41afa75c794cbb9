"""The greedy evaluations before and after a run, and the Markdown report that compares them."""

import shlex
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mesotron.config import TrainConfig
from mesotron.evaluate import scores
from mesotron.evaluate import transcripts as texts
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
    """What changed, over paired problems; takes two `EvalResult.to_json()`. Without gold answers
    and without a reward of the user's own there is no number."""
    kind = after.get("measure", "accuracy")
    result = {
        "problems": after["problems"],
        "measure": kind,
        "findings": after["findings"],
    }

    both = {one.id: one for one in transcripts(before)}
    pairs = [(both[one.id], one) for one in transcripts(after)]
    changes = texts.changes_of(pairs, kind)
    ends = {"before": main_score(before), "after": main_score(after)}
    if not changes or None in ends.values():
        return result

    result |= ends | {"gain": asdict(scores.bootstrap(changes))}
    if before["greedy"]["lenient"]:
        graded = [(old.correct, new.correct) for old, new in pairs]
        result |= {
            "lenient": {"before": before["greedy"]["lenient"], "after": after["greedy"]["lenient"]},
            "gained": graded.count((False, True)),
            "lost": graded.count((True, False)),
        }

    return result


def main_score(result: Row) -> Row | None:
    """Value and interval of an `EvalResult.to_json()`: its accuracy, or its mean reward."""
    return result["greedy"]["reward" if result.get("measure") == "reward" else "strict"]


def show(before: Row, after: Row, result: Row, console: Console) -> None:
    both = transcripts(before), transcripts(after)
    console.print(texts.side_by_side(*both, PAIRS_SHOWN))

    if result["measure"] == "accuracy" and "gain" in result:
        changes = texts.describe_changes(*both)
        note = f"; above, {PAIRS_SHOWN} typical problems in these proportions"
        print_line(console, changes + note * (len(both[0]) > PAIRS_SHOWN))

    if "gain" in result:
        table = Table(
            "",
            "before",
            "after",
            "gain",
            title=f"{headline(result)}, 95% intervals",
        )
        for row in score_rows(result):
            table.add_row(*row)

        console.print(table)

    for sentence in result["findings"]:
        console.print(f"note: {sentence}", soft_wrap=True, markup=False)


def write_report(run: RunFolder, config: TrainConfig, before: Row, after: Row, result: Row) -> str:
    rows = run.rows("metrics")
    environment = run.environment
    both = transcripts(before), transcripts(after)

    return fill_template(
        Path(__file__).with_name("report.md.j2"),
        name=run_name(config),
        config=config,
        rollout=config.rollout,
        command=shlex.join(environment.get("command", [])),
        rows=rows,
        spent=spell_time(sum(row.get("time/step", 0.0) for row in rows)),
        device=environment.get("device", "an unknown device"),
        headline=headline(result),
        scores=score_table(result),
        by_accuracy="gain" in result and result["measure"] == "accuracy",
        formatted=[e["greedy"]["rates"].get("facts/formatted", 0.0) for e in (before, after)],
        findings=result["findings"],
        curves=curve_lines(rows),
        watch=watch_lines(rows, run.rows("events")),
        changes=texts.describe_changes(*both),
        pairs=texts.pair_up(*both, PAIRS_SHOWN),
        verdict=texts.verdict,
        shorten=texts.shorten,
        indented=indented,
    )


def headline(result: Row) -> str:
    if "gain" not in result:
        return "No result: neither gold answers nor a reward of your own"
    what = "Mean reward" if result.get("measure") == "reward" else "Greedy accuracy"
    return f"{what} on {result['problems']} held-out problem{'s' * (result['problems'] != 1)}"


def score_rows(result: Row) -> list[list[str]]:
    """Lines of a table: the reward or strict accuracy and, where known, lenient accuracy."""
    if "gain" not in result:
        return []

    ends = [str(scores.Score(**result[key])) for key in ("before", "after", "gain")]
    by_reward = result.get("measure") == "reward"

    lines = [["mean reward" if by_reward else "strict: right and in the format", *ends]]
    if "lenient" in result:
        lenient = [str(scores.Score(**result["lenient"][key])) for key in ("before", "after")]
        lines.append(["lenient: right anywhere", *lenient, ""])

    return lines


def score_table(result: Row) -> list[str]:
    rows = score_rows(result)
    return make_table(["", "before", "after", "gain"], rows) if rows else []


def curve_lines(rows: list[Row]) -> list[str]:
    known = [row for row in rows if "reward" in row]
    # A step whose groups were all dropped has no entropy, one without readable golds no accuracy.
    names = [name for name in CURVES if any(name in row for row in known)]
    return ["", "## Training", "", *training_table(known, names, ".3f")] if known else []


def watch_lines(rows: list[Row], events: list[Row]) -> list[str]:
    if not rows:
        return []

    monitor = Monitor()
    monitor.replay(merge_history(rows, events), ())
    result = diagnose_run(monitor)
    advice = [result.diagnosis, result.remedy] if result.cause else []
    done = [action.sentence() for action in monitor.actions]

    return ["", "## The watch", "", result.text(), *(f"\n{line}" for line in (*advice, *done))]


def indented(text: str) -> str:
    lines = texts.shorten(text).splitlines() or ["(nothing)"]
    return "\n".join(f"    {line}" for line in lines)


def transcripts(result: Row) -> list[texts.Transcript]:
    return [texts.Transcript(**one) for one in result["transcripts"]]
