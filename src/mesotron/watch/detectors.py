"""Every failure the watch knows, as data: its signs, when it is fatal, the diagnosis, the remedy.

Rules are relative to the run's own first rows or to its best plateau; levels are backstops. Each
detector names the public run or paper that taught it. The engine that reads this is `engine`;
limits that decide on a stop were fitted on the tuning corpus of benchmarks/watch.
"""

from dataclasses import dataclass

from mesotron.watch.remedies import COOLER, KL_TO_START, SMALLER_STEP, TWO_PART, Change
from mesotron.watch.signs import Sign

Case = tuple[Sign, ...]


@dataclass(frozen=True, kw_only=True)
class Detector:
    """One failure.

    Args:
        name: a word, also in events and on the command line.
        cases: it is told of when every sign of any case is shown.
        fatal: it is also fatal when every sign of any of these is shown; () never, ((),) always.
        diagnosis: what has happened, one sentence.
        remedy: what to do, one sentence.
        changes: the remedy as data.
        taught_by: the public run, thread or paper behind it.
        patience: times as many rows in a row as the settings' patience must show it.
        fatal_patience: the same before it is fatal.
        harmless: worth saying, but no reason to call the run drifting or dead.
    """

    name: str
    cases: tuple[Case, ...]
    fatal: tuple[Case, ...] = ()
    diagnosis: str
    remedy: str
    changes: tuple[Change, ...] = ()
    taught_by: str
    patience: float = 1
    fatal_patience: float = 1
    harmless: bool = False

    @property
    def metrics(self) -> tuple[str, ...]:
        """Every metric it reads, in order."""
        signs = [sign for case in (*self.cases, *self.fatal) for sign in case]
        return tuple(dict.fromkeys(sign.metric for sign in signs))


# Signs that many failures share.
REWARD_FELL = Sign(metric="reward", moved="down", by=0.3, since="best")
REWARD_LOST = Sign(metric="reward", moved="down", by=0.5, since="best")
REWARD_NOT_UP = Sign(metric="reward", moved="not_up", by=0.1)
# Steps that were as small from the start on: in a warm-up they grow, and at the end of a schedule
# they have shrunk. (The rate itself is logged of the first group alone.)
EVER_SO_SMALL = Sign(metric="update_rms", moved="still", by=0.5)
# Where groups are chosen or resampled silence is that of all that were sampled; as long as half of
# the places train on a signal, there is something to learn.
PLACES_EMPTY = Sign(metric="filled", moved="below", level=0.5, optional=True)
# Two signs that have nothing to do with each other may each be shown by less: chance would have to
# move both (2.8 standard errors twice are 4 together).
BESIDE = 0.7
RIGHT_FEWER = Sign(metric="correct", moved="down", by=0.4, since="best", beside=BESIDE)
ALWAYS: tuple[Case, ...] = ((),)

# In order: where several speak at once, the first is called the cause.
DETECTORS = (
    Detector(
        name="nonfinite",
        cases=((Sign(metric="nonfinite", moved="above", level=1),),),
        fatal=ALWAYS,
        diagnosis="a loss, gradient or log-probability is not a finite number",
        remedy="go back to a checkpoint before it, halve the learning rate, and look for a reward "
        "that was never given or for overflow in 16 bits",
        changes=(SMALLER_STEP,),
        taught_by="verl #721: NaN log-probabilities, then '!!!!' as the only output",
        patience=1 / 3,
    ),
    Detector(
        name="update_explosion",
        cases=(
            (Sign(metric="grad_norm", moved="up", by=9),),
            (Sign(metric="grad_norm", moved="up", by=9, since="usual"),),
            (Sign(metric="update_ratio", moved="up", by=4),),
            (Sign(metric="kl", moved="up", by=9, change=0.1, since="usual"),),
            (Sign(metric="ratio_high", moved="up", by=4, change=3, since="usual"),),
        ),
        fatal=(
            (REWARD_LOST,),
            (Sign(metric="grad_norm", moved="up", by=99),),
            (Sign(metric="kl", moved="up", change=0.5), REWARD_NOT_UP),
        ),
        diagnosis="the steps are many times larger than at the start of this run",
        remedy="halve the learning rate and go back to the last healthy checkpoint; with Muon "
        "prefer pion, which drops the noisy directions",
        changes=(SMALLER_STEP,),
        taught_by="Search-R1 #88 (explodes near step 160); Muon in arXiv 2605.19282",
    ),
    Detector(
        name="parser_drift",
        cases=(
            (
                Sign(metric="length", moved="up", by=0.3),
                REWARD_FELL,
                Sign(metric="correct_unformatted", moved="up", change=0.1),
            ),
            (
                Sign(metric="length", moved="up", by=0.3),
                REWARD_FELL,
                Sign(metric="parsed", moved="down", change=0.15, since="best"),
            ),
        ),
        fatal=((REWARD_LOST,),),
        diagnosis="completions grow and still hold the answer, but the parser no longer finds it",
        remedy="read some completions; make the parser take the last answer, raise the token "
        "limit, or pay for the format apart from the answer (two_part)",
        changes=(TWO_PART,),
        taught_by="verl PR #7274: the answer was not looked for past 300 characters",
    ),
    Detector(
        name="structural_collapse",
        cases=(
            (
                Sign(metric="formatted", moved="down", by=0.3, change=0.15, since="best"),
                Sign(metric="correct_unformatted", moved="up", change=0.1),
            ),
            (Sign(metric="formatted", moved="down", by=0.5, since="best"),),
        ),
        fatal=((REWARD_LOST,), (Sign(metric="formatted", moved="down", by=0.6, since="best"),)),
        diagnosis="answers are right but no longer in the format that the reward reads",
        remedy="pay for the format apart from the answer (two_part) and halve the learning rate",
        changes=(TWO_PART, SMALLER_STEP),
        taught_by="verl #2150: a strict '####' format hides right answers; Muon on a 0.5B model",
    ),
    Detector(
        name="constant_answer",
        cases=(
            (Sign(metric="top_share", moved="up", change=0.25, level=0.5),),
            (
                Sign(metric="top_share", moved="up", change=0.15),
                Sign(metric="vote_share", moved="above", level=0.95),
                Sign(metric="distinct", moved="below", level=1.2),
            ),
        ),
        fatal=((Sign(metric="top_share", moved="up", change=0.4, level=0.8),),),
        diagnosis="one answer is given to most prompts, whatever was asked",
        remedy="a self-made reward has been hacked: go back to the last healthy checkpoint, use "
        "mgrpo or gold answers, and add a KL term",
        changes=(KL_TO_START, Change(field="objective.name", act="set", value="mgrpo")),
        taught_by="SRT, arXiv 2505.21444: one constant answer, self-reward near 1",
    ),
    Detector(
        name="self_reward_hacking",
        cases=(
            (
                Sign(metric="heldout", moved="down", change=0.05, since="best"),
                Sign(metric="reward", moved="up", by=0.05),
            ),
            (
                Sign(metric="heldout", moved="down", change=0.05, since="best"),
                Sign(metric="vote_share", moved="up", change=0.05),
            ),
            (
                Sign(metric="label_accuracy", moved="down", change=0.15, since="best"),
                Sign(metric="vote_share", moved="up", change=0.05),
            ),
        ),
        fatal=(
            (Sign(metric="heldout", moved="down", change=0.1, since="best"),),
            (Sign(metric="label_accuracy", moved="down", change=0.3, since="best"),),
        ),
        diagnosis="the training reward rises while accuracy on held-out problems falls",
        remedy="stop at the checkpoint with the best held-out score; go on with gold answers, "
        "with mgrpo, or with a reward that cannot be pleased without being right",
        changes=(KL_TO_START, Change(field="objective.name", act="set", value="mgrpo")),
        taught_by="arXiv 2603.08660 (nearly every intrinsic reward rises, then falls); SRT in "
        "arXiv 2512.13070, MATH-500 79.2 at best and 47.5 at the end",
        patience=2 / 3,
        fatal_patience=2 / 3,
    ),
    Detector(
        name="repetition",
        cases=(
            (Sign(metric="repetition", moved="up", change=0.2, level=0.3),),
            (Sign(metric="repetition", moved="up", change=0.1, level=0.6), REWARD_NOT_UP),
        ),
        fatal=(
            (REWARD_LOST,),
            (Sign(metric="repetition", moved="up", change=0.1, level=0.6), REWARD_NOT_UP),
        ),
        diagnosis="completions repeat themselves",
        remedy="go back to the last healthy checkpoint, halve the learning rate, and add a "
        "repetition or overlong part to the reward",
        changes=(SMALLER_STEP, KL_TO_START),
        taught_by="arXiv 2603.08660: entropy rewards end in repetition",
    ),
    Detector(
        name="length_explosion",
        cases=(
            (Sign(metric="length", moved="up", by=1.0), REWARD_NOT_UP),
            (Sign(metric="length", moved="up", by=0.5), REWARD_FELL),
            (Sign(metric="truncated", moved="up", change=0.3, level=0.5), REWARD_NOT_UP),
        ),
        fatal=((REWARD_LOST,),),
        diagnosis="completions grow without a gain in reward, and the limit cuts them",
        remedy="raise the token limit or penalise overlong completions; halve the learning rate",
        changes=(SMALLER_STEP,),
        taught_by="verl #1066 (length grows, then nonsense); TRL #5697 (97-99% cut at 256 tokens)",
    ),
    Detector(
        name="length_collapse",
        cases=(
            (Sign(metric="length", moved="down", by=0.5), REWARD_FELL),
            (Sign(metric="length", moved="down", by=0.5),
             Sign(metric="correct", moved="not_up", by=0.1)),
            (Sign(metric="length", moved="down", by=0.8),),
        ),
        fatal=(
            (REWARD_LOST,),
            (Sign(metric="correct", moved="down", by=0.5, since="best"),),
            (Sign(metric="heldout", moved="down", change=0.1, since="best"),),
        ),
        diagnosis="completions shrink to a few tokens and no longer reason",
        remedy="the reward pays for saying little: check it on short completions, add a KL term",
        changes=(KL_TO_START, SMALLER_STEP),
        taught_by="Llama-3.2-3B on self-certainty in TRL: 7 tokens by step 20, MATH-500 0.46 to "
        "0.002",
    ),
    Detector(
        name="entropy_explosion",
        cases=(
            (Sign(metric="entropy", moved="up", by=2.0, change=0.3),),
            (Sign(metric="entropy", moved="up", by=1.0, change=0.2), REWARD_FELL),
        ),
        fatal=((REWARD_LOST,),),
        diagnosis="the policy is ever less sure of its tokens, toward noise",
        remedy="halve the learning rate, lower the temperature, take out an entropy bonus",
        changes=(SMALLER_STEP, COOLER),
        taught_by="verl #781: an entropy bonus of 0.001 was enough",
    ),
    Detector(
        name="entropy_collapse",
        cases=(
            (Sign(metric="entropy", moved="down", by=0.5), REWARD_NOT_UP),
            (Sign(metric="entropy", moved="down", by=0.5), REWARD_FELL),
            (Sign(metric="entropy", moved="down", by=0.95),),
        ),
        fatal=((Sign(metric="entropy", moved="down", by=0.5), REWARD_FELL),),
        diagnosis="the policy is certain of every token and has stopped exploring",
        remedy="widen the upper clip (epsilon_high 0.28), raise the temperature, or halve the "
        "learning rate",
        changes=(SMALLER_STEP, Change(field="objective.epsilon_high", act="at_least", value=0.28)),
        taught_by="arXiv 2505.22617 (reward is bought with entropy); arXiv 2606.18487 (stop when "
        "half is gone early)",
    ),
    Detector(
        name="temperature_trap",
        cases=((Sign(metric="greedy_gap", moved="up", change=0.15, level=0.2, floor=0.35),),),
        fatal=((REWARD_LOST,),),
        diagnosis="greedy and sampled answers differ widely: the temperature is too high for this "
        "policy, or the score is not of the policy that is trained",
        remedy="lower the sampling temperature and evaluate as you will use the model",
        changes=(COOLER,),
        taught_by="miles PR #338 and tt-metal PR #56016: rollouts hotter than the evaluation",
        patience=2 / 3,
        fatal_patience=2 / 3,
    ),
    Detector(
        name="dead_optimizer",
        cases=(
            (Sign(metric="dead_blocks", moved="above", level=0.9),),
            (Sign(metric="update_ratio", moved="below", level=1e-4),),
            (Sign(metric="update_rms", moved="below", level=1e-8), EVER_SO_SMALL),
            (Sign(metric="grad_norm", moved="below", level=1e-10),
             Sign(metric="zero_signal", moved="below", level=0.5)),
        ),
        fatal=(
            (Sign(metric="update_ratio", moved="below", level=1e-6),),
            (Sign(metric="update_rms", moved="below", level=1e-8), EVER_SO_SMALL),
        ),
        diagnosis="there is a learning rate, yet weights do not move",
        remedy="check that the optimizer holds the parameters that train (build it after LoRA); "
        "with pion raise promote or use cutoff='noise'",
        changes=(Change(field="optim.cutoff", act="set", value="noise"),),
        taught_by="prime-rl PR #1433: the AdamW group was silently empty",
        patience=2,
        fatal_patience=4,
    ),
    Detector(
        name="reward_starvation",
        cases=(
            (Sign(metric="zero_signal", moved="above", level=0.8),
             Sign(metric="all_wrong", moved="above", level=0.7), PLACES_EMPTY),
            (Sign(metric="zero_signal", moved="above", level=0.8),
             Sign(metric="reward", moved="below", level=0.5), REWARD_NOT_UP, PLACES_EMPTY),
        ),
        fatal=(
            (Sign(metric="zero_signal", moved="above", level=0.95),
             Sign(metric="all_wrong", moved="above", level=0.9), PLACES_EMPTY),
            (Sign(metric="zero_signal", moved="above", level=0.95),
             Sign(metric="reward", moved="below", level=0.1), PLACES_EMPTY),
        ),
        diagnosis="nearly every group is all wrong: there is nothing to learn from",
        remedy="take easier problems, more completions of each prompt, or warm-start with sft",
        changes=(Change(field="rollout.generations", act="multiply", value=2),),
        taught_by="NeMo-RL #3567 (all rewards zero); TRL #3452 (loss 0, reward 0, why?)",
        patience=3,
        fatal_patience=5,
    ),
    Detector(
        name="reward_saturation",
        cases=(
            (Sign(metric="zero_signal", moved="above", level=0.8),
             Sign(metric="all_right", moved="above", level=0.7), PLACES_EMPTY),
            (Sign(metric="zero_signal", moved="above", level=0.8),
             Sign(metric="reward", moved="up", by=0.2, change=0.1),
             Sign(metric="reward", moved="still", by=0.1, since="best"),
             Sign(metric="all_wrong", moved="below", level=0.2, optional=True), PLACES_EMPTY),
        ),
        diagnosis="nearly every group is all right: there is nothing left to learn here",
        remedy="stop and keep the checkpoint, or go on with harder problems",
        taught_by="TRL #3708: groups without a signal are most of the cost",
        patience=3,
        harmless=True,
    ),
    Detector(
        name="lost_exploration",
        cases=(
            (Sign(metric="zero_signal", moved="above", level=0.6),
             Sign(metric="all_wrong", moved="above", level=0.25),
             Sign(metric="entropy", moved="down", by=0.6), PLACES_EMPTY),
        ),
        diagnosis="the policy became certain before it was right: most groups are all wrong or all "
        "right, and what is never sampled is never learned",
        remedy="keep its entropy up (--objective.entropy-bonus 0.02 --objective.entropy-target "
        "0.3), pay wrong numbers by their distance (--reward.parts two_part near), choose groups "
        "with a signal (--objective.dynamic-sampling resample), or halve the learning rate",
        taught_by="SmolLM2 on sums: entropy 0.7 to 0.1 within thirty steps, three groups of four "
        "silent; with all three it went on to 0.90",
        patience=3,
        harmless=True,
    ),
    Detector(
        name="constant_reward",
        cases=(
            (Sign(metric="zero_signal", moved="above", level=0.97),
             Sign(metric="reward", moved="still", by=0.02)),
        ),
        fatal=ALWAYS,
        diagnosis="every group has had one reward for all since the start",
        remedy="call the reward function on a right and on a wrong completion: it does not tell "
        "them apart",
        taught_by="ms-swift #4570 and TRL #3857: loss 0, gradient 0",
        patience=3,
        fatal_patience=8,
    ),
    Detector(
        name="lying_loss",
        cases=(
            (REWARD_FELL, Sign(metric="loss", moved="still", by=0.1, level=0.02)),
            (REWARD_FELL, Sign(metric="loss", moved="down", by=0.5)),
        ),
        diagnosis="the reward falls while the loss stays near zero or improves; the loss of a "
        "group-relative objective says nothing about progress",
        remedy="watch the reward and held-out accuracy, never the loss",
        taught_by="TRL #3452 and #3857: a loss of 0 taken for an error, or for success",
    ),
    Detector(
        name="reward_collapse",
        cases=((REWARD_FELL,),),
        fatal=((REWARD_LOST,),),
        diagnosis="the reward has fallen from its best",
        remedy="go back to the last healthy checkpoint with half the learning rate; log facts, "
        "groups and entropy to see why",
        changes=(SMALLER_STEP,),
        taught_by="open-r1 #257 and ConvSearch-R1 #6: reward falls to 0 after some hundred steps",
    ),
    Detector(
        name="accuracy_collapse",
        cases=(
            (Sign(metric="heldout", moved="down", by=0.2, since="best"),),
            (Sign(metric="correct", moved="down", by=0.3, since="best"),),
        ),
        fatal=(
            (Sign(metric="heldout", moved="down", by=0.25, since="best"),),
            (Sign(metric="correct", moved="down", by=0.4, since="best"),),
            (RIGHT_FEWER, Sign(metric="top_share", moved="up", by=0.3, beside=BESIDE)),
            (RIGHT_FEWER,
             Sign(metric="heldout", moved="down", by=0.25, since="best", beside=BESIDE)),
        ),
        diagnosis="right answers are being lost, whatever the reward says",
        remedy="go back to the checkpoint with the best held-out score and halve the learning "
        "rate; if the reward did not fall, it pays for something else than being right",
        changes=(SMALLER_STEP, KL_TO_START),
        taught_by="arXiv 2603.08660: held-out accuracy is the only test of a reward that is "
        "being hacked",
        patience=1 / 3,
        fatal_patience=1 / 3,
    ),
    Detector(
        name="stalled_throughput",
        cases=(
            (Sign(metric="step_time", moved="up", by=2.0, since="usual"),
             Sign(metric="length", moved="not_up", by=0.5, since="usual", optional=True)),
            (Sign(metric="step_time", moved="up", by=4.0),
             Sign(metric="length", moved="not_up", by=1.0, optional=True)),
        ),
        diagnosis="a step takes several times as long as it did, and completions are not longer",
        remedy="look for a slow reward function, a full disk, or another job on the machine",
        taught_by="verl #795: 230 steps in five days, slower toward the end",
        harmless=True,
    ),
)  # fmt: skip
