"""`mesotron route MODEL`: the routing table of a model, from its config alone, on the meta device,
without weights.

Configs are untrusted: no remote code runs, nothing is unpickled, and a broken file gives one
sentence.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from mesotron.config import RouteConfig
from mesotron.optim.routing.route import route
from mesotron.optim.routing.table import RoutingTable
from mesotron.runs.hub import go_offline_without_network

_MATRIX = {"muon": "muon", "pion": "pion", "muon_sgd": "muon", "adamw": "adamw"}
_AUX = {"muon": "adamw", "pion": "adamw", "muon_sgd": "sgd", "adamw": "adamw"}
# Optimizer state in fp32: one momentum, or AdamW's two moments.
_STATE_BYTES = {"muon": 4, "pion": 4, "sgd": 4, "adamw": 8}


def run(config: RouteConfig) -> int:
    """Print the routing table that `config` asks for; write it as JSON too when told."""
    model = load_on_meta(config.model)
    if config.lora is not None:
        model = add_lora(model, config.lora)
    table = route(
        model,
        matrix=_MATRIX[config.optim],
        aux=_AUX[config.optim],
        per_head=config.per_head,
        overrides=parse_overrides(config.override),
    )
    console = Console()
    if console.is_terminal:
        table.render(console)
    else:
        print(table.to_text(), end="")
    print(state_line(table))
    if config.out is not None:
        config.out.write_text(table.to_json() + "\n")
    return 0


def parse_overrides(pairs: tuple[str, ...]) -> dict[str, str]:
    """PATTERN=RULE strings as the mapping that `route` takes."""
    overrides = {}
    for pair in pairs:
        pattern, equals, rule = pair.rpartition("=")
        if not equals or not pattern:
            raise ValueError(
                f"override {pair!r} is not PATTERN=RULE; write for example '*.action_head.*=pion'"
            )
        overrides[pattern] = rule
    return overrides


def state_line(table: RoutingTable) -> str:
    """What the optimizer will keep, per rule and in all."""
    sizes = {rule: _STATE_BYTES[rule] * count.parameters for rule, count in table.counts().items()}
    parts = [f"{rule} {_megabytes(size)}" for rule, size in sizes.items()]
    return (
        f"optimizer state in fp32: {', '.join(parts)}; together {_megabytes(sum(sizes.values()))}"
    )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size < 1e9 else f"{size / 1e9:,.2f} GB"


def load_on_meta(source: str) -> nn.Module:
    """Build a Transformers model on the meta device from a folder, a config.json or a hub name.

    Raises:
        ValueError: no such place, a broken config, or an architecture that Transformers does not
            know.
    """
    if not Path(source).exists():
        go_offline_without_network()
    try:
        import transformers
    except ImportError as error:
        raise ValueError(
            "mesotron route needs Transformers to build a model from its config: pip install "
            "'mesotron[rlvr]'"
        ) from error
    transformers.logging.set_verbosity_error()
    config = _load_config(source)
    model_class = _model_class(config)
    try:
        with torch.device("meta"):
            return model_class(config)
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
        AssertionError,
    ) as error:
        # The config's numbers are the only input, so whatever its own model makes of them is the
        # config's fault.
        raise ValueError(
            f"{source}: {model_class.__name__} cannot be built from this config: {error}"
        ) from error


def _load_config(source: str) -> Any:
    """A Transformers config, read locally when the path exists and from the hub otherwise."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise ValueError(
                f"{source} is a folder without a config.json: give a Transformers model folder"
            )
    if path.is_file():
        _check_json(path)
    elif path.suffix == ".json" or source.startswith((".", "/", "~")):
        raise ValueError(
            f"{source} does not exist: give a model folder, a config.json or a hub name"
        )
    place = str(path) if path.is_file() else source
    try:
        return AutoConfig.from_pretrained(place, trust_remote_code=False)
    except OSError as error:
        raise ValueError(
            f"{source} is no local folder or file and could not be read from the hub (offline, or "
            "no such name): download its config.json and give that path"
        ) from error
    except (AttributeError, LookupError, StrictDataclassError, TypeError, ValueError) as error:
        # Transformers goes on with advice that does not fit here, such as trusting remote code.
        sentence = " ".join(str(error).split()).split(". ")[0] or type(error).__name__
        raise ValueError(
            f"{source}: Transformers cannot read this config: {sentence}; correct it, or build the "
            "model yourself and call mesotron.route(model)"
        ) from error


def _check_json(path: Path) -> None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise ValueError(
            f"{path} has no model_type: it is not the config.json of a Transformers model"
        )


def _model_class(config: Any) -> type[nn.Module]:
    """The class that the config names in `architectures`, else the causal language model, else the
    bare model."""
    import transformers

    for name in config.architectures or ():
        found = getattr(transformers, str(name), None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    for mapping in (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_MAPPING):
        found: Any = mapping.get(type(config), None)
        if isinstance(found, type):
            return found
    raise ValueError(
        f"Transformers has no model for {type(config).__name__} (architectures "
        f"{config.architectures}); it may need remote "
        "code, which mesotron does not run: build the model yourself and call mesotron.route(model)"
    )


def add_lora(model: nn.Module, rank: int) -> nn.Module:
    """The model as PEFT would train it: LoRA of this rank on all linear layers, the rest frozen."""
    if rank < 1:
        raise ValueError(f"--lora {rank} must be a rank of at least 1")
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ValueError("--lora needs PEFT: pip install 'mesotron[rlvr]'") from error
    lora = LoraConfig(r=rank, target_modules="all-linear")
    return get_peft_model(model, lora, low_cpu_mem_usage=True)  # type: ignore[arg-type]
