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

from benchmarks._lib.results import write_json
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
FIRST = 6.06  # the norm of the first gradient as an H200 logged it
LATER = 1.0  # and of those after it
SAMPLES = 8  # of a prompt


def main() -> None:
    parser = argparse.ArgumentParser(description="gradient and sampler of SmolLM2, checked")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", type=int, default=24, help="of the first gradient, x 8")
    parser.add_argument("--shots", type=int, nargs="*", default=[2, 8])
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    quiet_libraries()
    torch.manual_seed(0)

    found: dict[str, Any] = {}
    with ExitStack() as stack:
        trainer, parts = make(given.model, stack, prompts=2, generations=4)
        batch, _ = roll(trainer, 2, 4)
        found["gradients"] = compare_gradients(trainer, batch)
        found["sampler"] = compare_sampler(trainer.model, parts)
        write(found, given.out)

        trainer, parts = make(given.model, stack, given.prompts, SAMPLES)
        found["first_gradient"] = first_gradient(trainer, given.prompts)
        write(found, given.out)

        found["examples"] = {str(shots): try_examples(parts, shots) for shots in given.shots}
        write(found, given.out)


def write(found: dict[str, Any], path: Path) -> None:
    write_json(found, path, indent=1)
    print(json.dumps(found), flush=True)


def make(model: str, stack: ExitStack, prompts: int, generations: int) -> tuple[Any, Any]:
    """The recipe's trainer as the study builds it, on a CPU."""
    recipe: TrainConfig = make_recipe("arith_smollm2")
    rollout = replace(recipe.rollout, prompts=prompts, generations=generations, fast=True)
    named = replace(recipe.model, name=model)
    config = replace(recipe, device="cpu", model=named, rollout=rollout)

    parts = load(config, stack.enter_context(Verifier(config.reward.timeout)))
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run"
    trainer = build_trainer(parts, RunFolder.create(folder, config, {}))
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer, parts


def roll(trainer: Any, prompts: int, generations: int) -> tuple[dict[str, Any], Sequence[Facts]]:
    """A rollout of the first prompts, scored, and the facts of its completions."""
    rows = []
    for k in range(prompts):
        rows += [trainer.train_dataset[k]] * generations
    batch, scored = trainer._sample_and_score(rows)
    return to_trl(batch), scored.facts


def gradient(trainer: Any, batch: dict[str, Any], advantages: Tensor) -> Gradient:
    """Of the trainer's own loss."""
    B = len(advantages)
    trainer.model.zero_grad()
    for first in range(0, B, MICRO):
        part = rows_of(batch, B, slice(first, first + MICRO))
        part["advantages"] = advantages[first : first + MICRO]
        loss = trainer._compute_loss(trainer.model, part)
        (loss * len(part["advantages"]) / B).backward()

    return {name: g.clone() for name, g in gradients_of(trainer.model).items()}


def rows_of(batch: dict[str, Any], B: int, chosen: slice) -> dict[str, Any]:
    """Some rows of a batch; what does not have a value for each row is kept."""
    part = dict(batch)
    for name, x in batch.items():
        if isinstance(x, Tensor) and x.ndim and len(x) == B:
            part[name] = x[chosen]
    return part


def gradients_of(model: Any) -> Gradient:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def dot(a: Gradient, b: Gradient) -> float:
    return float(sum((a[name] * b[name]).sum() for name in b))


def size(g: Gradient) -> float:
    return float(sum(x.double().square().sum() for x in g.values()) ** 0.5)


def cosine(a: Gradient, b: Gradient) -> float:
    return dot(a, b) / size(a) / size(b)


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

    trainer.model.zero_grad()
    loss_of_logits(trainer.model, batch, advantages).backward()
    own = gradients_of(trainer.model)
    return {"packed_against_plain": apart(packed, plain), "plain_against_own": apart(plain, own)}


def loss_of_logits(model: Any, batch: dict[str, Any], advantages: Tensor) -> Tensor:
    """The policy gradient's loss, written down from plain logits."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    T = batch["completion_ids"].shape[1]
    with as_loaded(model):
        logits = model(input_ids=ids, attention_mask=mask).logits[:, -T - 1 : -1]

    logprobs = logits.log_softmax(-1).gather(-1, batch["completion_ids"][..., None])[..., 0]
    kept = batch["completion_mask"].float()
    of_rows = (advantages[:, None] * logprobs * kept).sum(1) / kept.sum(1)
    return -of_rows.mean()


class Seen(Sampling):
    """A way of drawing that keeps what it drew from."""

    logits: list[Tensor] = []  # noqa: RUF012  the sampler makes no copies of it

    def draw(self, logits: Tensor) -> Tensor:
        self.logits.append(logits.clone())
        return super().draw(logits)


def compare_sampler(model: Any, parts: Any) -> dict[str, float]:
    """The fused sampler's log-probabilities against the model's; bfloat16's by imitation.

    Legend: B completions, S longest prompt, N longest completion, T tokens that were drawn.
    """
    tokenizer = parts.tokenizer
    pad = tokenizer.pad_token_id
    N = parts.config.rollout.max_tokens
    prompts = repeat(encode(parts, parts.task.train[:6], parts.config.task), 3)
    Seen.logits.clear()
    drawn = FusedSampler(model, [tokenizer.eos_token_id], pad, Seen(1.0)).sample(prompts, N)

    ids, mask, S = side_by_side(prompts, drawn, N, pad)
    alive = mask[:, S:]  # [B, N]
    with torch.no_grad(), as_loaded(model):
        exact = model(input_ids=ids, attention_mask=mask.long()).logits[:, S - 1 : -1]
    exact = exact.log_softmax(-1)  # [B, N, V]

    own = torch.stack([x.log_softmax(-1) for x in Seen.logits], dim=1)  # [B, T, V]
    T = own.shape[1]
    difference = (own - exact[:, :T]).gather(-1, ids[:, S : S + T, None])[..., 0].abs()

    sampled = imitate(model, ids, mask, N + 1, sampling=True)[:, :-1]
    trained = imitate(model, ids, mask, N + 1, sampling=False)[:, :-1]
    kl = (sampled.exp() * (sampled - trained)).sum(-1)[alive].mean()
    log_ratio = (sampled - trained).gather(-1, ids[:, S:, None])[..., 0]

    return {
        "largest_difference": float(difference[alive[:, :T]].max()),
        "bfloat16_kl": float(kl),
        "bfloat16_log_ratio_spread": float(log_ratio.where(alive, 0.0).sum(1).std()),
    }


def side_by_side(
    prompts: list[list[int]], completions: list[list[int]], longest: int, pad: int
) -> tuple[Tensor, Tensor, int]:
    """[B, S + longest] ids and mask, prompts padded on the left, and S."""
    S = max(map(len, prompts))
    ids = torch.full((len(prompts), S + longest), pad)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        first = S - len(prompt)
        end = S + len(completion)
        ids[row, first:end] = torch.tensor([*prompt, *completion])
        mask[row, first:end] = True
    return ids, mask, S


def repeat(items: Sequence[Any], times: int) -> list[Any]:
    """Each item so many times in a row."""
    return [item for item in items for _ in range(times)]


def encode(parts: Any, problems: Sequence[Any], task: Any) -> list[list[int]]:
    """Prompts as token ids."""
    encoded = []
    for problem in problems:
        prompt = build_prompt(problem, task, parts.task.format, parts.task.examples)
        text = parts.tokenizer.apply_chat_template(
            prompt, tokenize=False, add_generation_prompt=True
        )
        encoded.append(parts.tokenizer(text, add_special_tokens=False)["input_ids"])
    return encoded


def try_examples(parts: Any, shots: int) -> dict[str, float]:
    """What 8 samples each of 48 held-out problems are like with so many examples."""
    from mesotron.tasks.load import load_task

    task = replace(parts.config.task, few_shot=shots)
    parts = replace(parts, task=load_task(task))
    problems = parts.task.eval[:48]
    tokenizer = parts.tokenizer
    eos = tokenizer.eos_token_id

    prompts = repeat(encode(parts, problems, task), SAMPLES)
    sampler = FusedSampler(parts.model, [eos], tokenizer.pad_token_id, Sampling(1.0))
    drawn = sampler.sample(prompts, parts.config.rollout.max_tokens)

    texts = tokenizer.batch_decode(drawn, skip_special_tokens=True)
    golds = repeat([problem.gold for problem in problems], SAMPLES)
    facts = parts.judge.judge(texts, golds, [ids[-1] != eos for ids in drawn])

    formatted = torch.tensor([fact.formatted for fact in facts]).float()
    correct = torch.tensor([fact.correct for fact in facts]).float()
    return {
        "formatted": formatted.mean().item(),
        "correct": correct.mean().item(),
        "groups_with_a_right_answer": correct.view(-1, SAMPLES).amax(1).mean().item(),
    }


def first_gradient(trainer: Any, prompts: int) -> dict[str, Any]:
    """Sizes with and without the format's reward, and what momentum keeps of the former."""
    batch, facts = roll(trainer, prompts, SAMPLES)
    two_part = torch.tensor([0.1 * fact.formatted + fact.correct for fact in facts])
    right = torch.tensor([float(fact.correct) for fact in facts])

    first = projections(gradient(trainer, batch, advantages(two_part)))
    later = projections(gradient(trainer, batch, advantages(right)))
    return {
        "two_part": size(first),
        "right_alone": size(later),
        "cosine": cosine(first, later),
        "ten_steps_later": momentum_later(first, later, steps=10),
    }


def projections(g: Gradient) -> Gradient:
    return {name: x for name, x in g.items() if "proj" in name}


def advantages(rewards: Tensor) -> Tensor:
    x = rewards.view(-1, SAMPLES)
    centered = x - x.mean(1, keepdim=True)
    return (centered / (x.std(1, keepdim=True) + 1e-4)).flatten()


def momentum_later(first: Gradient, later: Gradient, steps: int) -> dict[str, list[float]]:
    """Cosines of a step with the first gradient and with the later ones, clipped or not.

    The later ones are taken as one direction whose size grows as that of independent gradients.
    """
    names = [name for name in first if any(f"layers.{k}." in name for k in LAYERS)]
    A = {name: first[name] / size(first) for name in names}
    B = {name: later[name] / size(later) for name in names}
    grown = LATER * ((1 - MOMENTUM ** (2 * steps)) / (1 - MOMENTUM**2)) ** 0.5

    found = {}
    for clip, start in (("auxiliary", FIRST), ("all", LATER)):
        kept = start * MOMENTUM**steps
        for rule in ("muon", "noise"):
            step = {name: filtered(kept * A[name] + grown * B[name], rule) for name in names}
            found[f"{rule}, clip {clip}"] = [cosine(step, A), cosine(step, B)]
    return found


def filtered(X: Tensor, rule: str) -> Tensor:
    """Directions above the rule's edge, all as large."""
    U, sigma, Vh = torch.linalg.svd(X, full_matrices=False)
    edge = noise_edge(*sorted(X.shape)) if rule == "noise" else 0.0
    return (U * (sigma / sigma.norm() > edge)) @ Vh


if __name__ == "__main__":
    main()
