"""When a failure began: the row after the last one that still looked well.

An alarm comes late by its window, its patience and the size of the change it waits for. A guard
that goes back must go to before the change itself, so it is looked for in what a track remembers.
"""

from collections.abc import Callable, Sequence

from mesotron.watch.signs import Sign
from mesotron.watch.tracks import Look, middle

# A value that has gone less than this share of the way from its reference still looks well.
WELL = 0.25
# Values whose median is looked at, so that one lucky row in a decline is not taken for health.
SMOOTH = 5


def began(sign: Sign, look: Look, steps: Sequence[int]) -> int | None:
    """The step of the first row of the change that a sign was shown by.

    Args:
        sign: one that is shown.
        look: in which it is.
        steps: of the values that the look's track remembers, as many as those.

    Returns:
        The step; the oldest remembered one if no row looked well; None for a sign that tells of
        no change (not_up, still).

    Example:
        >>> from mesotron.watch.tracks import Track
        >>> track = Track(warmup=4, window=2)
        >>> for reward in [0.7] * 20 + [0.5, 0.3, 0.1, 0.1, 0.1, 0.1]:
        ...     track.add(reward)
        >>> fell = Sign(metric="reward", moved="down", by=0.5)
        >>> began(fell, track.look(0), range(26))
        20
    """
    well = judge(sign, look)
    if well is None:
        return None
    values = look.track.recent
    width = SMOOTH if look.track.windows[0] > 1 else 1
    # The median of a window that ends at the row: its newest rows may be ill already, so that
    # the first ill row is at most half a window before the first ill median.
    sick = [not well(middle(values[max(k + 1 - width, 0) : k + 1])) for k in range(len(values))]
    last_well = max((k for k, ill in enumerate(sick) if not ill), default=-1)
    if width == 1 and last_well >= 0:  # an evaluation: the change came somewhere since the last
        return steps[last_well] + 1
    first = max(last_well + 1 - width // 2, 0)
    return steps[min(first, len(steps) - 1)]


def judge(sign: Sign, look: Look) -> Callable[[float], bool] | None:
    """What a value must be to look well; None if the sign tells of no change."""
    level = sign.level
    if sign.moved == "above" and level is not None:
        return lambda value: value < level
    if sign.moved == "below" and level is not None:
        return lambda value: value > level
    reference = look.reference(sign.since)
    if sign.moved not in ("up", "down") or reference is None:
        return None
    way = look.now - reference
    return lambda value: (value - reference) * (1 if way > 0 else -1) < WELL * abs(way)
