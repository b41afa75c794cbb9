"""The greedy evaluations before and after a run, and the Markdown report that compares them."""

import shlex
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from mesotron.config import TrainConfig
from mesotron.rlvr import scores
from mesotron.rlvr.answers.facts import Judge
from mesotron.rlvr.evaluate import EvalResult, evaluate
from mesotron.rlvr.rewards import Reward
from mesotron.rlvr.tasks.problem import Task
from mesotron.rlvr.train import run_name
from mesotron.runs import RunFolder
from mesotron.runs.console import print_line, spell_time
from mesotron.watch.diagnosis import diagnose
from mesotron.watch.guard import Monitor, merge_history

Row = dict[str, Any]
PAIRS_SHOWN = 4
CURVES = ("reward", "facts/correct", "facts/formatted", "facts/correct_unformatted", "entropy")


def measure(
    model: Any, tokenizer: Any, task: Task, config: TrainConfig, judge: Judge, name: str,
    reward: Reward | None = None, toolbox: Any = None,
) -> EvalResult:  # fmt: skip
    return evaluate(
        model, tokenizer, task.eval, config.task, examples=task.examples, name=name, samples=0,
        max_tokens=config.rollout.max_tokens, seed=config.seed, judge=judge, reward=reward,
        toolbox=toolbox,
    )  # fmt: skip


def compare(before: Row, after: Row) -> Row:
    """What changed, over paired problems; takes two `EvalResult.to_json()`. Without gold answers
    and without a reward of the user's own there is no number."""
    kind = after.get("measure", "accuracy")
    result = {"problems": after["problems"], "measure": kind, "findings": after["findings"]}
    both = {one.id: one for one in transcripts(before)}
    pairs = [(both[one.id], one) for one in transcripts(after)]
    changes = scores.changes_of(pairs, kind)
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
    console.print(scores.side_by_side(*both, PAIRS_SHOWN))
    if result["measure"] == "accuracy" and "gain" in result:
        changes = scores.describe_changes(*both)
        note = f"above, {PAIRS_SHOWN} typical problems in these proportions"
        print_line(console, f"{changes}; {note}")
    if "gain" in result:
        table = Table("", "before", "after", "gain", title=f"{headline(result)}, 95 % intervals")
        for row in score_rows(result):
            table.add_row(*row)
        console.print(table)
    for sentence in result["findings"]:
        console.print(f"note: {sentence}", soft_wrap=True, markup=False)


def write_report(run: RunFolder, config: TrainConfig, before: Row, after: Row, result: Row) -> str:
    rows, rollout = run.rows("metrics"), config.rollout
    updates = "one update" if rollout.updates == 1 else f"{rollout.updates} updates"
    spent = sum(row.get("time/step", 0.0) for row in rows)
    formatted = [one["greedy"]["rates"].get("facts/formatted", 0.0) for one in (before, after)]
    in_format = "In the format: {:.0%} before, {:.0%} after.".format(*formatted)
    by_accuracy = "gain" in result and result["measure"] == "accuracy"
    changes = scores.describe_changes(transcripts(before), transcripts(after))
    lines = [
        f"# {run_name(config)}: {config.steps} steps",
        "",
        f"Model {config.model.name}, task {config.task.title}, objective {config.objective.name}, "
        f"optimizer {config.optim.name} at learning rate {config.optim.lr:g}, seed {config.seed}.",
        "",
        f"    mesotron {shlex.join(run.environment.get('command', []))}",
        "",
        f"Each rollout: {rollout.prompts} prompts x {rollout.generations} completions of at most "
        f"{rollout.max_tokens} tokens, for {updates}. The {len(rows)} steps took "
        f"{spell_time(spent)}, on {run.environment.get('device', 'an unknown device')}.",
        "",
        f"{headline(result)}, with 95 % intervals:",
        "",
        *(["| | before | after | gain |", "|---|---|---|---|"] if "gain" in result else []),
        *("| " + " | ".join(row) + " |" for row in score_rows(result)),
        "",
        *([in_format] if by_accuracy else []),
        "",
        *(f"- {sentence}" for sentence in result["findings"]),
        *curve_lines(rows),
        *watch_lines(rows, run.rows("events")),
        "",
        "## The same problems before and after",
        "",
        f"{changes}. Below, problems in these proportions."
        if by_accuracy
        else "The largest changes of the reward first.",
        *transcript_lines(before, after),
        "",
    ]
    return "\n".join(lines)


def headline(result: Row) -> str:
    if "gain" not in result:
        return "No result: neither gold answers nor a reward of your own"
    what = "Mean reward" if result.get("measure") == "reward" else "Greedy accuracy"
    return f"{what} on {result['problems']} held-out problems"


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


def curve_lines(rows: list[Row]) -> list[str]:
    known = [row for row in rows if "reward" in row]
    if not known:
        return []
    places = sorted({round(k * (len(known) - 1) / 9) for k in range(10)})
    # A step whose groups were all dropped has no entropy, one without readable golds no accuracy.
    names = [name for name in CURVES if any(name in row for row in known)]
    lines = ["", "## Training", "", "| step | " + " | ".join(names) + " |"]
    lines.append("|---" * (len(names) + 1) + "|")
    for row in (known[k] for k in places):
        cells = [f"{row[name]:.3f}" if name in row else "" for name in names]
        lines.append("| " + " | ".join([str(row["step"]), *cells]) + " |")
    return lines


def watch_lines(rows: list[Row], events: list[Row]) -> list[str]:
    if not rows:
        return []
    monitor = Monitor()
    monitor.replay(merge_history(rows, events), ())
    result = diagnose(rows, monitor.engine, monitor.events, actions=monitor.actions)
    advice = [result.diagnosis, result.remedy] if result.cause else []
    done = [action.sentence() for action in monitor.actions]
    return ["", "## The watch", "", result.text(), *(f"\n{line}" for line in (*advice, *done))]


def transcript_lines(before: Row, after: Row) -> list[str]:
    """Pairs of transcripts as indented blocks, which no completion can break out of."""
    lines = []

    def block(text: str) -> list[str]:
        return [f"    {line}" for line in scores.shorten(text).splitlines()] or ["    (nothing)"]

    for pair in scores.pair_up(transcripts(before), transcripts(after), PAIRS_SHOWN):
        lines += ["", f"### {pair.change}", "", *block(pair.before.question), ""]
        for word, one in (("before", pair.before), ("after", pair.after)):
            gold = " ".join(str(one.gold).split())  # on one line: no text breaks out of the title
            gold = "" if one.gold is None else f"; gold {scores.shorten(gold)}"
            title = f"{word} ({scores.verdict(one)}{gold}):"
            lines += [title, "", *block(one.completion), ""]
    return lines


def transcripts(result: Row) -> list[scores.Transcript]:
    return [scores.Transcript(**one) for one in result["transcripts"]]
