"""`mesotron spectrum` against independently worked values and against the filters it shows."""

import json
import sys

import numpy as np
import pytest

from mesotron.config import SpectrumConfig
from mesotron.spectral import make_filter, noise_edge, response, spectrum

# Worked out in float64 from the two quintics of Fan et al. 2026, apart from this library:
# promote of 5 steps: limit cutoff; sigma giving 0.1, 0.5, 0.9; directions at >= 0.5.
WORKED_OUT = {
    0: (0.8165, 0.771, 0.798, 0.824, 1),
    1: (0.5230, 0.450, 0.492, 0.536, 4),
    2: (0.2957, 0.220, 0.263, 0.310, 14),
    3: (0.1605, 0.093, 0.131, 0.174, 58),
    4: (0.0860, 0.029, 0.060, 0.098, 282),
}


@pytest.fixture(scope="module")
def record():
    """The JSON of pion with promote 0..4; the shape is too large to cap the directions."""
    config = SpectrumConfig(filters=("pion",), promote=tuple(WORKED_OUT), shape=(2048, 4096))
    return json.loads(json.dumps(spectrum.as_record(spectrum.make_curves(config))))


@pytest.mark.parametrize("promote", WORKED_OUT)
def test_properties_are_those_worked_out(record, promote):
    row = record["filters"][promote]
    cutoff, *crossings, directions = WORKED_OUT[promote]
    assert row["label"] == f"pion promote={promote}"
    assert row["limit_cutoff"] == pytest.approx(cutoff, abs=5e-5)
    assert list(row["sigma_giving"].values()) == pytest.approx(crossings, abs=5e-4)
    assert row["max_directions"] == directions


def test_responses_are_those_of_the_filters(record):
    sigma = np.array(record["sigma"])
    assert sigma[0] == 0
    assert sigma[-1] == 1
    for promote, row in enumerate(record["filters"]):
        expected = response(make_filter("pion", promote=promote), sigma)
        np.testing.assert_array_equal(row["response"], expected)


def test_flops_of_the_standard_form_follow_the_formula(record):
    m, n = record["shape"]
    per_step = 4 * m * m * n + 2 * m**3
    for row in record["filters"]:
        assert row["gigaflops"]["standard"] == pytest.approx(5 * per_step / 1e9)
        assert row["gigaflops"]["gram"] < row["gigaflops"]["standard"]


def test_a_tall_matrix_is_shown_as_its_transpose():
    curves = [
        spectrum.make_curves(SpectrumConfig(filters=("muon",), shape=shape))[0]
        for shape in ((64, 256), (256, 64))
    ]
    assert curves[0] == curves[1]


def test_pion_without_options_shows_two_promotions_and_the_noise_cutoff():
    labels = [curve.label for curve in spectrum.make_curves(SpectrumConfig())]
    assert labels[:3] == ["muon", "cubic", "polar_express"]
    assert labels[3:] == ["pion promote=0", "pion promote=2", "pion cutoff=noise"]


def test_the_noise_cutoff_stands_at_the_edge_of_its_shape():
    config = SpectrumConfig(filters=("pion",), cutoff=("noise",), shape=(128, 2048))
    (row,) = spectrum.as_record(spectrum.make_curves(config))["filters"]
    assert row["limit_cutoff"] == pytest.approx(noise_edge(128, 2048))
    assert row["sigma_unit"] == "Frobenius norm"


def test_a_relative_cutoff_bounds_no_number_of_directions():
    config = SpectrumConfig(filters=("pion",), cutoff=(0.5,), shape=(128, 2048))
    (row,) = spectrum.as_record(spectrum.make_curves(config))["filters"]
    assert row["sigma_unit"] == "largest singular value"
    assert row["max_directions"] == 128


def test_the_strip_is_empty_below_and_full_above():
    low, high = spectrum.area_rows(np.array([0.0, spectrum.PLOT_TOP]))[0]
    assert (low, high) == (" ", "█")
    bottom = spectrum.area_rows(np.array([0.0, spectrum.PLOT_TOP, -1.0, 9.0]))[-1]
    assert bottom == "▁█▁█"


def test_the_tables_fit_eighty_columns(mesotron):
    done = mesotron("spectrum")
    assert done.returncode == 0
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "…" not in done.stdout
    for word in ("muon", "cubic", "polar_express", "pion cutoff=noise", ".8165", "1024 × 4096"):
        assert word in done.stdout


def test_a_narrow_terminal_gets_fewer_columns_and_whole_numbers(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    assert spectrum.run(SpectrumConfig()) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 60
    assert "…" not in shown
    assert all(word in shown for word in ("pion cutoff=noise", ".8165", ".845", "1024 × 4096"))


@pytest.mark.parametrize(("suffix", "axis"), [(".svg", "log"), (".pdf", "linear"), (".png", "log")])
def test_the_same_curves_give_the_same_file(tmp_path, suffix, axis):
    pictures = [tmp_path / f"{name}{suffix}" for name in "ab"]
    for picture in pictures:
        spectrum.run(SpectrumConfig(filters=("muon", "pion"), plot=picture, axis=axis))
    assert pictures[0].read_bytes() == pictures[1].read_bytes()
    if suffix == ".svg":
        assert all(name in pictures[0].read_text() for name in ("muon", "pion cutoff=noise"))


def test_bad_requests_are_rejected(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="low_rank"):
        spectrum.run(SpectrumConfig(filters=("low_rank",)))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match="plot"):
        spectrum.run(SpectrumConfig(filters=("muon",), plot=tmp_path / "a.png"))


def test_files_are_written(mesotron, tmp_path):
    picture, numbers = tmp_path / "a.png", tmp_path / "a.json"
    done = mesotron("spectrum", "muon", "pion", "--plot", str(picture), "--out", str(numbers))
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads(numbers.read_text())["filters"][0]["label"] == "muon"
