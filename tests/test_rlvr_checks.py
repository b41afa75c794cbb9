"""What is refused before anything heavy is imported, and before a folder is made."""

import pytest

from mesotron.config import TrainConfig
from mesotron.rlvr.plan import begin


def test_the_folder_that_the_main_process_made_is_no_obstacle_to_the_others(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="is not empty"):
        begin(TrainConfig(), tmp_path)
    monkeypatch.setenv("RANK", "1")
    assert begin(TrainConfig(), tmp_path).path == tmp_path
