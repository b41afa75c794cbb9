"""The tournament: its rule, its processes, its record; cells here train nothing (compare_cell)."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mesotron.cli import main
from mesotron.compare import command
from mesotron.compare.cell import write_settings
from mesotron.compare.changes import change
from mesotron.compare.grid import Grid, search
from mesotron.compare.kinds import make_kind
from mesotron.compare.record import Cell, Threshold, Tournament, read_tournament
from mesotron.compare.standings import time_to_threshold
from mesotron.config import TrainConfig, WorldConfig
from mesotron.vla.demos import write_manifest

CELL = Path(__file__).parents[1] / "support" / "compare_cell.py"
SMALL = ["--rates", "3", "--factor", "2", "--seeds", "3", "--workers", "2"]
SET = ["--set", "optim.lr=0.001", "steps=6"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A tournament's folder, with cells that train nothing."""

    def fake(path, kind, config):
        return [sys.executable, str(CELL), *write_settings(path, kind, config)[-1:]]

    monkeypatch.setattr(command, "write_settings", fake)
    return tmp_path / "t"


def test_none_is_a_choice_where_a_setting_has_one():
    made = change(TrainConfig(), ["objective.scale_rewards=none", "objective.beta=none"])
    assert (made.objective.scale_rewards, made.objective.beta) == ("none", None)


def compare(folder, *words):
    return main(["compare", "arith", *SMALL, *words, *SET, "--out", str(folder)])


def by_name(record):
    return {row.contender: row for row in record.standings}


def test_a_tournament_finds_who_is_better_and_says_so(folder, capsys):
    assert compare(folder, "--optims", "adamw", "muon", "pion") == 0
    record = read_tournament(folder)
    rows = by_name(record)
    assert {cell.state for cell in record.cells} == {"done"}
    # The same skill: not told apart. A third less: behind, beyond doubt.
    first, second = sorted(("adamw", "muon"), key=lambda name: rows[name].rank)
    assert (rows[first].rank, rows[second].rank, rows["pion"].rank) == (1, 2, 3)
    assert rows[second].p_holm >= 0.05 > rows["pion"].p_holm
    assert rows["pion"].behind == pytest.approx(rows[first].score - rows["pion"].score)
    told = " ".join(record.words)
    assert f"{second} (behind by" in told
    assert "not told apart" in told
    assert "pion is behind by" in told
    assert (folder / "standings.md").read_text().count("| pion |") == 2
    assert ">the best<" in (folder / "report.html").read_text()
    assert "not told apart" in " ".join(capsys.readouterr().out.split())


def test_steps_are_matched_by_what_updates_measured_and_trials_are_counted(folder):
    compare(folder, "--optims", "adamw", "muon", "pion")
    record = read_tournament(folder)
    probes = {cell.contender: cell for cell in record.cells if cell.stage == "probe"}
    assert probes.keys() == {"muon", "pion"}  # AdamW's own step is the unit
    rows = by_name(record)
    # Its updates are a quarter as large as AdamW's: its matrices get four times the rate.
    assert [rows[name].gain for name in ("adamw", "muon", "pion")] == [1.0, 1.0, 4.0]
    for cell in record.cells:
        made = json.loads((folder / cell.run / "config.json").read_text())
        assert made["optim"]["lr"] == pytest.approx(cell.rate * cell.gain)
        assert made["optim"]["aux_lr"] == (None if cell.contender == "adamw" else cell.rate)
        assert made["steps"] == 6
    tried = {
        name: sorted({c.rate for c in record.cells if c.contender == name and c.stage == "search"})
        for name in rows
    }
    assert tried == {name: [5e-4, 1e-3, 2e-3] for name in rows}
    assert rows["pion"].rate == 1e-3
    assert all((r.trials, r.extended, r.edge) == (3, 0, None) for r in rows.values())
    assert "0.001 x4" in (folder / "standings.md").read_text()


def test_the_verdict_uses_other_problems_and_other_seeds_than_the_search(folder):
    compare(folder, "--optims", "adamw")
    record = read_tournament(folder)
    assert not set(record.problems["search"]) & set(record.problems["final"])
    assert sum(map(len, record.problems.values())) == 120
    assert record.problems.keys() == {"search", "final"}
    seeds = {stage: {c.seed for c in record.cells if c.stage == stage} for stage in record.problems}
    assert seeds == {"search": {0}, "final": {1, 2, 3}}
    for cell in record.cells:
        assert len(cell.per_problem) == len(record.problems[cell.stage])
        assert cell.score == pytest.approx(sum(cell.per_problem) / len(cell.per_problem))


def test_a_crash_is_told_and_the_rest_goes_on(folder, monkeypatch, capsys):
    monkeypatch.setenv("CRASH_AT", "muon 2")
    assert compare(folder, "--optims", "adamw", "muon") == 1
    record = read_tournament(folder)
    failed = [cell for cell in record.cells if cell.state == "failed"]
    assert [(cell.contender, cell.seed) for cell in failed] == [("muon", 2)]
    assert failed[0].why == "RuntimeError: out of memory"
    rows = by_name(record)
    assert (rows["muon"].seeds, rows["muon"].failed) == ([1, 3], 1)
    assert rows["adamw"].seeds == [1, 2, 3]
    assert "RuntimeError: out of memory" in (folder / "standings.md").read_text()
    # Called again, it tries that cell alone once more.
    monkeypatch.delenv("CRASH_AT")
    capsys.readouterr()
    assert compare(folder, "--optims", "adamw", "muon") == 0
    ran = [line for line in capsys.readouterr().out.splitlines() if ", seed " in line]
    assert len(ran) == 1
    assert "muon at 0.001, seed 2, final" in ran[0]


def test_where_nobody_scored_there_is_no_order(folder, monkeypatch):
    monkeypatch.setenv("SKILL", "0")
    assert compare(folder, "--optims", "adamw", "muon") == 0
    record = read_tournament(folder)
    assert {(row.score, row.rank, row.behind, row.p) for row in record.standings} == {
        (0.0, 1, None, None)
    }
    told = " ".join(record.words)
    assert "Nobody scored: no contender has more than 0, against 0." in told
    assert not re.search(r"first|behind|told apart|best rate|half way", told)
    page = (folder / "report.html").read_text()
    assert ">nobody<" in page
    assert ">the best<" not in page


def test_data_that_hold_too_few_problems_end_it_at_the_first_cell(folder, monkeypatch, capsys):
    """The setting asks for 600, but a table may hold fewer: nobody knows before a cell has run."""
    monkeypatch.setenv("PROBLEMS", "12")
    for _ in range(2):  # the same command once more comes to the same
        assert compare(folder, "--optims", "adamw", "--workers", "1") == 2
        assert "12 problems to evaluate on are too few" in capsys.readouterr().err
    assert len(list((folder / "cells").glob("*.log"))) == 1


def test_a_diverged_cell_is_a_result_with_the_lowest_score(folder):
    set_ = ["--set", "optim.lr=0.005", "steps=6"]
    words = ["compare", "arith", *SMALL, "--extend", "0", "--optims", "adamw", *set_]
    assert main([*words, "--out", str(folder)]) == 0
    record = read_tournament(folder)
    diverged = [cell for cell in record.cells if cell.verdict == "diverged"]
    assert [(cell.rate, cell.state, cell.score) for cell in diverged] == [(0.01, "done", 0.0)]
    assert "diverged at step 6" in diverged[0].why
    assert by_name(record)["adamw"].edge == "low"
    assert "smallest of the 3 tried" in " ".join(record.words)
    assert "0.000 ×" in (folder / "standings.md").read_text()


def test_weights_that_are_not_numbers_are_a_divergence_and_no_crash(folder, monkeypatch):
    monkeypatch.setenv("SPOIL_AT", "adamw 2")
    assert compare(folder, "--optims", "adamw") == 0
    record = read_tournament(folder)
    spoiled = [cell for cell in record.cells if cell.verdict == "diverged"]
    assert [(cell.seed, cell.stage, cell.state) for cell in spoiled] == [(2, "final", "done")]
    assert spoiled[0].per_problem == [0.0] * len(record.problems["final"])
    assert "diverged after step 6: ValueError: weights are not finite" in spoiled[0].why
    row = by_name(record)["adamw"]
    assert (row.seeds, row.dead, row.failed) == ([1, 2, 3], 1, 0)


@pytest.mark.parametrize(
    ("variable", "value", "why"),
    [
        ("CRASH_AT", "pion 0", "RuntimeError: out of memory"),
        ("NAN_UPDATES", "pion", "it logged no update of a finite size"),
    ],
)
def test_a_contender_whose_updates_were_not_measured_does_not_take_part(
    folder, monkeypatch, variable, value, why
):
    monkeypatch.setenv(variable, value)
    assert compare(folder, "--optims", "adamw", "pion") == 1
    record = read_tournament(folder)
    assert [cell.stage for cell in record.cells if cell.contender == "pion"] == ["probe"]
    assert [row.contender for row in record.standings] == ["adamw"]
    assert f"pion does not take part: the run that was to measure its updates failed ({why})." in (
        record.words
    )


def test_a_stopped_tournament_goes_on_and_ends_as_one_left_alone(folder, monkeypatch, capsys):
    looks = []

    def look(seconds, sleep=command.time.sleep):
        looks.append(seconds)
        if len(looks) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        sleep(seconds)

    monkeypatch.setenv("SECONDS_A_STEP", "0.1")
    monkeypatch.setattr(command.time, "sleep", look)
    assert compare(folder, "--optims", "adamw", "muon") == 130
    told = capsys.readouterr().err
    assert f"the same command goes on with {folder}" in " ".join(told.split())
    states = {cell.state for cell in read_tournament(folder).cells}
    assert "waiting" in states
    assert "running" not in states
    monkeypatch.setenv("SECONDS_A_STEP", "0")
    assert compare(folder, "--optims", "adamw", "muon") == 0
    resumed = read_tournament(folder)
    assert compare(folder.with_name("alone"), "--optims", "adamw", "muon") == 0
    alone = read_tournament(folder.with_name("alone"))
    scores = [{c.id: c.per_problem for c in record.cells} for record in (resumed, alone)]
    assert scores[0] == scores[1]
    assert [r.contender for r in resumed.standings] == [r.contender for r in alone.standings]


def test_what_was_begun_cannot_go_on_with_another_rule(folder, capsys):
    compare(folder, "--optims", "adamw")
    words = ["compare", "arith", *SMALL, "--optims", "adamw", "--set", "optim.lr=0.001", "steps=7"]
    assert main([*words, "--out", str(folder)]) == 2
    told = capsys.readouterr().err
    assert "another config (steps: 6, not 7)" in told
    # A setting that the version which began it did not have is no other rule.
    file = folder / "tournament.json"
    record = json.loads(file.read_text())
    del record["plan"]["config"]["optim"]["clip"]
    file.write_text(json.dumps(record))
    # A new contender may join; nothing is run again.
    assert compare(folder, "--optims", "adamw", "muon") == 0
    ran = [line for line in capsys.readouterr().out.splitlines() if ", seed " in line]
    assert len(ran) == 7
    assert all("muon at" in line for line in ran)


def test_a_namesake_with_another_objective_is_refused(folder, capsys):
    assert compare(folder, "--optims", "adamw", "--objectives", "grpo") == 0
    assert compare(folder, "--optims", "adamw", "--objectives", "gmpo") == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "holds a contender adamw with another objective (grpo, not gmpo)" in told


def test_a_longer_search_may_choose_another_rate_and_the_old_finals_count_no_more(folder, capsys):
    # AdamW's best rate is 1e-3; the recipe's is a quarter of it, so two more are needed.
    words = ["compare", "arith", *SMALL, "--optims", "adamw"]
    words += ["--set", "optim.lr=0.00025", "steps=6", "--out", str(folder)]
    assert main([*words, "--extend", "0"]) == 0
    first = by_name(read_tournament(folder))["adamw"]
    assert (first.rate, first.edge) == (5e-4, "high")
    assert main([*words, "--extend", "3"]) == 0
    record = read_tournament(folder)
    row = by_name(record)["adamw"]
    assert (row.rate, row.seeds) == (1e-3, [1, 2, 3])
    finals = [cell for cell in record.cells if cell.stage == "final"]
    assert sorted({cell.rate for cell in finals}) == [5e-4, 1e-3]
    of_chosen = [cell.score for cell in finals if cell.rate == 1e-3]
    assert row.score == pytest.approx(sum(of_chosen) / 3)
    assert {cell.rate for cell in finals if cell.threshold_steps is not None} == {1e-3}
    assert main([*words, "--extend", "0"]) == 2
    assert "may grow but not shrink" in " ".join(capsys.readouterr().err.split())


def test_two_processes_do_not_share_a_folder(folder, capsys):
    folder.mkdir()
    with command.locked(folder):
        assert compare(folder, "--optims", "adamw") == 2
    assert "in use by another process" in capsys.readouterr().err


def test_a_killed_tournament_leaves_its_folder_to_its_cells_and_then_goes_on(folder, capsys):
    """`kill -9` on the tournament alone: a cell that still runs keeps the folder."""
    code = (
        "import sys; from mesotron.compare import command; from mesotron.cli import main;"
        "from mesotron.compare.cell import write_settings;"
        "command.write_settings = lambda *x: [sys.executable, sys.argv[1], write_settings(*x)[-1]];"
        "sys.exit(main(sys.argv[2:]))"
    )
    words = ["compare", "arith", *SMALL, "--optims", "adamw", *SET, "--out", str(folder)]
    slow = {**os.environ, "SECONDS_A_STEP": "0.5"}
    process = subprocess.Popen([sys.executable, "-c", code, str(CELL), *words], env=slow)
    while not any(folder.glob("cells/*/metrics.jsonl")):
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert compare(folder, "--optims", "adamw") == 2
    assert "a cell that one has left" in capsys.readouterr().err
    while not in_use_no_more(folder):
        time.sleep(0.1)
    assert compare(folder, "--optims", "adamw") == 0
    assert {cell.state for cell in read_tournament(folder).cells} == {"done"}


def in_use_no_more(folder):
    try:
        with command.locked(folder):
            return True
    except ValueError:
        return False


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["arith", "--optims", "sgd"], "unknown optimizer 'sgd'"),
        (["arith", "--objectives", "ppo"], "unknown objective 'ppo'"),
        (["snake", "--objectives", "grpo"], "PPO has no objective"),
        (["vla", "--set", "demos=no/such"], "no demonstrations in no/such"),
        (["arit"], "did you mean arith?"),
        (["arith", "--set", "rollout.prompt=8"], "did you mean prompts?"),
        (["arith", "--set", "steps=many"], "'many' is not a whole number"),
        (["arith", "--set", "optim=muon"], "optim has parts"),
        (["arith", "--factor", "1"], "--factor 1 must be above 1"),
        (["arith", "--seeds", "0"], "--seeds 0 must be at least 1"),
        (["arith", "--optims", "muon", "muon"], "names one twice"),
        (["arith", "--set", "task.num_eval=2"], "2 problems to evaluate on are too few"),
        (["arith", "--set", "reward.parts=two_part,neer"], "did you mean near"),
        (["arith", "--set", "objective.dynamic_max_rounds=0"], "would sample nothing"),
        (["snake", "--set", "width=1"], "1x4 has no room"),
        (["vla", "--set", "demos={demos}", "batch=1"], "batch"),
        (["snake", "--set", "eval_episodes=16"], "16 problems to evaluate on are too few"),
        (["vla", "--set", "demos={demos}", "episodes=4"], "8 problems to evaluate on are too few"),
        (["arith", "--set", "optim.scale=spectral"], "not AdamW's unit"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_a_folder_is_made(
    words, sentence, capsys, tmp_path, monkeypatch, tmp_path_factory
):
    monkeypatch.chdir(tmp_path)
    demos = tmp_path_factory.mktemp("demos")
    write_manifest(demos, WorldConfig(tasks=("red-cube", "blue-cube")), False, {})
    assert main(["compare", *(word.format(demos=demos) for word in words)]) == 2
    assert sentence in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_settings_of_a_contender_are_its_own_and_the_rest_is_the_recipes(tmp_path):
    kind = make_kind("qwen3_gsm8k_pion", ["steps=3", "optim.schedule=cosine"])
    muon, pion = kind.contenders(["muon", "pion:promote=2,per_head=false"], [])
    config = kind.settings(muon, 1e-5, 7, tmp_path)
    assert (config.optim.name, config.optim.promote, config.optim.aux_lr) == ("muon", None, 1e-5)
    assert kind.base_rate == 1e-6  # what its AdamW has; its Pion's 2.5e-5 is for steps of rank one
    assert (config.optim.schedule, config.optim.lr, config.seed) == ("cosine", 1e-5, 7)
    config = kind.settings(pion, 1e-5, 7, tmp_path)
    assert (config.optim.name, config.optim.promote, config.optim.per_head) == ("pion", 2, False)
    several = kind.contenders(["muon"], ["grpo", "gmpo"])
    assert [one.name for one in several] == ["muon+grpo", "muon+gmpo"]
    assert kind.settings(several[1], 1e-5, 7, tmp_path).objective.name == "gmpo"


def test_snake_rates_are_matched_to_adams(tmp_path):
    kind = make_kind("snake", ["d_model=64"])
    config = kind.settings(kind.contenders(["muon"], [])[0], 1e-3, 3, tmp_path / "cell")
    # A 64 x 64 step of spectral norm s has RMS s / 8; AdamW's usual one is 0.2 of its rate.
    assert config.muon_lr / 8 == pytest.approx(0.2 * 1e-3)
    assert (config.aux_adam_lr, config.rule, config.seed) == (1e-3, "muon", 3)
    assert config.save_dir / config.run_name == tmp_path / "cell"


def test_rules_of_a_robots_parts_follow_the_contender(tmp_path):
    kind = make_kind("vla", [f"demos={tmp_path}", "steps=7", "optim.promote=2"])
    optims = {one.name: kind.settings(one, 2e-3, 3, tmp_path / "cell").optim
              for one in kind.contenders(kind.usual, [])}  # fmt: skip
    optim = optims["pion_action"]
    assert (optim.vision, optim.fusion, optim.action, optim.lr) == ("muon", "muon", "pion", 2e-3)
    # A strength is Pion's alone; mesotron vla train refuses it where no part has Pion.
    assert (optim.promote, optims["muon"].promote) == (2, None)


def test_recordings_that_know_no_world_are_refused_before_anything_is_trained(tmp_path):
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta" / "info.json").touch()
    with pytest.raises(ValueError, match="knows no world to judge a policy in"):
        make_kind("vla", [f"demos={tmp_path}"])


def test_half_way_down_a_curve_that_falls(tmp_path):
    """Losses from 9 to 1 and from 9 to 6: half way to the best one's end is 5."""
    kind = make_kind("vla", [f"demos={tmp_path}", "batch=2"])
    cells = [Cell(id=x, contender=x, objective="", rate=1.0, seed=0, stage="final") for x in "ab"]
    record = Tournament(recipe="vla", kind="vla", measure="", rule=[], contenders=[], plan={},
                        cells=cells, threshold=Threshold(metric=kind.curve))  # fmt: skip

    def rows(end):
        losses = [9.0] * 5 + [end] * 10
        return [{"step": k, "loss/action": x, "time/step": 2.0} for k, x in enumerate(losses, 1)]

    time_to_threshold(kind, record, {"a": rows(1.0), "b": rows(6.0)})
    assert record.threshold.value == 5.0
    # The mean of five steps passes 5 with the third of the new ones.
    assert (cells[0].threshold_steps, cells[0].threshold_seconds) == (8, 16.0)
    assert cells[0].threshold_tokens == 16.0
    assert cells[1].threshold_steps is None


def test_there_is_no_half_way_where_nothing_got_better(tmp_path):
    """A curve that rises, losses that are not numbers, and one lucky step at the start."""
    kind = make_kind("vla", [f"demos={tmp_path}", "batch=2"])
    cells = [Cell(id=x, contender=x, objective="", rate=1.0, seed=0, stage="final",
                  threshold_steps=3) for x in "ab"]  # fmt: skip
    record = Tournament(recipe="vla", kind="vla", measure="", rule=[], contenders=[], plan={},
                        cells=cells, threshold=Threshold(metric=kind.curve))  # fmt: skip

    def rows(*losses):
        return [{"step": k, "loss/action": x, "time/step": 2.0} for k, x in enumerate(losses, 1)]

    time_to_threshold(kind, record, {"a": rows(*[1.0] * 5, *[9.0] * 5), "b": rows(*[1.0] * 10)})
    assert record.threshold.value is None
    assert [cell.threshold_steps for cell in cells] == [None, None]
    lucky = rows(0.0, *[9.0] * 20, *[1.0] * 5)
    time_to_threshold(kind, record, {"a": lucky, "b": rows(*[9.0] * 5, *[float("nan")] * 5)})
    assert record.threshold.value == pytest.approx((7.2 + 9.0) / 4 + 0.5)
    assert [cell.threshold_steps for cell in cells] == [24, None]


def test_a_search_stops_at_its_limit_and_says_that_it_stands_at_an_end():
    grid = Grid(base=1.0, factor=2.0, rates=3, extend=2)
    rising = {k: k / 10 for k in range(-2, 9)}
    found = search(grid, rising)
    assert (found.wanted, found.best, found.extended, found.edge) == (
        (0, 1, -1, 2, 3),
        3,
        2,
        "high",
    )
    flat = search(grid, dict.fromkeys(range(-4, 5), 0.5))
    assert (flat.best, flat.extended, flat.edge) == (0, 0, None)
    crashed = search(grid, dict.fromkeys(range(-4, 5)))
    assert (crashed.best, crashed.done) == (None, True)


@pytest.mark.slow
def test_a_tiny_real_tournament_of_language_models(tmp_path):
    size = ["steps=3", "rollout.prompts=2", "rollout.generations=4", "task.num_eval=60"]
    words = ["compare", "arith", "--optims", "muon", "lowrank", "--rates", "2", "--extend", "0"]
    assert main([*words, "--seeds", "2", "--set", *size, "--out", str(tmp_path / "t")]) == 0
    record = read_tournament(tmp_path / "t")
    assert len(record.cells) == 10
    assert {cell.state for cell in record.cells} == {"done"}
    assert all(cell.tokens > 0 and cell.seconds > 0 and cell.steps == 3 for cell in record.cells)
    gains = {row.contender: row.gain for row in record.standings}
    assert gains["lowrank"] == 4.0  # 8 directions of 128, exactly
    assert 1.0 <= gains["muon"] <= 2.0
    for cell in record.cells:
        config = json.loads((tmp_path / "t" / cell.run / "config.json").read_text())
        assert config["optim"]["lr"] == pytest.approx(cell.rate * cell.gain)
        assert config["seed"] == cell.seed


@pytest.mark.slow
def test_a_tiny_real_tournament_of_games(tmp_path):
    pytest.importorskip("jumanji")
    size = ["total_timesteps=512", "num_envs=8", "num_steps=16", "num_minibatches=2",
            "eval_episodes=48"]  # fmt: skip
    words = ["compare", "snake", "--optims", "adam", "muon", "--rates", "1", "--extend", "0"]
    assert main([*words, "--seeds", "1", "--set", *size, "--out", str(tmp_path / "t")]) == 0
    record = read_tournament(tmp_path / "t")
    assert len(record.cells) == 4
    assert all(cell.tokens == 512 and cell.score is not None for cell in record.cells)
    assert record.start["final"] > 0
