"""Ends: which plain layers of a tree are the first and the last of a network.

Names often do not say it: a flax MLP is Dense_0, Dense_1, Dense_2. Numbered layers that lie
together are a run; where the outputs of one fit the inputs of the next they are one network, whose
ends go to Adam. Layers inside numbered blocks are hidden. What stays open raises.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import pairwise

from mesotron.jax.roles import Reading, Site, base_name
from mesotron.jax.views import read_view

Readings = dict[str, Reading]
_KNOWN_ENDS = ("input", "head", "embedding")


@dataclass(frozen=True)
class _Layer:
    """A plain layer of a run, with the widths it connects."""

    path: str
    number: int
    inputs: int
    outputs: int
    fixed: bool


def find_ends(sites: dict[str, Site], readings: Readings, fixed: set[str]) -> Readings:
    """The readings with the first and last layers of each network told from the hidden ones.

    Args:
        sites: path -> leaf.
        readings: path -> what its name says.
        fixed: the paths that an override has decided, which keep their reading.
    """
    found = dict(readings)
    fed, read = _known_widths(sites, readings)
    for root in _networks(sites, readings):
        runs = _runs(root, sites, readings, fixed)
        convolved = any(_is_convolution(readings[run[0].path]) for run in runs)
        for run in runs:
            if _is_convolution(readings[run[0].path]):
                _set(found, run[0], "input", "the first convolution")
            else:
                _end_run(run, found, fed, read, convolved)
    return found


def _is_convolution(reading: Reading) -> bool:
    return reading.role == "convolution"


def _networks(sites: dict[str, Site], readings: Readings) -> list[tuple[str, ...]]:
    """The modules in which a network's first and last layers lie.

    Going down from the top: a module with layers of its own is a network. One without is a mere
    container of networks, except for numbered parts, which are blocks.
    """
    layers = {site.layer for path, site in sites.items() if _is_layer(readings[path])}
    networks, open_ = [], [()]
    while open_:
        place = open_.pop()
        inside = [words for words in layers if words[: len(place)] == place]
        if any(len(words) <= len(place) + 1 for words in inside):
            networks.append(place)
            continue
        parts = {words[: len(place) + 1] for words in inside}
        open_ += [part for part in parts if len(parts) == 1 or not part[-1][-1].isdigit()]
    return sorted(networks)


def _is_layer(reading: Reading) -> bool:
    return reading.view is not None or reading.role in _KNOWN_ENDS


def _runs(
    root: tuple[str, ...], sites: dict[str, Site], readings: Readings, fixed: set[str]
) -> list[list[_Layer]]:
    """The plain layers directly in a module, together if their names differ by a number alone."""
    runs: dict[str, list[_Layer]] = {}
    for path, site in sites.items():
        reading = readings[path]
        plain = reading.role in ("matrix", "convolution") and "s" not in (reading.view or "s")
        if site.layer[:-1] != root or not plain:
            continue
        number = re.search(r"\d+$", site.layer[-1])
        _, outputs, inputs = read_view(reading.view or "", site.shape)
        layer = _Layer(path, int(number[0]) if number else -1, inputs, outputs, path in fixed)
        runs.setdefault(base_name(site.layer[-1]), []).append(layer)
    return [sorted(run, key=lambda layer: layer.number) for run in runs.values()]


def _end_run(
    run: list[_Layer], found: Readings, fed: set[int], read: set[int], convolved: bool
) -> None:
    """Mark the ends of each connected piece of a run, in `found`."""
    for piece in _pieces(run, found):
        first, last = piece[0], piece[-1]
        is_input = first.inputs not in fed and not (convolved and first is run[0])
        is_head = last.outputs not in read
        if (is_input or is_head) and first.number < 0:
            _doubt(found, first, "may be hidden, the first or the last layer")
            continue
        if is_input:
            _set(found, first, "input", "the first layer of its run")
        if is_head:
            _set(found, last, "head", "the last layer of its run")


def _known_widths(sites: dict[str, Site], readings: Readings) -> tuple[set[int], set[int]]:
    """Widths that come out of known input layers and tables, and that go into known heads."""
    fed, read = set(), set()
    for path, site in sites.items():
        role, torch_like = readings[path].role, site.attribute and site.leaf == "weight"
        if role in ("input", "embedding"):
            # A table is (entries, width) in every framework.
            fed.add(site.shape[0 if torch_like and role == "input" else -1])
        if role == "head":
            read.add(site.shape[-1 if torch_like else -2])
    return fed, read


def _pieces(run: list[_Layer], found: Readings) -> list[list[_Layer]]:
    """A run cut where the outputs of a layer do not fit the inputs of the next."""
    pieces = [[run[0]]]
    for before, after in pairwise(run):
        if before.outputs != after.inputs:
            pieces.append([after])
            continue
        narrow = before.outputs < before.inputs and after.inputs < after.outputs
        if narrow and not (before.fixed or after.fixed):
            _doubt(
                found, before, f"and {after.path} meet in a waist: a bottleneck, or two networks"
            )
        pieces[-1].append(after)
    return pieces


def _set(found: Readings, layer: _Layer, role: str, reason: str) -> None:
    if not layer.fixed and found[layer.path].doubt is None:
        found[layer.path] = Reading(role, reason)


def _doubt(found: Readings, layer: _Layer, why: str) -> None:
    if not layer.fixed:
        doubt = f"{layer.path} ({layer.inputs} to {layer.outputs}) {why}"
        found[layer.path] = replace(found[layer.path], doubt=doubt)
