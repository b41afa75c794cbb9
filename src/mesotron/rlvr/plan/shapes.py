"""Shapes of models by their names (`tables.toml`)."""

import os
import re
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from mesotron.models.gguf_header import model_config
from mesotron.models.names import TINY_WEIGHTS, is_gguf
from mesotron.runs.files import read_json

GIB = 2**30
TABLES = tomllib.loads(Path(__file__).with_name("tables.toml").read_text(encoding="utf-8"))


class Shape(NamedTuple):
    """A decoder-only transformer with a gated MLP."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = True
    head_norms: bool = False  # RMSNorm on queries and keys

    @property
    def query(self) -> int:
        return self.heads * self.head_dim

    @property
    def key_value(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """Outputs and inputs of the linear layers of one layer."""
        queries = (self.query, self.hidden)
        keys = (self.key_value, self.hidden)
        values = (self.key_value, self.hidden)
        output = (self.hidden, self.query)
        gate = (self.intermediate, self.hidden)
        up = (self.intermediate, self.hidden)
        down = (self.hidden, self.intermediate)

        return [queries, keys, values, output, gate, up, down]

    @property
    def linear(self) -> int:
        """Weights of all linear layers."""
        return self.layers * sum(m * n for m, n in self.matrices)

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        ends = 1 if self.tied else 2
        return self.linear + self.embedding * ends


SHAPES = {name: Shape(*row) for name, row in TABLES["shapes"].items()}


def find_shape(name: str) -> Shape | None:
    """The shape of a model by its folder, its file, its name, or the hub's cache; None if
    unknown."""
    if is_gguf(name):
        return _shape_in(model_config(Path(name).expanduser()))

    for folder in _folders_of(name):
        file = folder / "config.json"
        if file.is_file():
            return _shape_in(read_json(file, follow_links=True))

    plain = re.sub(r"-(math|coder|it|pt)\b", "", name.lower().replace("_", "-"))
    if plain == "smollm2":
        plain = "smollm2-135m"

    for key, shape in SHAPES.items():
        if f"{key}-" in f"{plain}-":
            return shape

    return None


def _folders_of(name: str) -> list[Path]:
    """Where the model's config may lie."""
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()
    snapshots = cache / f"models--{name.replace('/', '--')}" / "snapshots"

    own = TINY_WEIGHTS if name == "tiny" else Path(name).expanduser()
    return [own, *snapshots.glob("*")]


def _shape_in(config: dict[str, Any]) -> Shape | None:
    """The shape in a model's config.json; None for another architecture."""
    text = config.get("text_config") or config
    try:
        kind = text.get("model_type", "")
        hidden = text["hidden_size"]
        heads = text["num_attention_heads"]

        return Shape(
            layers=text["num_hidden_layers"],
            hidden=hidden,
            intermediate=text["intermediate_size"],
            heads=heads,
            kv_heads=text.get("num_key_value_heads") or heads,
            head_dim=text.get("head_dim") or hidden // heads,
            vocabulary=text["vocab_size"],
            tied=bool(text.get("tie_word_embeddings", True)),
            head_norms="qwen3" in kind or "gemma3" in kind,
        )
    except (AttributeError, KeyError, TypeError, ZeroDivisionError):
        return None
