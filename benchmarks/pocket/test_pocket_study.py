"""The study of the rate search: its command lines parse, and its table reads runs."""

import pytest

from benchmarks.pocket.__main__ import ARMS, GPU, SEEDS, TINY, cells, is_dead, print_table
from mesotron import cli
from mesotron.config import TrainConfig


@pytest.mark.parametrize("name", [*TINY, *GPU])
def test_settings_are_command_lines_at_the_recipes_rate(name):
    setting = {**TINY, **GPU}[name]
    words = f"{setting.flags} --lr auto".split()
    config = cli.parse(TrainConfig, words, "mesotron train", cli.RECIPE)

    assert config.lr_auto
    assert config.optim.lr == setting.rate


def test_every_setting_has_every_arm_and_seed():
    made = list(cells(TINY, list(SEEDS), list(ARMS)))
    assert len(made) == len(set(made)) == len(TINY) * len(ARMS) * len(SEEDS)
    assert not {*SEEDS} & {*range(300)}  # tuned on 0 to 4, and other studies' seeds


def test_the_table_counts_the_dead_and_the_cost(capsys):
    good = {"accuracy": 0.9, "start": 0.2, "condition": "healthy", "steps": 40, "extra": 10}
    bad = {**good, "accuracy": 0.1}
    runs = [
        {"setting": "arith", "arm": "auto", "seed": 1, **good},
        {"setting": "arith", "arm": "auto", "seed": 2, **bad},
    ]

    print_table(runs)
    assert "| arith | auto | 0.900, 0.100 | 0.500 | 1 | 1.25 |" in capsys.readouterr().out
    assert is_dead(bad)
    assert not is_dead(good)
