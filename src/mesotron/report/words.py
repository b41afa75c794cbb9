"""What happened, in two sentences and a few figures: the first thing that a page shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mesotron.report.read import Run
from mesotron.runs.console import spell_time
from mesotron.runs.files import Row


class Figure(NamedTuple):
    """A number that stands large at the top: what it is, its value, and what to know of it."""

    word: str
    value: str
    note: str = ""


def tell_run(run: Run) -> list[str]:
    """One run in two sentences: what came of it, and how it went."""
    told = {"train": _tell_train, "sft": _tell_sft, "snake": _tell_snake, "vla": _tell_vla}
    return [told.get(run.kind, _tell_other)(run), *_tell_watch(run), *_tell_cost(run)]


def tell_runs(runs: Sequence[Run]) -> list[str]:
    """Several runs in two sentences."""
    count = f"{_count(len(runs))} runs side by side"
    scored = [(run, score) for run in runs if (score := final_score(run)) is not None]
    told = [f"{count}."]
    if len({score.word for _, score in scored}) == 1:  # fruit and accuracy have no best
        best, worst = max(scored, key=lambda x: x[1].value), min(scored, key=lambda x: x[1].value)
        word = best[1].word
        told = [
            f"{count}: the best {word} is {best[1].shown} ({best[0].name}), the least "
            f"{worst[1].shown} ({worst[0].name})."
        ]
    dead = [run.name for run in runs if run.condition == "dead"]
    drifting = [run.name for run in runs if run.condition == "drifting"]
    if dead:
        told.append(f"The watch calls {_list(dead)} dead.")
    elif drifting:
        told.append(f"The watch sees {_list(drifting)} drift.")
    elif any(run.condition for run in runs):
        told.append("The watch found nothing wrong.")
    return told


class Score(NamedTuple):
    """The one number that runs of a kind are compared by."""

    word: str
    value: float
    shown: str


def final_score(run: Run) -> Score | None:
    """Held-out accuracy, fruit, or the mean reward of the last tenth; None if there is none."""
    result = run.result or {}
    if "after" in result:
        return Score(
            "held-out accuracy", result["after"]["value"], f"{result['after']['value']:.1%}"
        )
    if "greedy_fruit" in result:
        return Score("greedy fruit", result["greedy_fruit"], f"{result['greedy_fruit']:.2f}")
    if run.kind == "vla" and "success" in result:
        return Score("success", result["success"], f"{result['success']:.1%}")
    for metric, word in (("reward", "reward"), ("mean_token_accuracy", "share of tokens right")):
        column = [x for x in run.columns.get(metric, []) if x is not None and x - x == 0]
        if column:
            tail = column[-max(len(column) // 10, 1) :]
            value = sum(tail) / len(tail)
            return Score(word, value, f"{value:.3f}")
    return None


def figures_of(run: Run) -> list[Figure]:
    """The figures of one run."""
    found: list[Figure] = []
    result = run.result or {}
    if "gain" in result:
        before, after, gain = result["before"], result["after"], result["gain"]
        found.append(Figure("held-out accuracy", f"{after['value']:.1%}", _interval(after)))
        found.append(
            Figure("gain", f"{100 * gain['value']:+.1f} points", _interval(gain, points=True))
        )
        found.append(Figure("before", f"{before['value']:.1%}", _interval(before)))
    elif "greedy_fruit" in result:
        base = result["baselines"]
        found.append(
            Figure(
                "fruit, greedy",
                f"{result['greedy_fruit']:.2f}",
                f"of {base['maximum']:.0f}; {result['greedy_won']:.0%} won",
            )
        )
        found.append(
            Figure(
                "fruit, sampled",
                f"{result['sampled_fruit']:.2f}",
                f"{result['sampled_won']:.0%} won",
            )
        )
        found.append(Figure("random", f"{base['random_masked']:.2f}", "among legal moves"))
    elif run.kind == "vla" and "success" in result:
        shares = [(name, x) for name, x in result.items() if name not in ("steps", "loss")]
        found += [Figure(name, f"{share:.1%}") for name, share in shares]
    else:
        score = final_score(run)
        found += [Figure(score.word, score.shown, "mean of the last tenth")] if score else []
    if run.condition:
        found.append(Figure("the watch", run.condition, _cause(run)))
    return [*found, *_spent(run)]


def cost_line(run: Run) -> str:
    """What a run has taken, such as "3m 12s on cpu, 237 thousand tokens"; "" if that is unknown."""
    seconds, parts = seconds_of(run), []
    device = str(run.environment.get("device", ""))
    if seconds is not None:
        parts.append(f"{spell_time(seconds)}{f' on {device}' if device else ''}")
    tokens, steps = run.last("num_tokens"), run.last("time/env_steps")
    if tokens:
        parts.append(f"{spell_count(tokens)} tokens")
    if steps:
        parts.append(f"{spell_count(steps)} environment steps")
    spent, projected = run.last("cost/spent"), run.last("cost/projected")
    if spent is not None:
        ahead = f" of {projected:,.2f} projected" if projected and not run.result else ""
        parts.append(f"{spent:,.2f} dollars{ahead}")
    return ", ".join(parts)


def seconds_of(run: Run) -> float | None:
    """What the rows say: the whole session where it was metered, else the steps together."""
    for metric in ("time/seconds", "time/spent"):
        last = run.last(metric)
        if last is not None:
            return last
    total = run.total("time/step")
    return run.total("step_time") if total is None else total


def spell_count(count: float) -> str:
    """A large number as a person says it.

    Example:
        >>> spell_count(950), spell_count(237_412), spell_count(1_250_000)
        ('950', '237 thousand', '1.25 million')
    """
    for size, word in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if count >= size:
            return f"{count / size:.3g} {word}"
    return f"{count:.0f}"


def _tell_train(run: Run) -> str:
    optim, how = run.config["optim"], run.config["objective"]["name"].upper()
    steps = int(run.steps[-1]) if run.rows else 0
    made = f"{how} with {optim['name']} at rate {optim['lr']:g}"
    if run.result is None or "gain" not in run.result:
        moved = _moved(run, "reward", "reward")
        return f"{made}, {steps} of {run.planned_steps or '?'} steps so far{moved}."
    before, after, gain = (run.result[key] for key in ("before", "after", "gain"))
    course = f"from {before['value']:.1%} to {after['value']:.1%}"
    spread = _interval(gain, points=True)
    num = run.result["problems"]
    if gain["low"] > 0:
        what = f"took held-out accuracy {course} in {steps} steps"
    elif gain["high"] < 0:
        what = f"lost held-out accuracy, {course}, in {steps} steps"
    else:
        what = f"changed held-out accuracy by no more than {num} problems can tell, {course}"
    return f"{made} {what} (gain {100 * gain['value']:+.1f} points, {spread}, {num} problems)."


def _tell_sft(run: Run) -> str:
    model, steps = run.config["model"]["name"], int(run.steps[-1]) if run.rows else 0
    right = run.last("mean_token_accuracy")
    share = f", with {right:.1%} of the tokens right" if right is not None else ""
    return f"A warm start of {model}: {steps} steps{_moved(run, 'loss', 'loss')}{share}."


def _tell_snake(run: Run) -> str:
    board = f"{run.config['width']}x{run.config['height']}"
    rule = run.config["optim"] or ("muon" if run.config.get("use_muon") else "adam")
    made = f"PPO with {rule} on {board} Snake"
    if not run.result:
        return f"{made}, {len(run.rows)} updates so far{_moved(run, 'episode/fruit', 'fruit')}."
    base, fruit = run.result["baselines"], run.result["greedy_fruit"]
    return (
        f"{made} eats {fruit:.1f} fruit of {base['maximum']:.0f} when it plays greedily, where "
        f"random legal moves eat {base['random_masked']:.1f}."
    )


def _tell_vla(run: Run) -> str:
    optim = run.config["optim"]
    made = f"Behaviour cloning with {optim['action']} on the action module at rate {optim['lr']:g}"
    steps = int(run.steps[-1]) if run.rows else 0
    if not run.result or "success" not in run.result:
        return f"{made}, {steps} steps{_moved(run, 'loss', 'loss')}."
    wrong = run.result.get("wrong instruction")
    control = f", and {wrong:.1%} when told a wrong instruction" if wrong is not None else ""
    return f"{made} succeeds in {run.result['success']:.1%} of the episodes{control}."


def _tell_other(run: Run) -> str:
    steps = int(run.steps[-1]) if run.rows else 0
    return f"A run of {steps} steps and {len(run.columns)} metrics."


def _tell_watch(run: Run) -> list[str]:
    if run.condition is None or run.story is None:
        return []
    story = run.story
    if story.condition == "healthy":
        went = "The watch found nothing wrong"
        return [f"{went}." if run.condition == "healthy" else f"{went} in the end."]
    named = (story.cause or "").replace("_", " ")
    when = story.phases[-1].first
    if story.condition == "drifting":
        return [f"The watch sees it drift since step {when}: {named}."]
    waste = ""
    if story.wasted is not None:
        waste = f"; {story.wasted:.0%} of the {story.unit} came after the last useful step, "
        waste += f"{story.useful_step}"
    return [f"The watch calls it dead at step {when}: {named}{waste}."]


def _tell_cost(run: Run) -> list[str]:
    line = cost_line(run)
    return [f"It took {line}." if run.result else f"So far it has taken {line}."] if line else []


def _spent(run: Run) -> list[Figure]:
    found, seconds = [], seconds_of(run)
    if seconds is not None:
        found.append(Figure("time", spell_time(seconds), str(run.environment.get("device", ""))))
    spent, projected = run.last("cost/spent"), run.last("cost/projected")
    if spent is not None:
        note = f"{projected:,.2f} projected" if projected else ""
        found.append(Figure("dollars", f"{spent:,.2f}", note))
    return found


def _cause(run: Run) -> str:
    story = run.story
    return story.cause.replace("_", " ") if story and story.cause else "nothing wrong"


def _moved(run: Run, metric: str, word: str) -> str:
    known = [x for x in run.columns.get(metric, []) if x is not None and x - x == 0]
    if not known:
        return ""
    width = max(len(known) // 10, 1)
    first, last = sum(known[:width]) / width, sum(known[-width:]) / width
    return f", {word} from {first:.3g} to {last:.3g}"


def _interval(value: Row, points: bool = False) -> str:
    if points:
        return f"95 % interval {100 * value['low']:+.1f} to {100 * value['high']:+.1f}"
    return f"95 % interval {value['low']:.1%} to {value['high']:.1%}"


def _count(number: int) -> str:
    small = ("Zero", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine", "Ten")
    return small[number] if number < len(small) else str(number)


def _list(names: Sequence[str], most: int = 4) -> str:
    shown = list(names[:most])
    if len(names) > most:
        return f"{', '.join(shown)} and {len(names) - most} more"
    return f"{', '.join(shown[:-1])} and {shown[-1]}" if len(shown) > 1 else shown[0]
