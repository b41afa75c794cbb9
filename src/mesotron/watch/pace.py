"""How much smaller the steps of a run that ruined itself must be, for it to last to its end.

A policy is ruined by how far its weights have gone, more than by any one step: in benchmarks/watch
Muon does it within 10 to 20 steps at a rate of 6e-3 and within 40 at 1.5e-3. So the steps that it
took tell what those to come may take together.
"""

from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from mesotron.watch.settings import plain_scheduler

# The way to come may be this share of the way to where the failure began.
SAFETY = 0.5
# One rollback makes steps smaller by this at the most: over a long run the way is no measure.
SMALLEST = 1 / 16


def smaller_by(steps: int, left: int, rise: float = 1.0, number: int = 1) -> float:
    """What to multiply the learning rate by after a rollback.

    min(max(SAFETY * steps / left, SMALLEST), 0.5^number) / max(rise, 1)

    Args:
        steps: made at the rate that failed, from the start or the last rollback to where the
            failure began; an alarm may come much later.
        left: steps still to be made.
        rise: mean rate of those by the schedule, over the mean rate of the steps that were made;
            one that falls asks for nothing less.
        number: of the rollback: the first halves at least, the second quarters.

    Returns:
        A factor, at most a half.

    Example:
        >>> smaller_by(steps=10, left=100), smaller_by(steps=60, left=40)
        (0.0625, 0.5)
        >>> smaller_by(steps=20, left=80, rise=5.0)
        0.025
    """
    lasting = max(SAFETY * steps / max(left, 1), SMALLEST)
    return min(lasting, 0.5**number) / max(rise, 1.0)


def rise_to_come(trainer: Any, first: int, now: int, last: int) -> float:
    """The mean rate that the schedule has for the steps to come, over that of the steps made.

    Args:
        trainer: whose schedule; one that is no function of the step is taken for constant.
        first: step after which the counting begins.
        now: the present step.
        last: the run's last step.
    """
    scheduler = plain_scheduler(trainer)
    if not isinstance(scheduler, LambdaLR) or not first < now < last:
        return 1.0
    shape = scheduler.lr_lambdas[0]
    made = sum(map(shape, range(first, now))) / (now - first)
    coming = sum(map(shape, range(now, last))) / (last - now)
    return coming / made if made > 0 else 1.0
