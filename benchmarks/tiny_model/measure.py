"""What the shipped tiny model can do before any reinforcement learning.

    python -m benchmarks.tiny_model.measure

Greedy completions of held-out problems: as the model answers by itself, and with the first number
of the question given as the start of the answer, which is how a worked answer starts. The second
score shows what the model already knows.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._lib.results import write_json
from mesotron.answers.facts import Facts, Judge
from mesotron.answers.verify import Verifier
from mesotron.config import ModelConfig, TaskConfig
from mesotron.evaluate.scores import wilson
from mesotron.models.load import load_model
from mesotron.optim.device import use_one_thread_if_small
from mesotron.sampling.decode import generate
from mesotron.tasks.load import load_task
from mesotron.tasks.prompts import render_prompts

HERE = Path(__file__).parent
MAX_TOKENS = 32


def main(problems: int = 200) -> None:
    config = TaskConfig(name="arith", num_eval=problems)
    task = load_task(config)
    model, tokenizer = load_model(ModelConfig(name="tiny"))
    use_one_thread_if_small(model, model.device, None)
    prompts = render_prompts(task.eval, config, tokenizer)
    golds = [problem.gold for problem in task.eval]
    starts = {
        "alone": [""] * len(prompts),
        "first_number_given": [re.findall(r"\d+", problem.question)[0] for problem in task.eval],
    }

    result: dict[str, Any] = {"problems": len(prompts)}
    with Verifier() as verifier:
        judge = Judge(task.format, verifier)
        for name, given in starts.items():
            made = generate(model, tokenizer, joined(prompts, given), max_tokens=MAX_TOKENS)
            texts = joined(given, [one.text for one in made])
            facts = judge.judge(texts, golds, [one.truncated for one in made])
            result[name] = scores(facts) | {"worked": share(["=" in text for text in texts])}

    write_json(result, HERE / "result.json", indent=1)
    print(json.dumps(result, indent=1))


def joined(first: list[str], second: list[str]) -> list[str]:
    return [a + b for a, b in zip(first, second, strict=True)]


def share(hits: list[bool]) -> float:
    return sum(hits) / len(hits)


def scores(facts: Sequence[Facts]) -> dict[str, Any]:
    """Right answers in the format and anywhere, with intervals."""
    strict = sum(fact.correct for fact in facts)
    lenient = sum(fact.correct or fact.correct_unformatted for fact in facts)
    return {
        "strict": wilson(strict, len(facts)).__dict__,
        "lenient": wilson(lenient, len(facts)).__dict__,
    }


if __name__ == "__main__":
    main()
