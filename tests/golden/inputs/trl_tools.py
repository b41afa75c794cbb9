"""Tools and an environment: a random model calls one whenever it writes a +."""

import sys

import small
from datasets import Dataset

import mesotron

CHAT = (
    "{% for m in messages %}{{ '= ' if m.role == 'assistant' else '' }}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %} + {{ c.function.name }} "
    "{{ c.function.arguments | tojson }}{% endfor %} <eos> {% endfor %}"
    "{% if add_generation_prompt %}= {% endif %}"
)
CALL = {"type": "function", "function": {"name": "double", "arguments": {"number": "{content}"}}}
ANSWER = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<eos> =",
    "fields": {
        "tool_calls": {
            "open": "+",
            "close_pattern": r"<eos>|$",
            "content": "text",
            "repeats": True,
            "transform": CALL,
        },
        "content": {"close_pattern": r"<eos>|$", "content": "text"},
    },
}


def double(number: str) -> str:
    """Twice a number.

    Args:
        number: a digit.
    """
    return str(2 * int(number.split()[0]))


class World:
    """An environment that pays for its calls."""

    def __init__(self):
        self.calls = 0

    def reset(self, **row):
        self.calls = 0
        return " 7"

    def double(self, number: str) -> str:
        """Twice a number.

        Args:
            number: a digit.
        """
        self.calls += 1
        return double(number)

    def get_reward(self):
        return float(self.calls)


def short(completions, **_):
    return [float(len(one)) + len(one[-1].get("content") or "") % 3 for one in completions]


def train(name, objective, **tools):
    tokenizer = small.make_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.response_template = ANSWER
    prompts = [[{"role": "user", "content": f"{a} + {a} ="}] for a in range(8)]

    trainer = mesotron.GRPOTrainer(
        model=small.make_model(),
        reward_funcs=short,
        args=small.make_arguments(name, max_steps=2, max_completion_length=12),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        optim="muon",
        objective=objective,
        **tools,
    )
    trainer.train()
    small.save(name, trainer)


def main():
    train("tools", "grpo", tools=[double])
    train("environment", "gmpo", environment_factory=World)


sys.exit(main())
