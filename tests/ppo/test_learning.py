"""The smallest board is learned with every optimizer, in about two minutes of a CPU each."""

import pytest

pytest.importorskip("jumanji")
pytest.importorskip("jax")
from mesotron.config import SnakeConfig
from mesotron.ppo.training import train_snake
from mesotron.runs import RunFolder


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["adam", "muon", "pion"])
def test_four_by_four_is_learned(optim, tmp_path):
    """Masked random play has 7.33 fruit of 15; two CPU minutes bring a policy far beyond it."""
    config = SnakeConfig(optim=optim, save_dir=tmp_path, run_name=optim, gif=False)
    train_snake(config)
    result = RunFolder(tmp_path / optim).result
    assert 7.0 < result["baselines"]["random_masked"] < 7.7
    assert result["sampled_fruit"] > 11.0, result
