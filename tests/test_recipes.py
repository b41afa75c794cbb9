"""Recipes: consistent, documented, runnable; flags and TOML files win over their values."""

from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from mesotron import cli
from mesotron.cli import parse
from mesotron.config import ModelConfig, TrainConfig
from mesotron.config.base import from_plain, to_plain
from mesotron.models.load import load_model
from mesotron.recipes import RECIPES, describe_recipes, make_recipe
from mesotron.rlvr.trl_arguments import trl_arguments
from mesotron.runs import RunFolder
from support.rlvr_tiny import make_network

PRESETS = cli.COMMANDS["train"].presets
DOCS = Path(__file__).parents[1] / "docs"
FAMILIES = {
    "Qwen2.5": "qwen2",
    "Qwen3": "qwen3",
    "smollm2": "llama",
    "tiny": "llama",
}
GSM8K = '{"question": "Ann has %d pens and gets 2. How many?", "answer": "%d + 2 = %d\\n#### %d"}'
MATH = '{"problem": "What is %d + 2?", "solution": "It is $\\\\boxed{%d}$.", "level": "Level 5"}'


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_consistent_and_documented(name):
    config = make_recipe(name)
    assert config.recipe == name
    assert from_plain(TrainConfig, to_plain(config)) == config

    trl_arguments(config.objective, config.rollout, config.optim)
    assert name in describe_recipes(with_touchy=True)
    assert f"\n| `{name}` |" in (DOCS / "recipes.md").read_text()


def read(words: str) -> TrainConfig:
    return parse(TrainConfig, words.split(), "mesotron train", PRESETS)


def test_flags_win_over_a_file_and_a_file_over_the_recipe(tmp_path):
    assert read("") == make_recipe("arith")
    file = tmp_path / "mine.toml"
    file.write_text('recipe = "qwen3_math_mgrpo"\nsteps = 7\n[optim]\nlr = 1e-3\nname = "pion"\n')
    made = read(f"--config {file} --lr 2e-3")
    base = make_recipe("qwen3_math_mgrpo")

    assert (made.steps, made.optim.lr, made.optim.name) == (7, 2e-3, "pion")
    assert made.optim.warmup == base.optim.warmup == 0.1
    assert made.rollout == base.rollout
    assert read("arith_mgrpo --objective.momentum 0.5").objective.name == "mgrpo"


def test_touchy_recipes_are_in_the_whole_help_only():
    short = describe_recipes(with_touchy=False)
    assert "arith_collapse" in short
    assert "arith_sparse_collapse" not in short


def test_help_shows_the_values_of_a_recipe(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        cli.main(["train", "qwen3_math_mgrpo", "--help-all"])

    shown = " ".join(capsys.readouterr().out.split())
    assert "arith_sparse_collapse" in shown
    assert "Qwen/Qwen3-4B-Base" in shown
    assert "(default: 3072)" in shown


def small_model(folder: Path, kind: str) -> Path:
    _, tokenizer = load_model(ModelConfig(name="tiny"))
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    sizes = {
        "vocab_size": len(tokenizer),
        "head_dim": 16,
        "max_position_embeddings": 512,
    }

    make_network(
        kind,
        **sizes,
        **ends,
        tie_word_embeddings=True,
    ).save_pretrained(folder)

    tokenizer.save_pretrained(folder)
    return folder


def small_data(name: str) -> str:
    config = make_recipe(name)
    if config.task.name in ("arith", "sums") and name != "own":
        return "--task.num-train 40"

    lines = [
        MATH % (k, k + 2) if config.task.name == "math" else GSM8K % (k, k, k + 2, k + 2)
        for k in range(40)
    ]

    Path("data.jsonl").write_text("\n".join(lines) + "\n")
    return "--data data.jsonl"


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[pytest.mark.slow] * (x != "arith_smollm2_fast")) for x in RECIPES],
)
def test_two_steps_of_a_recipe(name, tmp_path, monkeypatch):
    """Everything as in the recipe but the sizes, and a random model of the same family."""
    monkeypatch.chdir(tmp_path)
    config = make_recipe(name)
    model = config.model.name or "tiny"
    kind = next(kind for start, kind in FAMILIES.items() if start in model)
    group, anchor = (8, "--objective.momentum-generations 4") if "mgrpo" in name else (4, "")

    sizes = (
        f"--steps 2 --device cpu --model {small_model(tmp_path / 'model', kind)} "
        f"--batch 4 --group {group} {anchor} --rollout.micro-batch 4 "
        "--max-tokens 4 --task.num-eval 2"
    )
    if config.model.dtype == "mixed":  # of a GPU alone
        sizes += " --model.dtype float32"

    words = ["train", name, *sizes.split(), *small_data(name).split(), "--out", "run"]
    assert cli.main(words) == 0

    made = RunFolder(Path("run"))
    assert [row["step"] for row in made.rows("metrics")] == [1, 2]
    assert made.result is not None


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_the_shipped_launch_files_are_read_by_accelerate(name):
    path = Path(__file__).parents[1] / "examples" / "scaling" / f"{name}.yaml"
    found = load_config_from_file(str(path))
    assert found.num_processes == 8

    if name == "fsdp2":
        assert found.fsdp_config["fsdp_version"] == 2
