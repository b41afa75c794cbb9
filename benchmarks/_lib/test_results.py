"""Results and pictures are small, readable under both names and the same bytes each time."""

import numpy as np
import pytest
from PIL import Image

from benchmarks._lib.pictures import COLORS, shrink
from benchmarks._lib.results import beside, read_json, write_json, write_result

RESULT = {
    "seeds": [1, 2],
    "runs": [{"loss": 0.1}, {"loss": None}],
    "name": "täglich",
}


@pytest.mark.parametrize("name", ["result.json", "result.json.gz"])
@pytest.mark.parametrize("write", [write_json, write_result])
def test_what_was_written_is_read(tmp_path, name, write):
    path = tmp_path / "results" / name
    write(RESULT, path)
    assert read_json(path) == RESULT
    assert [file.name for file in path.parent.iterdir()] == [name]


def test_the_same_result_gives_the_same_bytes(tmp_path):
    first = tmp_path / "first.json.gz"
    second = tmp_path / "second.json.gz"
    write_json(RESULT, first)
    write_json(RESULT, second)

    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes()[:2] == b"\x1f\x8b"  # gzip's mark


@pytest.mark.parametrize("name", ["object10.json", "object10.json.gz"])
def test_a_picture_is_named_after_its_result(tmp_path, name):
    assert beside(tmp_path / name, "_rates.png") == tmp_path / "object10_rates.png"


def test_a_shrunk_picture_keeps_its_frequent_colors(tmp_path):
    rng = np.random.default_rng(0)
    pixels = np.full((64, 64, 3), 255, np.uint8)
    pixels[:8] = rng.integers(0, 256, (8, 64, 3))  # more colors than the palette has
    pixels[20:24] = (31, 119, 180)
    source = tmp_path / "large.png"
    Image.fromarray(pixels).save(source)

    shrink(source, tmp_path / "small.png")

    with Image.open(tmp_path / "small.png") as image:
        assert image.mode == "P"
        small = np.array(image.convert("RGB"))

    assert len(np.unique(small.reshape(-1, 3), axis=0)) <= COLORS
    assert (small[8:] == pixels[8:]).all()
