"""Is the gradient right, is the sampler right, and what is the first gradient made of? On a CPU.

    python -m benchmarks.smollm2.checks --out checks.json

The untouched SmolLM2 in float32, a quarter of an hour on one core: packed rows and TRL's loss
against plain logits, the fused sampler against the model, how often few examples lead to the format
and to right answers, and how long the format's gradient stays in a momentum.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.smollm2.rounded import imitate
from mesotron.answers.facts import Facts
from mesotron.answers.verify import Verifier
from mesotron.config import TrainConfig
from mesotron.models.sharded import as_loaded
from mesotron.recipes import make_recipe
from mesotron.rlvr.lifecycle import quiet_libraries
from mesotron.rlvr.parts import build_trainer, load
from mesotron.rlvr.trl_trainer import to_trl
from mesotron.runs import RunFolder
from mesotron.sampling.decoder import FusedSampler
from mesotron.sampling.graphs import Sampling
from mesotron.spectral.filters import noise_edge
from mesotron.tasks.prompts import build_prompt

Gradient = dict[str, Tensor]
LAYERS = (2, 10, 18, 26)
MICRO = 64
MOMENTUM = 0.95
FIRST = 6.06
LATER = 1.0  # norms of the first gradient and of those after it, as an H200 logged


def main() -> None:
    parser = argparse.ArgumentParser(description="gradient and sampler of SmolLM2, checked")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument(
        "--prompts",
        type=int,
        default=24,
        help="of the first gradient, x 8",
    )

    parser.add_argument(
        "--shots",
        type=int,
        nargs="*",
        default=[2, 8],
    )

    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    quiet_libraries()
    torch.manual_seed(0)

    found: dict[str, Any] = {}
    with ExitStack() as stack:
        trainer, parts = make(given, stack, prompts=2, generations=4)
        found["gradients"] = compare_gradients(trainer, roll(trainer, 2, 4)[0])
        found["sampler"] = compare_sampler(trainer, parts)
        write(found, given.out)
        trainer, parts = make(given, stack, given.prompts, generations=8)
        found["first_gradient"] = first_gradient(trainer, given.prompts)
        write(found, given.out)
        found["examples"] = {str(shots): try_examples(parts, shots) for shots in given.shots}
        write(found, given.out)


def write(found: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found), flush=True)


def make(given: Any, stack: ExitStack, prompts: int, generations: int) -> tuple[Any, Any]:
    """The recipe's trainer as the study builds it, on a CPU."""
    config: TrainConfig = make_recipe("arith_smollm2")
    changed = {
        "prompts": prompts,
        "generations": generations,
        "fast": True,
    }

    config = replace(
        config,
        device="cpu",
        model=replace(config.model, name=given.model),
        rollout=replace(config.rollout, **changed),
    )

    parts = load(config, stack.enter_context(Verifier(config.reward.timeout)))
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run"
    trainer = build_trainer(parts, RunFolder.create(folder, config, {}))
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1

    return trainer, parts


def roll(trainer: Any, prompts: int, generations: int) -> tuple[dict[str, Any], Sequence[Facts]]:
    """A rollout of the first prompts, scored, and the facts of its completions."""
    rows = [trainer.train_dataset[k] for k in range(prompts) for _ in range(generations)]
    batch, scored = trainer._sample_and_score(rows)
    return to_trl(batch), scored.facts


def gradient(trainer: Any, batch: dict[str, Any], advantages: Tensor) -> Gradient:
    """Of the trainer's own loss."""
    B = len(advantages)
    trainer.model.zero_grad()

    for k in range(0, B, MICRO):
        part = {
            name: x[k : k + MICRO] if isinstance(x, Tensor) and x.ndim and len(x) == B else x
            for name, x in batch.items()
        }
        part["advantages"] = advantages[k : k + MICRO]
        loss = trainer._compute_loss(trainer.model, part)
        (loss * len(part["advantages"]) / B).backward()

    return {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}


def size(g: Gradient) -> float:
    return float(sum(x.double().square().sum() for x in g.values()) ** 0.5)


def apart(a: Gradient, b: Gradient) -> float:
    """The size of a difference, of the second's size."""
    return size({name: a[name] - b[name] for name in b}) / size(b)


def compare_gradients(trainer: Any, batch: dict[str, Any]) -> dict[str, float]:
    """Packed rows against plain rows, and those against a loss from plain logits."""
    advantages = torch.randn(len(batch["advantages"]))
    packed = gradient(trainer, batch, advantages)
    shared = trainer.shared_prompts
    trainer.shared_prompts = None
    plain = gradient(trainer, batch, advantages)
    trainer.shared_prompts = shared
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    T = batch["completion_ids"].shape[1]
    kept = batch["completion_mask"].float()
    trainer.model.zero_grad()

    with as_loaded(trainer.model):
        logits = trainer.model(input_ids=ids, attention_mask=mask).logits[:, -T - 1 : -1]

    drawn = logits.log_softmax(-1).gather(-1, batch["completion_ids"][..., None])[..., 0]
    (-(advantages[:, None] * drawn * kept).sum(1) / kept.sum(1)).mean().backward()
    own = {n: p.grad for n, p in trainer.model.named_parameters() if p.grad is not None}

    return {"packed_against_plain": apart(packed, plain), "plain_against_own": apart(plain, own)}


class Seen(Sampling):
    """A way of drawing that keeps what it drew from."""

    logits: list[Tensor] = []  # noqa: RUF012  the sampler makes no copies of it

    def draw(self, logits: Tensor) -> Tensor:
        self.logits.append(logits.clone())
        return super().draw(logits)


def compare_sampler(trainer: Any, parts: Any) -> dict[str, float]:
    """The fused sampler's log-probabilities against the model's; bfloat16's by imitation."""
    tokenizer = parts.tokenizer
    model = trainer.model
    eos = tokenizer.eos_token_id
    pad = tokenizer.pad_token_id
    Seen.logits.clear()
    prompts = [p for p in encode(parts, parts.task.train[:6], parts.config.task) for _ in range(3)]
    longest = parts.config.rollout.max_tokens
    drawn = FusedSampler(model, [eos], pad, Seen(1.0)).sample(prompts, longest)
    width = max(len(p) for p in prompts)
    ids = torch.full((len(prompts), width + longest), pad)

    mask = torch.zeros_like(ids, dtype=torch.bool)
    for row, (prompt, new) in enumerate(zip(prompts, drawn, strict=True)):
        first = width - len(prompt)
        end = width + len(new)
        ids[row, first:end] = torch.tensor([*prompt, *new])
        mask[row, first:end] = True

    alive = mask[:, width:]
    with torch.no_grad(), as_loaded(model):
        exact = model(input_ids=ids, attention_mask=mask.long()).logits[:, width - 1 : -1]

    exact = exact.log_softmax(-1)
    own = torch.stack([x.log_softmax(-1) for x in Seen.logits], dim=1)
    steps = own.shape[1]
    tokens = ids[:, width : width + steps, None]
    off = (own - exact[:, :steps]).gather(-1, tokens)[..., 0].abs()[alive[:, :steps]].max()

    sampled, trained = (
        imitate(
            model,
            ids,
            mask,
            longest + 1,
            sampling=one,
        )[:, :-1]
        for one in (True, False)
    )

    kl = (sampled.exp() * (sampled - trained)).sum(-1)[alive].mean()
    ratio = (sampled - trained).gather(-1, ids[:, width:, None])[..., 0].where(alive, 0.0).sum(1)

    return {
        "largest_difference": float(off),
        "bfloat16_kl": float(kl),
        "bfloat16_log_ratio_spread": float(ratio.std()),
    }


def encode(parts: Any, problems: Sequence[Any], task: Any) -> list[list[int]]:
    """Prompts as token ids."""
    made = [build_prompt(p, task, parts.task.format, parts.task.examples) for p in problems]
    make = parts.tokenizer.apply_chat_template
    texts = [make(one, tokenize=False, add_generation_prompt=True) for one in made]

    return [parts.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def try_examples(parts: Any, shots: int) -> dict[str, float]:
    """What 8 samples each of 48 held-out problems are like with so many examples."""
    from mesotron.tasks.load import load_task

    task = replace(parts.config.task, few_shot=shots)
    parts = replace(parts, task=load_task(task))
    problems = parts.task.eval[:48]
    tokenizer = parts.tokenizer
    prompts = [p for p in encode(parts, problems, task) for _ in range(8)]
    eos = tokenizer.eos_token_id
    sampler = FusedSampler(parts.model, [eos], tokenizer.pad_token_id, Sampling(1.0))
    drawn = sampler.sample(prompts, parts.config.rollout.max_tokens)

    facts = parts.judge.judge(
        tokenizer.batch_decode(drawn, skip_special_tokens=True),
        [p.gold for p in problems for _ in range(8)],
        [ids[-1] != eos for ids in drawn],
    )

    groups = [facts[k : k + 8] for k in range(0, len(facts), 8)]
    return {
        "formatted": sum(f.formatted for f in facts) / len(facts),
        "correct": sum(f.correct for f in facts) / len(facts),
        "groups_with_a_right_answer": sum(any(f.correct for f in g) for g in groups) / len(groups),
    }


def first_gradient(trainer: Any, prompts: int) -> dict[str, Any]:
    """Sizes with and without the format's reward, and what momentum keeps of the former."""
    batch, facts = roll(trainer, prompts, 8)
    both = torch.tensor([0.1 * f.formatted + f.correct for f in facts])
    right = torch.tensor([float(f.correct) for f in facts])

    one, other = (
        {n: x for n, x in gradient(trainer, batch, advantages(r, 8)).items() if "proj" in n}
        for r in (both, right)
    )

    cosine = float(sum((one[n] * other[n]).sum() for n in one)) / size(one) / size(other)
    sizes = {
        "two_part": size(one),
        "right_alone": size(other),
        "cosine": cosine,
    }

    return sizes | {"ten_steps_later": momentum_later(one, other, steps=10)}


def advantages(rewards: Tensor, group: int) -> Tensor:
    x = rewards.view(-1, group)
    return ((x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-4)).flatten()


def momentum_later(first: Gradient, later: Gradient, steps: int) -> dict[str, list[float]]:
    """Cosines of a step with the first gradient and with the later ones, clipped or not.

    The later ones are taken as one direction whose size grows as that of independent gradients.
    """
    names = [n for n in first if any(f"layers.{k}." in n for k in LAYERS)]
    A, B = ({n: g[n] / size(g) for n in names} for g in (first, later))
    grown = LATER * ((1 - MOMENTUM ** (2 * steps)) / (1 - MOMENTUM**2)) ** 0.5

    found = {}
    for clip, start in (("auxiliary", FIRST), ("all", LATER)):
        for rule in ("muon", "noise"):
            kept = start * MOMENTUM**steps
            step = {n: filtered(kept * A[n] + grown * B[n], rule) for n in names}
            found[f"{rule}, clip {clip}"] = [
                float(sum((step[n] * g[n]).sum() for n in names)) / size(step) / size(g)
                for g in (A, B)
            ]

    return found


def filtered(X: Tensor, rule: str) -> Tensor:
    """Directions above the rule's edge, all as large."""
    U, sigma, Vh = torch.linalg.svd(X, full_matrices=False)
    edge = noise_edge(*sorted(X.shape)) if rule == "noise" else 0.0
    return (U * (sigma / sigma.norm() > edge)) @ Vh


if __name__ == "__main__":
    main()
