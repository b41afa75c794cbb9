"""Layering and other rules that can be checked by reading the source."""

import ast
import gzip
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "mesotron"
FILES = sorted(SOURCE.rglob("*.py"))
RESULTS = SOURCE.parents[1] / "benchmarks"
# Bottom up: a package imports itself and the packages of the lines before its own.
LAYERS = [
    {"config", "probes"},
    {"runs"},
    {"spectral", "answers", "models", "watch"},
    {"optim", "jax", "tasks"},
    {"sampling", "ppo"},
    {"rewards"},
    {"evaluate"},
    {"rlvr"},
    {"vla", "serve"},
    {"report"},
    {"recipes"},
    {"compare"},
]
PACKAGES = [package for layer in LAYERS for package in sorted(layer)]
JAX = {"jax", "flax", "optax"}
FORBIDDEN = {"spectral": JAX | {"torch", "transformers", "trl"}, "optim": JAX}


def package_of(path: Path) -> str:
    """The first part below the package: a sub-package or a top-level file's name."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path) -> list[str]:
    """Every module that a file imports, at any depth, with dotted absolute names."""
    package = ["mesotron", *path.relative_to(SOURCE).parts[:-1]]
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, node.module] if node.module else above)
            # `from mesotron import optim` imports a package too.
            found += [base, *(f"{base}.{alias.name}" for alias in node.names)]

    return found


def test_every_folder_is_a_known_package():
    folders = {package_of(path) for path in FILES if path.parent != SOURCE}
    assert folders <= set(PACKAGES), "add a new package to PACKAGES"


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_run_downward(package):
    height = next(k for k, layer in enumerate(LAYERS) if package in layer)
    below = {package}.union(*LAYERS[:height])
    above = {f"mesotron.{package_of(path)}" for path in FILES if package_of(path) not in below}
    for path in FILES:
        if package_of(path) == package:
            names = [name.split(".") for name in imports(path)]
            roots = {name[0] for name in names}
            assert not above & {".".join(name[:2]) for name in names}, path
            assert not FORBIDDEN.get(package, set()) & roots, path
            assert package != "config" or roots <= {*sys.stdlib_module_names, "mesotron"}, path


def test_nothing_is_probed_or_swallowed():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "hasattr", f"{path}:{node.lineno}: no hasattr probing"

            if isinstance(node, ast.ExceptHandler):
                assert node.type is not None, f"{path}:{node.lineno}: a bare except hides bugs"
                swallowed = all(isinstance(line, ast.Pass) for line in node.body)
                assert not swallowed, f"{path}:{node.lineno}: no swallowed exceptions"


def test_results_name_no_folder_of_the_machine_that_made_them():
    for path in sorted(RESULTS.rglob("*")):
        if path.suffix not in (".json", ".jsonl", ".md", ".gz"):
            continue

        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)

        named = [home for home in (b"/root/", b"/home/") if home in data]
        assert not named, f"{path} names {named}"
