"""`iresnet.reproduce` uses only public names, and the rest of the library does not import it."""

import ast
from pathlib import Path

import pytest

# Syntax trees only; none of the library's code runs here.
pytestmark = pytest.mark.no_cover

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "iresnet"
PACKAGE = LIBRARY / "reproduce"


def imported(path, source):
    """The dotted names that a file of the library imports, with their lines."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else ())))
            yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)


def modules(path, source):
    """The names in a file that are modules of other packages."""
    tree = ast.parse(source)
    froms = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and (n.level != 1 or n.module is None)]
    plain = [a for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
    return {a.asname or a.name.partition(".")[0] for a in [*plain, *(a for n in froms for a in n.names)]}


def private(path, source):
    """The lines that use a private name of another package: by an import, or as an attribute of a module."""
    own = ".".join(path.relative_to(ROOT).parts[:-1]) + "."
    lines = {
        line
        for name, line in imported(path, source)
        if not name.startswith(own) and any(p.startswith("_") and p != "__future__" for p in name.split("."))
    }
    names = modules(path, source)
    for node in ast.walk(ast.parse(source)):
        taken = isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__")
        if taken and isinstance(node.value, ast.Name) and node.value.id in names:
            lines.add(node.lineno)
    return sorted(lines)


def reproduce_imports(path, source):
    """The lines that import `iresnet.reproduce`."""
    return sorted({line for name, line in imported(path, source) if f"{name}.".startswith("iresnet.reproduce.")})


@pytest.mark.parametrize(
    "line",
    [
        "from ..run.fit import _release",
        "from .._hidden import thing",
        "from iresnet.run._hidden import thing",
        "import iresnet._hidden",
        "from .. import run; run._private()",
        "import torch; torch._dynamo.reset()",
    ],
)
def test_a_private_name_is_detected(line):
    assert private(PACKAGE / "sample.py", line) == [1]


@pytest.mark.parametrize(
    "line", ["from ..run import Run", "from .record import _head", "from __future__ import annotations", "self._x = 1"]
)
def test_public_names_and_own_private_names_are_allowed(line):
    assert private(PACKAGE / "sample.py", line) == []


@pytest.mark.parametrize(
    "line",
    [
        "from .reproduce import RESULTS",
        "from . import reproduce",
        "import iresnet.reproduce",
        "from .reproduce.job import Job",
    ],
)
def test_an_import_of_reproduce_is_detected(line):
    assert reproduce_imports(LIBRARY / "sample.py", line) == [1]
    assert reproduce_imports(LIBRARY / "run" / "sample.py", line.replace("from .", "from ..")) == [1]


def test_reproduce_uses_only_public_names():
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 10
    found = {path.name: private(path, path.read_text()) for path in files}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_only_the_command_imports_reproduce():
    files = [p for p in sorted(LIBRARY.rglob("*.py")) if PACKAGE not in p.parents]
    found = {p.relative_to(LIBRARY).as_posix() for p in files if reproduce_imports(p, p.read_text())}
    assert found == {"cli/completion.py", "cli/reproduce.py"}
