"""The unit of the learning rate: the factor of a filtered direction of norm about 1.

"rms" changes each weight by 0.2 lr on average in a full-rank step, as AdamW usually does, so that
AdamW's learning rate carries over (Liu et al. 2025, arXiv 2502.16982).
"""

import math

Scale = str | float
SCALES = ("rms", "moonlight", "spectral")


def step_scale(scale: Scale, rows: int, cols: int) -> float:
    """The factor between lr times the filtered matrix and the change of the weights.

    Args:
        scale: "rms" or "moonlight": 0.2 sqrt(max(rows, cols)), element RMS 0.2 lr for a full-rank
            step; "spectral": sqrt(max(1, rows / cols)), Jordan's form, lr is the spectral norm of
            the step of a wide matrix; a number s: s sqrt(max(rows, cols)), for the constants 0.2,
            2.0 and 5.0 of Pion's releases.
        rows: outputs of the logical matrix.
        cols: inputs of the logical matrix.

    Example:
        >>> step_scale("rms", 1024, 256), step_scale("spectral", 1024, 256)
        (6.4, 2.0)
    """
    if scale in ("rms", "moonlight"):
        return 0.2 * math.sqrt(max(rows, cols))
    if scale == "spectral":
        return math.sqrt(max(1.0, rows / cols))

    return check_scale(scale) * math.sqrt(max(rows, cols))


def check_scale(scale: Scale) -> float:
    if scale in SCALES:
        return 1.0
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not scale > 0:
        raise ValueError(f"scale={scale!r} must be one of {', '.join(SCALES)} or a positive number")

    return float(scale)
