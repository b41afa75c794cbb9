"""`mesotron train`, with labels: accuracy on problems that the run and its watch never see.

    python -m benchmarks.watch.labelled train --steps 60 --out runs/x --eval-every 10

Every ten steps, and before the first, the policy answers 320 held-out problems greedily. What it
got right goes to labels.jsonl in the run's folder and nowhere else: no metric, no row and no
detector knows of it. Greedy decoding draws no random number, so the run is the same without it.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from mesotron.cli import main
from mesotron.rlvr import session
from mesotron.runs.files import append_row
from mesotron.sampling.decode import Completion, generate
from mesotron.tasks.builtin import arith
from mesotron.tasks.problem import Problem
from mesotron.tasks.prompts import render_prompts

EVERY = 10
PROBLEMS = 320
# Another seed than the task's, which gives the problems that the run evaluates on.
SEED = 1_000_003


class LabelEvery(TrainerCallback):
    """Appends {"step", "correct", "problems", "unchanged"} to labels.jsonl every ten steps.

    Args:
        trainer: whose model answers.
        parts: of the session: task, tokenizer and judge.
        path: the run's folder.
    """

    def __init__(self, trainer: Any, parts: Any, path: Path) -> None:
        self.trainer = trainer
        self.parts = parts
        self.file = path / "labels.jsonl"
        self.first = path / "label_start.json"
        self.problems = label_problems(parts.task.eval, parts.config.task.levels)
        self.prompts = render_prompts(
            self.problems, parts.config.task, parts.tokenizer, parts.task.examples
        )

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Label the start, unless the run is resumed."""
        if state.global_step == 0:
            said = self.answer()
            self.first.write_text(json.dumps([one.text for one in said]))
            self.write(0, said)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Label every ten steps."""
        if state.global_step % EVERY == 0:
            self.write(state.global_step, self.answer())

    def answer(self) -> list[Completion]:
        """One greedy completion of each problem, all in one batch."""
        model = self.trainer.model
        was_training = model.training
        model.eval()

        max_tokens = self.parts.config.rollout.max_tokens
        tokenizer = self.parts.tokenizer
        said = generate(model, tokenizer, self.prompts, max_tokens=max_tokens, batch=PROBLEMS)

        model.train(was_training)
        return said

    def write(self, step: int, said: Sequence[Completion]) -> None:
        """Judge and append."""
        texts = [one.text for one in said]
        golds = [problem.gold for problem in self.problems]
        facts = self.parts.judge.judge(texts, golds, [one.truncated for one in said])

        first = json.loads(self.first.read_text())
        same = [before == now for before, now in zip(first, texts, strict=True)]
        row = {
            "step": step,
            "correct": sum(fact.correct for fact in facts) / len(facts),
            "problems": len(facts),
            "unchanged": sum(same) / len(same),
        }
        append_row(self.file, row)


def label_problems(seen: Sequence[Problem], levels: tuple[int, ...]) -> list[Problem]:
    """Held-out problems of the task, except those that the run evaluates on."""
    known = {problem.question for problem in seen}
    drawn = arith.generate("eval", PROBLEMS + len(known), levels, SEED)
    return [problem for problem in drawn if problem.question not in known][:PROBLEMS]


def add_labels() -> None:
    """Add labels to every training session of this process."""
    usual = session.build_trainer

    def with_labels(parts: Any, run: Any) -> Any:
        trainer = usual(parts, run)
        trainer.add_callback(LabelEvery(trainer, parts, run.path))
        return trainer

    session.build_trainer = with_labels


if __name__ == "__main__":
    add_labels()
    sys.exit(main())
