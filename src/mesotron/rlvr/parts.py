"""What a training run is made of: model, task and reward, and the trainer built of them."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PrinterCallback, set_seed
from trl.trainer.grpo_config import GRPOConfig

from mesotron.answers.facts import Judge
from mesotron.answers.verify import Verifier
from mesotron.config import TrainConfig
from mesotron.evaluate.evaluate import evaluate
from mesotron.models.adapters import lora_config
from mesotron.models.load import load_model
from mesotron.models.precision import choose_precision, supports_bfloat16
from mesotron.models.sharded import as_loaded
from mesotron.models.speed import choose_speed
from mesotron.optim.device import choose_device, use_one_thread_if_small
from mesotron.rewards.call import Reward, as_reward_function, make_reward, reads_answers
from mesotron.rlvr.lifecycle import trainer_arguments
from mesotron.rlvr.objectives import resolve
from mesotron.rlvr.optimizer import check_settings
from mesotron.rlvr.together import meet_others, together
from mesotron.rlvr.trl_arguments import check_enough, sampler_arguments, trl_arguments
from mesotron.rlvr.trl_options import trl_options
from mesotron.rlvr.trl_trainer import GRPOTrainer
from mesotron.runs import RunFolder, process
from mesotron.runs.trust import code_names
from mesotron.sampling.decoder import FusedSampler
from mesotron.sampling.tools import Toolbox, load_toolbox
from mesotron.sampling.turns import TurnSampler
from mesotron.tasks.load import load_task
from mesotron.tasks.problem import Task
from mesotron.tasks.prompts import check_prompts
from mesotron.tasks.rows import first_level, make_curriculum, make_rows

# An alarm may come three checkpoints late, and one from before its evidence must remain.
KEPT_FOR_ROLLBACK = 4


@dataclass
class Parts:
    """Everything that a run loads before it trains."""

    config: TrainConfig  # with what was left open decided
    device: torch.device
    model: Any
    tokenizer: Any
    task: Task
    judge: Judge  # of evaluations
    reward: Reward
    objective_arguments: dict[str, Any]  # of `GRPOConfig`
    toolbox: Toolbox | None = None
    turns: TurnSampler | None = None  # plays the environments of --env

    def close(self) -> None:
        """Stop what environments have started."""
        if self.turns is not None:
            self.turns.close()


def load(config: TrainConfig, verifier: Verifier) -> Parts:
    device = choose_device(config.device, config.threads)
    meet_others(device.type)
    arguments = trl_arguments(
        config.objective, config.rollout, config.optim, process.num_processes()
    )
    check_settings(config.optim)

    toolbox = load_toolbox(config)
    task = load_task(config.task)
    check_enough(len(task.train), config)
    judge = Judge(task.format, verifier)
    reward = make_reward(config.reward, judge, config.rollout.max_tokens)

    config = choose_precision(config, supports_bfloat16(device))
    model, tokenizer = load_model(config.model, device)
    if toolbox is not None:
        tokenizer = toolbox.prepare(tokenizer, config.model.name)

    if toolbox is not None or config.task.env:
        config = replace(config, rollout=replace(config.rollout, fast=False))

    options = trl_options(config)
    tokenizer.template_kwargs = options.get("chat_template_kwargs") or {}
    check_prompts(task, config.task, tokenizer, model, config.rollout.max_tokens)

    turns = None
    if config.task.env:
        turns = TurnSampler(config.task.env, tokenizer, config.task.system)

    use_one_thread_if_small(model, device, config.threads)
    fuses = FusedSampler.obstacle(model) is None
    config = choose_speed(config, device.type == "cuda", model.num_parameters(), fuses)
    arguments |= sampler_arguments(config.rollout, config.objective.name)

    return Parts(
        config=config,
        device=device,
        model=model,
        tokenizer=tokenizer,
        task=task,
        judge=judge,
        reward=reward,
        objective_arguments=arguments | options,
        toolbox=toolbox,
        turns=turns,
    )


def build_trainer(parts: Parts, run: RunFolder) -> GRPOTrainer:
    config = parts.config
    toolbox = parts.toolbox
    set_seed(config.seed)  # LoRA is initialized before the trainer seeds

    trainer = GRPOTrainer(
        model=parts.model,
        reward_funcs=as_reward_function(parts.reward, together),
        args=make_arguments(parts, run),
        train_dataset=make_rows(first_level(parts.task, config.task), config.task, parts.tokenizer),
        processing_class=parts.tokenizer,
        peft_config=lora_config(config.model),
        optim=config.optim,
        objective=resolve(config.objective, config.rollout.generations),
        # Own rewards alone read no answers, and what is logged of answers would mislead the watch.
        judge=Judge(parts.judge.format, parts.judge.verifier, reads=reads_answers(config)),
        fast=bool(config.rollout.fast),
        average=config.average,
        max_staleness=config.rollout.max_staleness,
        turns=parts.turns,
        tools=toolbox.tools if toolbox else None,
        environment_factory=toolbox.environment if toolbox else None,
    )
    if config.task.curriculum is not None:
        trainer.use_curriculum(make_curriculum(parts.task, config.task, parts.tokenizer))

    if process.asks_for_sharding() and not trainer.is_fsdp_enabled:
        raise ValueError("FSDP needs GPUs here: launch with examples/scaling/ddp.yaml instead")

    trainer.remove_callback(PrinterCallback)
    return trainer


def make_arguments(parts: Parts, run: RunFolder) -> GRPOConfig:
    try:
        return GRPOConfig(**grpo_arguments(parts, run))
    except (TypeError, ValueError) as error:
        own = parts.config.trl
        if not own:
            raise
        raise ValueError(f"TRL refuses --trl {' '.join(own)}: {error}") from error


def grpo_arguments(parts: Parts, run: RunFolder) -> dict[str, Any]:
    """The arguments of `GRPOConfig`."""
    config = parts.config
    keep = config.keep
    if config.guard == "rollback":
        keep = max(keep, KEPT_FOR_ROLLBACK)

    arguments = dict(parts.objective_arguments)
    arguments |= trainer_arguments(config, parts.device, parts.model, run)
    arguments["save_total_limit"] = keep
    arguments["report_to"] = list(config.report_to) or "none"

    return arguments


def evaluate_part(parts: Parts, model: Any, name: str) -> dict[str, Any]:
    """A greedy evaluation of a model on the task's held-out problems."""
    config = parts.config
    has_own_reward = bool(code_names(config.reward) or config.task.env)

    with as_loaded(model):
        result = evaluate(
            model,
            parts.tokenizer,
            parts.task.eval,
            config.task,
            examples=parts.task.examples,
            name=name,
            samples=0,
            max_tokens=config.rollout.max_tokens,
            seed=config.seed,
            judge=parts.judge,
            reward=parts.reward if has_own_reward else None,
            toolbox=parts.turns or parts.toolbox,
        )

    return result.to_json()
