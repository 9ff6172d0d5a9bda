"""Rules for the library's source code, checked on its syntax trees."""

import ast
from pathlib import Path

import pytest

from iresnet.lipschitz import ACTIVATIONS

# Syntax trees only; none of the library's code runs here.
pytestmark = pytest.mark.no_cover

LIBRARY = Path(__file__).resolve().parent.parent / "iresnet"
FILES = sorted(LIBRARY.rglob("*.py"))

#: Methods that modify a dictionary.
WRITING = {"update", "pop", "popitem", "setdefault", "clear", "__setitem__", "__delitem__", "__ior__"}


def is_namespace(node, aliases=()):
    """Whether an expression is the dictionary of an object: `vars(x)`, `x.__dict__`, or an alias of one."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "vars" and bool(node.args)
    return (isinstance(node, ast.Attribute) and node.attr == "__dict__") or (
        isinstance(node, ast.Name) and node.id in aliases
    )


def targets(node):
    """The targets that a statement assigns to or deletes."""
    found = {
        ast.Assign: lambda: node.targets,
        ast.Delete: lambda: node.targets,
        ast.AugAssign: lambda: [node.target],
        ast.AnnAssign: lambda: [node.target],
        ast.For: lambda: [node.target],
        ast.NamedExpr: lambda: [node.target],
    }.get(type(node), list)()
    for target in found:
        yield from (t for t in ast.walk(target) if isinstance(t, ast.Subscript | ast.Attribute | ast.Name))


def pairs(node):
    """The (target, value) pairs of an assignment, with tuples unpacked."""
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        both = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
        yield from zip(target.elts, node.value.elts, strict=False) if both else [(target, node.value)]


def patches(source):
    """The lines that modify an object through its dictionary."""
    tree = ast.parse(source)
    assigned = [n for n in ast.walk(tree) if isinstance(n, ast.Assign | ast.NamedExpr)]
    aliases = {t.id for n in assigned for t, v in pairs(n) if isinstance(t, ast.Name) and is_namespace(v)}
    lines = set()
    for node in ast.walk(tree):
        for target in targets(node):
            inside = isinstance(target, ast.Subscript) and is_namespace(target.value, aliases)
            if inside or (isinstance(target, ast.Attribute) and target.attr == "__dict__"):
                lines.add(node.lineno)
        if isinstance(node, ast.AugAssign) and is_namespace(node.target, aliases):
            lines.add(node.lineno)
        call = node.func if isinstance(node, ast.Call) else None
        if isinstance(call, ast.Attribute) and call.attr in WRITING and is_namespace(call.value, aliases):
            lines.add(node.lineno)
    return sorted(lines)


@pytest.mark.parametrize(
    "line",
    [
        'vars(model)["estimator"] = drawn',
        "vars(chain).update(forward=plan.forward)",
        'vars(chain).pop("forward", None)',
        'del vars(m)["forward_and_logdet"]',
        'x, vars(m)["forward"] = 1, f',
        'vars(m)["count"] += 1',
        'for vars(m)["step"] in range(3): pass',
        'vars(m).setdefault("forward", f)',
        'm.__dict__["forward"] = f',
        "m.__dict__ = {}",
        "m.__dict__.update(other)",
        "m.__dict__ |= other",
        'own = vars(m); own["forward"] = f',
        "known, own = 1, vars(m); own.update(forward=f)",
    ],
)
def test_a_patch_is_detected(line):
    assert patches(line) == [1]


@pytest.mark.parametrize(
    "line",
    [
        'f = vars(m)["forward"]',
        "state = {**m.__dict__, 'kept': None}",
        "names = dict(vars(m)); names['x'] = 1",
        "m.forward = f",
        "for value in vars(m).values(): pass",
    ],
)
def test_reading_a_dictionary_is_not_a_patch(line):
    assert patches(line) == []


def test_the_library_patches_no_object():
    """Faster implementations wrap a module; they do not replace methods or settings of a live object."""
    assert len(FILES) > 100
    found = {path.relative_to(LIBRARY).as_posix(): patches(path.read_text()) for path in FILES}
    assert {name: lines for name, lines in found.items() if lines} == {}


# -------------------------------------------------------------------------------------------------- activations

#: Files that may distinguish activations by class: their records, and the audit, which shares no code with them.
RECORDS = {"lipschitz/activations.py", "audit/extended.py"}
KINDS = {record.kind.__name__ for record in ACTIVATIONS.values() if not record.may_return_input}


def distinctions(tree):
    """Where code distinguishes activations: by isinstance, match, comparison, or as keys and members of a table."""
    found = []
    for node in ast.walk(tree):
        places = []
        match node:
            case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, kinds]):
                places = [kinds]
            case ast.MatchClass(cls=cls):
                places = [cls]
            case ast.Compare():
                places = [node.left, *node.comparators]
            case ast.Dict():
                places = [*filter(None, node.keys), *node.values]
            case ast.Set() | ast.Tuple() | ast.List() if all(
                isinstance(e, ast.Attribute | ast.Name) for e in node.elts
            ):
                places = [*node.elts] if len(node.elts) > 1 else []
        for place in places:
            names = [getattr(n, "attr", getattr(n, "id", "")) for n in ast.walk(place)]
            found += [f"line {node.lineno}: {name}" for name in names if name in KINDS]
    return found


def test_only_activation_records_distinguish_activations():
    found = {}
    for path in FILES:
        name = path.relative_to(LIBRARY).as_posix()
        if name not in RECORDS and (places := distinctions(ast.parse(path.read_text()))):
            found[name] = places
    assert not found


@pytest.mark.parametrize(
    "code",
    [
        "isinstance(layer, nn.ELU | nn.Tanh)",
        "match layer:\n    case nn.ELU():\n        pass",
        "kind is Sine",
        "{nn.ReLU: 1.0}",
        "{'elu': nn.ELU}",
        "KINDS = (nn.ELU, nn.Tanh)",
    ],
)
def test_a_distinction_is_detected(code):
    assert distinctions(ast.parse(code))


def test_creating_an_activation_is_allowed():
    assert not distinctions(ast.parse("nn.Sequential(nn.Linear(2, 2), nn.ELU(), nn.Linear(2, 2))"))
