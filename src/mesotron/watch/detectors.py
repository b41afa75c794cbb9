"""Every failure the watch knows, as data: symptoms, when it is fatal, diagnosis and remedy.

Rules are relative to the run's own first rows or its best plateau; absolute levels are backstops.
Each detector names the public run or paper behind it. `engine` evaluates the rules. The limits that
decide on a stop were fitted on the tuning corpus of benchmarks/watch.
"""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal

from mesotron.watch.tracks import Symptom

Case = tuple[Symptom, ...]


@dataclass(frozen=True, kw_only=True)
class Change:
    """One part of a remedy: a change of a field of the training config, such as optim.lr."""

    field: str
    act: Literal["multiply", "set", "at_least"]
    value: Any

    def applied_to(self, old: Any) -> Any:
        if self.act == "multiply":
            return old * self.value
        return max(old, self.value) if self.act == "at_least" else self.value


PRIOR = 4


@cache
def record() -> dict[str, dict[str, tuple[int, int]]]:
    """Detector (or any) -> severity -> failed and healthy runs of the corpora in which it spoke,
    as `benchmarks/watch/calibrate.py` counted them."""
    return json.loads(Path(__file__).with_name("record.json").read_text(encoding="utf-8"))


@dataclass(frozen=True, kw_only=True)
class Detector:
    """One failure.

    Args:
        name: also used in events and on the command line.
        cases: it warns when every symptom of any case is present.
        fatal: it stops when every symptom of any of these is present too; () never, ((),) always.
        diagnosis: what has happened, one sentence.
        remedy: what to do, one sentence.
        changes: the remedy as data.
        source: the public run, thread or paper behind it.
        patience: consecutive rows before a warning, in multiples of the patience setting.
        fatal_patience: the same before a stop.
        harmless: worth reporting, but the run still counts as healthy.
        trust: probability that an alarm is right, for a detector without a record in the corpora.
    """

    name: str
    cases: tuple[Case, ...]
    fatal: tuple[Case, ...] = ()
    diagnosis: str
    remedy: str
    changes: tuple[Change, ...] = ()
    source: str = ""
    patience: float = 1
    fatal_patience: float = 1
    harmless: bool = False
    trust: float = 1.0

    @property
    def metrics(self) -> tuple[str, ...]:
        """Every metric it reads, in order."""
        symptoms = [symptom for case in (*self.cases, *self.fatal) for symptom in case]
        return tuple(dict.fromkeys(symptom.metric for symptom in symptoms))

    def confidence(self, severity: str) -> float:
        """Share of its alarms that were right in the corpora. A short record counts together with
        `PRIOR` alarms that were right as often as those of all detectors."""
        if self.name not in record():
            return self.trust
        right, wrong = record()["any"][severity]
        usual = (right + 1) / (right + wrong + 2)
        right, wrong = record()[self.name][severity]
        return round((right + PRIOR * usual) / (right + wrong + PRIOR), 3)


SMALLER_STEP = Change(field="optim.lr", act="multiply", value=0.5)
KL_TO_START = Change(field="objective.beta", act="at_least", value=0.01)
TWO_PART = Change(field="reward.parts", act="set", value=("two_part",))
CO_REWARDING = Change(field="objective.name", act="set", value="corewarding")
COOLER = Change(field="rollout.temperature", act="multiply", value=0.8)

# Symptoms that many failures share.
REWARD_FELL = Symptom("reward", "down", by=0.3, since="best")
REWARD_LOST = Symptom("reward", "down", by=0.5, since="best")
REWARD_NOT_UP = Symptom("reward", "not_up", by=0.1)
NO_PROGRESS = Symptom("reward", "not_up", by=0.05, since="usual")
CAN_IMPROVE = Symptom("all_right", "below", level=0.6, optional=True)
# Steps as small as at the start: in a warmup they grow, and at the end of a schedule they have
# shrunk. (The learning rate is logged for the first group only.)
ALWAYS_SMALL = Symptom("update_rms", "still", by=0.5)
# With dynamic sampling zero_signal counts all sampled groups; while half of the batch has a signal,
# there is something to learn.
BATCH_EMPTY = Symptom("filled", "below", level=0.5, optional=True)
ALL_SILENT = Symptom("zero_signal", "above", level=0.8)
ALWAYS_SILENT = Symptom("zero_signal", "above", level=0.8, since="run")
# Two independent symptoms may each exceed the noise by less: chance would have to move both (2.8
# standard errors twice are 4 together).
JOINT = 0.7
FEWER_CORRECT = Symptom("correct", "down", by=0.4, since="best", noise_share=JOINT)
ONE_ANSWER: Case = (FEWER_CORRECT, Symptom("top_share", "up", by=0.3, noise_share=JOINT))
BOTH_FELL: Case = (
    FEWER_CORRECT, Symptom("heldout", "down", by=0.25, since="best", noise_share=JOINT),
)  # fmt: skip
NO_GRADIENT: Case = (
    Symptom("grad_norm", "below", level=1e-10), Symptom("zero_signal", "below", level=0.5),
    Symptom("reward_std", "above", level=1e-6, optional=True),
)  # fmt: skip
ALWAYS: tuple[Case, ...] = ((),)

# In order: when several fire together, the first is named as the cause.
DETECTORS = (
    Detector(
        name="nonfinite", patience=1 / 3, changes=(SMALLER_STEP,), fatal=ALWAYS,
        cases=((Symptom("nonfinite", "above", level=1),),),
        diagnosis="a loss, gradient or log-probability is not finite",
        remedy="go back to an earlier checkpoint, halve the learning rate, and look for a missing "
        "reward or an overflow in 16 bits",
        source="verl #721: NaN log-probabilities, then '!!!!' as the only output",
    ),
    Detector(
        name="update_explosion", changes=(SMALLER_STEP,),
        cases=((Symptom("grad_norm", "up", by=9),),
               (Symptom("grad_norm", "up", by=9, since="high"),),
               (Symptom("update_ratio", "up", by=4),),
               (Symptom("kl", "up", by=9, change=0.1, since="high"),),
               (Symptom("ratio_high", "up", by=4, change=3, since="high"),)),
        fatal=((REWARD_LOST,), (Symptom("kl", "up", change=0.5), REWARD_FELL)),
        diagnosis="updates are many times larger than is usual in this run",
        remedy="go back to the last healthy checkpoint and halve the learning rate",
        source="Search-R1 #88 (explodes near step 160); Muon in arXiv 2605.19282",
    ),
    Detector(
        name="parser_drift", changes=(TWO_PART,), fatal=((REWARD_LOST,),),
        cases=((Symptom("length", "up", by=0.3), REWARD_FELL,
                Symptom("correct_unformatted", "up", change=0.1)),
               (Symptom("length", "up", by=0.3), REWARD_FELL,
                Symptom("parsed", "down", change=0.15, since="best")),
               # Without these facts: no reward is left to differ in, and not for want of tokens.
               (Symptom("parsed", "absent"), Symptom("length", "up", by=0.3), REWARD_FELL,
                Symptom("reward_std", "down", by=0.5, since="best"),
                Symptom("truncated", "below", level=0.3, optional=True))),
        diagnosis="completions grow while the reward and its spread vanish: the parser or the "
        "format no longer matches them",
        remedy="read some completions; let the parser take the last answer, raise the token "
        "limit, or reward the format separately (two_part)",
        source="verl PR #7274: only the first 300 characters were searched for the answer",
    ),
    Detector(
        name="sampler_mismatch", changes=(SMALLER_STEP,), fatal=((REWARD_LOST,),),
        cases=((Symptom("gap_logp", "up", by=1.5, change=0.03),),
               (Symptom("gap_logp", "above", level=0.2),),
               (Symptom("gap_kl", "up", by=2, change=0.015),),
               (Symptom("gap_kl", "above", level=0.1),),
               (Symptom("gap_prob", "up", by=1.5, change=0.01),),
               (Symptom("gap_ratio", "above", level=2.0),),
               (Symptom("gap_ratio", "below", level=0.5),),
               (Symptom("gap_ratio_max", "up", by=9, change=10),),
               (Symptom("gap_cut", "up", change=0.2),)),
        diagnosis="the sampler's probabilities differ from the trainer's more than at the start",
        remedy="check the weight sync, top-p and temperature; cap or mask the importance ratio "
        "(2 per token), use float16 or a float32 head in both engines, or halve the learning rate",
        source="verl docs/algo/rollout_corr.md; arXiv 2510.26788; prime-rl #877 (gap, then "
        "gibberish)",
    ),
    Detector(
        name="stale_samples", changes=(SMALLER_STEP,), fatal=((REWARD_LOST,),),
        cases=((Symptom("staleness", "up", by=1.0, change=2), REWARD_NOT_UP),
               (Symptom("staleness", "above", level=8), REWARD_FELL)),
        diagnosis="samples are many policy versions old",
        remedy="sync the sampler's weights at every step, allow fewer off-policy steps, or halve "
        "the learning rate",
        source="prime-rl max_off_policy_steps (default 8)",
    ),
    Detector(
        name="structural_collapse", changes=(TWO_PART, SMALLER_STEP),
        cases=((Symptom("formatted", "down", by=0.3, change=0.15, since="best"),
                Symptom("correct_unformatted", "up", change=0.1)),
               (Symptom("formatted", "down", by=0.5, since="best"),)),
        fatal=((REWARD_LOST,),
               (Symptom("formatted", "down", by=0.6, since="best"), REWARD_NOT_UP)),
        diagnosis="answers are correct but no longer in the format that the reward reads",
        remedy="reward the format separately (two_part) and halve the learning rate",
        source="verl #2150: a strict '####' format hides correct answers; Muon on a 0.5B model",
    ),
    Detector(
        name="constant_answer",
        cases=((Symptom("top_share", "up", change=0.25, level=0.5),),
               (Symptom("top_share", "up", change=0.15), Symptom("vote_share", "above", level=0.95),
                Symptom("distinct", "below", level=1.2))),
        fatal=((Symptom("top_share", "up", change=0.4, level=0.8),),),
        diagnosis="most prompts get the same answer",
        remedy="the self-reward has been hacked: go back to the last healthy checkpoint, use gold "
        "answers or corewarding, and add a KL term",
        changes=(KL_TO_START, CO_REWARDING),
        source="SRT, arXiv 2505.21444: one constant answer, self-reward near 1",
    ),
    Detector(
        name="self_reward_hacking", patience=2 / 3, fatal_patience=2 / 3,
        cases=((Symptom("heldout", "down", change=0.05, since="best"),
                Symptom("reward", "up", by=0.05)),
               (Symptom("heldout", "down", change=0.05, since="best"),
                Symptom("vote_share", "up", change=0.05)),
               (Symptom("label_accuracy", "down", change=0.15, since="best"),
                Symptom("vote_share", "up", change=0.05))),
        fatal=((Symptom("heldout", "down", change=0.1, since="best"),),
               (Symptom("label_accuracy", "down", change=0.3, since="best"),)),
        diagnosis="the training reward rises while accuracy on held-out problems falls",
        remedy="stop at the checkpoint with the best held-out score; continue with gold answers, "
        "corewarding, or a reward that only correct answers can raise",
        changes=(KL_TO_START, CO_REWARDING),
        source="arXiv 2603.08660 (nearly every intrinsic reward rises, then falls); SRT in "
        "arXiv 2512.13070, MATH-500 79.2 at best and 47.5 at the end",
    ),
    Detector(
        name="repetition", changes=(SMALLER_STEP, KL_TO_START),
        cases=((Symptom("repetition", "up", change=0.2, level=0.3),),
               (Symptom("repetition", "up", change=0.1, level=0.6), REWARD_NOT_UP)),
        fatal=((REWARD_LOST,),
               (Symptom("repetition", "up", change=0.1, level=0.6), REWARD_NOT_UP)),
        diagnosis="completions repeat themselves",
        remedy="go back to the last healthy checkpoint, halve the learning rate, and add a "
        "repetition or overlong part to the reward",
        source="arXiv 2603.08660: entropy rewards end in repetition",
    ),
    Detector(
        name="length_explosion", changes=(SMALLER_STEP,), fatal=((REWARD_LOST,),),
        cases=((Symptom("length", "up", by=0.5), REWARD_FELL),
               (Symptom("truncated", "up", change=0.3, level=0.5), REWARD_NOT_UP)),
        diagnosis="completions grow without a gain in reward, up to the token limit",
        remedy="raise the token limit or penalize overlong completions; halve the learning rate",
        source="verl #1066 (length grows, then nonsense); TRL #5697 (97-99% cut at 256 tokens)",
    ),
    Detector(
        name="length_collapse", changes=(KL_TO_START, SMALLER_STEP),
        cases=((Symptom("length", "down", by=0.5), REWARD_FELL),
               (Symptom("length", "down", by=0.5), Symptom("correct", "not_up", by=0.1)),
               (Symptom("length", "down", by=0.8),)),
        fatal=((REWARD_LOST,),
               (Symptom("correct", "down", by=0.5, since="best"),),
               (Symptom("heldout", "down", change=0.1, since="best"),)),
        diagnosis="completions shrink to a few tokens without reasoning",
        remedy="the reward favors short completions: check it on some, and add a KL term",
        source="Llama-3.2-3B on self-certainty in TRL: 7 tokens by step 20, MATH-500 0.46 to "
        "0.002",
    ),
    Detector(
        name="entropy_explosion", changes=(SMALLER_STEP, COOLER), fatal=((REWARD_LOST,),),
        cases=((Symptom("entropy", "up", by=2.0, level=2.0), REWARD_NOT_UP),
               (Symptom("entropy", "up", by=1.0, change=0.2), REWARD_FELL)),
        diagnosis="the policy drifts toward random tokens",
        remedy="halve the learning rate, lower the temperature, remove an entropy bonus",
        source="verl #781: an entropy bonus of 0.001 was enough",
    ),
    Detector(
        name="entropy_collapse",
        # Entropy also falls when a task is being solved: a failure only if the reward falls, or
        # if it stands while most groups are silent, and neither its gain nor its level is large.
        cases=((Symptom("entropy", "down", by=0.5), REWARD_FELL),
               (Symptom("entropy", "down", by=0.6), Symptom("zero_signal", "above", level=0.6),
                Symptom("zero_signal", "up", change=0.2), NO_PROGRESS, CAN_IMPROVE,
                BATCH_EMPTY, Symptom("reward", "below", level=0.8),
                Symptom("reward", "not_up", by=0.5))),
        fatal=((REWARD_LOST,),),
        diagnosis="entropy has fallen and the reward does not rise: the policy no longer explores",
        remedy="widen the upper clip (epsilon_high 0.28), raise the temperature, or halve the "
        "learning rate",
        changes=(SMALLER_STEP, Change(field="objective.epsilon_high", act="at_least", value=0.28)),
        source="arXiv 2505.22617 (reward is bought with entropy); arXiv 2606.18487 (stop when "
        "half is gone early)",
    ),
    Detector(
        name="temperature_trap", patience=2 / 3, fatal_patience=2 / 3, changes=(COOLER,),
        cases=((Symptom("greedy_gap", "up", change=0.15, level=0.2, floor=0.35),),),
        fatal=((REWARD_LOST,),),
        diagnosis="greedy and sampled accuracy differ widely: the temperature is too high for this "
        "policy, or another policy than the trained one was evaluated",
        remedy="lower the sampling temperature and evaluate as you will use the model",
        source="miles PR #338 and tt-metal PR #56016: rollouts hotter than the evaluation",
    ),
    Detector(
        name="dead_optimizer", patience=2, fatal_patience=4,
        cases=((Symptom("dead_blocks", "above", level=0.9),),
               (Symptom("update_ratio", "below", level=1e-4),),
               (Symptom("update_rms", "below", level=1e-8), ALWAYS_SMALL)),
        fatal=((Symptom("update_ratio", "below", level=1e-6),),
               (Symptom("update_rms", "below", level=1e-8), ALWAYS_SMALL)),
        diagnosis="the learning rate is not zero, but the weights do not move",
        remedy="check that the optimizer has the trainable parameters (build it after LoRA); "
        "with pion raise promote or use cutoff='aligned'",
        changes=(Change(field="optim.cutoff", act="set", value="aligned"),),
        source="prime-rl PR #1433: the AdamW group was silently empty",
    ),
    Detector(
        name="zero_gradient", patience=2, trust=0.9,
        # Some trainers always log a norm of 0; while the reward rises, there is a gradient.
        cases=((*NO_GRADIENT, REWARD_NOT_UP),
               (*NO_GRADIENT, Symptom("grad_norm", "above", level=1e-6, since="run"))),
        diagnosis="rewards differ within groups, but the gradient is zero",
        remedy="check that the model has trainable parameters that the loss reaches, and that no "
        "reward is so large (1e38) that its advantages vanish",
        source="float32: the deviation of rewards of 1e38 overflows, and advantages become 0",
    ),
    Detector(
        name="reward_starvation", patience=3, fatal_patience=8,
        cases=((ALL_SILENT, ALWAYS_SILENT, Symptom("all_wrong", "above", level=0.7), BATCH_EMPTY),
               (ALL_SILENT, ALWAYS_SILENT, Symptom("reward", "below", level=0.5), REWARD_NOT_UP,
                CAN_IMPROVE, BATCH_EMPTY)),
        fatal=((Symptom("zero_signal", "above", level=0.9, since="run"),
                Symptom("zero_signal", "above", level=0.95),
                Symptom("all_wrong", "above", level=0.9)),
               (Symptom("zero_signal", "above", level=0.9, since="run"),
                Symptom("zero_signal", "above", level=0.95),
                Symptom("reward", "below", level=0.05),
                Symptom("reward", "below", level=0.05, since="run"))),
        diagnosis="nearly every group is all wrong: there is nothing to learn from",
        remedy="use easier problems or more completions per prompt, or warm-start with sft",
        changes=(Change(field="rollout.generations", act="multiply", value=2),),
        source="NeMo-RL #3567 (all rewards zero); TRL #3452 (loss 0, reward 0, why?)",
    ),
    Detector(
        name="reward_saturation", patience=3, harmless=True,
        cases=(
            (Symptom("zero_signal", "above", level=0.8), Symptom("all_right", "above", level=0.7),
             BATCH_EMPTY),
            (Symptom("zero_signal", "above", level=0.8),
             Symptom("reward", "up", by=0.2, change=0.1),
             Symptom("reward", "still", by=0.1, since="best"),
             Symptom("all_wrong", "below", level=0.2, optional=True), BATCH_EMPTY),
        ),
        diagnosis="nearly every group is all correct: there is nothing left to learn",
        remedy="stop and keep the checkpoint, or continue with harder problems",
        source="TRL #3708: groups without a signal are most of the cost",
    ),
    Detector(
        name="lost_exploration", patience=3, harmless=True,
        cases=(
            (Symptom("zero_signal", "above", level=0.6), Symptom("all_wrong", "above", level=0.25),
             Symptom("entropy", "down", by=0.6), BATCH_EMPTY),
        ),
        diagnosis="the policy became certain before it was correct: most groups are all wrong or "
        "all correct, and what is never sampled is never learned",
        remedy="keep the entropy up (--objective.entropy-bonus 0.02 --objective.entropy-target "
        "0.3), reward near misses (--reward.parts two_part near), choose groups with a signal "
        "(--objective.dynamic-sampling resample), or halve the learning rate",
        source="SmolLM2 on sums: entropy from 0.7 to below 0.15 nats after 6 to 23 steps, three "
        "groups of four without a signal; with all three remedies it reached 0.90",
    ),
    Detector(
        name="constant_reward", patience=3, fatal_patience=8, fatal=ALWAYS,
        # A task that is solved within a few rows is silent too, but its reward has moved.
        cases=((Symptom("zero_signal", "above", level=0.97),
                Symptom("zero_signal", "above", level=0.95, since="run"),
                Symptom("reward", "still", by=0.02, since="run"), CAN_IMPROVE),),
        diagnosis="in every group all rewards have been equal since the start",
        remedy="call the reward function on a correct and on a wrong completion: it does not "
        "distinguish them",
        source="ms-swift #4570 and TRL #3857: loss 0, gradient 0",
    ),
    Detector(
        name="lying_loss",
        cases=((REWARD_FELL, Symptom("loss", "still", by=0.1, level=0.02)),
               (REWARD_FELL, Symptom("loss", "down", by=0.5))),
        diagnosis="the reward falls while the loss stays near zero or improves; the loss of a "
        "group-relative objective does not measure progress",
        remedy="watch the reward and held-out accuracy, never the loss",
        source="TRL #3452 and #3857: a loss of 0 taken for an error, or for success",
    ),
    Detector(
        name="reward_collapse", changes=(SMALLER_STEP,), fatal=((REWARD_LOST,),),
        cases=((REWARD_FELL,),),
        diagnosis="the reward has fallen from its best, and nothing else that is logged shows why",
        remedy="go back to the last healthy checkpoint with half the learning rate, and log what "
        "is missing",
        source="open-r1 #257 and ConvSearch-R1 #6: reward falls to 0 after a few hundred steps",
    ),
    Detector(
        name="accuracy_collapse", patience=1 / 3, fatal_patience=1 / 3,
        cases=((Symptom("heldout", "down", by=0.2, since="best"),),
               (Symptom("correct", "down", by=0.3, since="best"),), ONE_ANSWER, BOTH_FELL),
        fatal=((Symptom("heldout", "down", by=0.25, since="best"),),
               (Symptom("correct", "down", by=0.5, since="best"),), ONE_ANSWER, BOTH_FELL),
        diagnosis="accuracy falls, whatever the reward says",
        remedy="go back to the checkpoint with the best held-out score and halve the learning "
        "rate; if the reward did not fall, it rewards something other than correct answers",
        changes=(SMALLER_STEP, KL_TO_START),
        source="arXiv 2603.08660: held-out accuracy is the only test of a hacked reward",
    ),
    Detector(
        name="stalled_throughput", harmless=True,
        cases=((Symptom("step_time", "up", by=2.0, since="usual"),
                Symptom("length", "not_up", by=0.5, since="usual", optional=True)),
               (Symptom("step_time", "up", by=4.0),
                Symptom("length", "not_up", by=1.0, optional=True))),
        diagnosis="a step takes several times as long as before, and completions are not longer",
        remedy="look for a slow reward function, a full disk, or another job on the machine",
        source="verl #795: 230 steps in five days, slower toward the end",
    ),
)  # fmt: skip


def load_detectors(path: Path) -> tuple[Detector, ...]:
    """Detectors of a TOML file: tables [[detector]] with the fields of `Detector`, where a case is
    a list of tables with the fields of `Symptom`; metrics by our names or as they are logged.

    Example:
        [[detector]]
        name = "tool_errors"
        cases = [[{metric = "tools/failed", moved = "above", level = 0.3}]]
        diagnosis = "a third of the tool calls fail"
        remedy = "look at the sandbox"
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        return tuple(map(read_detector, tables["detector"]))
    except (tomllib.TOMLDecodeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} does not hold detectors: {error}") from None


def read_detector(table: Mapping[str, Any]) -> Detector:
    """A detector from a TOML table or a dict."""
    known = {field.name for field in fields(Detector)}
    if unknown := sorted(table.keys() - known):
        raise ValueError(f"{unknown[0]!r} is not one of {', '.join(sorted(known))}")
    cases = {key: tuple(tuple(Symptom(**symptom) for symptom in case) for case in table[key])
             for key in ("cases", "fatal") if key in table}  # fmt: skip
    changes = {"changes": tuple(Change(**change) for change in table.get("changes", ()))}
    return Detector(**{**table, **cases, **changes})


def with_own(own: Sequence[Detector]) -> tuple[Detector, ...]:
    """The user's detectors, before ours; one with the name of ours replaces it."""
    names = {detector.name for detector in own}
    return (*own, *(detector for detector in DETECTORS if detector.name not in names))


def explain(name: str, detectors: Sequence[Detector] = DETECTORS) -> str:
    """Rule, corpus record, remedy and source of a detector, as `watch --explain` prints them."""
    detector = next((one for one in detectors if one.name == name), None)
    if detector is None:
        names = ", ".join(one.name for one in detectors)
        raise ValueError(f"{name!r} is not a detector: choose one of {names}")
    lines = [f"{name}: {detector.diagnosis}"]
    for word, cases in (("warns", detector.cases), ("stops", detector.fatal)):
        for case in cases:
            also = " in that case also" if word == "stops" else ""
            rule = " and ".join(symptom.text() for symptom in case) or "always"
            lines.append(f"  {word}{also} if {rule}")
    counts = record().get(name)
    for severity, (right, wrong) in (counts or {}).items():
        lines.append(
            f"corpora: {severity} in {right} failed and {wrong} healthy runs, "
            f"probability {detector.confidence(severity):.2f}"
        )
    if counts is None:
        lines.append(f"corpora: no record, trusted with {detector.trust:.2f}")
    changes = ", ".join(f"{c.field} {c.act} {c.value}" for c in detector.changes)
    lines += [f"remedy: {detector.remedy}", f"automatic: {changes or 'nothing'}"]
    return "\n".join([*lines, f"source: {detector.source or 'your own'}"])
