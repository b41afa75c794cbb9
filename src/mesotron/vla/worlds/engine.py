"""MuJoCo as this room uses it; its bindings are compiled and tell a type checker nothing.

Checked against 3.3: 4.0 gave `mj_multiRay` one more argument.
"""

from typing import Any

import mujoco

mj: Any = mujoco
Model = Any
"""A `mujoco.MjModel`."""
Data = Any
"""A `mujoco.MjData`."""

if int(mj.__version__.split(".")[0]) > 3:
    raise ValueError(
        f"MuJoCo {mj.__version__} casts rays by another signature: pip install 'mujoco>=3.3,<4'"
    )
