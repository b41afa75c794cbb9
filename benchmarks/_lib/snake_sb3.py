"""The Snake policy in PyTorch, and Stable-Baselines3's PPO around it: the peer of `mesotron ppo`.

The network is that of `mesotron.ppo.policy`, layer by layer (`load_jax` copies its weights), and
PPO has the same settings; what differs is the loop. Values are not clipped, in both.

Legend: B observations, T cells, F features, d width of a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from gymnasium import Env
from stable_baselines3 import PPO
from stable_baselines3.common.distributions import CategoricalDistribution
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecMonitor
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks._lib.snake_gym import SnakeVecEnv
from benchmarks._lib.snake_numpy import SnakeNumpy
from mesotron.config import SnakeConfig
from mesotron.ppo.env import HEAD, NUM_ACTIONS, NUM_FEATURES
from mesotron.ppo.policy import waves

# For `mesotron.muon(network, overrides=ENDS)`: of several heads, and of an input layer behind no
# table, the routing of a torch module cannot know; the JAX side reads their names.
ENDS = {"input.weight": "adamw", "actor.weight": "adamw"}


class Block(nn.Module):
    """Attention and MLP, each after a norm and added to what came in."""

    def __init__(self, width: int, num_heads: int, hidden: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.RMSNorm(width, eps=1e-6)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.RMSNorm(width, eps=1e-6)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, X: Tensor, tokens: Tensor | None = None) -> Tensor:
        """[B, T, d] -> [B, T, d]; X looks at itself, or at `tokens`."""
        Y = self.attention_norm(X)
        seen = Y if tokens is None else self.attention_norm(tokens)
        query = self.heads(self.query(Y))
        key = self.heads(self.key(seen))
        value = self.heads(self.value(seen))
        mixed = F.scaled_dot_product_attention(query, key, value)
        X = X + self.out(mixed.transpose(1, 2).flatten(2))

        hidden = F.gelu(self.up(self.mlp_norm(X)), approximate="tanh")
        return X + self.down(hidden)

    def heads(self, X: Tensor) -> Tensor:
        """[B, T, d] -> [B, heads, T, d / heads]."""
        return X.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


class SnakeNetwork(nn.Module):
    """The transformer over cells: logits of four moves and a value."""

    def __init__(self, config: SnakeConfig) -> None:
        super().__init__()
        d = config.d_model
        self.over_all = config.num_layers - (config.readout == "head")
        self.input = nn.Linear(NUM_FEATURES, d)
        self.position_rows = nn.Parameter(_tensor(waves(config.height, d)))
        self.position_columns = nn.Parameter(_tensor(waves(config.width, d)))
        hidden = d * config.mlp_ratio
        blocks = (Block(d, config.num_heads, hidden) for _ in range(config.num_layers))
        self.layers = nn.ModuleList(blocks)
        self.final_norm = nn.RMSNorm(d, eps=1e-6)
        self.trunk = nn.Linear(2 * d, d)
        self.actor = nn.Linear(d, NUM_ACTIONS)
        self.critic = nn.Linear(d, 1)

    def forward(self, cells: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Cells [B, T, F] and mask [B, 4] -> logits [B, 4], values [B, 1]."""
        places = self.position_rows[:, None] + self.position_columns[None]
        X = self.input(cells) + places.flatten(0, 1)
        for layer in self.layers[: self.over_all]:
            X = layer(X)

        head = torch.einsum("bt,btd->bd", cells[..., HEAD], X)[:, None]
        for layer in self.layers[self.over_all :]:
            head = layer(head, X)

        read = torch.cat([self.final_norm(head)[:, 0], self.final_norm(X).mean(1)], dim=-1)
        features = F.gelu(self.trunk(read), approximate="tanh")

        logits = self.actor(features)
        legal = mask.bool()
        logits = logits.masked_fill(~legal & legal.any(-1, keepdim=True), -1e9)

        return logits, self.critic(features)

    def load_jax(self, params: dict[str, Any]) -> None:
        """Copy the weights of `mesotron.ppo.policy`, which are (in, out) and stacked by layers."""
        state = {
            "position_rows": params["position"]["rows"],
            "position_columns": params["position"]["columns"],
            "final_norm.weight": params["final_norm"]["scale"],
        }
        for name in ("input", "trunk", "actor", "critic"):
            state |= _linear(name, params[name])

        for k in range(len(self.layers)):
            for name, part in params["layers"].items():
                if "scale" in part:
                    state[f"layers.{k}.{name}.weight"] = part["scale"][k]
                else:
                    state |= _linear(f"layers.{k}.{name}", {key: x[k] for key, x in part.items()})

        self.load_state_dict({name: _tensor(x) for name, x in state.items()})


class SnakePolicy(ActorCriticPolicy):
    """The network where Stable-Baselines3 expects a policy; illegal moves are masked inside it."""

    def __init__(self, *args: Any, snake: SnakeConfig, **kwargs: Any) -> None:
        self.snake = snake
        super().__init__(*args, **kwargs)

    def _build(self, lr_schedule: Callable[[float], float]) -> None:
        self.network = SnakeNetwork(self.snake)
        for name, module in self.network.named_modules():
            if isinstance(module, nn.Linear):
                gain = 0.01 if name == "actor" else 1.0
                nn.init.normal_(module.weight, std=gain / math.sqrt(module.in_features))
                nn.init.zeros_(module.bias)

        make: Any = self.optimizer_class
        rate = lr_schedule(1)
        self.optimizer = make(self.network.parameters(), lr=rate, **self.optimizer_kwargs)

    def forward(self, obs: Any, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Actions, values and log-probabilities."""
        distribution, values = self._look(obs)
        actions = distribution.get_actions(deterministic=deterministic)
        return actions, values, distribution.log_prob(actions)

    def evaluate_actions(self, obs: Any, actions: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Values, log-probabilities of these actions, entropy."""
        distribution, values = self._look(obs)
        return values, distribution.log_prob(actions), distribution.entropy()

    def get_distribution(self, obs: Any) -> CategoricalDistribution:
        """Over the moves."""
        return self._look(obs)[0]

    def predict_values(self, obs: Any) -> Tensor:
        """[B, 1]."""
        return self._look(obs)[1]

    def _look(self, obs: Any) -> tuple[CategoricalDistribution, Tensor]:
        logits, values = self.network(obs["cells"], obs["mask"])
        return CategoricalDistribution(NUM_ACTIONS).proba_distribution(logits), values


def make_sb3(
    config: SnakeConfig,
    device: str = "auto",
    games: Literal["batched", "in_turn", "processes"] = "batched",
    **policy_options: Any,
) -> PPO:
    """Stable-Baselines3's PPO with the settings of a config.

    Args:
        config: board, PPO and network; without convolution and dropout.
        device: torch's.
        games: all in one compiled call, or in NumPy one after the other, or in NumPy each in a
            process of its own.
        **policy_options: `optimizer_class` and `optimizer_kwargs`; Adam if not given.
    """
    if config.use_cnn or config.dropout or config.kl_coef:
        raise ValueError("the Stable-Baselines3 peer has neither convolution, dropout nor kl_coef")

    return PPO(
        SnakePolicy,
        make_games(config, games),
        learning_rate=lambda left: config.lr * (left if config.anneal_lr else 1.0),
        n_steps=config.num_steps,
        batch_size=config.batch_size // config.num_minibatches,
        n_epochs=config.update_epochs,
        gamma=config.gamma,
        gae_lambda=config.gae_lambda,
        clip_range=config.clip_eps,
        ent_coef=config.ent_coef,
        vf_coef=0.5 * config.vf_coef,  # its value loss has no factor of a half
        max_grad_norm=config.max_grad_norm or math.inf,
        policy_kwargs={"snake": config, **policy_options},
        seed=config.seed,
        device=device,
    )


def make_games(config: SnakeConfig, games: Literal["batched", "in_turn", "processes"]) -> VecEnv:
    """The games of a config, in the three forms that Stable-Baselines3 can be given."""
    if games == "batched":
        return SnakeVecEnv(config)

    makers: list[Callable[[], Env]] = [partial(SnakeNumpy, config)] * config.num_envs
    if games == "in_turn":
        return VecMonitor(DummyVecEnv(makers))

    # Spawned, since JAX and CUDA do not survive a fork.
    return VecMonitor(SubprocVecEnv(makers, start_method="spawn"))


def _linear(name: str, layer: dict[str, Any]) -> dict[str, Any]:
    return {f"{name}.weight": np.asarray(layer["kernel"]).T.copy(), f"{name}.bias": layer["bias"]}


def _tensor(x: Any) -> Tensor:
    return torch.tensor(np.asarray(x))
