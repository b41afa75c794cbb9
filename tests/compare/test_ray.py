"""Cells and trials on a Ray cluster of two nodes, one of which dies; they train nothing."""

import json
import sys
import threading
from importlib.util import find_spec

import pytest

from mesotron.cli import main
from mesotron.compare import sweep, tournament
from mesotron.compare.record import read_tournament
from support import compare_cell, sweep_trial

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (find_spec("ray") and find_spec("optuna")), reason="needs ray, optuna"),
    pytest.mark.filterwarnings("ignore"),  # of Ray's own code
]


@pytest.fixture(scope="module")
def cluster():
    import ray
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SECONDS_A_STEP", "0.05")
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        yield cluster
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture
def kill_a_node(cluster):
    """Start a second node and kill it once a condition holds."""
    threads = []
    over = threading.Event()

    def start(is_due) -> None:
        node = cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()

        def watch() -> None:
            while not (is_due() or over.wait(0.1)):
                pass
            cluster.remove_node(node, allow_graceful=False)

        threads.append(threading.Thread(target=watch, daemon=True))
        threads[0].start()

    yield start
    over.set()
    threads[0].join()


def test_a_tournament_loses_nothing_with_a_node(
    tmp_path, cluster, kill_a_node, monkeypatch, capsys
):
    monkeypatch.setattr(tournament, "cell_command", compare_cell.command)
    words = ["compare", "arith", "--optims", "adamw", "pion", "--rates", "2", "--seeds", "2"]
    words += ["--set", "optim.lr=0.001", "steps=6"]
    alone = tmp_path / "alone"
    folder = tmp_path / "ray"

    assert main([*words, "--workers", "2", "--out", str(alone)]) == 0

    def is_due() -> bool:
        if not (folder / "tournament.json").exists():
            return False
        states = [cell.state for cell in read_tournament(folder).cells]
        return states.count("done") >= 2 and states.count("running") == 2

    kill_a_node(is_due)
    assert main([*words, "--on", f"ray:{cluster.address}", "--out", str(folder)]) == 0
    assert "lost with its machine" in capsys.readouterr().out

    def standings(folder):
        rows = read_tournament(folder).standings
        return [(row.contender, row.rank, row.rate, row.score, row.p_holm) for row in rows]

    assert standings(folder) == standings(alone)


def test_a_sweep_resumes_the_trial_of_a_dead_node_and_prunes(
    tmp_path, cluster, kill_a_node, monkeypatch, capsys
):
    words = [sys.executable, sweep_trial.__file__]
    monkeypatch.setattr(sweep, "process_command", lambda rest: [*words, *rest])
    folder = tmp_path / "s"
    rows = [folder / "trials" / f"trial-000{k}" / "metrics.jsonl" for k in (0, 1)]
    kill_a_node(lambda: all(path.exists() and path.stat().st_size > 100 for path in rows))
    common = ["compare", "sweep", "arith", "--on", f"ray:{cluster.address}"]
    narrow = ["--space", "optim.lr=1e-4..1e-3", "--trials", "4"]  # where no trial is pruned

    assert main([*common, *narrow, "--out", str(folder)]) == 0
    assert "lost with its machine" in capsys.readouterr().out

    trials = json.loads((folder / "sweep.json").read_text())["trials"]
    assert sorted(one["number"] for one in trials) == [0, 1, 2, 3]

    results = [json.loads(path.read_text()) for path in folder.glob("trials/*/result.json")]
    assert sum(one["resumed_at"] > 0 for one in results) == 1

    high = ["--space", "optim.lr=0.05..0.1", "--trials", "1", "--out", str(tmp_path / "high")]
    assert main([*common, *high]) == 0
    assert "pruned" in capsys.readouterr().out


def test_a_wrong_address_is_refused(tmp_path, capsys):
    assert main(["compare", "arith", "--on", "ray:127.0.0.1:1", "--out", str(tmp_path)]) == 2
    assert "127.0.0.1:1" in capsys.readouterr().err
