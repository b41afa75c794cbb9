"""Dataset rows: read once per group, copied cheaply, and passed through Accelerate untouched."""

from copy import deepcopy

import pytest
from accelerate.utils import send_to_device
from datasets import Dataset
from torch.utils.data._utils.pin_memory import pin_memory

from mesotron.answers.formats import FORMATS
from mesotron.config import TaskConfig
from mesotron.tasks.problem import Problem, Task
from mesotron.tasks.prompts import check_prompts, render
from mesotron.tasks.rows import RowBatch, Rows
from support.rlvr_tiny import make_model, make_tokenizer

KEYS = [3, 3, 3, 0, 0, 3, 5]
COLUMNS = {
    "prompt": [[{"role": "user", "content": f"{k} + {k}"}] for k in range(6)],
    "gold": [str(2 * k) for k in range(6)],
}


def test_rows_are_those_of_a_plain_dataset_and_may_be_changed():
    rows = Rows.from_dict(COLUMNS).__getitems__(KEYS)
    assert rows == Dataset.from_dict(COLUMNS).__getitems__(KEYS)
    assert rows[0]["prompt"] is rows[5]["prompt"]

    rows[0]["gold"] = "spoiled"  # a row of its own
    assert rows[1]["gold"] == "6"

    prompts = [row["prompt"] for row in rows]
    copied = deepcopy(prompts)
    assert copied == prompts
    assert copied[0][0] is prompts[0][0]  # messages are not copied

    copied[0].append({"role": "tool", "content": "7"})
    assert len(prompts[0]) == 1


def test_a_batch_goes_through_as_it_is():
    batch = RowBatch(Rows.from_dict(COLUMNS).__getitems__(KEYS))
    assert send_to_device(batch, "cpu") is batch
    assert pin_memory(batch) is batch
    assert "labels" not in batch  # as Transformers asks


def test_a_prompt_that_does_not_fit_the_context_is_refused():
    def check(words: int, tokens: int) -> None:
        problems = [Problem("1 + 1", "2", "a"), Problem("1 " * words, "1", "long")]
        task = Task(
            train=problems,
            eval=[],
            format=FORMATS["boxed"],
        )

        check_prompts(
            task,
            TaskConfig(system=""),
            make_tokenizer(),
            make_model(),
            tokens,
        )

    check(50, tokens=8)  # of 64
    for words, tokens in ((58, 8), (50, 20)):
        with pytest.raises(ValueError, match="long"):
            check(words, tokens)


def test_a_chat_template_that_fails_is_named():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ cycler.__init__.__globals__ }}"

    with pytest.raises(ValueError, match="chat template"):
        render([{"role": "user", "content": "1 + 1"}], tokenizer)
