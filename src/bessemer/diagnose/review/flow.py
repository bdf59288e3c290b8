"""Where the value of an expression comes from, and where a statement is relative to an event."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from bessemer.diagnose.review.script import Function, TrainingScript
from bessemer.diagnose.review.trace import Loop, Trace, TrainingEvent

SHAPES = ("view", "reshape", "flatten", "contiguous", "transpose", "permute", "squeeze", "unsqueeze", "float", "long",
          "to", "cuda", "clone", "type")  # fmt: skip
ONE_RANK = re.compile(
    r"\b(rank|global_rank|local_rank|gpu_id|get_rank|is_(local_)?main_process|is_global_zero|is_main|is_master|"
    r"master_process|main_process|is_rank_?0|is_rank_zero|RANK)\b"
)


def definitions(script: TrainingScript, node: ast.expr) -> list[ast.expr]:
    """The expressions assigned to a variable anywhere in its scope, in the order of the text."""
    key = script.key(node)
    return script.assigned.get(key, []) if key else []


def before(values: list[ast.expr], place: ast.AST) -> ast.expr | None:
    """The last of some expressions above a place."""
    earlier = [value for value in values if value.lineno < getattr(place, "lineno", 0)]
    return earlier[-1] if earlier else None


def shaped(node: ast.expr) -> ast.expr:
    """An expression without .view(), .reshape() and other changes of its shape, type or device."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SHAPES:
        node = node.func.value
    return node


def origin(script: TrainingScript, node: ast.expr) -> ast.expr:
    """The expression that a value was computed by, through names and changes of shape."""
    for _ in range(4):
        node = shaped(node)
        previous = before(definitions(script, node), node) if isinstance(node, ast.Name) else None
        if previous is None:
            return node
        node = previous
    return node


def ancestry(script: TrainingScript, node: ast.expr) -> Iterator[ast.expr]:
    """An expression and those that it was computed from in its function, through names: `loss`, `total / n`, ..."""
    waiting, visited = [node], set[int]()
    while waiting and len(visited) < 30:
        current = waiting.pop()
        if id(current) in visited:
            continue
        visited.add(id(current))
        yield current
        for part in ast.walk(current):
            if isinstance(part, ast.Name):
                waiting += definitions(script, part)


def mentions(node: ast.AST, text: str) -> bool:
    """Whether an expression that reads `text` is a part of the node."""
    return any(ast.unparse(part) == text for part in ast.walk(node) if isinstance(part, ast.Name | ast.Attribute))


def inside_of(script: TrainingScript, node: ast.AST, above: ast.AST) -> bool:
    return node is above or any(parent is above for parent in script.ancestors(node))


def sibling(script: TrainingScript, block: list[ast.stmt], event: TrainingEvent) -> ast.stmt | None:
    """The statement of a block in which an event happens, also through calls of functions."""
    for node in event.statement_nodes:
        for statement in block:
            if inside_of(script, node, statement):
                return statement
    return None


def modulo_period(script: TrainingScript, event: TrainingEvent, loop: ast.AST) -> ast.expr | None:
    """N if an event happens under `if ... % N == 0` in a loop, or under a variable with that value."""
    for frame in event.conditions(loop):
        assert isinstance(frame.node, ast.If)
        tests = [frame.node.test]
        for name in ast.walk(frame.node.test):
            tests += definitions(script, name) if isinstance(name, ast.Name) else []
        for part in (part for test in tests for part in ast.walk(test)):
            if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod):
                return part.right
    return None


def range_end(loop: ast.AST) -> ast.expr | None:
    """N of `for ... in range(N)` or range(start, N)."""
    if isinstance(loop, ast.For) and isinstance(loop.iter, ast.Call):
        call = loop.iter
        for inner in ast.walk(call):  # also in tqdm(range(N))
            if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name) and inner.func.id == "range":
                return inner.args[min(1, len(inner.args) - 1)] if inner.args else None
    return None


def accumulation(script: TrainingScript, backward: TrainingEvent, step: TrainingEvent) -> ast.expr | None:
    """The number of micro-batches of a step: from `% N`, or from an inner `for _ in range(N)`."""
    outer = step.loops
    if backward.loops[: len(outer)] != outer or not outer:
        return None
    if len(backward.loops) == len(outer):
        period = modulo_period(script, step, outer[-1])
        return None if period is None or modulo_period(script, backward, outer[-1]) is not None else period
    return range_end(backward.loops[len(outer)]) if len(backward.loops) == len(outer) + 1 else None


def same_iteration(first: TrainingEvent, second: TrainingEvent) -> bool:
    return bool(first.loops) and first.loops[-1] is second.loops[-1] if second.loops else False


def one_rank_condition(test: ast.expr) -> bool:
    """Whether a condition holds on some ranks only."""
    return ONE_RANK.search(ast.unparse(test)) is not None


def on_one_rank(script: TrainingScript, event: TrainingEvent) -> bool:
    """Whether an event is limited to some ranks, by an `if` around it or an early return above it."""
    if any(one_rank_condition(frame.node.test) for frame in event.conditions() if isinstance(frame.node, ast.If)):
        return True
    for node in event.statement_nodes:
        function = script.function_of(node)
        for statement in function.body if function is not None else ():
            if isinstance(statement, ast.If) and statement.lineno < getattr(node, "lineno", 0):
                leaves = isinstance(statement.body[-1], ast.Return | ast.Continue)
                if leaves and one_rank_condition(statement.test):
                    return True
    return False


def calls_inside(script: TrainingScript, node: ast.AST, name: str) -> bool:
    return any(True for _ in script.calls(name, inside=node))


def loop_of_epochs(trace: Trace, loops: list[Loop]) -> ast.For | None:
    """The outermost `for` whose variable counts."""
    return next((loop for loop in loops if isinstance(loop, ast.For) and isinstance(loop.target, ast.Name)), None)


def visible(script: TrainingScript, name: str, place: ast.stmt) -> bool:
    """Whether a variable of the text `name` has a value at a place."""
    root = name.split(".")[0]
    function = script.function_of(place)
    if root == "self":
        return function is not None and script.class_of(place) is not None
    scopes: list[Function | None] = [function, None]
    for node in script.nodes:
        if isinstance(node, ast.arg) and node.arg == root and script.function_of(node) is function:
            return True
        if isinstance(node, ast.Name) and node.id == root and isinstance(node.ctx, ast.Store):
            scope = script.function_of(node)
            if scope in scopes and (scope is not function or node.lineno < place.lineno):
                return True
    return False
