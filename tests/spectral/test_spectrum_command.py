"""`mesotron optim spectrum` against values worked by hand and the filters that it shows."""

import json

import numpy as np
import pytest

from mesotron.config import SpectrumConfig
from mesotron.spectral import limit_cutoff, make_filter, noise_edge, response, spectrum, threshold

# Of five promotions, in float64 apart from this library: directions at >= 0.5.
DIRECTIONS = (1, 4, 14, 58, 282)


def record_of(**options) -> dict:
    config = SpectrumConfig(**options)
    return json.loads(json.dumps(spectrum.as_record(spectrum.make_curves(config))))


def test_a_record_holds_the_properties_of_the_filters():
    m, n = shape = (2048, 4096)  # too large to cap the directions
    record = record_of(
        filters=("pion",),
        promote=range(5),
        shape=shape,
    )

    sigma = np.array(record["sigma"])
    assert (sigma[0], sigma[-1]) == (0, 1)

    for promote, row in enumerate(record["filters"]):
        filter = make_filter("pion", promote=promote)
        assert row["label"] == f"pion promote={promote}"
        assert row["limit_cutoff"] == pytest.approx(limit_cutoff(filter))

        crossings = [threshold(filter, level) for level in (0.1, 0.5, 0.9)]
        assert list(row["sigma_giving"].values()) == pytest.approx(crossings)
        assert row["max_directions"] == DIRECTIONS[promote]

        np.testing.assert_array_equal(row["response"], response(filter, sigma))
        flops = row["gigaflops"]
        assert flops["standard"] == pytest.approx(5 * (4 * m * m * n + 2 * m**3) / 1e9)
        assert flops["gram"] < flops["standard"]

    tall, wide = (record_of(filters=("muon",), shape=shape) for shape in ((256, 64), (64, 256)))
    assert tall["filters"] == wide["filters"]


def test_cutoffs_are_shown_in_their_unit():
    record = record_of(
        filters=("pion",),
        cutoff=("noise", 0.5),
        shape=(128, 2048),
    )

    noise, relative = record["filters"]
    assert noise["limit_cutoff"] == pytest.approx(noise_edge(128, 2048))
    assert noise["sigma_unit"] == "Frobenius norm"
    assert relative["sigma_unit"] == "largest singular value"
    assert relative["max_directions"] == 128


@pytest.mark.parametrize(("columns", "most"), [(100, 80), (60, 60)])
def test_the_tables_fit_with_whole_numbers(monkeypatch, capsys, columns, most):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert spectrum.run(SpectrumConfig()) == 0

    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= most
    assert "…" not in shown

    names = ("muon", "cubic", "polar_express", "pion promote=2", "pion cutoff=aligned")
    assert all(text in shown for text in (*names, ".8165", ".845", "1024 × 4096"))


def test_the_same_curves_give_the_same_file(tmp_path):
    pictures = [tmp_path / "a.svg", tmp_path / "b.svg"]
    curves = spectrum.make_curves(SpectrumConfig(filters=("muon", "pion"), cutoff=("noise",)))
    for picture in pictures:
        spectrum.draw(curves, picture, "log")

    assert pictures[0].read_bytes() == pictures[1].read_bytes()
    assert all(curve.label in pictures[0].read_text() for curve in curves)

    spectrum.draw(curves, tmp_path / "a.pdf", "log")
    assert b"/CreationDate" not in (tmp_path / "a.pdf").read_bytes()


def test_files_are_written_and_a_filter_without_a_curve_refused(tmp_path):
    with pytest.raises(ValueError, match="low_rank"):
        spectrum.run(SpectrumConfig(filters=("low_rank",)))

    picture = tmp_path / "a.png"
    numbers = tmp_path / "a.json"
    config = SpectrumConfig(
        filters=("muon",),
        plot=picture,
        axis="linear",
        out=numbers,
    )

    assert spectrum.run(config) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads(numbers.read_text())["filters"][0]["label"] == "muon"
