"""Every failure the watch knows, as data: symptoms, when it is fatal, diagnosis and remedy.

Rules are relative to the run's own first rows or its best plateau; absolute levels are backstops.
Each detector names the public run or paper behind it. `engine` evaluates the rules. The limits that
decide on a stop were fitted on the tuning corpus of benchmarks/watch.
"""

from dataclasses import dataclass
from typing import Any, Literal

from mesotron.watch.tracks import Symptom

Case = tuple[Symptom, ...]


@dataclass(frozen=True, kw_only=True)
class Change:
    """One part of a remedy, as a change of the training config.

    Args:
        field: dotted name of a config field, such as optim.lr.
        act: multiply by the value, set to it, or raise to at least it.
        value: the number or word.
    """

    field: str
    act: Literal["multiply", "set", "at_least"]
    value: Any

    def applied_to(self, old: Any) -> Any:
        """The field's new value.

        Example:
            >>> Change(field="optim.lr", act="multiply", value=0.5).applied_to(1e-3)
            0.0005
        """
        if self.act == "multiply":
            return old * self.value
        return max(old, self.value) if self.act == "at_least" else self.value


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
    """

    name: str
    cases: tuple[Case, ...]
    fatal: tuple[Case, ...] = ()
    diagnosis: str
    remedy: str
    changes: tuple[Change, ...] = ()
    source: str
    patience: float = 1
    fatal_patience: float = 1
    harmless: bool = False

    @property
    def metrics(self) -> tuple[str, ...]:
        """Every metric it reads, in order."""
        symptoms = [symptom for case in (*self.cases, *self.fatal) for symptom in case]
        return tuple(dict.fromkeys(symptom.metric for symptom in symptoms))


SMALLER_STEP = Change(field="optim.lr", act="multiply", value=0.5)
KL_TO_START = Change(field="objective.beta", act="at_least", value=0.01)
TWO_PART = Change(field="reward.parts", act="set", value=("two_part",))
COOLER = Change(field="rollout.temperature", act="multiply", value=0.8)

# Symptoms that many failures share.
REWARD_FELL = Symptom(metric="reward", moved="down", by=0.3, since="best")
REWARD_LOST = Symptom(metric="reward", moved="down", by=0.5, since="best")
REWARD_NOT_UP = Symptom(metric="reward", moved="not_up", by=0.1)
# Steps as small as at the start: in a warmup they grow, and at the end of a schedule they have
# shrunk. (The learning rate is logged for the first group only.)
ALWAYS_SMALL = Symptom(metric="update_rms", moved="still", by=0.5)
# With dynamic sampling zero_signal counts all sampled groups; while half of the batch has a signal,
# there is something to learn.
BATCH_EMPTY = Symptom(metric="filled", moved="below", level=0.5, optional=True)
# Two independent symptoms may each exceed the noise by less: chance would have to move both (2.8
# standard errors twice are 4 together).
JOINT = 0.7
FEWER_CORRECT = Symptom(metric="correct", moved="down", by=0.4, since="best", noise_share=JOINT)
ALWAYS: tuple[Case, ...] = ((),)

# In order: when several fire together, the first is named as the cause.
DETECTORS = (
    Detector(
        name="nonfinite",
        cases=((Symptom(metric="nonfinite", moved="above", level=1),),),
        fatal=ALWAYS,
        diagnosis="a loss, gradient or log-probability is not a finite number",
        remedy="go back to a checkpoint before it, halve the learning rate, and look for a reward "
        "that was never given or for overflow in 16 bits",
        changes=(SMALLER_STEP,),
        source="verl #721: NaN log-probabilities, then '!!!!' as the only output",
        patience=1 / 3,
    ),
    Detector(
        name="update_explosion",
        cases=(
            (Symptom(metric="grad_norm", moved="up", by=9),),
            (Symptom(metric="grad_norm", moved="up", by=9, since="usual"),),
            (Symptom(metric="update_ratio", moved="up", by=4),),
            (Symptom(metric="kl", moved="up", by=9, change=0.1, since="usual"),),
            (Symptom(metric="ratio_high", moved="up", by=4, change=3, since="usual"),),
        ),
        fatal=(
            (REWARD_LOST,),
            (Symptom(metric="grad_norm", moved="up", by=99),),
            (Symptom(metric="kl", moved="up", change=0.5), REWARD_NOT_UP),
        ),
        diagnosis="the steps are many times larger than at the start of this run",
        remedy="halve the learning rate and go back to the last healthy checkpoint; with Muon "
        "prefer pion, which drops the noisy directions",
        changes=(SMALLER_STEP,),
        source="Search-R1 #88 (explodes near step 160); Muon in arXiv 2605.19282",
    ),
    Detector(
        name="parser_drift",
        cases=(
            (
                Symptom(metric="length", moved="up", by=0.3),
                REWARD_FELL,
                Symptom(metric="correct_unformatted", moved="up", change=0.1),
            ),
            (
                Symptom(metric="length", moved="up", by=0.3),
                REWARD_FELL,
                Symptom(metric="parsed", moved="down", change=0.15, since="best"),
            ),
        ),
        fatal=((REWARD_LOST,),),
        diagnosis="completions grow and still hold the answer, but the parser no longer finds it",
        remedy="read some completions; make the parser take the last answer, raise the token "
        "limit, or pay for the format apart from the answer (two_part)",
        changes=(TWO_PART,),
        source="verl PR #7274: the answer was not looked for past 300 characters",
    ),
    Detector(
        name="structural_collapse",
        cases=(
            (
                Symptom(metric="formatted", moved="down", by=0.3, change=0.15, since="best"),
                Symptom(metric="correct_unformatted", moved="up", change=0.1),
            ),
            (Symptom(metric="formatted", moved="down", by=0.5, since="best"),),
        ),
        fatal=((REWARD_LOST,), (Symptom(metric="formatted", moved="down", by=0.6, since="best"),)),
        diagnosis="answers are right but no longer in the format that the reward reads",
        remedy="pay for the format apart from the answer (two_part) and halve the learning rate",
        changes=(TWO_PART, SMALLER_STEP),
        source="verl #2150: a strict '####' format hides right answers; Muon on a 0.5B model",
    ),
    Detector(
        name="constant_answer",
        cases=(
            (Symptom(metric="top_share", moved="up", change=0.25, level=0.5),),
            (
                Symptom(metric="top_share", moved="up", change=0.15),
                Symptom(metric="vote_share", moved="above", level=0.95),
                Symptom(metric="distinct", moved="below", level=1.2),
            ),
        ),
        fatal=((Symptom(metric="top_share", moved="up", change=0.4, level=0.8),),),
        diagnosis="one answer is given to most prompts, whatever was asked",
        remedy="a self-made reward has been hacked: go back to the last healthy checkpoint, use "
        "mgrpo or gold answers, and add a KL term",
        changes=(KL_TO_START, Change(field="objective.name", act="set", value="mgrpo")),
        source="SRT, arXiv 2505.21444: one constant answer, self-reward near 1",
    ),
    Detector(
        name="self_reward_hacking",
        cases=(
            (
                Symptom(metric="heldout", moved="down", change=0.05, since="best"),
                Symptom(metric="reward", moved="up", by=0.05),
            ),
            (
                Symptom(metric="heldout", moved="down", change=0.05, since="best"),
                Symptom(metric="vote_share", moved="up", change=0.05),
            ),
            (
                Symptom(metric="label_accuracy", moved="down", change=0.15, since="best"),
                Symptom(metric="vote_share", moved="up", change=0.05),
            ),
        ),
        fatal=(
            (Symptom(metric="heldout", moved="down", change=0.1, since="best"),),
            (Symptom(metric="label_accuracy", moved="down", change=0.3, since="best"),),
        ),
        diagnosis="the training reward rises while accuracy on held-out problems falls",
        remedy="stop at the checkpoint with the best held-out score; go on with gold answers, "
        "with mgrpo, or with a reward that cannot be pleased without being right",
        changes=(KL_TO_START, Change(field="objective.name", act="set", value="mgrpo")),
        source="arXiv 2603.08660 (nearly every intrinsic reward rises, then falls); SRT in "
        "arXiv 2512.13070, MATH-500 79.2 at best and 47.5 at the end",
        patience=2 / 3,
        fatal_patience=2 / 3,
    ),
    Detector(
        name="repetition",
        cases=(
            (Symptom(metric="repetition", moved="up", change=0.2, level=0.3),),
            (Symptom(metric="repetition", moved="up", change=0.1, level=0.6), REWARD_NOT_UP),
        ),
        fatal=(
            (REWARD_LOST,),
            (Symptom(metric="repetition", moved="up", change=0.1, level=0.6), REWARD_NOT_UP),
        ),
        diagnosis="completions repeat themselves",
        remedy="go back to the last healthy checkpoint, halve the learning rate, and add a "
        "repetition or overlong part to the reward",
        changes=(SMALLER_STEP, KL_TO_START),
        source="arXiv 2603.08660: entropy rewards end in repetition",
    ),
    Detector(
        name="length_explosion",
        cases=(
            (Symptom(metric="length", moved="up", by=1.0), REWARD_NOT_UP),
            (Symptom(metric="length", moved="up", by=0.5), REWARD_FELL),
            (Symptom(metric="truncated", moved="up", change=0.3, level=0.5), REWARD_NOT_UP),
        ),
        fatal=((REWARD_LOST,),),
        diagnosis="completions grow without a gain in reward, and the limit cuts them",
        remedy="raise the token limit or penalise overlong completions; halve the learning rate",
        changes=(SMALLER_STEP,),
        source="verl #1066 (length grows, then nonsense); TRL #5697 (97-99% cut at 256 tokens)",
    ),
    Detector(
        name="length_collapse",
        cases=(
            (Symptom(metric="length", moved="down", by=0.5), REWARD_FELL),
            (Symptom(metric="length", moved="down", by=0.5),
             Symptom(metric="correct", moved="not_up", by=0.1)),
            (Symptom(metric="length", moved="down", by=0.8),),
        ),
        fatal=(
            (REWARD_LOST,),
            (Symptom(metric="correct", moved="down", by=0.5, since="best"),),
            (Symptom(metric="heldout", moved="down", change=0.1, since="best"),),
        ),
        diagnosis="completions shrink to a few tokens and no longer reason",
        remedy="the reward pays for saying little: check it on short completions, add a KL term",
        changes=(KL_TO_START, SMALLER_STEP),
        source="Llama-3.2-3B on self-certainty in TRL: 7 tokens by step 20, MATH-500 0.46 to "
        "0.002",
    ),
    Detector(
        name="entropy_explosion",
        cases=(
            (Symptom(metric="entropy", moved="up", by=2.0, change=0.3),),
            (Symptom(metric="entropy", moved="up", by=1.0, change=0.2), REWARD_FELL),
        ),
        fatal=((REWARD_LOST,),),
        diagnosis="the policy is ever less sure of its tokens, toward noise",
        remedy="halve the learning rate, lower the temperature, take out an entropy bonus",
        changes=(SMALLER_STEP, COOLER),
        source="verl #781: an entropy bonus of 0.001 was enough",
    ),
    Detector(
        name="entropy_collapse",
        cases=(
            (Symptom(metric="entropy", moved="down", by=0.5), REWARD_NOT_UP),
            (Symptom(metric="entropy", moved="down", by=0.5), REWARD_FELL),
            (Symptom(metric="entropy", moved="down", by=0.95),),
        ),
        fatal=((Symptom(metric="entropy", moved="down", by=0.5), REWARD_FELL),),
        diagnosis="the policy is certain of every token and has stopped exploring",
        remedy="widen the upper clip (epsilon_high 0.28), raise the temperature, or halve the "
        "learning rate",
        changes=(SMALLER_STEP, Change(field="objective.epsilon_high", act="at_least", value=0.28)),
        source="arXiv 2505.22617 (reward is bought with entropy); arXiv 2606.18487 (stop when "
        "half is gone early)",
    ),
    Detector(
        name="temperature_trap",
        cases=((Symptom(metric="greedy_gap", moved="up", change=0.15, level=0.2, floor=0.35),),),
        fatal=((REWARD_LOST,),),
        diagnosis="greedy and sampled answers differ widely: the temperature is too high for this "
        "policy, or the score is not of the policy that is trained",
        remedy="lower the sampling temperature and evaluate as you will use the model",
        changes=(COOLER,),
        source="miles PR #338 and tt-metal PR #56016: rollouts hotter than the evaluation",
        patience=2 / 3,
        fatal_patience=2 / 3,
    ),
    Detector(
        name="dead_optimizer",
        cases=(
            (Symptom(metric="dead_blocks", moved="above", level=0.9),),
            (Symptom(metric="update_ratio", moved="below", level=1e-4),),
            (Symptom(metric="update_rms", moved="below", level=1e-8), ALWAYS_SMALL),
            (Symptom(metric="grad_norm", moved="below", level=1e-10),
             Symptom(metric="zero_signal", moved="below", level=0.5)),
        ),
        fatal=(
            (Symptom(metric="update_ratio", moved="below", level=1e-6),),
            (Symptom(metric="update_rms", moved="below", level=1e-8), ALWAYS_SMALL),
        ),
        diagnosis="there is a learning rate, yet weights do not move",
        remedy="check that the optimizer holds the parameters that train (build it after LoRA); "
        "with pion raise promote or use cutoff='noise'",
        changes=(Change(field="optim.cutoff", act="set", value="noise"),),
        source="prime-rl PR #1433: the AdamW group was silently empty",
        patience=2,
        fatal_patience=4,
    ),
    Detector(
        name="reward_starvation",
        cases=(
            (Symptom(metric="zero_signal", moved="above", level=0.8),
             Symptom(metric="all_wrong", moved="above", level=0.7), BATCH_EMPTY),
            (Symptom(metric="zero_signal", moved="above", level=0.8),
             Symptom(metric="reward", moved="below", level=0.5), REWARD_NOT_UP, BATCH_EMPTY),
        ),
        fatal=(
            (Symptom(metric="zero_signal", moved="above", level=0.95),
             Symptom(metric="all_wrong", moved="above", level=0.9), BATCH_EMPTY),
            (Symptom(metric="zero_signal", moved="above", level=0.95),
             Symptom(metric="reward", moved="below", level=0.1), BATCH_EMPTY),
        ),
        diagnosis="nearly every group is all wrong: there is nothing to learn from",
        remedy="take easier problems, more completions of each prompt, or warm-start with sft",
        changes=(Change(field="rollout.generations", act="multiply", value=2),),
        source="NeMo-RL #3567 (all rewards zero); TRL #3452 (loss 0, reward 0, why?)",
        patience=3,
        fatal_patience=5,
    ),
    Detector(
        name="reward_saturation",
        cases=(
            (Symptom(metric="zero_signal", moved="above", level=0.8),
             Symptom(metric="all_right", moved="above", level=0.7), BATCH_EMPTY),
            (Symptom(metric="zero_signal", moved="above", level=0.8),
             Symptom(metric="reward", moved="up", by=0.2, change=0.1),
             Symptom(metric="reward", moved="still", by=0.1, since="best"),
             Symptom(metric="all_wrong", moved="below", level=0.2, optional=True), BATCH_EMPTY),
        ),
        diagnosis="nearly every group is all right: there is nothing left to learn here",
        remedy="stop and keep the checkpoint, or go on with harder problems",
        source="TRL #3708: groups without a signal are most of the cost",
        patience=3,
        harmless=True,
    ),
    Detector(
        name="lost_exploration",
        cases=(
            (Symptom(metric="zero_signal", moved="above", level=0.6),
             Symptom(metric="all_wrong", moved="above", level=0.25),
             Symptom(metric="entropy", moved="down", by=0.6), BATCH_EMPTY),
        ),
        diagnosis="the policy became certain before it was right: most groups are all wrong or all "
        "right, and what is never sampled is never learned",
        remedy="keep its entropy up (--objective.entropy-bonus 0.02 --objective.entropy-target "
        "0.3), pay wrong numbers by their distance (--reward.parts two_part near), choose groups "
        "with a signal (--objective.dynamic-sampling resample), or halve the learning rate",
        source="SmolLM2 on sums: entropy 0.7 to 0.1 within thirty steps, three groups of four "
        "silent; with all three it went on to 0.90",
        patience=3,
        harmless=True,
    ),
    Detector(
        name="constant_reward",
        cases=(
            (Symptom(metric="zero_signal", moved="above", level=0.97),
             Symptom(metric="reward", moved="still", by=0.02)),
        ),
        fatal=ALWAYS,
        diagnosis="every group has had one reward for all since the start",
        remedy="call the reward function on a right and on a wrong completion: it does not tell "
        "them apart",
        source="ms-swift #4570 and TRL #3857: loss 0, gradient 0",
        patience=3,
        fatal_patience=8,
    ),
    Detector(
        name="lying_loss",
        cases=(
            (REWARD_FELL, Symptom(metric="loss", moved="still", by=0.1, level=0.02)),
            (REWARD_FELL, Symptom(metric="loss", moved="down", by=0.5)),
        ),
        diagnosis="the reward falls while the loss stays near zero or improves; the loss of a "
        "group-relative objective says nothing about progress",
        remedy="watch the reward and held-out accuracy, never the loss",
        source="TRL #3452 and #3857: a loss of 0 taken for an error, or for success",
    ),
    Detector(
        name="reward_collapse",
        cases=((REWARD_FELL,),),
        fatal=((REWARD_LOST,),),
        diagnosis="the reward has fallen from its best",
        remedy="go back to the last healthy checkpoint with half the learning rate; log facts, "
        "groups and entropy to see why",
        changes=(SMALLER_STEP,),
        source="open-r1 #257 and ConvSearch-R1 #6: reward falls to 0 after some hundred steps",
    ),
    Detector(
        name="accuracy_collapse",
        cases=(
            (Symptom(metric="heldout", moved="down", by=0.2, since="best"),),
            (Symptom(metric="correct", moved="down", by=0.3, since="best"),),
        ),
        fatal=(
            (Symptom(metric="heldout", moved="down", by=0.25, since="best"),),
            (Symptom(metric="correct", moved="down", by=0.4, since="best"),),
            (FEWER_CORRECT, Symptom(metric="top_share", moved="up", by=0.3, noise_share=JOINT)),
            (FEWER_CORRECT,
             Symptom(metric="heldout", moved="down", by=0.25, since="best", noise_share=JOINT)),
        ),
        diagnosis="right answers are being lost, whatever the reward says",
        remedy="go back to the checkpoint with the best held-out score and halve the learning "
        "rate; if the reward did not fall, it pays for something else than being right",
        changes=(SMALLER_STEP, KL_TO_START),
        source="arXiv 2603.08660: held-out accuracy is the only test of a reward that is "
        "being hacked",
        patience=1 / 3,
        fatal_patience=1 / 3,
    ),
    Detector(
        name="stalled_throughput",
        cases=(
            (Symptom(metric="step_time", moved="up", by=2.0, since="usual"),
             Symptom(metric="length", moved="not_up", by=0.5, since="usual", optional=True)),
            (Symptom(metric="step_time", moved="up", by=4.0),
             Symptom(metric="length", moved="not_up", by=1.0, optional=True)),
        ),
        diagnosis="a step takes several times as long as it did, and completions are not longer",
        remedy="look for a slow reward function, a full disk, or another job on the machine",
        source="verl #795: 230 steps in five days, slower toward the end",
        harmless=True,
    ),
)  # fmt: skip
