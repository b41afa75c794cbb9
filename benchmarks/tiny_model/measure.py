"""What the shipped tiny model can do before any reinforcement learning.

    python -m benchmarks.tiny_model.measure

Greedy completions of held-out problems: as the model answers by itself, and with the first number
of the question given as the start of the answer, which is how a worked answer starts. The second
score shows what the model already knows.
"""

import json
import re
from pathlib import Path

from mesotron.answers.facts import Judge
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
    firsts = [re.findall(r"\d+", problem.question)[0] for problem in task.eval]

    result = {"problems": len(prompts)}
    with Verifier() as verifier:
        judge = Judge(task.format, verifier)
        for name, starts in (("alone", [""] * len(prompts)), ("first_number_given", firsts)):
            given = [prompt + start for prompt, start in zip(prompts, starts, strict=True)]
            made = generate(model, tokenizer, given, max_tokens=MAX_TOKENS)
            texts = [start + one.text for start, one in zip(starts, made, strict=True)]
            cut = [one.truncated for one in made]
            facts = judge.judge(texts, [problem.gold for problem in task.eval], cut)

            right = {
                "strict": sum(one.correct for one in facts),
                "lenient": sum(one.correct or one.correct_unformatted for one in facts),
            }

            result[name] = {key: wilson(num, len(facts)).__dict__ for key, num in right.items()}
            result[name]["worked"] = sum("=" in text for text in texts) / len(texts)

    (HERE / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
