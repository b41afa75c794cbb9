"""Layering and other rules that can be checked by reading the source."""

import ast
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "mesotron"
FILES = sorted(SOURCE.rglob("*.py"))
RESULTS = SOURCE.parents[1] / "benchmarks"
# Bottom up: a package imports itself and the packages before it.
PACKAGES = ["config", "runs", "spectral", "optim", "jax", "probes", "watch", "rlvr", "ppo", "vla"]
PACKAGES += ["report", "recipes", "compare"]
FRAMEWORKS = {"torch", "jax", "flax", "optax", "transformers", "trl"}


def package_of(path: Path) -> str:
    """The first part below the package: a sub-package or a top-level file's name."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path, tree: ast.AST | None = None) -> list[str]:
    """Every module that a file imports, at any depth, with dotted absolute names."""
    package = ["mesotron", *path.relative_to(SOURCE).parts[:-1]]
    found = []
    for node in ast.walk(tree or ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, node.module] if node.module else above)
            # `from mesotron import optim` imports a package too.
            found += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return found


def packages_imported(path: Path) -> set[str]:
    """The sub-packages and top-level files that a file imports."""
    parts = [name.split(".") for name in imports(path)]
    known = {package_of(file) for file in FILES}
    return {name[1] for name in parts if name[0] == "mesotron" and len(name) > 1} & known


def files_of(*packages: str) -> list[Path]:
    return [path for path in FILES if package_of(path) in packages]


def ids(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def test_every_folder_is_a_known_package():
    folders = {package_of(path) for path in FILES if path.parent != SOURCE}
    assert folders <= set(PACKAGES), "add a new package to PACKAGES"


@pytest.mark.parametrize("path", files_of(*PACKAGES), ids=ids)
def test_imports_run_downward(path):
    allowed = set(PACKAGES[: PACKAGES.index(package_of(path)) + 1])
    assert packages_imported(path) <= allowed


@pytest.mark.parametrize("path", files_of("config"), ids=ids)
def test_config_imports_the_standard_library_alone(path):
    known = {*sys.stdlib_module_names, "mesotron"}  # of which it may import itself alone
    assert {name.split(".")[0] for name in imports(path)} <= known


@pytest.mark.parametrize("path", files_of("spectral"), ids=ids)
def test_filters_know_no_framework(path):
    assert not FRAMEWORKS & {name.split(".")[0] for name in imports(path)}


@pytest.mark.parametrize("path", files_of("optim"), ids=ids)
def test_torch_optimizers_know_no_jax(path):
    assert not {"jax", "optax", "flax"} & {name.split(".")[0] for name in imports(path)}


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_nothing_is_probed_or_swallowed(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "hasattr", f"line {node.lineno}: no hasattr probing"
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"line {node.lineno}: a bare except hides bugs"
            swallowed = all(isinstance(line, ast.Pass) for line in node.body)
            assert not swallowed, f"line {node.lineno}: no swallowed exceptions"


def test_the_reader_of_imports_sees_every_form():
    text = (
        "import a.b\nfrom c import d\nfrom mesotron import optim\nfrom . import x\n"
        "from ..spectral import filters\ndef f():\n    import e\n"
    )
    found = imports(SOURCE / "optim" / "muon.py", ast.parse(text))
    expected = {"a.b", "c", "e", "mesotron.optim", "mesotron.optim.x", "mesotron.spectral"}
    assert expected | {"mesotron.spectral.filters"} <= set(found)


def test_results_name_no_folder_of_the_machine_that_made_them():
    for path in sorted(RESULTS.rglob("*")):
        if path.suffix in (".json", ".jsonl", ".md"):
            found = [home for home in ("root", "home") if f"/{home}/" in path.read_text()]
            assert not found, f"{path} names {found}"
