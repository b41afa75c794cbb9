"""TensorBoard gets the names and numbers of metrics.jsonl, through TRL's `report_to`."""

import pytest
from transformers.integrations import TensorBoardCallback

from mesotron.report import read_run, render_runs
from mesotron.report.data import make_spectra
from mesotron.rlvr.callbacks import RunLog
from mesotron.rlvr.optimizer import OptimizerLog
from mesotron.runs import RunFolder
from mesotron.runs.console import LiveView
from mesotron.watch.log import read_log
from support.rlvr_tiny import make_trainer

pytest.importorskip("tensorboard")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    path = tmp_path_factory.mktemp("mirrors") / "run"
    folder = RunFolder.create(path, {"steps": 2}, {"device": "cpu"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSORBOARD_LOGGING_DIR", str(path / "board"))
        trainer = make_trainer(
            path / "checkpoints", max_steps=2, report_to=["tensorboard"], parts={"optim": "muon"}
        )
        assert TensorBoardCallback in {type(each) for each in trainer.callback_handler.callbacks}

        trainer.add_callback(RunLog(folder, LiveView(2, {}), trainer))
        trainer.add_callback(OptimizerLog(folder))
        trainer.train()

    return folder


def test_tensorboard_has_every_name_and_number_of_the_run_folder(run):
    board: dict[int, dict[str, float]] = {}
    for row in read_log(run.path / "board").rows:
        board.setdefault(int(row["step"]), {}).update(row)

    rows = run.rows("metrics")
    assert len(rows) == 2

    for row in rows:
        for name, value in row.items():
            if name != "step":
                assert board[row["step"]][f"train/{name}"] == pytest.approx(value, rel=1e-6), name

    assert {"groups/zero_signal", "optim/muon/update_rms", "time/step"} <= set(rows[0])


def test_a_run_keeps_its_routing_and_spectra(run, tmp_path):
    assert {row["rule"] for row in run.load("routing")["rows"]} == {"muon", "adamw"}  # pyright: ignore
    copy = RunFolder.create(tmp_path / "copy", {}, {})
    for row in run.rows("spectra"):
        assert row["before"][0] == 1.0
        assert row["before"] == sorted(row["before"], reverse=True)
        assert 0.6 < row["after"][0] < 1.3  # Muon brings the first direction to about 1
        copy.append("spectra", row)

    assert {row["step"] for row in copy.rows("spectra")} == {1, 2}
    copy.cut_after(1)  # a resumed run writes the rest again
    assert {row["step"] for row in copy.rows("spectra")} == {1}

    read = read_run(run.path)
    assert "Update rule of each parameter" in render_runs([read])

    for chart in make_spectra(read):
        assert chart.x_name == "rank"
        shown = [(line.name.split()[0], line.name.split()[-1]) for line in chart.lines]
        assert shown == [("before", "2"), ("after", "2"), ("before", "1"), ("after", "1")]
