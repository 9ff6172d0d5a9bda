"""No code is written twice: no two functions of the library have the same syntax tree up to their names.

Docstrings, annotations and typing decorators are ignored, arguments and local names are numbered in order of
appearance, and numbers and strings count only by their type. Names of attributes, other functions and keywords are
kept, so two functions that call different functions differ.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

# Syntax trees only; none of the library's code runs here.
pytestmark = pytest.mark.no_cover

LIBRARY = Path(__file__).parent.parent / "iresnet"

#: Functions with fewer nodes are too short to compare: `return self.x`, `pass`, `...`.
LEAST = 12

Function = ast.FunctionDef | ast.AsyncFunctionDef


class _Numbered(ast.NodeTransformer):
    """Numbers local names in order of appearance, replaces constants by their type, and drops annotations."""

    def __init__(self, local: set[str]) -> None:
        self.local = local
        self.numbers: dict[str, str] = {}

    def name(self, given: str) -> str:
        return self.numbers.setdefault(given, f"_{len(self.numbers)}") if given in self.local else given

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name(self.name(node.id), node.ctx)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(self.name(node.arg), None)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        kind = type(node.value).__name__
        return node if node.value is None or isinstance(node.value, bool) else ast.Constant(f"a {kind}")

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is None:
            return ast.Pass()
        return self.visit(ast.Assign([node.target], node.value, lineno=0))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        inner = ast.FunctionDef(self.name(node.name), node.args, node.body, [], None, None, lineno=0)
        return self.generic_visit(inner)


def _local_names(function: Function) -> set[str]:
    stored = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    inside = {n.name for n in ast.walk(function) if isinstance(n, ast.FunctionDef)}
    return stored | inside | {n.arg for n in ast.walk(function) if isinstance(n, ast.arg)}


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0]
    said = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    return body[1:] if said else body


def normalised(function: Function) -> str | None:
    """What a function does, whatever it calls its own things; None where that is next to nothing."""
    body = _without_docstring(function.body)
    size = sum(1 for statement in body for _ in ast.walk(statement))
    if not body or isinstance(body[0], ast.Raise | ast.Pass) or (len(body) < 2 and size < LEAST):
        return None
    bare = type(function)("f", function.args, body, function.decorator_list, None, None, lineno=0)
    return ast.dump(_Numbered(_local_names(function) - {"f"}).generic_visit(bare))


def functions(path: Path, name: str) -> Iterator[tuple[str, Function]]:
    """Every function of a file, with its location."""

    def within(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                yield from within(child, f"{prefix}{child.name}.")
            elif isinstance(child, Function):
                yield f"{prefix}{child.name}", child
                yield from within(child, f"{prefix}{child.name}.")
            else:
                yield from within(child, prefix)

    yield from within(ast.parse(path.read_text("utf-8")), f"{name}:")


def duplicates(root: Path) -> list[list[str]]:
    """Groups of identical functions below a folder."""
    found = defaultdict(list)
    for path in sorted(root.rglob("*.py")):
        for place, function in functions(path, path.relative_to(root).as_posix()):
            if (tree := normalised(function)) is not None:
                found[tree].append(place)
    return [places for places in found.values() if len(places) > 1]


def test_no_function_is_written_twice() -> None:
    found = duplicates(LIBRARY)
    assert not found, "the same function is written more than once:\n" + "\n".join(" = ".join(p) for p in found)


def test_the_same_function_with_other_names_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        'def mean(x: list[float]) -> float:\n    """Of all."""\n    n: int = len(x)\n    return sum(x) / max(n, 1)\n'
    )
    (tmp_path / "b.py").write_text(
        "class B:\n    def average(values):\n        count = len(values)\n        return sum(values) / max(count, 2)\n"
    )
    (tmp_path / "c.py").write_text("def other(x):\n    n = len(x)\n    return sum(x) / min(n, 1)\n")
    assert duplicates(tmp_path) == [["a.py:mean", "b.py:B.average"]]


def test_very_short_functions_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "def f(self):\n    return self.x\n\ndef g(that):\n    return that.x\n\n"
        "def h(x):\n    raise NotImplementedError\n\ndef i(y):\n    raise NotImplementedError\n\n"
        'def j(x):\n    """None."""\n\ndef k(y):\n    """None."""\n'
    )
    assert duplicates(tmp_path) == []
