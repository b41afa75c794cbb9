"""The tournament: its rule, its processes, its record; cells here train nothing (compare_cell)."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from mesotron.cli import main
from mesotron.compare import tournament
from mesotron.compare.cell import cell_command
from mesotron.compare.change import change
from mesotron.compare.kind import is_for_choosing
from mesotron.compare.kinds import make_kind
from mesotron.compare.record import Threshold, read_tournament
from mesotron.compare.search import Grid, search
from mesotron.compare.standings import rank, time_to_threshold
from mesotron.config import TrainConfig, WorldConfig
from mesotron.config.rules import SPECTRAL_RULES
from mesotron.runs import RunFolder
from mesotron.runs.folder import try_lock
from mesotron.vla.demos import write_manifest
from support import compare_cell
from support.report_worlds import make_final, make_record

SMALL = ["--rates", "3", "--factor", "2", "--seeds", "3", "--workers", "2"]
FEW = ["--rates", "1", "--extend", "0", "--seeds", "1"]


@pytest.fixture(autouse=True, scope="module")
def fake_cells():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tournament, "cell_command", compare_cell.command)
        patch.setattr(tournament, "POLL_SECONDS", 0.05)
        yield


@pytest.fixture(autouse=True)
def no_page(fake_cells, monkeypatch):
    """Skip the HTML page, which takes longer than the cells; `finished` has written one."""
    monkeypatch.setattr(tournament, "write_report", lambda *_: None)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "t"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished tournament of two equal contenders and a worse one."""
    folder = tmp_path_factory.mktemp("finished") / "t"
    assert (
        compare(
            folder,
            "--optims",
            "adamw",
            "muon",
            "pion",
        )
        == 0
    )

    return folder


def compare(folder, *words, set_=("optim.lr=0.001", "steps=6")):
    return main(["compare", "arith", *SMALL, *words, "--set", *set_, "--out", str(folder)])


def play(folder, *words, ends=0, **settings):
    assert compare(folder, *words, **settings) == ends
    return read(folder)


def read(folder):
    """The record and its standings by contender."""
    record = read_tournament(folder)
    return record, {row.contender: row for row in record.standings}


def test_standings_of_a_finished_tournament(finished):
    record, rows = read(finished)
    assert {cell.state for cell in record.cells} == {"done"}

    first, second = sorted(("adamw", "muon"), key=lambda name: rows[name].rank)
    assert (rows[first].rank, rows[second].rank, rows["pion"].rank) == (1, 2, 3)
    assert rows[second].p_holm >= 0.05 > rows["pion"].p_holm
    assert rows["pion"].behind == pytest.approx(rows[first].score - rows["pion"].score)
    assert "pion is behind by" in " ".join(record.words)

    markdown = (finished / "standings.md").read_text()
    assert markdown.count("| pion |") == 2
    assert "0.001 x4" in markdown
    assert (finished / "report.html").is_file()

    # The ranking uses other problems and seeds than the search.
    assert record.problems.keys() == {"search", "final"}
    assert not set(record.problems["search"]) & set(record.problems["final"])
    assert sum(map(len, record.problems.values())) == 120

    seeds = {stage: {c.seed for c in record.cells if c.stage == stage} for stage in record.problems}
    assert seeds == {"search": {0}, "final": {1, 2, 3}}

    for cell in record.cells:
        if cell.stage != "probe":
            assert len(cell.per_problem) == len(record.problems[cell.stage])
            assert cell.score == pytest.approx(sum(cell.per_problem) / len(cell.per_problem))


def test_updates_are_matched_and_trials_counted(finished):
    record, rows = read(finished)
    probed = {cell.contender for cell in record.cells if cell.stage == "probe"}
    assert probed == {"muon", "pion"}  # AdamW's own step is the unit

    # Pion's updates are a quarter as large as AdamW's: its matrices get four times the rate.
    assert [rows[name].gain for name in ("adamw", "muon", "pion")] == [1.0, 1.0, 4.0]
    for cell in record.cells:
        config = json.loads((finished / cell.run / "config.json").read_text())
        assert config["optim"]["lr"] == pytest.approx(cell.rate * cell.gain)
        assert config["optim"]["aux_lr"] == (None if cell.contender == "adamw" else cell.rate)
        assert config["steps"] == 6

    searched = {(cell.contender, cell.rate) for cell in record.cells if cell.stage == "search"}
    assert searched == {(name, rate) for name in rows for rate in (5e-4, 1e-3, 2e-3)}
    assert rows["pion"].rate == 1e-3
    assert all((r.trials, r.extended, r.edge) == (3, 0, None) for r in rows.values())


def test_a_crash_does_not_stop_the_rest_and_is_retried(folder, monkeypatch, capsys):
    monkeypatch.setenv("CRASH_AT", "muon 2")
    record, rows = play(
        folder,
        "--optims",
        "adamw",
        "muon",
        ends=1,
    )

    (failed,) = [cell for cell in record.cells if cell.state == "failed"]
    assert (failed.contender, failed.seed) == ("muon", 2)
    assert failed.why == "RuntimeError: out of memory"
    assert (rows["muon"].seeds, rows["muon"].failed) == ([1, 3], 1)
    assert rows["adamw"].seeds == [1, 2, 3]
    assert "RuntimeError: out of memory" in (folder / "standings.md").read_text()

    monkeypatch.delenv("CRASH_AT")
    capsys.readouterr()
    assert compare(folder, "--optims", "adamw", "muon") == 0

    (ran,) = [line for line in capsys.readouterr().out.splitlines() if ", seed " in line]
    assert "muon at 0.001, seed 2, final" in ran


def test_scores_of_zero_are_not_ranked(folder, monkeypatch):
    monkeypatch.setenv("SKILL", "0")
    record, rows = play(
        folder,
        *FEW,
        "--optims",
        "adamw",
        "muon",
    )

    found = {(row.score, row.rank, row.behind, row.p) for row in rows.values()}
    assert found == {(0.0, 1, None, None)}

    words = " ".join(record.words)
    assert not any(name in words for name in ("first", "behind", "best", "significant"))


def test_too_few_problems_in_the_data_stop_at_the_first_cell(folder, monkeypatch, capsys):
    monkeypatch.setenv("PROBLEMS", "12")  # the config requests 600
    for _ in range(2):
        assert (
            compare(
                folder,
                "--optims",
                "adamw",
                "--workers",
                "1",
            )
            == 2
        )

        assert "12 problems" in capsys.readouterr().err

    assert len(list((folder / "cells").glob("*.log"))) == 1


def test_diverged_cells_have_the_lowest_score(folder, monkeypatch):
    monkeypatch.setenv("SPOIL_AT", "adamw 2")  # its weights are not finite; 0.01 is too high a rate
    words = ("--optims", "adamw", "--extend", "0")
    record, rows = play(folder, *words, set_=("optim.lr=0.005", "steps=6"))
    diverged = [cell for cell in record.cells if cell.verdict == "diverged"]
    search, final = sorted(diverged, key=lambda cell: cell.seed)

    assert (search.rate, search.stage, search.state, search.score) == (0.01, "search", "done", 0.0)
    assert "step 6" in search.why
    assert (final.seed, final.stage, final.state) == (2, "final", "done")
    assert final.per_problem == [0.0] * len(record.problems["final"])
    assert "not finite" in final.why

    row = rows["adamw"]
    assert (row.seeds, row.dead, row.failed, row.edge) == ([1, 2, 3], 1, 0, "low")
    assert "0.000 ×" in (folder / "standings.md").read_text()


@pytest.mark.parametrize(("variable", "value"), [("CRASH_AT", "pion 0"), ("NAN_UPDATES", "pion")])
def test_a_contender_without_measured_updates_is_left_out(folder, monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    record, rows = play(
        folder,
        *FEW,
        "--optims",
        "adamw",
        "pion",
        ends=1,
    )

    (probe,) = [cell for cell in record.cells if cell.contender == "pion"]
    assert (probe.stage, probe.state) == ("probe", "failed")
    assert list(rows) == ["adamw"]
    assert "pion" in " ".join(record.words)


def test_a_stopped_tournament_ends_like_an_uninterrupted_one(folder, finished, monkeypatch, capsys):
    polls = []

    def poll(seconds, sleep=tournament.time.sleep):
        polls.append(seconds)
        if len(polls) == 12:
            os.kill(os.getpid(), signal.SIGINT)
        sleep(seconds)

    monkeypatch.setenv("SECONDS_A_STEP", "0.1")
    monkeypatch.setattr(tournament.time, "sleep", poll)
    assert (
        compare(
            folder,
            "--optims",
            "adamw",
            "muon",
            "pion",
        )
        == 130
    )

    assert str(folder) in "".join(capsys.readouterr().err.split())
    states = {cell.state for cell in read_tournament(folder).cells}
    assert states & {"waiting", "running"} == {"waiting"}

    monkeypatch.setenv("SECONDS_A_STEP", "0")
    assert (
        compare(
            folder,
            "--optims",
            "adamw",
            "muon",
            "pion",
        )
        == 0
    )

    resumed = read_tournament(folder)
    alone = read_tournament(finished)
    scores = [{c.id: c.per_problem for c in record.cells} for record in (resumed, alone)]

    assert scores[0] == scores[1]
    assert [r.contender for r in resumed.standings] == [r.contender for r in alone.standings]


def test_continuing_needs_the_same_rule(folder, capsys):
    few = (*FEW, "--optims", "adamw")
    compare(folder, *few, "--objectives", "grpo")
    assert compare(folder, *few, set_=("optim.lr=0.001", "steps=7")) == 2
    assert "steps: 6, not 7" in capsys.readouterr().err
    assert compare(folder, *few, "--objectives", "gmpo") == 2
    assert "grpo, not gmpo" in " ".join(capsys.readouterr().err.split())

    # A setting that the version which started it did not have is not another rule.
    file = folder / "tournament.json"
    record = json.loads(file.read_text())
    del record["plan"]["config"]["optim"]["clip"]
    file.write_text(json.dumps(record))

    # A new contender may join; nothing is run again.
    assert compare(folder, *few, "muon") == 0
    ran = [line for line in capsys.readouterr().out.splitlines() if ", seed " in line]
    assert len(ran) == 3
    assert all("muon at" in line for line in ran)

    # A plan without a part of its rule, such as a stranger's, is refused.
    for name in ("factor", "extend"):
        record = json.loads(file.read_text())
        del record["plan"][name]
        file.write_text(json.dumps(record))

        assert compare(folder, *few) == 2


def test_an_extended_search_may_choose_another_rate(folder, capsys):
    # AdamW's best rate is 1e-3; the recipe's is a quarter of it, so two more are needed.
    def extend(count, **how):
        words = ("--optims", "adamw", "--extend", str(count))
        record, rows = play(folder, *words, set_=("optim.lr=0.00025", "steps=6"), **how)
        return record, rows["adamw"]

    _, first = extend(0)
    assert (first.rate, first.edge) == (5e-4, "high")

    record, row = extend(3)
    assert (row.rate, row.seeds) == (1e-3, [1, 2, 3])

    finals = [cell for cell in record.cells if cell.stage == "final"]
    assert sorted({cell.rate for cell in finals}) == [5e-4, 1e-3]

    chosen = [cell.score for cell in finals if cell.rate == 1e-3]
    assert row.score == pytest.approx(sum(chosen) / 3)
    assert {cell.rate for cell in finals if cell.threshold_steps is not None} == {1e-3}

    extend(0, ends=2)
    assert "--extend 3" in " ".join(capsys.readouterr().err.split())


def test_two_processes_do_not_share_a_folder(folder, capsys):
    folder.mkdir()
    with try_lock(folder / "lock"):
        assert compare(folder, "--optims", "adamw") == 2
    assert str(folder) in "".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_cells_of_a_killed_tournament_keep_the_lock(folder):
    code = (
        "import sys; from mesotron.compare import tournament; from mesotron.cli import main\n"
        "make = tournament.cell_command\n"
        "tournament.cell_command = lambda *x: [sys.executable, sys.argv[1], make(*x)[-1]]\n"
        "sys.exit(main(sys.argv[2:]))"
    )

    words = ["compare", "arith", *SMALL, "--optims", "adamw", "--out", str(folder)]
    words += ["--set", "optim.lr=0.001", "steps=6"]
    slow = {**os.environ, "SECONDS_A_STEP": "0.5"}
    python = [sys.executable, "-c", code, compare_cell.__file__]
    process = subprocess.Popen([*python, *words], env=slow)

    while not any(folder.glob("cells/*/metrics.jsonl")):
        time.sleep(0.05)

    process.kill()  # the tournament only: a cell that still runs locks the folder
    process.wait()
    assert compare(folder, "--optims", "adamw") == 2

    while (code := compare(folder, "--optims", "adamw")) == 2:
        time.sleep(0.1)

    assert code == 0
    assert {cell.state for cell in read_tournament(folder).cells} == {"done"}


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ("arit", "arith"),
        ("arith --optims sgd", "sgd"),
        ("arith --objectives ppo", "ppo"),
        ("snake --objectives grpo", "grpo"),
        ("arith --set rollout.prompt=8", "--batch"),
        ("arith --set steps=many", "many"),
        ("arith --set optim.per-head=true", "per_head"),
        ("arith --set seed=3", "seed"),
        ("arith --optims muon:lr=0.9", "lr=0.9"),
        ("arith --set optim.lr=0", "rate"),
        ("arith --set task.num_eval=2", "task.num_eval"),
        ("arith --set reward.parts=two_part,neer", "near"),
        ("arith --set optim.scale=spectral", "optim.scale"),
        ("arith --factor 1.001", "--factor"),
        ("arith --factor 1e9", "--factor"),
        ("arith --on slurm", "--on"),
        ("snake --set muon-lr=0.1", "muon_lr"),
        ("snake --set run_name=x", "run_name"),
        ("snake --set eval_episodes=16", "eval_episodes"),
        ("vla --set demos=no/such", "no/such"),
        ("vla --set demos={demos} optim.vision=adamw", "optim.vision"),
        ("vla --set demos={demos} batch=1", "batch"),
        ("vla --set demos={demos} episodes=4", "episodes"),
    ],
)
def test_invalid_settings_are_refused_before_a_folder_is_made(
    words, match, capsys, tmp_path, monkeypatch, tmp_path_factory
):
    monkeypatch.chdir(tmp_path)
    demos = tmp_path_factory.mktemp("demos")
    write_manifest(demos, WorldConfig(tasks=("red-cube", "blue-cube")), False, {})

    assert main(["compare", *words.format(demos=demos).split()]) == 2
    assert match in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_settings_of_language_contenders(tmp_path):
    kind = make_kind("qwen3_gsm8k_pion", ["steps=3", "optim.schedule=cosine"])
    muon, pion = kind.contenders(["muon", "pion:promote=2,per_head=false"], [])
    config = kind.settings(muon, 1e-5, 7, tmp_path)

    assert (config.optim.name, config.optim.promote, config.optim.aux_lr) == ("muon", None, 1e-5)
    assert kind.base_rate == 1e-6  # of its AdamW; its Pion's 2.5e-5 is for steps of rank one
    assert (config.optim.schedule, config.optim.lr, config.seed) == ("cosine", 1e-5, 7)

    config = kind.settings(pion, 1e-5, 7, tmp_path)
    assert (config.optim.name, config.optim.promote, config.optim.per_head) == ("pion", 2, False)

    several = kind.contenders(["muon"], ["grpo", "gmpo"])
    assert [one.name for one in several] == ["muon+grpo", "muon+gmpo"]
    assert kind.settings(several[1], 1e-5, 7, tmp_path).objective.name == "gmpo"

    config = change(TrainConfig(), ["objective.scale_rewards=none", "objective.beta=none"])
    assert (config.objective.scale_rewards, config.objective.beta) == ("none", None)


def test_settings_of_game_contenders(tmp_path):
    kind = make_kind("snake", ["d_model=64"])
    config = kind.settings(kind.contenders(["muon"], [])[0], 1e-3, 3, tmp_path / "cell")

    # A 64 x 64 step of spectral norm s has RMS s / 8; AdamW's usual one is 0.2 of its rate.
    assert config.muon_lr / 8 == pytest.approx(0.2 * 1e-3)
    assert (config.aux_adam_lr, config.rule, config.seed) == (1e-3, "muon", 3)
    assert config.save_dir / config.run_name == tmp_path / "cell"


def test_settings_of_robot_contenders(tmp_path):
    kind = make_kind("vla", [f"demos={tmp_path}", "steps=7", "optim.promote=2"])
    optims = {
        one.name: kind.settings(one, 2e-3, 3, tmp_path / "cell").optim
        for one in kind.contenders(kind.usual, [])
    }

    rules = {name: (x.vision, x.language, x.fusion, x.action) for name, x in optims.items()}
    assert rules == {
        "adamw": ("adamw",) * 4,
        "muon": ("muon",) * 4,
        "pion_action": ("muon", "muon", "muon", "pion"),
        "pion": ("pion",) * 4,
        "lowrank": ("low_rank",) * 4,
    }

    # Only Pion has a strength; mesotron vla train refuses it without Pion.
    assert (optims["pion_action"].promote, optims["muon"].promote) == (2, None)
    assert optims["pion"].lr == 2e-3

    (tmp_path / "meta").mkdir()
    (tmp_path / "meta" / "info.json").touch()

    with pytest.raises(ValueError, match="LeRobot"):  # recordings without a simulator
        make_kind("vla", [f"demos={tmp_path}"])


def threshold_of(tmp_path, *curves):
    kind = make_kind("vla", [f"demos={tmp_path}", "batch=4"])
    cells = [make_final(name, threshold_steps=3) for name in "ab"]
    record = make_record(cells, threshold=Threshold(metric=kind.curve))

    rows = {
        cell.id: [
            {
                "step": k,
                "loss/action": x,
                "time/step": 2.0,
            }
            for k, x in enumerate(losses, 1)
        ]
        for cell, losses in zip(cells, curves, strict=True)
    }

    time_to_threshold(kind, record, rows)
    return record.threshold.value, cells


def test_time_to_threshold(tmp_path):
    # Losses from 9 to 1 and from 9 to 6: halfway to the best one's end is 5.
    value, (a, b) = threshold_of(tmp_path, [9.0] * 5 + [1.0] * 10, [9.0] * 5 + [6.0] * 10)
    assert value == 5.0

    # The mean of five steps passes 5 with the third of the new ones.
    assert (a.threshold_steps, a.threshold_seconds, a.threshold_tokens) == (8, 16.0, 32.0)
    assert b.threshold_steps is None

    value, cells = threshold_of(tmp_path, [1.0] * 5 + [9.0] * 5, [1.0] * 10)  # no improvement
    assert (value, [cell.threshold_steps for cell in cells]) == (None, [None, None])

    # One lucky first step passes no threshold; losses that are not finite do not count.
    lucky = [0.0] + [9.0] * 20 + [1.0] * 5
    nan = [9.0] * 5 + [float("nan")] * 5
    value, cells = threshold_of(tmp_path, lucky, nan)

    assert value == pytest.approx((7.2 + 9.0) / 4 + 0.5)
    assert [cell.threshold_steps for cell in cells] == [24, None]


def test_search_limits():
    grid = Grid(base=1.0, factor=2.0, rates=3, extend=2)
    rising = search(grid, {k: k / 10 for k in range(-2, 9)})
    assert rising.wanted == (0, 1, -1, 2, 3)
    assert (rising.best, rising.extended, rising.edge) == (3, 2, "high")

    flat = search(grid, dict.fromkeys(range(-4, 5), 0.5))
    assert (flat.best, flat.extended, flat.edge) == (0, 0, None)

    crashed = search(grid, dict.fromkeys(range(-4, 5)))
    assert (crashed.best, crashed.done) == (None, True)


@pytest.mark.parametrize("rule", list(SPECTRAL_RULES))
def test_updates_of_every_spectral_rule_are_measured(tmp_path, rule):
    save_rows(tmp_path, {f"optim/{rule} rows:2/update_rms": 0.0002})
    run = RunFolder(tmp_path)
    assert make_kind("arith").update_ratio(run, run.rows("metrics")) == pytest.approx(0.2)


def test_a_diverged_run_is_not_above_negative_rewards(tmp_path):
    save_rows(tmp_path, {"loss": float("nan")})
    rewards = [{"id": "a", "reward": -1.0}, {"id": "b", "reward": -0.5}]
    (tmp_path / "before.json").write_text(json.dumps({"measure": "reward", "transcripts": rewards}))
    outcome = make_kind("arith").outcome(tmp_path)

    assert (outcome.health.verdict, outcome.scores) == ("diverged", {"a": -1.0, "b": -1.0})


def save_rows(path, values):
    optim = {"schedule": "constant", "warmup": 0.0, "lr": 0.001}
    (path / "config.json").write_text(json.dumps({"optim": optim}))
    (path / "metrics.jsonl").write_text(json.dumps({"step": 1, **values}) + "\n")


def test_cells_that_never_got_halfway_count_as_the_slowest():
    cells = [
        make_final("a", seed, per_problem=[1.0, 0.0], threshold_seconds=seconds)
        for seed, seconds in enumerate([10.0, 20.0, None])
    ]

    record = make_record(cells, plan={"search_seeds": 1})
    for seconds in (20.0, None):
        rank(record, {"a": search(Grid(1.0, 2.0, 1, 0), {0: 1.0})}, {"a": 1.0})
        assert record.standings[0].threshold_seconds == seconds
        cells[0].threshold_seconds = None


def compare_for_real(folder, monkeypatch, *words):
    monkeypatch.setattr(tournament, "cell_command", cell_command)
    assert main(["compare", *words, "--extend", "0", "--out", str(folder)]) == 0
    return read_tournament(folder)


@pytest.mark.slow
def test_a_tiny_real_tournament_of_language_models(folder, monkeypatch):
    size = ["steps=3", "rollout.prompts=2", "rollout.generations=4", "task.num_eval=60"]
    words = ["arith", "--optims", "muon", "lowrank", "--rates", "2", "--seeds", "2"]
    record = compare_for_real(
        folder,
        monkeypatch,
        *words,
        "--set",
        *size,
    )

    assert len(record.cells) == 10
    assert {cell.state for cell in record.cells} == {"done"}
    assert all(cell.tokens > 0 and cell.seconds > 0 and cell.steps == 3 for cell in record.cells)

    gains = {row.contender: row.gain for row in record.standings}
    assert gains["lowrank"] == 4.0  # 8 directions of 128, exactly

    # Few tokens give gradients of low rank: more than at full rank, less than of 8 directions.
    assert 1.0 <= gains["muon"] < gains["lowrank"]


@pytest.mark.slow
def test_a_tiny_real_tournament_of_games(folder, monkeypatch):
    pytest.importorskip("jumanji")
    size = [
        "total_timesteps=512",
        "num_envs=8",
        "num_steps=16",
        "num_minibatches=2",
        "eval_episodes=48",
    ]

    words = ["snake", "--optims", "adam", "muon", "--rates", "1", "--seeds", "1"]
    record = compare_for_real(
        folder,
        monkeypatch,
        *words,
        "--set",
        *size,
    )

    assert len(record.cells) == 4
    assert all(cell.tokens == 512 and cell.score is not None for cell in record.cells)
    assert record.start["final"] > 0


def test_half_of_the_problems_choose_rates_and_always_the_same():
    marks = "".join(str(int(is_for_choosing(f"sums-eval-{k}"))) for k in range(512))
    assert marks.startswith("011100111110")
    assert 0.4 < marks.count("1") / len(marks) < 0.6
