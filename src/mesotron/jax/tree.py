"""Routes the leaves of a tree to the rules that step them: matrices, LoRA pairs, and AdamW.

A transformation has no parameters before `init`, so a tree is routed whenever one is seen: by
`init` the parameters, by `update` the gradients, which have the same paths and shapes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import optax
from jax import Array

from mesotron.jax.filter import filter_batch
from mesotron.jax.labels import complain, label, only_matrices
from mesotron.jax.lora import LoraRule, LoraUnit, is_factor
from mesotron.jax.safety import skip_nonfinite
from mesotron.jax.stats import Rate, check_range, measured
from mesotron.jax.step import Views
from mesotron.jax.transforms import NEWTON_SCHULZ, scale_by_pion
from mesotron.jax.views import named_leaves
from mesotron.spectral import Filter, make_filter

ROUTING = ("per_head", "stacked", "overrides", "strict")  # arguments of `label`
FILTER = ("filter", "steps", "rank", "promote", "cutoff")  # arguments of `make_filter`
STEP = ("momentum", "nesterov", "weight_decay", "scale", "momentum_dtype")  # and of a LoRA pair


@dataclass(frozen=True, kw_only=True)
class AuxiliaryAdamW:
    """The rule of all leaves that are no matrices."""

    lr: Rate
    betas: tuple[float, float]
    eps: float
    weight_decay: Rate  # of all but norms and biases

    def build(self, weight_decay: Rate) -> optax.GradientTransformation:
        direction = [optax.scale_by_adam(*self.betas, eps=self.eps)]
        is_zero = isinstance(weight_decay, int | float) and weight_decay == 0
        if not is_zero:
            direction.append(optax.add_decayed_weights(weight_decay))

        # The rate is outside, so that its schedule advances when a step is skipped.
        safe = skip_nonfinite(optax.chain(*direction))
        return optax.chain(safe, optax.scale_by_learning_rate(self.lr))


@dataclass(frozen=True, kw_only=True)
class TreeRule:
    """The options of one transformation of a whole tree; see `mesotron.jax.muon`."""

    scale_by: Callable[..., optax.GradientTransformation]  # scale_by_muon or scale_by_pion
    lr: Rate
    options: Mapping[str, Any]  # further arguments of `scale_by`
    adamw: AuxiliaryAdamW
    views: Views
    routing: Mapping[str, Any]
    lora: str | None
    lora_unit: LoraUnit

    def init(self, params: Any) -> Any:
        return self.route(params).init(params)

    def update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return self.route(updates).update(updates, state, params)

    def route(self, tree: Any) -> optax.GradientTransformation:
        """The transformation of a tree with these paths and shapes."""
        are_factors = [is_factor(path) for path, _ in named_leaves(tree)]
        has_pairs = self.lora is not None and any(are_factors)
        if self.lora is not None and are_factors and not has_pairs:
            raise ValueError("lora='product': no leaf's name ends in lora_a or lora_b")

        known = None if has_pairs or self.routing else only_matrices(tree)
        if self.views is not None:
            return self.step_matrices(self.views)
        if known is not None:
            return self.step_matrices(known)
        if has_pairs and all(are_factors):
            return self.step_pairs()

        return self.partition(tree, has_pairs)

    def partition(self, tree: Any, has_pairs: bool) -> optax.GradientTransformation:
        """Each leaf by the rule that `label` chooses."""
        table = label(tree, lora=has_pairs, **self.routing)
        if not table.views() and not has_pairs:
            complain(
                "no leaf is a hidden matrix, so this is plain AdamW. Name one in "
                f"overrides={{'<path>': 'matrix'}}:\n{table}",
                self.routing.get("strict", False),
            )

        parts = {"matrix": self.step_matrices(table.views())}
        for group, decay in (("adamw", self.adamw.weight_decay), ("adamw_vectors", 0.0)):
            rule = self.adamw.build(decay)
            if self.options.get("stats", False):
                rule = measured(rule, group, self.adamw.lr, decay)
            parts[group] = rule

        if has_pairs:
            parts["lora"] = self.step_pairs()

        return optax.partition(parts, table.labels())  # pyright: ignore

    def step_matrices(self, views: Views) -> optax.GradientTransformation:
        direction = self.scale_by(views=views, stats_rate=self.lr, **self.options)
        return optax.chain(direction, optax.scale_by_learning_rate(self.lr))

    def step_pairs(self) -> optax.GradientTransformation:
        filter, promote = self.pair_filter()
        dtype = self.options.get("dtype")
        apply = partial(filter_batch, filter=filter, dtype=dtype, promote=promote)
        step = {}
        for key in STEP:
            if key in self.options:
                step[key] = self.options[key]

        rule = LoraRule(learning_rate=self.lr, filter=apply, unit=self.lora_unit, **step)
        return rule.transformation()

    def pair_filter(self) -> tuple[Filter, Array | None]:
        """The filter of LoRA pairs, and a traced `promote` in place of its own."""
        shape = {}
        for key in FILTER:
            if self.options.get(key) is not None:
                shape[key] = self.options[key]

        promote = shape.get("promote")
        if not isinstance(promote, Array):
            promote = None
        else:
            del shape["promote"]
            if "cutoff" in shape:  # an injected default, which is ignored next to a cutoff
                promote = None

        name = "pion"
        if self.scale_by is not scale_by_pion:
            name = NEWTON_SCHULZ.get(self.options.get("ns") or "", "muon")

        return make_filter(shape.pop("filter", name), **shape), promote


def transform_tree(
    scale_by: Callable[..., optax.GradientTransformation],
    lr: Rate,
    *,
    rate_name: str = "learning_rate",
    **options: Any,
) -> optax.GradientTransformation:
    """The transformation behind `muon` and `pion`; `rate_name` is what its caller calls `lr`."""
    options = flatten_injected(options)
    aux_lr = options.pop("aux_lr", None)
    adamw = AuxiliaryAdamW(
        lr=lr if aux_lr is None else aux_lr,
        betas=options.pop("betas", (0.9, 0.999)),
        eps=options.pop("eps", 1e-8),
        weight_decay=options["weight_decay"],
    )
    rates: dict[str, Any] = {rate_name: lr, "aux_lr": aux_lr, "eps": adamw.eps}
    check_range(**rates)
    beta_1, beta_2 = adamw.betas
    check_range(1, **{"beta 1": beta_1, "beta 2": beta_2})

    lora = options.pop("lora", None)
    if lora not in (None, "product"):
        raise ValueError(f"lora={lora!r} must be 'product' or None")

    lora_unit = LoraUnit(options.pop("lora_scale", 1.0), options.pop("lora_unit", "rms"))
    lora_unit.check()

    views = options.pop("views", None)
    routing = {}
    for key in ROUTING:
        if key in options:
            routing[key] = options.pop(key)

    scale_by(**options)  # refuses a wrong option now, not at the first step

    rule = TreeRule(
        scale_by=scale_by,
        lr=lr,
        options=options,
        adamw=adamw,
        views=views,
        routing=routing,
        lora=lora,
        lora_unit=lora_unit,
    )
    return optax.GradientTransformation(rule.init, rule.update)


def flatten_injected(options: dict[str, Any]) -> dict[str, Any]:
    """Undo the nesting of ** arguments: optax.inject_hyperparams passes them as one argument."""
    for key in ("options", "routing"):
        while key in options:
            options |= options.pop(key)

    return options
