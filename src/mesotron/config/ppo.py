"""Configs of `mesotron ppo`: the game, PPO, the optimizer, the network and the run.

The flags are flat and carry the names that Snake trainers in JAX have had, so that their commands
and sweeps run unchanged.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mesotron.config.fields import ANEW

COUNTS = (
    "num_envs", "num_steps", "total_timesteps", "update_epochs", "num_minibatches", "num_layers",
    "num_heads", "num_seeds", "num_shards", "chunk", "eval_episodes",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SnakeConfig:
    """Train a transformer to play Snake with PPO, wholly inside jax.jit."""

    width: int = 4
    """Columns of the board."""

    height: int = 4
    """Rows of the board."""

    max_steps: int | None = None
    """Steps after which a game is cut off; cells squared if not given."""

    apple_reward: float = 1.0
    """Reward of a fruit."""

    death_penalty: float = 0.0
    """Added when the snake dies; negative or zero."""

    step_penalty: float = 0.0
    """Added at every step; negative or zero."""

    action_mask: bool = True
    """Let the policy choose among legal moves alone."""

    num_envs: int = 64
    """Games played side by side."""

    num_steps: int = 64
    """Steps of each game in one rollout."""

    total_timesteps: int = 120_000
    """Environment steps of a run; rounded up to whole updates."""

    update_epochs: int = 4
    """Passes over each rollout."""

    num_minibatches: int = 8
    """Gradient steps in one pass."""

    lr: float = 8e-3
    """Adam's learning rate where Adam trains everything."""

    gamma: float = 0.99
    """Discount."""

    gae_lambda: float = 0.95
    """Decay of the advantage estimate."""

    clip_eps: float = 0.2
    """Half-width of the interval to which the probability ratio is clipped."""

    ent_coef: float = 0.01
    """Weight of the entropy bonus."""

    vf_coef: float = 0.5
    """Weight of the value loss."""

    max_grad_norm: float = 0.5
    """Clip the gradient to this norm; 0 does not clip."""

    anneal_lr: bool = True
    """Let every learning rate fall linearly to zero over the run's gradient steps."""

    optim: Literal["adam", "muon", "pion"] | None = None
    """Optimizer of the hidden matrices; muon with --use-muon, adam without, if not given."""

    use_muon: bool = False
    """The same as --optim muon."""

    muon_lr: float = 0.02
    """Learning rate of Muon or Pion; the spectral norm of a step."""

    aux_adam_lr: float = 8e-3
    """Adam's learning rate for all that Muon or Pion leave: embeddings, norms, biases, heads."""

    muon_momentum: float = 0.95
    """Momentum of Muon and Pion."""

    muon_nesterov: bool = True
    """Let Muon and Pion look one step ahead."""

    pion_cutoff: str = "noise"
    """Strength of Pion: noise, aligned, or a fraction of the largest singular value such as 0.3."""

    d_model: int = 32
    """Width of a token."""

    num_layers: int = 1
    """Transformer layers."""

    num_heads: int = 2
    """Attention heads."""

    mlp_ratio: int = 4
    """Hidden width of an MLP over d_model."""

    readout: Literal["all", "head"] = "all"
    """Where the last layer looks from: all cells, or the snake's head alone, which with two layers
    takes about half the time."""

    dropout: float = 0.0
    """Share of units dropped, alike when a step is acted and when it is scored."""

    use_cnn: bool = False
    """Put a 3x3 convolution before the transformer."""

    cnn_features: int = 32
    """Channels of that convolution."""

    cnn_mode: Literal["replace", "append"] = "replace"
    """Feed its channels in place of the cells' own features, or beside them."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the network's products; weights are float32. auto is bfloat16 on a GPU, where
    it is about twice as fast, and float32 elsewhere."""

    attention: Literal["auto", "xla", "cudnn"] = "auto"
    """Who computes attention: auto is cuDNN's fused kernel from 64 cells on, in bfloat16 on a
    GPU."""

    pretrained_model: Path | None = None
    """Start from the weights of this run's newest checkpoint."""

    kl_coef: float = 0.0
    """Weight of the KL divergence from the pretrained policy."""

    seed: int = 0
    """Seed of the run, and the first of --num-seeds."""

    num_seeds: int = 1
    """Whole runs trained side by side in one program."""

    sweep: tuple[str, ...] = ()
    """Values to train side by side, such as lr=0.001,0.003 ent_coef=0.01,0.02: every
    combination."""

    num_shards: int = 1
    """Devices that share the games of one run; with several seeds, that share the seeds."""

    save_dir: Path = Path("runs")
    """Where run folders lie."""

    run_name: str | None = None
    """Name of the run's folder; snake-DATE if not given."""

    resume: Path | None = field(default=None, metadata=ANEW)
    """Continue the run in this folder, with its own settings.
    Only --chunk, --save-freq, --guard, --gif and where metrics are sent to may change."""

    chunk: int = field(default=10, metadata=ANEW)
    """Updates between two looks at the run: metrics are written, Ctrl-C is heard."""

    save_freq: int = field(default=0, metadata=ANEW)
    """A checkpoint each so many updates, and one at the end; 0 keeps the last alone."""

    eval_freq: int = 0
    """Evaluate each so many updates; 0 evaluates at the end alone."""

    eval_episodes: int = 128
    """Whole games of an evaluation, greedy and sampled each."""

    guard: Literal["off", "warn", "stop"] = field(default="warn", metadata=ANEW)
    """What the watch does when the run fails: write it down, say it too, or also save and stop;
    runs side by side are not stopped."""

    gif: bool = field(default=True, metadata=ANEW)
    """Draw a greedy game at the end."""

    wandb: bool = field(default=False, metadata=ANEW)
    """Also send the metrics to Weights & Biases."""

    wandb_project: str = field(default="mesotron-snake", metadata=ANEW)
    """Project there."""

    wandb_entity: str | None = field(default=None, metadata=ANEW)
    """Account or team there."""

    tensorboard: bool = field(default=False, metadata=ANEW)
    """Also write the metrics for TensorBoard."""

    @property
    def num_cells(self) -> int:
        """Cells of the board."""
        return self.width * self.height

    @property
    def most_fruit(self) -> int:
        """The most fruit that a game can hold: all cells but the first."""
        return self.num_cells - 1

    @property
    def time_limit(self) -> int:
        """Steps of the longest game."""
        return self.num_cells**2 if self.max_steps is None else self.max_steps

    @property
    def rule(self) -> str:
        """The optimizer that the two flags name."""
        return self.optim or ("muon" if self.use_muon else "adam")

    @property
    def batch_size(self) -> int:
        """Environment steps of one rollout."""
        return self.num_envs * self.num_steps

    @property
    def minibatch_size(self) -> int:
        """Environment steps of one gradient step."""
        return self.batch_size // self.num_minibatches

    @property
    def is_single(self) -> bool:
        """Whether one run is trained, and not several side by side."""
        return self.num_seeds == 1 and not self.sweep

    @property
    def num_groups(self) -> int:
        """Groups of games shuffled apart: one for each device, where devices share a run."""
        return self.num_shards if self.is_single else 1

    @property
    def num_updates(self) -> int:
        """Rollouts of a run."""
        return -(-self.total_timesteps // self.batch_size)

    @property
    def num_gradient_steps(self) -> int:
        """Gradient steps of a run: what learning rates are annealed over."""
        return self.num_updates * self.update_epochs * self.num_minibatches

    def check(self) -> None:
        """Refuse what would be silently wrong, with a sentence on the first fault."""
        for fault in (*self._faults_of_size(), *self._faults_of_choice()):
            raise ValueError(fault)

    def _faults_of_size(self) -> Iterator[str]:
        for name in COUNTS:
            if getattr(self, name) < 1:
                yield f"{name}={getattr(self, name)} must be at least 1"
        for name in ("save_freq", "eval_freq"):
            if getattr(self, name) < 0:
                yield f"{name}={getattr(self, name)} must be at least 0, which is never"
        if min(self.width, self.height) < 2:
            yield f"a board of {self.width}x{self.height} has no room: take 2x2 or more"
        if self.num_steps > self.time_limit:
            yield (
                f"num_steps={self.num_steps} is longer than a game of {self.time_limit} steps: "
                "lower --num-steps or raise --max-steps"
            )
        groups = self.num_groups
        if self.num_envs % groups or self.batch_size // groups % max(self.num_minibatches, 1):
            yield (
                f"{self.num_envs} games of {self.num_steps} steps on {groups} shards do not "
                f"divide into {self.num_minibatches} minibatches: change one of the four"
            )
        if self.d_model % (4 * max(self.num_heads, 1)):
            yield f"d_model={self.d_model} must be a multiple of 4 * num_heads ({self.num_heads})"

    def _faults_of_choice(self) -> Iterator[str]:
        if self.death_penalty > 0 or self.step_penalty > 0:
            yield (
                f"death_penalty={self.death_penalty} and step_penalty={self.step_penalty} are "
                "added to the reward: give negative numbers or zero"
            )
        if not 0 <= self.dropout < 1:
            yield f"dropout={self.dropout} must lie in [0, 1)"
        if self.kl_coef and self.pretrained_model is None:
            yield f"kl_coef={self.kl_coef} needs a --pretrained-model to stay close to"
        if self.use_muon and self.optim not in (None, "muon"):
            yield f"--use-muon and --optim {self.optim} name two optimizers: leave one out"
        if self.cutoff is None:
            yield f"pion_cutoff={self.pion_cutoff!r} must be noise, aligned or a number such as 0.3"

    @property
    def cutoff(self) -> float | Literal["aligned", "noise"] | None:
        """Pion's strength as the filter takes it; None if it is none."""
        if self.pion_cutoff in ("aligned", "noise"):
            return self.pion_cutoff
        try:
            return float(self.pion_cutoff)
        except ValueError:
            return None
