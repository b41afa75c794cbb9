"""The changes: every place where one expression or statement can be made wrong."""

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "amax": "amin", "amin": "amax"}
_DELETABLE = ast.Expr | ast.AugAssign | ast.Raise | ast.Continue | ast.Break
_LOGGERS = ("_log", "log", "logger", "warnings", "console")


@dataclass(frozen=True, kw_only=True)
class Change:
    path: str  # below src/mesotron
    function: str  # the qualified name around it; "" is the module
    line: int
    kind: str
    start: int  # of the bytes that are replaced
    end: int
    before: str
    after: str

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.after.encode() + source[self.end :]


def changes_of(root: Path, path: str) -> list[Change]:
    """All changes of one file; none in docstrings, annotations, messages of errors, and logging."""
    source = (root / path).read_bytes()
    finder = _Finder(path, source)
    finder.visit(ast.parse(source))
    return finder.changes


class _Finder(ast.NodeVisitor):
    def __init__(self, path: str, source: bytes) -> None:
        self.changes: list[Change] = []
        self._path = path
        self._source = source
        self._scope: list[str] = []

        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._scope += [node.name, "<locals>"]
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.visit(default)

        self._body(node.body)
        del self._scope[-2:]

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._scope.append(node.name)
        self._body(node.body)
        self._scope.pop()

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """The places of nodes in f-strings are not those of the file."""

    def visit_Raise(self, node: ast.Raise) -> None:
        self._delete(node)

    def visit_Assert(self, node: ast.Assert) -> None:
        """Asserts of the package are for its type checker."""

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return

        if not isinstance(node.test, ast.Compare | ast.BoolOp | ast.UnaryOp):
            self._add("condition", node.test, ast.UnaryOp(ast.Not(), node.test))

        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        other = ast.IfExp(node.test, node.orelse, node.body)
        self._add("condition", node, other)
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant) or _is_logging(node.value):
            return

        if isinstance(node.value, ast.Call):
            self._delete(node)

        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets):
            self._delete(node)

        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._delete(node)
        self.visit(node.value)

    def visit_Continue(self, node: ast.Continue) -> None:
        self._delete(node)

    def visit_Break(self, node: ast.Break) -> None:
        self._delete(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None:
            self._delete(node)
        else:
            self.visit(node.value)

    def visit_Compare(self, node: ast.Compare) -> None:
        for number, operator in enumerate(node.ops):
            other = copy.deepcopy(node)
            other.ops[number] = COMPARISONS[type(operator)]()
            self._add("comparison", node, other)

            if isinstance(operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE):
                turned = copy.deepcopy(node)
                less = isinstance(operator, ast.Lt | ast.LtE)
                turned.ops[number] = ast.Gt() if less else ast.Lt()
                self._add("comparison", node, turned)

        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in OPERATORS and not _is_text(node):
            other = ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
            self._add("operator", node, other)

        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        operator = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self._add("boolean", node, ast.BoolOp(operator, node.values))

        for number in range(len(node.values)):
            left = node.values[:number] + node.values[number + 1 :]
            self._add("boolean", node, left[0] if len(left) == 1 else ast.BoolOp(node.op, left))

        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub):
            self._add("unary", node, node.operand)

        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if _is_logging(node):
            return

        if isinstance(node.func, ast.Name) and node.func.id in NAMES:
            self._add("name", node.func, ast.Name(NAMES[node.func.id]))
        elif isinstance(node.func, ast.Attribute) and node.func.attr in NAMES:
            other = ast.Attribute(node.func.value, NAMES[node.func.attr])
            self._add("name", node.func, other)

        for number in range(len(node.args) - 1):
            pair = node.args[number : number + 2]
            if any(isinstance(argument, ast.Starred) for argument in pair):
                continue

            swapped = copy.deepcopy(node)
            swapped.args[number : number + 2] = copy.deepcopy(pair[::-1])
            self._add("arguments", node, swapped)

        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._add("constant", node, ast.Constant(not value))
        elif isinstance(value, int | float):
            self._add("constant", node, ast.Constant(value + 1))
            if value not in (0, 1):
                self._add("constant", node, ast.Constant(value * 2))

    def _body(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            self.visit(statement)

    def _delete(self, node: ast.stmt) -> None:
        self._add("deleted", node, ast.Pass())

    def _add(self, kind: str, node: ast.expr | ast.stmt, other: ast.AST) -> None:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._starts[node.lineno - 1] + node.col_offset
        end = self._starts[node.end_lineno - 1] + node.end_col_offset

        after = ast.unparse(ast.fix_missing_locations(other))
        if isinstance(other, ast.expr) and not isinstance(other, ast.Name | ast.Constant):
            after = f"({after})"

        before = self._source[start:end].decode()
        if ast.unparse(node) == ast.unparse(other):
            return

        scope = ".".join(self._scope).removesuffix(".<locals>")
        self.changes.append(
            Change(
                path=self._path,
                function=scope,
                line=node.lineno,
                kind=kind,
                start=start,
                end=end,
                before=before,
                after=after,
            )
        )


def _is_logging(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False

    function = node.func
    if isinstance(function, ast.Name):
        return function.id == "print"
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return function.value.id in _LOGGERS

    return False


def _is_text(node: ast.BinOp) -> bool:
    """Whether the operator joins or formats strings."""
    return any(isinstance(side, ast.JoinedStr) or _is_string(side) for side in _sides(node))


def _sides(node: ast.BinOp) -> Iterator[ast.expr]:
    for side in (node.left, node.right):
        if isinstance(side, ast.BinOp):
            yield from _sides(side)
        else:
            yield side


def _is_string(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
