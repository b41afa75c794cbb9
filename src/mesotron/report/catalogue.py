"""Which metrics are drawn together, under which title and question: the catalogue of plots.

Data alone. A metric that no plot here names is drawn at the end of the page by itself.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plot:
    """One plot.

    Args:
        title: above it.
        lines: metric, or a pattern with one `*`, -> what its line is called; for a pattern "" is
            what the `*` stands for.
        note: what one sees, in a sentence.
        band: metrics of the band's lower and upper edge; or one metric, the half width of a band
            around the first line.
        log: the y axis is logarithmic.
        spoken: the lines' names say what they are without the title.
        unless: left to the end of the page where a run has this metric, which tells more.
    """

    title: str
    lines: dict[str, str]
    note: str = ""
    band: tuple[str, ...] = ()
    log: bool = False
    spoken: bool = False
    unless: str = ""


@dataclass(frozen=True)
class Chapter:
    """Plots that answer one question."""

    question: str
    plots: tuple[Plot, ...]


CHAPTERS = (
    Chapter("Is it learning?", (
        Plot("Reward", {"reward": "reward"},
             "Mean over the step's completions; the band is one standard deviation of them.",
             band=("reward_std",)),
        Plot("Correct, and in the format", {
                 "facts/correct": "correct", "facts/formatted": "in the format",
                 "facts/correct_unformatted": "right outside the format"},
             "Right outside the format, rising, is how a model forgets the box.", spoken=True),
        Plot("Held-out accuracy", {"eval/greedy": "greedy", "eval/sampled": "sampled"},
             "Problems that are never trained on."),
        Plot("Success", {"eval/success": "success", "success": "success"},
             "Share of the episodes that reach the goal."),
        Plot("Fruit in a game", {"episode/fruit": "fruit"},
             "Games that ended in training; the band is the range over runs side by side."),
        Plot("Labels that are right", {
                 "votes/label_accuracy": "labels that are right",
                 "votes/agreement": "policy and anchor agree", "votes/share": "share of the vote"},
             "Self-made labels against the gold that the training does not see.", spoken=True),
        Plot("Loss", {"loss": "loss"}, unless="reward"),  # GRPO's loss tells next to nothing
        Plot("Tokens right", {"mean_token_accuracy": "tokens right"}),
        Plot("Losses", {"loss/policy": "policy", "loss/value": "value"}),
        Plot("Value explained", {"value/explained": "explained"},
             "1 is a perfect critic, 0 one that knows the mean alone."),
    )),
    Chapter("Is it still exploring?", (
        Plot("Entropy", {"entropy": "entropy", "policy/entropy": "entropy"},
             "Of a token or move, in nats; the band is the quartiles over completions.",
             band=("entropy/trajectory_q1", "entropy/trajectory_q3")),
        Plot("Groups without a signal", {
                 "groups/zero_signal": "groups without a signal",
                 "groups/all_right": "groups all right", "groups/all_wrong": "groups all wrong"},
             "A group whose completions all earn the same teaches nothing.", spoken=True),
        Plot("Different answers to one prompt", {"answers/distinct_in_group": "answers"}),
        Plot("The commonest answer", {"answers/top_share": "its share"},
             "Rising past one half: one answer for everything."),
        Plot("Distance from the start", {"kl": "KL", "kl/start": "KL", "policy/kl": "KL"},
             "In nats a token, by the estimate that the trainer logs."),
    )),
    Chapter("What does it write?", (
        Plot("Length", {"completions/mean_length": "tokens"},
             "Of a completion; the band is from the shortest to the longest.",
             band=("completions/min_length", "completions/max_length")),
        Plot("Cut off and repeated", {
                 "facts/truncated": "cut at the limit", "completions/repetition": "said before"},
             "Shares of the completions, and of their 4-grams.", spoken=True),
        Plot("Length of a game", {"episode/length": "moves"}),
    )),
    Chapter("How large are its steps?", (
        Plot("Update RMS", {"optim/*/update_rms": "", "update_rms/*": ""},
             "Root mean square of the change of a weight in one step, by rule.", log=True),
        Plot("Learning rate", {"learning_rate": "rate", "optim/lr": "rate"}),
        Plot("Gradient norm", {
                 "grad_norm": "all", "grad_norm/auxiliary": "auxiliary",
                 "optim/gradient_norm": "all"}, log=True),
        Plot("Directions that pass", {"optim/*/passed_rank": ""},
             "How many directions of a block got a full step, mean over blocks."),
        Plot("Dead blocks", {"optim/*/dead_blocks": ""},
             "Blocks that the filter lets nothing through of."),
        Plot("Energy in few directions", {"optim/*/concentration": ""},
             "Toward 1 all of a block's gradient points one way."),
        Plot("Effective rank of the gradient", {"gradient/*/effective_rank": ""},
             "Of each part's matrices, mean over them."),
        Plot("Signal to noise of the gradient", {"gradient/*/snr": ""},
             "At or below 0 for long: the batch is too small for this gradient."),
        Plot("Log-ratio of new to old", {
                 "ratio/log_max": "largest", "ratio/log_min": "smallest"}),
    )),
    Chapter("What does it cost?", (
        Plot("Seconds of a step", {
                 "time/step": "step", "time/rollout": "rollout", "time/optimizer": "optimizer"}),
        Plot("Steps a second", {"time/steps_per_second": "environment steps a second"}),
        Plot("Seconds in all", {"time/spent": "spent", "time/projected": "projected"},
             "Of the command, with loading, saving and evaluations."),
        Plot("Dollars", {"cost/spent": "spent", "cost/projected": "projected"}),
    )),
)  # fmt: skip


def match(pattern: str, metric: str) -> str | None:
    """What the `*` of a pattern stands for in a metric, "" for an equal name, None for no match.

    Example:
        >>> match("optim/*/update_rms", "optim/muon rows:4/update_rms")
        'muon rows:4'
        >>> match("loss", "loss"), match("loss", "losses")
        ('', None)
    """
    head, star, tail = pattern.partition("*")
    if not star:
        return "" if metric == pattern else None
    inside = len(metric) > len(head) + len(tail)
    fits = inside and metric.startswith(head) and metric.endswith(tail)
    return metric[len(head) : len(metric) - len(tail)] if fits else None
