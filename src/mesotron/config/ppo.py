"""Config of `mesotron ppo snake`, with the flag names used by Snake trainers in JAX."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mesotron.config.base import Config, setting
from mesotron.config.types import (
    Count,
    Fraction,
    Natural,
    NonNegative,
    NonPositive,
    Positive,
    Seed,
    Several,
    Share,
)


@dataclass(frozen=True, kw_only=True)
class SnakeConfig(Config):
    """Train a transformer to play Snake with PPO, entirely inside jax.jit."""

    width: Several = 4
    """Columns of the board."""
    height: Several = 4
    """Rows of the board."""
    max_steps: Count | None = None
    """Steps after which a game is truncated (unset: cells squared)."""
    apple_reward: float = 1.0
    """Reward of a fruit."""
    death_penalty: NonPositive = 0.0
    """Added when the snake dies; negative or zero."""
    step_penalty: NonPositive = 0.0
    """Added at every step; negative or zero."""
    num_envs: Count = 64
    """Games played in parallel."""
    num_steps: Count = 64
    """Steps of each game in one rollout."""
    total_timesteps: Count = 120_000
    """Environment steps of a run, rounded up to whole updates."""
    update_epochs: Count = 4
    """Passes over each rollout."""
    num_minibatches: Count = 8
    """Gradient steps per pass."""
    lr: NonNegative = 8e-3
    """Adam's learning rate where Adam trains everything."""
    gamma: Share = 0.99
    """Discount factor."""
    gae_lambda: Share = 0.95
    """Decay of the advantage estimate (GAE)."""
    clip_eps: Positive = 0.2
    """Clip width of the probability ratio."""
    ent_coef: float = 0.01
    """Weight of the entropy bonus."""
    vf_coef: NonNegative = 0.5
    """Weight of the value loss."""
    max_grad_norm: NonNegative = 0.5
    """Clip the gradient to this norm (0: off)."""
    anneal_lr: bool = True
    """Decay every learning rate linearly to zero over the run's gradient steps."""
    optim: Literal["adam", "muon", "pion"] | None = None
    """Optimizer of the hidden matrices (unset: adam, which trains everything)."""
    muon_lr: NonNegative = 0.02
    """Learning rate of Muon or Pion: the spectral norm of a step."""
    aux_adam_lr: NonNegative = 8e-3
    """Adam's learning rate for the rest: embeddings, norms, biases and heads."""
    d_model: Count = 32
    """Width of a token."""
    num_layers: Count = 1
    """Transformer layers."""
    num_heads: Count = 2
    """Attention heads."""
    mlp_ratio: Count = 4
    """Hidden width of an MLP over d_model."""
    readout: Literal["all", "head"] = "all"
    """Tokens the last layer reads: all cells, or only the snake's head (half the time)."""
    dropout: Fraction = 0.0
    """Dropout rate, the same mask when acting and when scoring."""
    use_cnn: bool = False
    """Put a 3x3 convolution before the transformer."""
    cnn_features: Count = 32
    """Channels of that convolution."""
    cnn_mode: Literal["replace", "append"] = "replace"
    """Feed its channels in place of the cells' own features, or beside them."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the products; weights are float32 (auto: bfloat16 on a GPU)."""
    attention: Literal["auto", "xla", "cudnn"] = "auto"
    """Attention implementation (auto: cuDNN from 64 cells on, in bfloat16 on a GPU)."""
    pretrained_model: Path | None = None
    """Start from the weights of this run's newest checkpoint."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL divergence from the pretrained policy."""
    seed: Seed = 0
    """Seed of the run, and the first of --num-seeds."""
    num_seeds: Count = 1
    """Whole runs trained in parallel in one program."""
    sweep: tuple[str, ...] = ()
    """Values to train in parallel, such as lr=0.001,0.003 ent_coef=0.01,0.02: every combination."""
    num_shards: Count = 1
    """Devices that share the games of one run or, with several seeds, the seeds."""
    save_dir: Path = Path("runs")
    """Folder of the run folders."""
    run_name: str | None = None
    """Name of the run's folder (unset: snake-DATE)."""
    resume: Path | None = setting(None, on_resume=True)
    """Continue this run; only --chunk, --save-freq, --guard, --gif and logging may change."""
    chunk: Count = setting(10, on_resume=True)
    """Updates between logging: metrics are written and Ctrl-C is handled."""
    save_freq: Natural = setting(0, on_resume=True)
    """Save a checkpoint every N updates and at the end (0: only at the end)."""
    eval_freq: Natural = 0
    """Evaluate every N updates (0: only at the end)."""
    eval_episodes: Count = 128
    """Whole games per evaluation, greedy and sampled each."""
    guard: Literal["off", "warn", "stop"] = setting("warn", on_resume=True)
    """What the watch does when a single run fails: record it, also warn, or also save and stop."""
    gif: bool = setting(True, on_resume=True)
    """Draw a greedy game at the end."""
    report_to: tuple[Literal["tensorboard", "wandb"], ...] = setting((), on_resume=True)
    """Also send the metrics there; the run folder always has them."""
    wandb_project: str = setting("mesotron-snake", on_resume=True)
    """W&B project."""
    wandb_entity: str | None = setting(None, on_resume=True)
    """W&B account or team."""

    @property
    def num_cells(self) -> int:
        return self.width * self.height

    @property
    def most_fruit(self) -> int:
        return self.num_cells - 1

    @property
    def time_limit(self) -> int:
        if self.max_steps is None:
            return self.num_cells**2

        return self.max_steps

    @property
    def rule(self) -> str:
        return self.optim or "adam"

    @property
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def is_single(self) -> bool:
        return self.num_seeds == 1 and not self.sweep

    @property
    def num_groups(self) -> int:
        return self.num_shards if self.is_single else 1

    @property
    def num_updates(self) -> int:
        return -(-self.total_timesteps // self.batch_size)

    @property
    def num_gradient_steps(self) -> int:
        return self.num_updates * self.update_epochs * self.num_minibatches

    def check_fields(self) -> None:
        if self.num_steps > self.time_limit:
            self.refuse("num_steps", f"exceeds a game of {self.time_limit} steps: see --max-steps")

        groups = self.num_groups
        if self.num_envs % groups or self.batch_size // groups % self.num_minibatches:
            batch = f"--num-envs x --num-steps = {self.batch_size} on {groups} shards"
            self.refuse("num_minibatches", f"does not divide {batch}")

        if self.d_model % (4 * self.num_heads):
            self.refuse("d_model", f"must be a multiple of 4 x --num-heads {self.num_heads}")

        if self.kl_coef and self.pretrained_model is None:
            self.refuse("kl_coef", "needs a --pretrained-model")
