"""The policy: images, an instruction and the robot's state in; a chunk of actions out.

Four parts whose names drive the optimizer's routing: `vision`, `language`, `fusion`, where their
tokens meet, and `action`, whose queries look at the fused tokens. The context is computed once and
the action module as often as its head asks. It does not remember earlier observations.

Legend: B batch, C cameras, L words, K actions of a chunk, A numbers of an action, S of a state, D
width, T tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mesotron.config import PolicyConfig
from mesotron.vla.draws import Draws
from mesotron.vla.encoders import Language, Sentence, Sight, Vision
from mesotron.vla.heads import make_head
from mesotron.vla.interface import Demos
from mesotron.vla.layers import Mlp, Stack, hide
from mesotron.vla.normalise import Normaliser, fit_all
from mesotron.vla.sizes import SIZES, Size
from mesotron.vla.towers import LanguageTower, make_language, make_vision

PARTS = ("vision", "language", "fusion", "action")
"""Prefixes of the parameters; a policy without cameras has no vision."""


@dataclass(frozen=True)
class Body:
    """What the policy sees and moves: of a world, or of a recording.

    Args:
        cameras: names of the images, in the order of their tokens.
        pixels: height and width of an image.
        state_dim: S.
        action_dim: A.
    """

    cameras: tuple[str, ...]
    pixels: int
    state_dim: int
    action_dim: int


class Inputs(NamedTuple):
    """What is seen: images uint8 [B, C, 3, H, W] or None, states [B, S], U different instructions
    [U, L], and which of them each is told, [B]."""

    images: Tensor | None
    state: Tensor
    words: Tensor
    told: Tensor


class Targets(NamedTuple):
    """What is to be learned: actions [B, K, A], `real` [B, K] False past the end of an episode,
    and the position of the named object, [B, 3] or None."""

    actions: Tensor
    real: Tensor
    where: Tensor | None


class Context(NamedTuple):
    """Fused tokens [B, T, D], [B, T] what is added to the scores of who looks at them (None:
    nothing), and the state's own token [B, D]."""

    tokens: Tensor
    bias: Tensor | None
    state: Tensor


class Fusion(nn.Module):
    """A transformer over image tokens, words and the state, all of which are told the sentence.

    The sentence is added to every token: attention begins even, and one token among fifty would
    at first be heard faintly.
    """

    def __init__(self, size: Size, state_dim: int) -> None:
        super().__init__()
        self.word_tokens = size.word_tokens
        self.state = nn.Linear(state_dim, size.width)
        self.sentence = nn.Linear(size.width, size.width)
        self.encoder = Stack(size.width, size.num_heads, size.mlp, size.fusion)

    def forward(self, sight: Sight | None, sentence: Sentence, state: Tensor) -> Context:
        """What was seen if anything, a sentence, normalised states [B, S]."""
        told = self.sentence(sentence.pooled())[:, None]
        tokens = [self.state(state)[:, None]]
        biases: list[Tensor | None] = [None]
        if self.word_tokens:
            tokens, biases = [*tokens, sentence.tokens], [*biases, hide(sentence.mask)]
        if sight is not None:
            tokens, biases = [*tokens, sight.tokens], [*biases, sight.notice]
        bias = join_biases(tokens, biases)
        fused = self.encoder(torch.cat(tokens, dim=1) + told, bias)
        return Context(fused, bias, fused[:, 0])


def join_biases(tokens: list[Tensor], biases: list[Tensor | None]) -> Tensor | None:
    """The biases of tokens side by side; None if nobody has one: attention is faster without."""
    if all(bias is None for bias in biases):
        return None
    full = [
        X.new_zeros(X.shape[:2], dtype=torch.float32) if bias is None else bias
        for X, bias in zip(tokens, biases, strict=True)
    ]
    return torch.cat(full, dim=1)


class Action(nn.Module):
    """Learned queries, one for each action of a chunk, that look at the context.

    Args:
        size: of the policy.
        chunk: K.
        action_dim: A.
        needs_noise: whether it takes noisy actions and their time too.
    """

    def __init__(self, size: Size, chunk: int, action_dim: int, needs_noise: bool) -> None:
        super().__init__()
        self.queries = nn.Parameter(place_waves(chunk, size.width))
        self.noisy = nn.Linear(action_dim, size.width) if needs_noise else None
        self.time = Mlp(size.width, size.width) if needs_noise else None
        self.decoder = Stack(size.width, size.num_heads, size.mlp, size.action, cross=True)
        self.head = nn.Linear(size.width, action_dim)

    def forward(self, context: Context, noisy: Tensor | None, time: Tensor | None) -> Tensor:
        """[B, K, A]; `noisy` [B, K, A] and `time` [B] if it was made for noise."""
        X = self.queries + context.state[:, None]
        if self.noisy is not None and self.time is not None:
            assert noisy is not None
            assert time is not None
            X = X + self.noisy(noisy) + self.time(waves(time, X.shape[-1]))[:, None]
        return self.head(self.decoder(X, None, context.tokens, context.bias))


class Where(nn.Module):
    """The auxiliary question, where the named object is, answered by the state's token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, 3)

    def forward(self, context: Context) -> Tensor:
        """[B, 3], normalised."""
        return self.head(context.state)


class Policy(nn.Module):
    """A vision-language-action policy.

    Args:
        config: size, head, chunk and towers.
        body: what it sees and moves.
        where: also answer where the named object is, for the auxiliary loss.
        folder: a checkpoint that describes its pretrained towers; they are built without weights.

    Example:
        >>> body = Body(cameras=("front",), pixels=24, state_dim=4, action_dim=4)
        >>> policy = Policy(PolicyConfig(size="ci"), body)
        >>> seen = Inputs(torch.zeros(2, 1, 3, 24, 24, dtype=torch.uint8), torch.zeros(2, 4),
        ...               policy.language.encode(["put it down", "lift"]), torch.arange(2))
        >>> policy.act(seen).shape
        torch.Size([2, 8, 4])
    """

    def __init__(
        self, config: PolicyConfig, body: Body, where: bool = False, folder: Path | None = None
    ) -> None:
        super().__init__()
        size = SIZES[config.size]
        self.config, self.body = config, body
        self.core = make_head(config.head, config.flow_steps)
        self.vision = build_vision(config, body, folder)
        self.language = build_language(config, folder)
        self.fusion = Fusion(size, body.state_dim)
        self.action = Action(size, config.chunk, body.action_dim, self.core.needs_noise)
        self.where = Where(size.width) if where else None
        self.units = nn.ModuleDict(
            {
                "state": Normaliser(body.state_dim),
                "action": Normaliser(body.action_dim),
                "where": Normaliser(3),
            }
        )

    def fit(self, demos: Demos) -> None:
        """Take the units of states and actions, and the usual picture, from demonstrations."""
        fit_all(self.units, demos)
        if isinstance(self.vision, Vision):
            self.vision.fit(demos.images)

    def context(self, seen: Inputs) -> Context:
        """Everything that is seen, fused."""
        sight = None
        if self.vision is not None:
            assert seen.images is not None
            sight = self.vision(seen.images)
        tokens, mask = self.language(seen.words)
        sentence = Sentence(tokens[seen.told], mask[seen.told])
        return self.fusion(sight, sentence, self.units["state"](seen.state))

    def losses(self, seen: Inputs, targets: Targets, draws: Draws) -> dict[str, Tensor]:
        """The loss of the actions under "loss/action", and of the position under "loss/where"."""
        context = self.context(seen)
        actions = self.units["action"](targets.actions)

        def predict(noisy: Tensor | None, time: Tensor | None) -> Tensor:
            return self.action(context, noisy, time)

        found = {"loss/action": self.core.loss(predict, actions, targets.real, draws)}
        if self.where is not None and targets.where is not None:
            gap = self.where(context).float() - self.units["where"](targets.where)
            found["loss/where"] = gap.abs().mean()
        return found

    @torch.no_grad()
    def act(self, seen: Inputs) -> Tensor:
        """A chunk of actions in the world's units, [B, K, A]."""
        context = self.context(seen)

        def predict(noisy: Tensor | None, time: Tensor | None) -> Tensor:
            return self.action(context, noisy, time)

        shape = (len(seen.state), self.config.chunk, self.body.action_dim)
        return self.units["action"].back(self.core.sample(predict, shape, seen.state))  # type: ignore[operator]


def build_vision(config: PolicyConfig, body: Body, folder: Path | None) -> nn.Module | None:
    """The image encoder: pretrained, from scratch, or none where there is no camera."""
    size, cameras = SIZES[config.size], len(body.cameras)
    if not cameras:
        return None
    if config.vision_tower is not None:
        return make_vision(config, size.width, cameras, folder)
    return Vision(size, cameras, body.pixels, config.patch or size.patch)


def build_language(config: PolicyConfig, folder: Path | None) -> Language | LanguageTower:
    """The instruction encoder: pretrained, or from scratch."""
    size = SIZES[config.size]
    if config.language_tower is not None:
        return make_language(config, size.width, folder)
    return Language(size)


def place_waves(num: int, width: int) -> Tensor:
    """What queries are learned from: [num, D] sines and cosines of their place in the chunk, from a
    quarter of a wave to one every two places. Queries that begin alike are late to differ."""
    places = (torch.arange(num) + 0.5) / num
    frequencies = torch.logspace(math.log10(0.25), math.log10(max(num / 2, 0.5)), width // 2)
    angles = 2 * math.pi * places[:, None] * frequencies
    return 0.7 * torch.cat([angles.sin(), angles.cos()], dim=1)


def waves(time: Tensor, width: int) -> Tensor:
    """Times in [0, 1] as sines and cosines, [B] -> [B, D]."""
    periods = torch.logspace(math.log10(4e-3), math.log10(4.0), width // 2, device=time.device)
    angles = 2 * math.pi * time[:, None] / periods
    return torch.cat([angles.sin(), angles.cos()], dim=-1)
