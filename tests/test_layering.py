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
    {"compare", "agents"},
]
# Files that import each other; the list may only get shorter.
CIRCLES: list[set[str]] = []
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
            if node.level:
                above = package[: len(package) - node.level + 1]
            else:
                above = []

            base = ".".join([*above, node.module] if node.module else above)
            # `from mesotron import optim` imports a package too.
            found += [base, *(f"{base}.{alias.name}" for alias in node.names)]

    return found


def test_every_folder_is_a_known_package():
    folders = set()
    for path in FILES:
        if path.parent != SOURCE:
            folders.add(package_of(path))

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


def without_type_checking(tree: ast.AST) -> ast.AST:
    """The tree without imports that only a type checker reads."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = [ast.Pass()]

    return tree


def file_of(module: str) -> Path | None:
    """The file of a module of ours, by its dotted name."""
    parts = module.split(".")
    if parts[0] != "mesotron":
        return None

    place = SOURCE.joinpath(*parts[1:])
    for path in (place.with_suffix(".py"), place / "__init__.py"):
        if path in FILES:
            return path

    return None


def imported_files(path: Path) -> set[Path]:
    """The files of ours that a file imports at run time, at its top or inside functions."""
    package = ["mesotron", *path.relative_to(SOURCE).parts[:-1]]
    found = set()
    for node in ast.walk(without_type_checking(ast.parse(path.read_text()))):
        if isinstance(node, ast.Import):
            found |= {file_of(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                above = package[: len(package) - node.level + 1]
            else:
                above = []

            base = ".".join([*above, node.module] if node.module else above)
            for alias in node.names:
                # A module of the package, or a name in it.
                found.add(file_of(f"{base}.{alias.name}") or file_of(base))

    return {file for file in found if file is not None} - {path}


def circles(graph: dict[Path, set[Path]]) -> list[set[str]]:
    """Sets of files that reach each other, as names below the package."""
    reached: dict[Path, set[Path]] = {}
    for start in graph:
        seen: set[Path] = set()
        waiting = list(graph[start])
        while waiting:
            file = waiting.pop()
            if file not in seen:
                seen.add(file)
                waiting += graph[file]

        reached[start] = seen

    found: list[set[str]] = []
    for start in graph:
        if start in reached[start]:
            together = {file for file in reached[start] if start in reached[file]}
            names = {str(file.relative_to(SOURCE)) for file in together}
            if names not in found:
                found.append(names)

    return found


def test_no_import_runs_in_a_circle():
    graph = {path: imported_files(path) for path in FILES}
    unknown = [names for names in circles(graph) if names not in CIRCLES]
    assert not unknown, "these files import each other"

    gone = [names for names in CIRCLES if names not in circles(graph)]
    assert not gone, "take these out of CIRCLES: they are open"


def test_circles_are_found():
    a, b, c = (SOURCE / f"{name}.py" for name in "abc")
    assert circles({a: {b}, b: {c}, c: set()}) == []
    assert circles({a: {b}, b: {a}, c: {a}}) == [{"a.py", "b.py"}]


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

        named = []
        for home in (b"/%b/" % name for name in (b"root", b"home")):
            if home in data:
                named.append(home)

        assert not named, f"{path} names {named}"


def test_a_class_name_means_one_thing():
    places: dict[str, set[str]] = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, set()).add(str(path.relative_to(SOURCE)))

    assert {name: found for name, found in places.items() if len(found) > 1} == {}
