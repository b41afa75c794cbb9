"""Rows on their way to the trainer: read once for a group, and looked into by nobody."""

from copy import deepcopy

import pytest
import trl
from accelerate.utils import send_to_device
from datasets import Dataset
from torch.utils.data._utils.pin_memory import pin_memory

from mesotron.rlvr.dataset import Batch, Rows
from support.rlvr_tiny import make_data, make_trainer, rows, same, weights

KEYS = [3, 3, 3, 0, 0, 3, 5]
COLUMNS = {
    "prompt": [[{"role": "user", "content": f"{k} + {k}"}] for k in range(6)],
    "gold": [str(2 * k) for k in range(6)],
}


def test_rows_are_those_of_a_plain_dataset():
    found = Rows.from_dict(COLUMNS).__getitems__(KEYS)
    assert found == Dataset.from_dict(COLUMNS).__getitems__(KEYS)
    assert found[0]["prompt"] is found[5]["prompt"]
    found[0]["gold"] = "spoiled"  # a row of its own
    assert found[1]["gold"] == "6"


def test_a_copied_chat_can_be_added_to():
    prompts = [row["prompt"] for row in Rows.from_dict(COLUMNS).__getitems__(KEYS)]
    copied = deepcopy(prompts)
    assert copied == prompts
    assert copied[0][0] is prompts[0][0]  # messages are not copied
    copied[0].append({"role": "tool", "content": "7"})
    assert len(prompts[0]) == 1


def test_a_batch_goes_through_as_it_is():
    batch = Batch(Rows.from_dict(COLUMNS).__getitems__(KEYS))
    assert send_to_device(batch, "cpu") is batch
    assert pin_memory(batch) is batch
    assert "labels" not in batch  # as Transformers asks


@pytest.mark.parametrize("engine", ["generate", "graph"])
def test_training_on_rows_is_training_on_a_dataset(tmp_path, engine):
    trainers = []
    for data in (make_data(), Rows.from_dict(make_data().to_dict())):
        trainer = make_trainer(tmp_path, parts={"train_dataset": data, "engine": engine})
        trainer.train()
        trainers.append(trainer)
    assert trainers[1].data_collator is Batch
    assert same(*map(weights, trainers))
    assert [row["loss"] for row in rows(trainers[0])] == [row["loss"] for row in rows(trainers[1])]


def test_prompts_are_tokenized_before_their_rollout_begins(tmp_path, monkeypatch):
    happened = []
    for name in ("_generate", "_tokenize_prompts", "_compute_loss"):
        own = getattr(trl.GRPOTrainer, name)

        def noted(*args, own=own, name=name):
            happened.append(name)
            return own(*args)

        monkeypatch.setattr(trl.GRPOTrainer, name, noted)
    parts = {"train_dataset": Rows.from_dict(make_data().to_dict()), "engine": "graph"}
    make_trainer(tmp_path, parts=parts).train()
    first = ["_generate", "_tokenize_prompts", "_compute_loss"]
    later = ["_tokenize_prompts", "_generate", "_compute_loss"]
    assert happened[:9] == first + later + later
