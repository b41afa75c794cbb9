"""A calculator that a model may call: `--tools benchmarks/gsm8k/calculator.py:calculate`."""

import ast
import operator

OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}
LONGEST = 200  # characters


def calculate(expression: str) -> str:
    """Compute with + - * / and parentheses.

    Args:
        expression: such as (12 + 3.5) * 7.
    """
    if len(expression) > LONGEST:
        raise ValueError("the expression is too long")

    try:
        value = compute(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError, OverflowError, RecursionError) as error:
        raise ValueError(f"cannot compute {expression!r}") from error

    return f"{value:.10g}"


def compute(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return float(node.value)

    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](compute(node.left), compute(node.right))

    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](compute(node.operand))

    raise ValueError("write numbers, + - * / and parentheses")
