"""The policy: images, an instruction and the robot's state in; a chunk of actions out.

Four parts whose names drive the optimizer's routing: `vision`, `language`, `fusion` over all their
tokens, and `action`, whose queries attend to the fused tokens as often as its head needs it.

Legend: B batch, C cameras, L words, K actions per chunk, A action size, S state size, D width.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mesotron.config import PolicyConfig
from mesotron.vla import encoders
from mesotron.vla.encoders import SIZES, ImageTokens, Size, Stack, TextTokens, Vision
from mesotron.vla.interface import IMAGES, STATE, TASK, Act, Demos, Observation
from mesotron.vla.towers import load_language_tower, load_vision_tower

PARTS = ("vision", "language", "fusion", "action")  # without cameras there is no vision


@dataclass(frozen=True)
class Body:
    cameras: tuple[str, ...]  # in the order of their tokens
    pixels: int  # height and width of an image
    state_dim: int
    action_dim: int


class Inputs(NamedTuple):
    """A batch of observations: images uint8 [B, C, 3, H, W] or None, states [B, S], the ids of U
    distinct instructions [U, L], and the index of each observation's instruction [B]."""

    images: Tensor | None
    state: Tensor
    text_ids: Tensor
    text_index: Tensor


class Targets(NamedTuple):
    """Actions [B, K, A], `real` [B, K] False for padding, the named object's position [B, 3]."""

    actions: Tensor
    real: Tensor
    where: Tensor | None


class Context(NamedTuple):
    """Fused tokens [B, T, D], their attention bias [B, T] or None, and the state token [B, D]."""

    tokens: Tensor
    bias: Tensor | None
    state: Tensor


Predict = Callable[[Tensor | None, Tensor | None], Tensor]
"""(noisy actions [B, K, A], their time [B]) -> [B, K, A]; both None for a head without noise."""

# Every chunk starts from the same noise, so that episodes do not depend on others in their batch.
NOISE_SEED = 20_260


class KeyedRandom:
    """Random numbers as a function of a key, int64 [1], equal in an eager step and a replayed CUDA
    graph, which does not see the state of a `torch.Generator`. SplitMix64 (Steele et al. 2014,
    "Fast splittable pseudorandom number generators") in wrapping signed 64-bit arithmetic."""

    _GOLDEN = 0x9E3779B97F4A7C15 - 2**64
    _FIRST = 0xBF58476D1CE4E5B9 - 2**64
    _SECOND = 0x94D049BB133111EB - 2**64
    _BITS = 24  # per uniform number: what float32 holds exactly

    def __init__(self, key: Tensor) -> None:
        self._key = key
        self._num_drawn = 0

    def uniform(self, shape: tuple[int, ...]) -> Tensor:
        size = math.prod(shape)
        count = torch.arange(self._num_drawn, self._num_drawn + size, device=self._key.device)
        self._num_drawn += size
        words = self._scramble(self._scramble(self._key) + count)
        bits = (words >> (64 - self._BITS)) & (2**self._BITS - 1)

        return ((bits.float() + 0.5) * 2.0**-self._BITS).reshape(shape)

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        radius = (-2 * self.uniform(shape).log()).sqrt()
        return radius * (2 * math.pi * self.uniform(shape)).cos()

    def _scramble(self, x: Tensor) -> Tensor:
        # The masks make the shifts logical.
        x = (x + 1) * self._GOLDEN
        x = (x ^ ((x >> 30) & (2**34 - 1))) * self._FIRST
        x = (x ^ ((x >> 27) & (2**37 - 1))) * self._SECOND

        return x ^ ((x >> 31) & (2**33 - 1))


class RegressionHead:
    """Predict the actions; mean absolute error (Kim et al. 2025, arXiv 2502.19645)."""

    needs_noise = False

    def loss(self, predict: Predict, actions: Tensor, real: Tensor, random: KeyedRandom) -> Tensor:
        return masked_mean((predict(None, None).float() - actions).abs(), real)

    def sample(self, predict: Predict, shape: tuple[int, int, int], device: torch.device) -> Tensor:
        return predict(None, None).float()


FLOW_STEPS = 5  # Euler steps from noise to actions


class FlowHead:
    """Predict the velocity of the path t noise + (1 - t) actions, t ~ Beta(1.5, 1); a few Euler
    steps to act (Black et al., pi0, 2024, arXiv 2410.24164; Lipman et al., 2023, 2210.02747)."""

    needs_noise = True

    def __init__(self, num_steps: int = FLOW_STEPS) -> None:
        self.num_steps = num_steps

    def loss(self, predict: Predict, actions: Tensor, real: Tensor, random: KeyedRandom) -> Tensor:
        noise = random.normal(tuple(actions.shape))
        # The inverse of the distribution function of Beta(1.5, 1), t^1.5.
        t = random.uniform((len(actions),)) ** (1 / 1.5)
        x = t[:, None, None] * noise + (1 - t[:, None, None]) * actions

        return masked_mean((predict(x, t).float() - (noise - actions)).square(), real)

    def sample(self, predict: Predict, shape: tuple[int, int, int], device: torch.device) -> Tensor:
        generator = torch.Generator().manual_seed(NOISE_SEED)
        x = torch.randn(shape[1:], generator=generator).to(device).expand(shape)
        for k in range(self.num_steps):
            t = torch.full((shape[0],), 1 - k / self.num_steps, device=device)
            x = x - predict(x, t).float() / self.num_steps

        return x


def masked_mean(errors: Tensor, real: Tensor) -> Tensor:
    """The mean of errors [B, K, A] where `real` [B, K] is True."""
    weights = real[..., None].to(errors.dtype).expand_as(errors)
    return (errors * weights).sum() / weights.sum().clamp_min(1)


class Normalizer(nn.Module):
    """x -> (x - mean) / spread and back; saved with the weights, since actions depend on it."""

    # For numbers that never change in the demonstrations, in units of actions (-1 to 1) and meters.
    MIN_SPREAD = 1e-2
    mean: Tensor
    spread: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("spread", torch.ones(size))

    def fit(self, values: np.ndarray) -> None:
        """Take mean and standard deviation from values [N, size]."""
        self.mean.copy_(torch.from_numpy(values.mean(axis=0)))
        self.spread.copy_(torch.from_numpy(np.maximum(values.std(axis=0), self.MIN_SPREAD)))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.spread

    def inverse(self, x: Tensor) -> Tensor:
        return x * self.spread + self.mean


class Fusion(nn.Module):
    """A transformer over image tokens, words and the state. The pooled instruction is added to
    every token: one among fifty would at first have little weight."""

    def __init__(self, size: Size, state_dim: int) -> None:
        super().__init__()
        self.word_tokens = size.word_tokens
        self.state = nn.Linear(state_dim, size.width)
        self.sentence = nn.Linear(size.width, size.width)
        self.encoder = Stack(size, size.fusion)

    def forward(self, image: ImageTokens | None, text: TextTokens, state: Tensor) -> Context:
        instruction = self.sentence(text.pooled())[:, None]
        tokens = [self.state(state)[:, None]]

        biases: list[Tensor | None] = [None]
        if self.word_tokens:
            tokens = [*tokens, text.tokens]
            biases = [*biases, encoders.mask_to_bias(text.mask)]

        if image is not None:
            tokens = [*tokens, image.tokens]
            biases = [*biases, image.salience]

        bias = join_biases(tokens, biases)
        fused = self.encoder(torch.cat(tokens, dim=1) + instruction, bias)
        return Context(fused, bias, fused[:, 0])


def join_biases(tokens: list[Tensor], biases: list[Tensor | None]) -> Tensor | None:
    """One attention bias [B, T] of all tokens; None, which is faster, if no part has one."""
    if all(bias is None for bias in biases):
        return None

    parts = []
    for X, bias in zip(tokens, biases, strict=True):
        if bias is None:
            bias = X.new_zeros(X.shape[:2], dtype=torch.float32)
        parts.append(bias)

    return torch.cat(parts, dim=1)


class ActionDecoder(nn.Module):
    """Learned queries, one per action of a chunk, that attend to the context."""

    def __init__(self, size: Size, chunk: int, action_dim: int, needs_noise: bool) -> None:
        super().__init__()
        self.queries = nn.Parameter(chunk_positions(chunk, size.width))
        self.noisy = nn.Linear(action_dim, size.width) if needs_noise else None

        if needs_noise:
            self.time = encoders.Mlp(size.width, size.width)
        else:
            self.time = None

        self.decoder = Stack(size, size.action, cross=True)
        self.head = nn.Linear(size.width, action_dim)

    def forward(self, context: Context, noisy: Tensor | None, time: Tensor | None) -> Tensor:
        """[B, K, A]; `noisy` [B, K, A] and `time` [B] for a head with noise."""
        X = self.queries + context.state[:, None]
        if self.noisy is not None and self.time is not None:
            assert noisy is not None
            assert time is not None

            low = math.log10(4e-3)
            high = math.log10(4.0)
            periods = torch.logspace(low, high, X.shape[-1] // 2, device=time.device)
            angles = 2 * math.pi * time[:, None] / periods
            times = torch.cat([angles.sin(), angles.cos()], dim=-1)  # [B, D]
            X = X + self.noisy(noisy) + self.time(times)[:, None]

        return self.head(self.decoder(X, None, context.tokens, context.bias))


def chunk_positions(num: int, width: int) -> Tensor:
    """Initial queries [num, D]: sines and cosines of the place, since equal ones differ slowly."""
    places = (torch.arange(num) + 0.5) / num
    frequencies = torch.logspace(math.log10(0.25), math.log10(max(num / 2, 0.5)), width // 2)
    angles = 2 * math.pi * places[:, None] * frequencies

    return 0.7 * torch.cat([angles.sin(), angles.cos()], dim=1)


class Policy(nn.Module):
    """A vision-language-action policy. With `where` it also predicts the position of the named
    object. `checkpoint` is a folder that describes its pretrained towers, built without weights."""

    def __init__(
        self, config: PolicyConfig, body: Body, where: bool = False, checkpoint: Path | None = None
    ) -> None:
        super().__init__()
        size = SIZES[config.size]
        num_cameras = len(body.cameras)
        self.config = config
        self.body = body

        if config.head == "flow":
            self.head = FlowHead()
        else:
            self.head = RegressionHead()

        self.vision = None

        if num_cameras and config.vision_tower is not None:
            self.vision = load_vision_tower(config, size.width, num_cameras, checkpoint)
        elif num_cameras:
            self.vision = Vision(size, num_cameras, body.pixels, config.patch or size.patch)

        if config.language_tower is not None:
            self.language = load_language_tower(config, size.width, checkpoint)
        else:
            self.language = encoders.Language(size)

        self.fusion = Fusion(size, body.state_dim)
        self.action = ActionDecoder(size, config.chunk, body.action_dim, self.head.needs_noise)

        if where:
            self.where = nn.ModuleDict({"head": nn.Linear(size.width, 3)})
        else:
            self.where = None

        units = {
            "state": Normalizer(body.state_dim),
            "action": Normalizer(body.action_dim),
            "where": Normalizer(3),
        }
        self.units: Any = nn.ModuleDict(units)

    def fit(self, demos: Demos) -> None:
        """Take normalization and the median image from demonstrations."""
        data = {"state": demos.state, "action": demos.action, "where": demos.where}
        for name, values in data.items():
            if values is not None:
                self.units[name].fit(np.asarray(values, dtype=np.float64))

        if isinstance(self.vision, Vision):
            self.vision.fit(demos.images)

    def context(self, inputs: Inputs) -> Context:
        image = None if self.vision is None else self.vision(inputs.images)
        tokens, mask = self.language(inputs.text_ids)
        text = TextTokens(tokens[inputs.text_index], mask[inputs.text_index])

        return self.fusion(image, text, self.units["state"](inputs.state))

    def losses(self, inputs: Inputs, targets: Targets, random: KeyedRandom) -> dict[str, Tensor]:
        """The loss of the actions, "loss/action", and of the position, "loss/where"."""
        context = self.context(inputs)
        actions = self.units["action"](targets.actions)
        predict = partial(self.action, context)

        losses = {"loss/action": self.head.loss(predict, actions, targets.real, random)}
        if self.where is not None and targets.where is not None:
            error = self.where["head"](context.state).float() - self.units["where"](targets.where)
            losses["loss/where"] = error.abs().mean()

        return losses

    @torch.no_grad()
    def act(self, inputs: Inputs) -> Tensor:
        """A chunk of actions in the world's units, [B, K, A]."""
        predict = partial(self.action, self.context(inputs))
        shape = (len(inputs.state), self.config.chunk, self.body.action_dim)
        return self.units["action"].inverse(self.head.sample(predict, shape, inputs.state.device))

    def describe(self) -> str:
        count = sum(p.numel() for p in self.parameters())
        views = [f"{camera} {self.body.pixels} px" for camera in self.body.cameras]

        return (
            f"{self.config.size} policy, {count / 1e6:.2f}M parameters, {self.config.head} head, "
            f"chunks of {self.config.chunk}, from {' and '.join(views) or 'state'}"
        )


def stack_images(observations: list[Observation], cameras: tuple[str, ...]) -> Tensor:
    """uint8 [B, C, 3, H, W]."""
    views = []
    for camera in cameras:
        pixels = np.stack([one[IMAGES + camera] for one in observations])
        views.append(torch.from_numpy(pixels))

    return torch.stack(views, dim=1).permute(0, 1, 4, 2, 3)


def make_act(policy: Policy, device: torch.device | str = "cpu") -> Act:
    """The policy as a function of B observations to actions (B, K, A), in the units of its data."""
    cameras = policy.body.cameras

    def act(observations: list[Observation]) -> np.ndarray:
        for name in cameras:
            if IMAGES + name not in observations[0]:
                raise ValueError(f"the policy needs a camera {name!r}, which the world lacks")

        texts = [one[TASK] for one in observations]
        distinct = list(dict.fromkeys(texts))

        if cameras:
            images = stack_images(observations, cameras).to(device)
        else:
            images = None

        inputs = Inputs(
            images,
            torch.from_numpy(np.stack([one[STATE] for one in observations])).float().to(device),
            policy.language.encode(distinct).to(device),
            torch.tensor([distinct.index(text) for text in texts], device=device),
        )
        return policy.act(inputs).float().cpu().numpy()

    return act
