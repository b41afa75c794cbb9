"""How much the first round of dynamic sampling samples: known before a run, without torch.

The trainer adds whole prompts on each process; a plan and the checks count with the same numbers.
"""

from mesotron.config.training import ObjectiveConfig, RolloutConfig
from mesotron.rlvr.objectives.options import resolve, trained_generations


def first_round_rows(rows: int, generations: int, oversample: float) -> int:
    """Rows of one process's first round: its own, and those of prompts sampled beside them.

    Args:
        rows: of the process's part of the batch that trains.
        generations: G.
        oversample: prompts sampled for each that trains; above 1 at least one prompt is added.

    Raises:
        ValueError: prompts are to be added, and the process does not hold whole groups.

    Example:
        >>> first_round_rows(32, 8, 1.5), first_round_rows(16, 8, 1.2), first_round_rows(16, 8, 1.0)
        (48, 24, 16)
    """
    if oversample == 1:
        return rows
    if rows % generations:
        raise ValueError(
            f"objective.dynamic_oversample = {oversample:g} needs whole groups on each process, "
            f"which has {rows} completions in groups of {generations}: leave it out, or change "
            "rollout.prompts"
        )
    own = rows // generations
    return (own + max(1, round((oversample - 1) * own))) * generations


def first_round_prompts(
    objective: ObjectiveConfig, rollout: RolloutConfig, num_processes: int = 1
) -> int:
    """Prompts of the first round over all processes; those of a batch if none are added.

    Args:
        objective: resolved or not.
        rollout: as `mesotron.rlvr.objectives.options.trl_arguments` takes it.
        num_processes: how many train together.

    Example:
        >>> more = ObjectiveConfig(dynamic_sampling="resample", dynamic_oversample=1.3)
        >>> first_round_prompts(more, RolloutConfig(prompts=4))
        5
    """
    G = trained_generations(resolve(objective, rollout.generations), rollout.generations)
    share = rollout.prompts * G // num_processes
    return first_round_rows(share, G, objective.dynamic_oversample) * num_processes // G
