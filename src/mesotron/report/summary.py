"""What happened in a run: one to three sentences and a few headline figures."""

from collections.abc import Sequence
from typing import NamedTuple

from mesotron.report.read import Run
from mesotron.runs.console import spell_time
from mesotron.runs.files import Row


class Figure(NamedTuple):
    label: str
    value: str
    note: str = ""


class Score(NamedTuple):
    label: str
    value: float
    text: str


def summarize_run(run: Run) -> list[str]:
    makers = {
        "train": _train,
        "sft": _sft,
        "snake": _snake,
        "vla": _vla,
    }

    make = makers.get(run.kind, lambda run: f"{run.last_step} steps, {len(run.columns)} metrics.")
    cost = f"{'Cost' if run.result else 'Cost so far'}: {text}." if (text := cost_of(run)) else ""

    return [sentence for sentence in (make(run), _condition(run), cost) if sentence]


def summarize_runs(runs: Sequence[Run]) -> list[str]:
    scores = [(score, run.name) for run in runs if (score := final_score(run)) is not None]
    sentences = [f"{len(runs)} runs."]
    if len({score.label for score, _ in scores}) == 1:  # fruit and accuracy have no common best
        best, worst = (pick(scores, key=lambda x: x[0].value) for pick in (max, min))
        sentences = [
            f"{len(runs)} runs: the best {best[0].label} is {best[0].text} ({best[1]}), the lowest "
            f"{worst[0].text} ({worst[1]})."
        ]

    for condition in ("dead", "drifting"):
        if names := [run.name for run in runs if run.condition == condition]:
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            return [*sentences, f"{condition.capitalize()}: {', '.join(names[:4])}{more}."]

    return [*sentences, *(["No problems detected."] if any(r.condition for r in runs) else [])]


def final_score(run: Run) -> Score | None:
    """Held-out accuracy, fruit, success, or the mean reward of the last tenth."""
    result = run.result or {}
    if "after" in result:
        value = result["after"]["value"]
        is_reward = result.get("measure") == "reward"
        name, text = ("reward", f"{value:.3f}") if is_reward else ("accuracy", f"{value:.1%}")
        return Score(f"held-out {name}", value, text)

    if "greedy_fruit" in result:
        return Score("greedy fruit", result["greedy_fruit"], f"{result['greedy_fruit']:.2f}")
    if run.kind == "vla" and "success" in result:
        return Score("success", result["success"], f"{result['success']:.1%}")

    for metric, label in (("reward", "reward"), ("mean_token_accuracy", "token accuracy")):
        if values := run.finite(metric):
            _, value = _ends(values)
            return Score(label, value, f"{value:.3f}")

    return None


def figures_of(run: Run) -> list[Figure]:
    figures: list[Figure] = []
    result = run.result or {}

    score = final_score(run)
    if "gain" in result:
        label = f"held-out {result.get('measure') or 'accuracy'}"
        names = {
            "after": label,
            "gain": "gain",
            "before": "before",
        }
        figures = [Figure(name, *_with_interval(result, key)) for key, name in names.items()]
    elif "greedy_fruit" in result:
        base = result["baselines"]
        greedy = f"of {base['maximum']:.0f}; {result['greedy_won']:.0%} won"
        sampled = f"{result['sampled_won']:.0%} won"

        figures = [
            Figure("fruit, greedy", f"{result['greedy_fruit']:.2f}", greedy),
            Figure("fruit, sampled", f"{result['sampled_fruit']:.2f}", sampled),
            Figure("random", f"{base['random_masked']:.2f}", "legal moves"),
        ]
    elif run.kind == "vla" and "success" in result:
        shares = {name: x for name, x in result.items() if name not in ("steps", "loss")}
        figures = [Figure(name, f"{share:.1%}") for name, share in shares.items()]
    elif score:
        figures = [Figure(score.label, score.text, "mean of the last tenth")]

    if run.condition:
        cause = run.diagnosis.cause if run.diagnosis else None
        without = "rolled back" if _was_rolled_back(run) else "no problems"
        without = "too little is logged" if run.condition == "unknown" else without
        figures.append(Figure("watch", run.condition, (cause or without).replace("_", " ")))

    if (seconds := seconds_of(run)) is not None:
        figures.append(Figure("time", spell_time(seconds), str(run.environment.get("device", ""))))

    if (spent := run.last("cost/spent")) is not None:
        projected = run.last("cost/projected")
        note = f"{projected:,.2f} projected" if projected else ""
        figures.append(Figure("dollars", f"{spent:,.2f}", note))

    return figures


def cost_of(run: Run) -> str:
    """Such as "3m 12s on cpu, 237 thousand tokens"; "" if nothing is known."""
    parts = []
    device = run.environment.get("device", "")
    if (seconds := seconds_of(run)) is not None:
        parts.append(f"{spell_time(seconds)}{f' on {device}' if device else ''}")

    for metric, unit in (("num_tokens", "tokens"), ("time/env_steps", "environment steps")):
        if count := run.last(metric):
            sizes = ((1e9, " billion"), (1e6, " million"), (1e3, " thousand"))
            size, word = next((one for one in sizes if count >= one[0]), (1, ""))
            parts.append(f"{count / size:.3g}{word} {unit}")

    projected = run.last("cost/projected")
    if (spent := run.last("cost/spent")) is not None:
        ahead = f" of {projected:,.2f} projected" if projected and not run.result else ""
        parts.append(f"{spent:,.2f} dollars{ahead}")

    return ", ".join(parts)


def seconds_of(run: Run) -> float | None:
    """The metered time of the session, else the sum over steps."""
    for metric in ("time/seconds", "time/spent"):
        if (last := run.last(metric)) is not None:
            return last
    return sum(run.finite("time/step") or run.finite("step_time")) or None


def _train(run: Run) -> str:
    optim = run.config["optim"]
    objective = run.config["objective"]["name"].upper()

    setup = f"{objective} with {optim['name']} at rate {optim['lr']:g}"
    if run.result is None or "gain" not in run.result:
        planned = run.config.get("steps", "?")
        return f"{setup}, step {run.last_step} of {planned}{_change(run, 'reward')}."

    measured = run.result["gain"]
    verb = "improved" if measured["low"] > 0 else "reduced" if measured["high"] < 0 else None
    verb = verb or "did not significantly change"
    what = "held-out accuracy"

    unit = "problems"
    if run.result.get("measure") == "reward":
        what = "the mean reward on held-out prompts"
        unit = "prompts"

    before, after = (_with_interval(run.result, key)[0] for key in ("before", "after"))
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
    control = f", {wrong:.1%} with a wrong instruction" if wrong is not None else ""

    return f"{setup}: {run.result['success']:.1%} success{control}."


def _condition(run: Run) -> str:
    diagnosis = run.diagnosis
    if run.condition is None or diagnosis is None:
        return ""
    if diagnosis.condition == "unknown":
        return "The log does not show whether the model learns."
    if diagnosis.condition == "healthy":
        return "Healthy after a rollback." if _was_rolled_back(run) else "No problems detected."

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
    if not (values := run.finite(metric)):
        return ""
    first, last = _ends(values)
    return f", {name or metric} from {first:.3g} to {last:.3g}"


def _ends(values: Sequence[float]) -> tuple[float, float]:
    width = max(len(values) // 10, 1)
    return sum(values[:width]) / width, sum(values[-width:]) / width


def _with_interval(result: Row, key: str) -> tuple[str, str]:
    """A measured number of a result (before, after or gain) and its interval, as texts."""
    value, low, high = (result[key][part] for part in ("value", "low", "high"))
    if result.get("measure") == "reward":
        sign = "+" if key == "gain" else ""
        return f"{value:{sign}.3f}", f"95% interval {low:.3f} to {high:.3f}"

    if key == "gain":
        return f"{100 * value:+.1f} points", f"95% interval {100 * low:+.1f} to {100 * high:+.1f}"

    return f"{value:.1%}", f"95% interval {low:.1%} to {high:.1%}"
