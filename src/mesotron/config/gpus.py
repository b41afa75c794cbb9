"""GPUs by name: what `--gpu` knows of them.

Peak numbers are those of the data sheets. Prices are typical on-demand dollars per hour of one GPU;
they move, so `--price` comes first. GPUs that people own rather than rent have no price.
"""

import re
from typing import TYPE_CHECKING, Literal, NamedTuple

PRICES_AS_OF = "November 2025"


class GpuModel(NamedTuple):
    bf16: float  # TFLOP/s of dense products, summed in float32; 0: it has none
    fp32: float  # TFLOP/s
    bandwidth: float  # GB/s
    memory: float  # usable GiB
    price: float | None = None  # dollars per hour


GPUS: dict[str, GpuModel] = {
    # Data centers
    "b200": GpuModel(2250, 80, 8000, 178, 6.25),
    "h200": GpuModel(989, 67, 4800, 139, 4.54),
    "h100": GpuModel(989, 67, 3350, 79, 3.95),
    "a100": GpuModel(312, 19.5, 2039, 79, 2.50),  # of 80 GB
    "l40s": GpuModel(362, 91, 864, 44, 1.95),
    "a6000": GpuModel(155, 38, 768, 47, 0.80),
    "a10": GpuModel(125, 31, 600, 22, 1.10),
    "a10g": GpuModel(70, 31, 600, 22, 1.21),
    "l4": GpuModel(121, 30, 300, 22, 0.80),
    "t4": GpuModel(0, 8.1, 320, 14.5, 0.59),
    # Desktops and workstations of NVIDIA
    "4090": GpuModel(165, 82, 1008, 23.5, 0.69),
    "3060": GpuModel(25, 12.7, 360, 11.6),
    "3080": GpuModel(59, 29.8, 760, 9.6),
    "3090": GpuModel(71, 35.6, 936, 23.5),
    "4060": GpuModel(30, 15.1, 272, 7.6),
    "4060-ti": GpuModel(44, 22.1, 288, 15.5),
    "4070": GpuModel(58, 29.1, 504, 11.6),
    "4080": GpuModel(97, 48.7, 717, 15.6),
    "5060-ti": GpuModel(47, 23.7, 448, 15.5),
    "5070": GpuModel(62, 30.9, 672, 11.6),
    "5080": GpuModel(113, 56.3, 960, 15.6),
    "5090": GpuModel(210, 105, 1792, 31.4),
    "6000-ada": GpuModel(182, 91, 960, 47),
    "pro-6000": GpuModel(252, 126, 1792, 94.5),
    # AMD
    "mi250x": GpuModel(192, 48, 1638, 63),  # one of its two dies, which programs see as a GPU each
    "mi300x": GpuModel(1307, 163, 5300, 191),
    "mi325x": GpuModel(1307, 163, 6000, 255),
    "7900-xtx": GpuModel(123, 61, 960, 23.5),
    "9070-xt": GpuModel(195, 49, 640, 15.5),
    # Apple: three quarters of the largest memory that is sold, which a process may take
    "m1-max": GpuModel(10.4, 10.4, 400, 48),
    "m2-max": GpuModel(13.6, 13.6, 400, 72),
    "m2-ultra": GpuModel(27.2, 27.2, 800, 144),
    "m3-max": GpuModel(14.2, 14.2, 400, 96),
    "m3-ultra": GpuModel(28.4, 28.4, 819, 384),
    "m4": GpuModel(4.3, 4.3, 120, 24),
    "m4-pro": GpuModel(9.2, 9.2, 273, 48),
    "m4-max": GpuModel(18.4, 18.4, 546, 96),
}

if TYPE_CHECKING:
    GpuName = str
else:
    GpuName = Literal[tuple(GPUS)]


def find_gpu(name: str) -> GpuName | None:
    """The key of the GPU that a driver's or a user's name means: the one with the most words."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    named = [key for key in GPUS if set(key.split("-")) <= words]
    return max(named, key=lambda key: len(key.split("-")), default=None)
