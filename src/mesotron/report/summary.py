"""What happened in a run: one to three sentences and a few headline figures."""

from collections.abc import Sequence
from typing import NamedTuple

from mesotron.report.read import Run
from mesotron.rlvr import pocket
from mesotron.runs import RunFolder
from mesotron.runs.console import spell_time
from mesotron.runs.files import Row


class Figure(NamedTuple):
    label: str
    value: str
    note: str = ""


class FinalScore(NamedTuple):
    label: str
    value: float
    text: str


def summarize_run(run: Run) -> list[str]:
    makers = {"train": _train, "sft": _sft, "snake": _snake, "vla": _vla}
    make = makers.get(run.kind, _other)
    sentences = [make(run), _condition(run)]

    cost = cost_of(run)
    if cost:
        title = "Cost" if run.result else "Cost so far"
        sentences.append(f"{title}: {cost}.")

    return [sentence for sentence in sentences if sentence]


def summarize_runs(runs: Sequence[Run]) -> list[str]:
    return [_best_and_worst(runs), *_conditions(runs)]


def _conditions(runs: Sequence[Run]) -> list[str]:
    """Which runs are dead, drifting, healthy or unknown, each by its own verdict."""
    sentences = []
    for condition in ("dead", "drifting", "unknown", "healthy"):
        names = [run.name for run in runs if run.condition == condition]
        if names:
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            sentences.append(f"{condition.capitalize()}: {', '.join(names[:4])}{more}.")

    return sentences


def verdict_of(run: Run) -> str:
    """Such as "dead: reward collapse", as on the run's own page; "" for one not watched."""
    if run.condition is None:
        return ""

    why = _why(run, run.condition)
    return f"{run.condition}: {why}" if why else run.condition


def _best_and_worst(runs: Sequence[Run]) -> str:
    scores = []
    for run in runs:
        score = final_score(run)
        if score is not None:
            scores.append((score, run.name))

    if len({score.label for score, _ in scores}) != 1:  # fruit and accuracy have no common best
        return f"{len(runs)} runs."

    best, best_name = max(scores, key=lambda pair: pair[0].value)
    worst, worst_name = min(scores, key=lambda pair: pair[0].value)

    return (
        f"{len(runs)} runs: the best {best.label} is {best.text} ({best_name}), the lowest "
        f"{worst.text} ({worst_name})."
    )


def final_score(run: Run) -> FinalScore | None:
    """Held-out accuracy, fruit, success, or the mean reward of the last tenth."""
    result = run.result or {}
    if "after" in result:
        value = result["after"]["value"]
        if result.get("measure") == "reward":
            return FinalScore("held-out reward", value, f"{value:.3f}")
        return FinalScore("held-out accuracy", value, f"{value:.1%}")

    if "greedy_fruit" in result:
        return FinalScore("greedy fruit", result["greedy_fruit"], f"{result['greedy_fruit']:.2f}")
    if run.kind == "vla" and "success" in result:
        return FinalScore("success", result["success"], f"{result['success']:.1%}")

    for metric, label in (("reward", "reward"), ("mean_token_accuracy", "token accuracy")):
        values = run.finite(metric)
        if values:
            _, value = _ends(values)
            return FinalScore(label, value, f"{value:.3f}")

    return None


def figures_of(run: Run) -> list[Figure]:
    """The headline numbers: scores, the watch's verdict, time and dollars."""
    figures = _score_figures(run)
    if run.condition:
        figures.append(Figure("watch", run.condition, _why(run, run.condition)))

    if run.best is not None:
        kept = run.best.checkpoint or "its checkpoint is not kept"
        value = f"{run.best.value:.3g} at step {run.best.step}"
        figures.append(Figure("best evaluation", value, kept))

    seconds = seconds_of(run)
    if seconds is not None:
        figures.append(Figure("time", spell_time(seconds), str(run.environment.get("device", ""))))

    spent = run.last("cost/spent")
    if spent is not None:
        projected = run.last("cost/projected")
        note = f"{projected:,.2f} projected" if projected else ""
        figures.append(Figure("dollars", f"{spent:,.2f}", note))

    return figures


def _score_figures(run: Run) -> list[Figure]:
    result = run.result or {}
    if "gain" in result:
        label = f"held-out {result.get('measure') or 'accuracy'}"
        return [
            Figure(label, *_with_interval(result, "after")),
            Figure("gain", *_with_interval(result, "gain")),
            Figure("before", *_with_interval(result, "before")),
        ]

    if "greedy_fruit" in result:
        base = result["baselines"]
        greedy = f"of {base['maximum']:.0f}; {result['greedy_won']:.0%} won"
        sampled = f"{result['sampled_won']:.0%} won"
        return [
            Figure("fruit, greedy", f"{result['greedy_fruit']:.2f}", greedy),
            Figure("fruit, sampled", f"{result['sampled_fruit']:.2f}", sampled),
            Figure("random", f"{base['random_masked']:.2f}", "legal moves"),
        ]

    if run.kind == "vla" and "success" in result:
        names = [name for name in result if name not in ("steps", "loss")]
        return [Figure(name, f"{result[name]:.1%}") for name in names]

    score = final_score(run)
    if score is None:
        return []

    return [Figure(score.label, score.text, "mean of the last tenth")]


def _why(run: Run, condition: str) -> str:
    """The watch's cause in words, or why there is none."""
    if run.diagnosis is not None and run.diagnosis.cause:
        return run.diagnosis.cause.replace("_", " ")
    if run.diagnosis is not None and condition == "unknown":
        return run.diagnosis.diagnosis

    if _was_rolled_back(run):
        return "rolled back"

    return "no problems"


def cost_of(run: Run) -> str:
    """Such as "3m 12s on cpu, 237 thousand tokens"; "" if nothing is known."""
    parts = []
    device = run.environment.get("device", "")
    seconds = seconds_of(run)
    if seconds is not None:
        place = f" on {device}" if device else ""
        parts.append(f"{spell_time(seconds)}{place}")

    for metric, unit in (("num_tokens", "tokens"), ("time/env_steps", "environment steps")):
        count = run.last(metric)
        if count:
            parts.append(f"{spell_count(count)} {unit}")

    spent = run.last("cost/spent")
    projected = run.last("cost/projected")
    if spent is not None:
        if projected and not run.result:
            ahead = f" of {projected:,.2f} projected"
        else:
            ahead = ""

        parts.append(f"{spent:,.2f} dollars{ahead}")

    return ", ".join(parts)


def spell_count(count: float) -> str:
    """Such as "237 thousand"."""
    for size, word in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if count >= size:
            return f"{count / size:.3g} {word}"

    return f"{count:.3g}"


def seconds_of(run: Run) -> float | None:
    """The metered time of the session, else the sum over steps."""
    for metric in ("time/seconds", "time/spent"):
        last = run.last(metric)
        if last is not None:
            return last

    return sum(run.finite("time/step") or run.finite("step_time")) or None


def _other(run: Run) -> str:
    return f"{run.last_step} steps, {len(run.columns)} metrics."


def _train(run: Run) -> str:
    optim = run.config["optim"]
    objective = run.config["objective"]["name"].upper()

    rate = pocket.spell_rate(optim["lr"], RunFolder(run.path).load(pocket.NAME))
    setup = f"{objective} with {optim['name']} at rate {rate}"
    if run.result is None or "gain" not in run.result:
        planned = run.config.get("steps", "?")
        return f"{setup}, step {run.last_step} of {planned}{_change(run, 'reward')}."

    what = "held-out accuracy"
    unit = "problems"
    if run.result.get("measure") == "reward":
        what = "the mean reward on held-out prompts"
        unit = "prompts"

    verb = "did not significantly change"
    if run.result["gain"]["low"] > 0:
        verb = "improved"
    elif run.result["gain"]["high"] < 0:
        verb = "reduced"

    before, _ = _with_interval(run.result, "before")
    after, _ = _with_interval(run.result, "after")
    gain = ", ".join(_with_interval(run.result, "gain"))

    return (
        f"{setup} {verb} {what}: {before} to {after} in {run.last_step} steps "
        f"(gain {gain}, {run.result['problems']} {unit})."
    )


def _sft(run: Run) -> str:
    accuracy = run.last("mean_token_accuracy")
    share = f", token accuracy {accuracy:.1%}" if accuracy is not None else ""
    model = run.config["model"]["name"]

    return f"Supervised warm start of {model}: {run.last_step} steps{_change(run, 'loss')}{share}."


def _snake(run: Run) -> str:
    rule = run.config["optim"] or ("muon" if run.config.get("use_muon") else "adam")
    setup = f"PPO with {rule} on {run.config['width']}x{run.config['height']} Snake"
    if not run.result:
        return f"{setup}, {len(run.rows)} updates{_change(run, 'episode/fruit', 'fruit')}."

    base = run.result["baselines"]
    fruit = run.result["greedy_fruit"]

    return (
        f"{setup}: greedy play eats {fruit:.1f} of {base['maximum']:.0f} fruit, random legal moves "
        f"{base['random_masked']:.1f}."
    )


def _vla(run: Run) -> str:
    optim = run.config["optim"]
    setup = f"Behavior cloning with {optim['action']} on the action module at rate {optim['lr']:g}"
    if not run.result or "success" not in run.result:
        return f"{setup}, {run.last_step} steps{_change(run, 'loss')}."

    wrong = run.result.get("wrong instruction")

    if wrong is not None:
        control = f", {wrong:.1%} with a wrong instruction"
    else:
        control = ""

    return f"{setup}: {run.result['success']:.1%} success{control}."


def _condition(run: Run) -> str:
    diagnosis = run.diagnosis
    if run.condition is None or diagnosis is None:
        return ""
    if diagnosis.condition == "unknown":
        return f"The watch cannot tell how it went: {diagnosis.diagnosis}."
    if diagnosis.condition == "healthy":
        if _was_rolled_back(run):
            return "Healthy after a rollback."

        return "No problems detected."

    cause = (diagnosis.cause or "").replace("_", " ")
    text = f"{diagnosis.condition.capitalize()} since step {diagnosis.phases[-1].first}: {cause}"
    if diagnosis.condition == "dead" and diagnosis.wasted is not None:
        share = f"{diagnosis.wasted:.0%} of the {diagnosis.unit}"
        text += f"; {share} came after the last useful step, {diagnosis.useful_step}"

    return f"{text}."


def _was_rolled_back(run: Run) -> bool:
    actions = run.diagnosis.actions if run.diagnosis else ()
    return any(each.action == "rollback" for each in actions)


def _change(run: Run, metric: str, name: str = "") -> str:
    values = run.finite(metric)
    if not values:
        return ""

    first, last = _ends(values)
    return f", {name or metric} from {first:.3g} to {last:.3g}"


def _ends(values: Sequence[float]) -> tuple[float, float]:
    width = max(len(values) // 10, 1)
    return sum(values[:width]) / width, sum(values[-width:]) / width


def _with_interval(result: Row, key: str) -> tuple[str, str]:
    """A measured number of a result (before, after or gain) and its interval, as texts."""
    value = result[key]["value"]
    low = result[key]["low"]
    high = result[key]["high"]
    if result.get("measure") == "reward":
        sign = "+" if key == "gain" else ""
        return f"{value:{sign}.3f}", f"95% interval {low:.3f} to {high:.3f}"

    if key == "gain":
        return f"{100 * value:+.1f} points", f"95% interval {100 * low:+.1f} to {100 * high:+.1f}"

    return f"{value:.1%}", f"95% interval {low:.1%} to {high:.1%}"
