"""Configs of `mesotron bench`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mesotron.config.fields import POSITIONAL


@dataclass(frozen=True, kw_only=True)
class BenchOptimConfig:
    """Time the optimizer's whole step against its peers, as ratios in one run."""

    models: tuple[str, ...] = field(default=("micro_192x576", "gpt2_124m"), metadata=POSITIONAL)
    """Models whose matrix shapes are stepped, by name; weights are never loaded."""

    optims: tuple[str, ...] = ()
    """Optimizers to time; every one that is installed if not given."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto takes CUDA if there is one."""

    repeats: int = 5
    """Timed steps of each optimizer; the median is reported."""

    layers: int | None = None
    """Step only this many layers. If not given: all on CUDA, about two seconds' worth on a CPU."""

    embeddings: bool = False
    """Also step the embedding, by each optimizer's auxiliary rule."""

    buckets: bool = False
    """Also time our Muon on each matrix shape alone."""

    stats_cost: bool = False
    """Also measure what the statistics of a step cost."""

    accuracy: bool = True
    """Also compare every update with the float64 SVD."""

    threads: int | None = None
    """CPU threads; torch's own choice if not given."""

    out: Path | None = None
    """Also write the result to this JSON file."""


@dataclass(frozen=True, kw_only=True)
class BenchTrainConfig:
    """Train a small language model with each optimizer, over learning rates and seeds."""

    optims: tuple[str, ...] = field(default=(), metadata=POSITIONAL)
    """Optimizers to compare, by name. If not given: all of them, or four with --quick."""

    lrs: tuple[float, ...] = ()
    """Learning rates to sweep for each optimizer; extended where the best one is at an edge.
    If not given: 0.002 0.004 0.008 0.016 0.032, or 0.002 0.016 with --quick."""

    aux_lr: float = 4e-3
    """AdamW's rate for embeddings, head and norms beside Muon and Pion."""

    aux_sgd_lrs: tuple[float, ...] = ()
    """SGD's rates for the same parameters in muon_sgd, swept as well.
    If not given: 0.1 0.3 1, or 0.3 with --quick."""

    seeds: tuple[int, ...] = ()
    """Seeds; the first searches the rates, all of them judge the best one and its neighbours.
    If not given: 0 1 2, or 0 with --quick."""

    steps: int | None = None
    """Optimizer steps of each run. If not given: 120, or 50 with --quick."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto takes CUDA if there is one."""

    threads: int | None = None
    """CPU threads; torch's own choice if not given."""

    quick: bool = False
    """A minute's run to look at, not to cite: fewer optimizers, steps, rates and seeds."""

    out: Path | None = None
    """Also write the result to this JSON file.
    A sweep that was stopped continues from the .runs.jsonl beside it."""

    plot: Path | None = None
    """Also draw rates and curves into this file (.png, .svg or .pdf)."""


@dataclass(frozen=True, kw_only=True)
class BenchSnakeConfig:
    """Compare Adam, Muon and Pion on Snake: a rate sweep each, then seeds, in one program."""

    boards: tuple[int, ...] = field(default=(6,), metadata=POSITIONAL)
    """Sides of the boards."""

    optims: tuple[Literal["adam", "muon", "pion"], ...] = ("adam", "muon", "pion")
    """Optimizers to compare."""

    seeds: int = 5
    """Seeds of each optimizer, trained side by side; also the number of rates that are tried."""

    seconds: float = 60.0
    """What the seeds of one optimizer may take; the first optimizer's pace turns it into steps,
    which are then the same for all."""

    steps: int | None = None
    """Environment steps of each seed, instead of --seconds."""

    sweep_share: float = 0.2
    """Length of a trial of the rate sweep, as a share of the steps of a seed."""

    num_envs: int = 1024
    """Games played side by side in each run."""

    num_steps: int = 64
    """Steps of each game in one rollout."""

    update_epochs: int = 4
    """Passes over each rollout."""

    num_minibatches: int = 16
    """Gradient steps in one pass."""

    gamma: float = 0.99
    """Discount."""

    ent_coef: float = 0.01
    """Weight of the entropy bonus."""

    d_model: int = 64
    """Width of a token."""

    num_layers: int = 2
    """Transformer layers."""

    num_heads: int = 4
    """Attention heads."""

    use_cnn: bool = False
    """Put a 3x3 convolution before the transformer."""

    readout: Literal["all", "head"] = "all"
    """Where the last layer looks from: all cells, or the snake's head alone."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the network's products."""

    attention: Literal["auto", "xla", "cudnn"] = "auto"
    """Who computes attention, see mesotron ppo snake."""

    eval_episodes: int = 256
    """Whole games of the evaluation, greedy and sampled each."""

    out: Path = Path("benchmarks/ppo/study.json")
    """Result; cells that it has already are not run again."""

    plot: bool = True
    """Also draw the curves beside it."""


@dataclass(frozen=True, kw_only=True)
class BenchPpoConfig:
    """Time PPO on Snake against Stable-Baselines3 and a plain loop in JAX, in one run."""

    contenders: tuple[str, ...] = field(default=(), metadata=POSITIONAL)
    """What to time, by name, or as sb3_adam@64 with its own number of games; everything but
    sb3_processes if not given."""

    board: int = 6
    """Rows and columns of the board."""

    num_envs: int = 64
    """Games played side by side."""

    num_steps: int = 32
    """Steps of each game in one update."""

    num_minibatches: int = 4
    """Gradient steps in one pass over an update's steps."""

    update_epochs: int = 4
    """Passes over an update's steps."""

    d_model: int = 64
    """Width of the network, the same for all."""

    num_layers: int = 2
    """Its layers."""

    num_heads: int = 4
    """Its attention heads."""

    readout: Literal["all", "head"] = "all"
    """Where its last layer looks from: all cells, or the snake's head alone."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the JAX networks' products; Stable-Baselines3's are float32."""

    updates: int = 2
    """Updates in one timing."""

    repeats: int = 3
    """Timings of each contender, interleaved; the median is reported."""

    out: Path | None = None
    """Also write the result to this JSON file."""
