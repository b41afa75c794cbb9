"""Which statements of the package a test runs: each statement of a copy sets a byte of a file.

The file is mapped into the memory of every process that imports the copy, so that processes that
a test starts, forks or kills are seen too, and a byte costs less than most statements.
"""

import ast
import mmap
import os
from pathlib import Path

MODULE = "_reached.py"
VARIABLE = "REACHED_FILE"
# Of the copy; a process without the file sets bytes that nobody reads.
_SOURCE = f'''import mmap
import os

_name = os.environ.get("{VARIABLE}")
if _name:
    _file = os.open(_name, os.O_RDWR)
    hits = mmap.mmap(_file, 0)
    os.close(_file)
else:
    hits = bytearray(1 << 20)
'''
_SIZE = 1 << 20
_IMPORT = f"""
try:
    from mesotron._reached import hits as _reached_hits
except ImportError:  # a file that is also run as a script
    _reached_hits = bytearray({_SIZE})
"""


class Hits:
    """The bytes of the statements that have run since `clear`."""

    def __init__(self, file: Path) -> None:
        file.write_bytes(bytes(_SIZE))
        handle = os.open(file, os.O_RDWR)
        self._map = mmap.mmap(handle, 0)
        os.close(handle)
        os.environ[VARIABLE] = str(file)

    def clear(self) -> None:
        self._map[:] = bytes(_SIZE)

    def read(self) -> set[int]:
        content = self._map[:]
        found = set()
        place = content.find(1)
        while place >= 0:
            found.add(place)
            place = content.find(1, place + 1)

        return found


def keys_of(path: str, source: bytes) -> dict[int, str]:
    """The key of the innermost statement of a function on each line of a file.

    A key counts the statements of its function, so that a change elsewhere leaves it as it is.
    """
    keys = {}
    for key, node in _statements(path, ast.parse(source)):
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
            keys[line] = key

    return keys


def insert(package: Path, paths: list[str]) -> list[str]:
    """Put the probes into these files of a copy of the package; the key of each byte."""
    (package / MODULE).write_text(_SOURCE)
    numbers: list[str] = []
    for path in paths:
        file = package / path
        tree = ast.parse(file.read_bytes())
        ids = {id(node): key for key, node in _statements(path, tree)}
        _Inserter(ids, numbers).visit(tree)
        _import_hits(tree)
        file.write_text(ast.unparse(ast.fix_missing_locations(tree)), encoding="utf-8")

    assert len(numbers) < _SIZE
    return numbers


def _statements(path: str, tree: ast.Module) -> list[tuple[str, ast.stmt]]:
    """Every statement inside a function, outer ones before those inside them."""
    found: list[tuple[str, ast.stmt]] = []

    def visit(node: ast.AST, scope: str, function: str, counts: dict[str, int]) -> None:
        for child in ast.iter_child_nodes(node):
            inner = function
            name = scope
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{scope}.{child.name}" if scope else child.name

            if isinstance(child, ast.stmt) and function:
                counts[function] = counts.get(function, -1) + 1
                found.append((f"{path}:{function}:{counts[function]}", child))

            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                inner = name

            visit(child, name, inner, counts)

    visit(tree, "", "", {})
    return found


class _Inserter(ast.NodeTransformer):
    def __init__(self, ids: dict[int, str], numbers: list[str]) -> None:
        self._ids = ids
        self._numbers = numbers

    def visit(self, node: ast.AST) -> ast.AST:
        self.generic_visit(node)
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                setattr(node, name, self._with_probes(block))

        return node

    def _with_probes(self, block: list[ast.stmt]) -> list[ast.stmt]:
        longer: list[ast.stmt] = []
        for number, statement in enumerate(block):
            key = self._ids.get(id(statement))
            if key is not None and not (number == 0 and _is_docstring(statement)):
                longer.append(self._probe(key))
            longer.append(statement)

        return longer

    def _probe(self, key: str) -> ast.stmt:
        self._numbers.append(key)
        return ast.parse(f"_reached_hits[{len(self._numbers) - 1}] = 1").body[0]


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _import_hits(tree: ast.Module) -> None:
    """After the docstring and the imports from the future, which come first."""
    place = 0
    for number, node in enumerate(tree.body):
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            place = number + 1
        elif number == 0 and _is_docstring(node):
            place = 1

    tree.body[place:place] = ast.parse(_IMPORT).body
