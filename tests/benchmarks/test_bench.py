"""The benchmarks measure what they say: shapes, floors, oracles, search, resuming, pages."""

import json
import math
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mesotron.bench import accuracy, console, optim_step, training
from mesotron.bench.corpus import VOCABULARY, read_corpus
from mesotron.bench.language_model import RunSettings, has_diverged, train
from mesotron.bench.peers import LR, PEERS, Peer
from mesotron.bench.shapes import SHAPES, Projection
from mesotron.bench.statistics_cost import replaced_collectors, statistics_share
from mesotron.bench.step_tables import HEADINGS, accuracy_row, step_row, without_empty
from mesotron.bench.sweep import Ledger, Point, Search, beside
from mesotron.bench.timing import bare_products, interleave, peak_extra_bytes, state_bytes
from mesotron.bench.workbench import Workbench
from mesotron.config import BenchOptimConfig, BenchTrainConfig, checks
from mesotron.optim import apply_filter, step_scale
from mesotron.spectral import high_pass, muon, pion

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
# Hidden matrices' parameters by the models' public configs, in millions.
MILLIONS = {
    "gpt_30m": 25.2,
    "gpt2_124m": 84.9,
    "smollm2_135m": 106.2,
    "qwen2_5_0_5b": 357.8,
    "qwen3_1_7b": 1409.3,
    "llama3_8b": 6979.3,
}


@pytest.mark.parametrize("model", MILLIONS)
def test_shapes_add_up_to_the_model(model):
    total = sum(p.rows * p.cols for p in SHAPES[model].matrices())
    assert total / 1e6 == pytest.approx(MILLIONS[model], abs=0.05)


@pytest.mark.parametrize("model", SHAPES)
def test_heads_cut_every_attention_matrix_evenly(model):
    for p in SHAPES[model].layer:
        length = p.cols if p.axis == "cols" else p.rows
        assert p.heads == 0 or length % p.heads == 0
        assert p.view(per_head=False) == "whole"


def test_layers_are_cut_to_a_budget_but_never_to_none():
    shape = SHAPES["gpt2_124m"]
    assert shape.layers_within(1.0) == 1
    assert shape.layers_within(1e30) == 12 == len(shape.matrices()) // len(shape.layer)


def test_the_floor_does_exactly_the_products_of_the_plain_form():
    shapes = [Projection(24, 8), Projection(8, 24), Projection(16, 16)]
    run = bare_products(shapes, torch.float32, CPU)
    with FlopCounterMode(display=False) as counted:
        run()
    assert counted.get_total_flops() == sum(p.plain_flops for p in shapes)


def test_repeats_are_interleaved_after_a_warm_up():
    calls = []
    steps = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    times = interleave(steps, 2, CPU, lambda text: None)
    assert calls == ["a", "b"] + ["a", "b"] * 2
    assert {name: len(found) for name, found in times.items()} == {"a": 2, "b": 2}


def test_state_is_one_buffer_for_ours_and_two_for_adamw():
    bed = Workbench([Projection(24, 16)], None, CPU)
    per_parameter = {}
    for name in ("adamw_fused", "muon"):
        built = bed.build(PEERS[name])
        built.step()
        per_parameter[name] = state_bytes(*built.optimizers) / bed.num_parameters
    assert per_parameter["muon"] == 4
    assert per_parameter["adamw_fused"] == pytest.approx(8, abs=0.05)  # and its step counter


def test_peak_memory_is_what_a_step_holds_at_one_time():
    def step():
        for _ in range(3):
            torch.empty(1000, 256).add_(1).mul(2.0)  # two of 1.024 MB at one time, never more

    assert peak_extra_bytes(step, CPU) == pytest.approx(2 * 1.024e6, rel=0.01)


def test_an_embedding_is_stepped_by_the_auxiliary_rule():
    bed = Workbench([Projection(24, 16)], (40, 16), CPU)
    assert bed.embedding is not None
    before = bed.embedding.detach().clone()
    built = bed.build(PEERS["muon_sgd"])
    built.step()
    assert isinstance(built.optimizers[1], torch.optim.SGD)
    assert not torch.equal(before, bed.embedding)


@pytest.mark.parametrize("filter", [muon(), pion(promote=2), high_pass("noise")], ids=str)
@pytest.mark.parametrize("kind", accuracy.KINDS)
def test_the_exact_update_is_the_filter_in_float64(filter, kind):
    G = accuracy.make_gradient(kind, 24, 40)
    filtered = apply_filter(G.clone()[None], filter).X[0]
    assert accuracy.relative_error(filtered, accuracy.exact_update(G, filter), 1.0) < 1e-6
    plain = accuracy.plain_update(G, filter, torch.float64)
    assert accuracy.relative_error(plain, accuracy.exact_update(G, filter), 1.0) < 1e-10


def test_an_error_of_the_update_is_seen():
    G = accuracy.make_gradient("gaussian", 24, 40)
    exact = accuracy.exact_update(G, muon())
    assert accuracy.relative_error(G, exact, None) > 0.1
    assert accuracy.relative_error(3 * exact, exact, None) < 1e-12


def test_every_step_of_ours_is_as_exact_as_claimed():
    rows = accuracy.measure(["muon", "polar_express", "pion", "pion_noise"], CPU)
    assert len(rows) == 4 * len(accuracy.CPU_SHAPES)
    for row in rows:
        assert row["plain_error"] < 1e-5
        assert row["error"] < 1e-2, row  # below the plain bfloat16 iteration's


@pytest.mark.parametrize("name", [n for n in PEERS if not PEERS[n].per_head])
def test_every_peer_steps_downhill(name):
    if PEERS[name].missing(CPU):
        pytest.skip(str(PEERS[name].missing(CPU)))
    G = accuracy.make_gradient("spiked", 16, 24)
    update = accuracy.peer_update(PEERS[name], G)
    assert float((update * G).sum()) > 0


def test_a_missing_peer_is_left_out_with_a_reason():
    absent = Peer(PEERS["muon"].build, package="no_such_package")
    assert "not installed" in str(absent.missing(CPU))
    here, left_out = optim_step.available(("muon", "muon_sgd", "dion"), BenchOptimConfig(), CPU)
    assert here == ["muon"]
    assert set(left_out) == {"muon_sgd", "dion"}


def test_an_emulated_peer_is_timed_once_and_says_so(monkeypatch):
    shapes = [Projection(32, 16)] * 3
    row = optim_step.time_emulated(PEERS["torch_muon"], shapes, CPU)
    assert "one step" in row["note"]
    monkeypatch.setattr(optim_step, "BEARABLE_SECONDS", 0.0)
    row = optim_step.time_emulated(PEERS["torch_muon"], shapes, CPU)
    assert row["seconds"] == pytest.approx(3 * row["all"][0])
    assert "one 32x16 matrix, x3 by FLOPs" in row["note"]


def test_collectors_can_be_silenced_and_come_back():
    bed = Workbench([Projection(24, 16)], None, CPU)
    optimizer = bed.build(PEERS["muon"]).optimizers[0]
    with replaced_collectors(lambda method: lambda *values: None):
        optimizer.step()
        assert "whole/update_rms" not in optimizer.stats()
    optimizer.step()
    scale = step_scale("rms", 24, 16)
    assert 0 < optimizer.stats()["whole/update_rms"] < 2 * LR * scale


def test_the_cost_of_statistics_is_the_time_inside_the_collectors(monkeypatch):
    bed = Workbench([Projection(24, 16)], None, CPU)
    built = bed.build(PEERS["muon"])
    built.step()
    assert 0 < statistics_share(built.step, bed.shapes, 3, CPU) < 1
    with replaced_collectors(lambda method: lambda *values: time.sleep(0.02)):
        slow = built.step
        monkeypatch.setattr("mesotron.bench.timing.time.thread_time", time.perf_counter)
        assert statistics_share(slow, bed.shapes, 3, CPU) > 0.5


def test_bench_optim_without_rich_and_tyro(tmp_path):
    out = tmp_path / "result.json"
    fields = {"models": ["micro_192x576"], "layers": 1, "repeats": 2, "threads": 1}
    fields |= {"optims": ["adamw_fused", "muon", "pion_per_head"], "out": str(out)}
    fields |= {"accuracy": False, "buckets": True, "stats_cost": True}
    code = (
        "import sys; sys.modules['rich'] = sys.modules['tyro'] = None\n"
        "from mesotron.bench.optim_step import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "--json-config", json.dumps(fields)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "micro_192x576: 1 of 12 layers" in done.stdout
    (model,) = json.loads(out.read_text())["models"]
    rows = {row["optimizer"]: row for row in model["rows"]}
    assert rows["muon"]["versus_adamw"] == pytest.approx(
        rows["muon"]["seconds"] / rows["adamw_fused"]["seconds"]
    )
    assert rows["muon"]["versus_floor"] == pytest.approx(
        rows["muon"]["seconds"] / model["floor_seconds"]
    )
    assert "stats_share" in rows["muon"]
    assert "stats_share" not in rows["adamw_fused"]
    assert [bucket["shape"] for bucket in model["buckets"]] == [[192, 576]]


def test_columns_without_a_value_are_not_shown(capsys, monkeypatch):
    monkeypatch.setattr(console, "find_spec", lambda name: None)
    headings, rows = without_empty(("a", "b", "c"), [["x", "–", "1"], ["y", "–", "–"]])
    console.show_table("title", headings, rows)
    assert capsys.readouterr().out == "\ntitle\na  c\nx  1\ny  –\n"


def test_the_corpus_is_split_by_topic_and_sampled_by_seed():
    corpus = read_corpus()
    assert corpus.sha256 == read_corpus().sha256
    assert int(corpus.train.max()) < VOCABULARY
    first, again, other = (corpus.batches(seed, 3, 2, 16) for seed in (0, 0, 1))
    assert first.shape == (3, 2, 16)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(corpus.evaluation(4, 16), corpus.evaluation(4, 16))


def test_divergence_is_a_loss_that_is_not_finite_or_worse_than_guessing():
    even = math.log(VOCABULARY)
    assert has_diverged([2.0, math.nan])
    assert has_diverged([even * 1.3] * 8)
    assert not has_diverged([even * 1.3] * 7)  # too early to tell
    assert not has_diverged([even] * 8)


def test_a_diverging_run_stops_and_has_no_loss():
    settings = RunSettings(
        optimizer="muon_sgd", lr=100.0, aux_lr=1e4, seed=0, steps=30, batch=2, context=16, layers=1
    )
    record = train(settings, read_corpus(), CPU)
    assert record["loss"] is None
    assert record["diverged_at"] == len(record["train_losses"]) < 30


def parabola(best_lr, best_aux=None):
    """A loss with one minimum over the logarithms of the rates."""

    def measure(point, seed):
        loss = math.log(point.lr / best_lr) ** 2 + 0.001 * seed
        return loss + (math.log(point.aux_lr / best_aux) ** 2 if best_aux else 0)

    return measure


@pytest.mark.parametrize("best_lr", [0.0005, 0.002, 0.004, 0.032])
def test_the_best_rate_never_stays_at_an_edge(best_lr):
    search = Search(parabola(best_lr), (0.002, 0.004, 0.008), (None,), (0, 1, 2))
    best = search.run()
    assert best == Point(best_lr, None)
    for lr in (best_lr / 2, best_lr, best_lr * 2):
        assert set(search.losses[Point(lr, None)]) == {0, 1, 2}


def test_the_auxiliary_rate_is_searched_too():
    search = Search(parabola(0.004, 4.0), (0.002, 0.004, 0.008), (0.5, 1.0, 2.0), (0, 1))
    assert search.run() == Point(0.004, 4.0)


def test_a_diverged_rate_is_never_the_best():
    search = Search(
        lambda p, seed: math.inf if p.lr > 3 else -p.lr, (1.0, 2.0, 4.0), (None,), (0, 1)
    )
    assert search.run().lr == 2.0


def test_more_seeds_can_move_the_best():
    def measure(point, seed):  # the first seed alone prefers 2
        return {1.0: 5, 2.0: 0 if seed == 0 else 9, 4.0: 1, 8.0: 5, 16.0: 9}[point.lr]

    search = Search(measure, (1.0, 2.0, 4.0), (None,), (0, 1, 2))
    assert search.run().lr == 4.0
    assert set(search.losses[Point(8.0, None)]) == {0, 1, 2}


def test_values_beside_a_rate():
    assert beside(2.0, [1.0, 2.0, 8.0]) == (1.0, 8.0)
    assert beside(1.0, [1.0, 2.0, 8.0]) == (0.5, 2.0)
    assert beside(3.0, [3.0]) == (1.5, 6.0)


def test_the_ledger_forgets_nothing_but_a_torn_line(tmp_path):
    path = tmp_path / "runs.jsonl"
    ledger = Ledger(path, {"corpus": "x"})
    for seed in (0, 1):
        ledger.get_or_run({"seed": seed}, lambda seed=seed: {"loss": seed + 0.5})
    path.write_text(path.read_text()[:-9])  # killed while it wrote the second run
    ran = []
    again = Ledger(path, {"corpus": "x"})
    for seed in (0, 1):
        again.get_or_run({"seed": seed}, lambda seed=seed: ran.append(seed) or {"loss": seed + 0.5})
    assert ran == [1]
    whole = Ledger(path, {"corpus": "x"})
    assert sorted(run["loss"] for run in whole.runs.values()) == [0.5, 1.5]
    other = Ledger(path, {"corpus": "y"})
    other.get_or_run({"seed": 0}, lambda: ran.append("new text") or {"loss": 0.0})
    assert ran[-1] == "new text"


@pytest.fixture
def tiny(tmp_path):
    return BenchTrainConfig(
        optims=("adamw", "pion_per_head"),
        lrs=(0.004, 0.008),
        seeds=(0, 1),
        steps=2,
        quick=False,
        device="cpu",
        out=tmp_path / "result.json",
    )


def test_a_sweep_stopped_and_continued_gives_the_same_result(tiny, monkeypatch, capsys):
    monkeypatch.setattr("mesotron.bench.sweep.MAX_MOVES", 1)
    first = training.compare(tiny)
    start = {(r["optimizer"], r["seed"]): r["train_losses"][0] for r in first["runs"]}
    assert start["adamw", 0] == start["pion_per_head", 0] != start["adamw", 1]

    def refuse(*values):
        raise AssertionError("a finished run was run again")

    monkeypatch.setattr(training, "train", refuse)
    capsys.readouterr()
    assert training.compare(tiny) == first
    assert f"{tiny.out.with_suffix('.runs.jsonl')}, " in capsys.readouterr().err
    by_name = {entry["optimizer"]: entry for entry in first["summary"]}
    assert by_name["adamw"]["versus_adamw"] == 0
    assert by_name["pion_per_head"]["interval"] > 0


def test_what_is_given_wins_over_the_quick_look():
    asked = BenchTrainConfig(quick=True, steps=120, seeds=(0, 1, 2), optims=("pion",))
    done = training.complete(asked)
    assert (done.steps, done.seeds, done.optims) == (120, (0, 1, 2), ("pion",))
    assert done.lrs == training.QUICK["lrs"]
    full = training.complete(BenchTrainConfig())
    assert {name: getattr(full, name) for name in training.FULL} == training.FULL


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"steps": 0}, "--steps 0 must be at least 1"),
        ({"lrs": (0.01, 0.0)}, "rate of 0 cannot"),
        ({"lrs": (math.nan,)}, "rate of nan cannot"),
        ({"aux_lr": math.inf}, "rate of inf cannot"),
        ({"seeds": (0, 1, 0)}, "give each seed once"),
        ({"optims": ("mun",)}, "unknown optimizer 'mun'"),
        ({"out": Path(".")}, "is a folder"),
        ({"plot": Path("x.gif")}, "end the name in .png"),
    ],
)
def test_a_sweep_that_cannot_end_well_is_refused_before_it_starts(monkeypatch, wrong, told):
    monkeypatch.setattr(training, "compare", lambda config: pytest.fail("it started"))
    with pytest.raises(ValueError, match=told):
        training.run(BenchTrainConfig(**wrong))


def test_a_file_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    checks.check_writable(tmp_path / "new" / "result.json")
    assert (tmp_path / "new").is_dir()
    monkeypatch.setattr(checks.os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match="cannot be written"):
        checks.check_writable(tmp_path / "result.json")


def test_an_interrupted_sweep_says_how_to_go_on(tiny, monkeypatch):
    def interrupt(*values):
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "train", interrupt)
    with pytest.raises(KeyboardInterrupt, match=r"continues from .*result\.runs\.jsonl"):
        training.run(tiny)
    with pytest.raises(KeyboardInterrupt, match="--out FILE would keep"):
        training.run(replace(tiny, out=None))


def test_the_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    from mesotron.bench.training_plot import draw

    result = json.loads((ROOT / "benchmarks" / "training" / "result.json").read_text())
    draw(result, tmp_path / "rates.png")
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")


def test_the_training_page_shows_the_result_beside_it():
    folder = ROOT / "benchmarks" / "training"
    page = (folder / "README.md").read_text()
    result = json.loads((folder / "result.json").read_text())
    for entry in result["summary"]:
        assert f"| {' | '.join(training.table_row(entry))} |" in page
    assert result["corpus"]["sha256"] in page
    assert result["command"] in page


@pytest.mark.parametrize(("name", "data"), [("README.md", "cpu.json"), ("h200.md", "h200.json")])
def test_the_step_pages_show_the_results_beside_them(name, data):
    folder = ROOT / "benchmarks" / "optim_step"
    page = (folder / name).read_text()
    result = json.loads((folder / data).read_text())
    for model in result["models"]:
        rows = [step_row(row) for row in model["rows"]]
        for row in without_empty(HEADINGS, rows)[1]:
            assert f"| {' | '.join(row)} |" in page
    for row in result["accuracy"]:
        assert f"| {' | '.join(accuracy_row(row))} |" in page
    assert result["command"] in page


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("bench optim gpt5", "unknown model 'gpt5': choose from micro_192x576"),
        ("bench optim --optims lion", "unknown optimizer 'lion': choose from adamw_fused"),
        ("bench optim --repeats 0", "at least one repeat"),
        ("bench train lion", "unknown optimizer 'lion': choose from adamw"),
        ("bench train --steps 0", "--steps 0 must be at least 1"),
    ],
)
def test_bad_input_gets_one_sentence(words, said, sentence):
    assert said in sentence(*words.split())
