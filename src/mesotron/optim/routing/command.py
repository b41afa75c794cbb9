"""`mesotron optim route MODEL`: the routing table of a model from its config, without weights.

Configs are untrusted: no remote code runs, and a broken file gives one message.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mesotron.config import RouteConfig
from mesotron.config.rules import AUXILIARY_RULES
from mesotron.optim.routing.route import route
from mesotron.runs.console import SafeConsole
from mesotron.runs.extras import require
from mesotron.runs.process import go_offline_without_network
from mesotron.spectral.routing import RoutingTable

_MOMENTUM_BYTES = 4  # for each weight, in float32


def run(config: RouteConfig) -> int:
    model: Any = load_on_meta(config.model)
    if config.lora is not None:
        require("rlvr", ["peft"], "--lora")
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(r=config.lora, target_modules="all-linear")
        model = get_peft_model(model, lora, low_cpu_mem_usage=True)

    matrix = config.optim
    aux = "adamw"
    if config.optim == "muon_sgd":
        matrix = "muon"
        aux = "sgd"

    overrides = {}
    for pair in config.override:
        pattern, equals, rule = pair.rpartition("=")
        if not equals or not pattern:
            raise ValueError(f"--override {pair!r} is not PATTERN=RULE, as '*.action_head.*=pion'")
        overrides[pattern] = rule

    table = route(
        model,
        matrix=matrix,
        aux=aux,
        per_head=config.per_head,
        overrides=overrides,
    )

    console = SafeConsole()
    if console.is_terminal:
        table.render(console)
    else:
        print(table.to_text(), end="")

    print(_state_line(table))
    if config.out is not None:
        config.out.write_text(table.to_json() + "\n")

    return 0


def _state_line(table: RoutingTable) -> str:
    sizes = {}
    for rule, count in table.counts().items():
        bytes_each = _MOMENTUM_BYTES
        if rule in AUXILIARY_RULES:
            bytes_each = AUXILIARY_RULES[rule].state_bytes

        sizes[rule] = bytes_each * count.parameters

    parts = ", ".join(f"{rule} {_show(size)}" for rule, size in sizes.items())
    return f"optimizer state in fp32: {parts}; total {_show(sum(sizes.values()))}"


def _show(size: int) -> str:
    if size < 1e9:
        return f"{size / 1e6:,.1f} MB"

    return f"{size / 1e9:,.2f} GB"


def load_on_meta(source: str) -> nn.Module:
    """A Transformers model on the meta device: of a folder, a config.json, a hub name or tiny."""
    if source == "tiny":
        source = str(Path(__file__).parents[2] / "models" / "tiny" / "weights")

    if not Path(source).exists():
        go_offline_without_network()

    require("rlvr", ["transformers"], "mesotron optim route")
    import transformers

    transformers.logging.set_verbosity_error()
    config = _load_config(source)

    model_class = _model_class(config)
    try:
        with torch.device("meta"):
            return model_class(config)
    except Exception as error:  # the config is the only input, so it is the config's fault
        name = model_class.__name__
        raise ValueError(f"{source}: {name} cannot be built from this config: {error}") from error


def _load_config(source: str) -> Any:
    from transformers import AutoConfig

    path = Path(source)

    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{path} is not valid JSON: {error}") from error

        if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
            raise ValueError(f"{path} has no model_type: not a Transformers config.json")
    elif path.suffix == ".json" or source.startswith((".", "/", "~")):
        raise ValueError(f"{path} does not exist: pass a model folder, a config.json or a hub name")

    try:
        place = str(path) if path.is_file() else source
        return AutoConfig.from_pretrained(place, trust_remote_code=False)
    except OSError as error:
        raise ValueError(
            f"{source} is not a local folder or file and could not be read from the hub (offline, "
            "or no such name): download its config.json and pass that path"
        ) from error
    except Exception as error:
        # Transformers appends advice that does not apply, such as trusting remote code.
        first = " ".join(str(error).split()).split(". ")[0] or type(error).__name__
        raise ValueError(
            f"{source}: Transformers cannot read this config: {first}; fix it, or build the model "
            "yourself and call mesotron.route(model)"
        ) from error


def _model_class(config: Any) -> type[nn.Module]:
    import transformers

    for name in config.architectures or ():
        named = getattr(transformers, str(name), None)
        if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
            return named

    for mapping in (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_MAPPING):
        mapped: Any = mapping.get(type(config), None)
        if isinstance(mapped, type):
            return mapped

    raise ValueError(
        f"Transformers has no model for {type(config).__name__} (architectures "
        f"{config.architectures}); it may need remote code, which mesotron does not run: build the "
        "model yourself and call mesotron.route(model)"
    )
