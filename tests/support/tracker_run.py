"""A run of forty rows that collapses, sent to one tracker by Transformers' callback and ours.

    python -m support.tracker_run trackio FOLDER

The last line printed is JSON: the pages of the run, and what W&B's summary says.
"""

import json
import sys
from types import SimpleNamespace
from typing import Any

from rlvr.test_trackers import FALLING, SAMPLES, state_at
from transformers import TrainerControl, TrainingArguments
from transformers.integrations import integration_utils

from mesotron.rlvr.trackers import Tracked
from mesotron.rlvr.trl_trainer import Sample
from mesotron.watch.callback import Watch

CALLBACKS = {
    "wandb": "WandbCallback",
    "trackio": "TrackioCallback",
    "tensorboard": "TensorBoardCallback",
    "mlflow": "MLflowCallback",
}


def main(name: str, folder: str) -> None:
    theirs = getattr(integration_utils, CALLBACKS[name])()
    handler = SimpleNamespace(callbacks=[theirs])
    trainer = SimpleNamespace(callback_handler=handler, samples=samples)
    watch = Watch("off")
    pages: list[str] = []
    ours = Tracked([name], trainer, watch, "run-1", pages.append)

    said: dict[str, Any] = {"pages": pages}
    args = TrainingArguments(folder, report_to="none", use_cpu=True, run_name="run-1")
    send([theirs, watch, ours], args)
    if name == "wandb":
        import wandb

        said["condition"] = wandb.run.summary["watch/condition"]
        wandb.finish()

    theirs.on_train_end(args, state_at(40), TrainerControl(), model=None)
    print(json.dumps(said))


def samples(number: int) -> list[Sample]:
    return SAMPLES[:number]


def send(callbacks: list[Any], args: TrainingArguments) -> None:
    control = TrainerControl()
    for callback in callbacks:
        callback.on_train_begin(args, fill(state_at(0)), control, model=None)

    rows: list[dict[str, float]] = []
    for reward in FALLING:
        rows.append({"loss": 0.1, "reward": reward})

    rows.append({"train_runtime": 1.0})

    for step, logs in enumerate(rows, 1):
        for callback in callbacks:
            state = fill(state_at(min(step, len(FALLING))))
            callback.on_log(args, state, control, logs=dict(logs), model=None)


def fill(state: Any) -> Any:
    """What Transformers' callbacks read of a state besides."""
    state.is_hyper_param_search = False
    state.trial_name = None
    return state


if __name__ == "__main__":
    main(*sys.argv[1:])
