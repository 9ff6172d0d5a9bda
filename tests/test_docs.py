"""The README and the documentation show what runs, and name what exists."""

import dataclasses
import importlib
import inspect
import pkgutil
import re
import shlex
import sys
from functools import cache
from pathlib import Path

import pytest
import typer.main

import iresnet
from iresnet.cli import app
from iresnet.presets import PRESETS, Experiment
from iresnet.results import read
from tools import ship, tables

ROOT = Path(__file__).resolve().parent.parent
TEXTS = {p.relative_to(ROOT).as_posix(): p.read_text() for p in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))}
PAGES = sorted(name for name, text in TEXTS.items() if "```python" in text)
CONSOLE = "".join(TEXTS.values()).replace("\\\n", " ")  # a line that ends in a backslash goes on
COMMANDS = sorted(set(re.findall(r"^ *\$ (iresnet .*)$", CONSOLE, re.MULTILINE)))
GROUPS = ["data", "network", "objective", "training", "acceleration"]
DESIGN = TEXTS["docs/explanation/design.md"]


#: Pages whose snippets train for more than a few seconds.
LONG = {"docs/guide/estimators.md", "docs/guide/train.md"}


@pytest.mark.parametrize("page", TEXTS)
def test_attributes_of_a_heading_stand_in_its_line(page):
    """Trap: in a line of their own they are shown as text, and the anchor does not exist."""
    assert not re.findall(r"^\{ [#.:].*$", TEXTS[page], re.MULTILINE)


@pytest.mark.parametrize("page", [pytest.param(p, marks=[pytest.mark.slow] * (p in LONG)) for p in PAGES])
@pytest.mark.no_cover
def test_snippets_run_in_order(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for snippet in re.findall(r"^```python\n(.*?)^```", TEXTS[page], re.MULTILINE | re.DOTALL):
        exec(compile(snippet, page, "exec"), names)
    assert "__builtins__" in names  # something was executed


def test_there_are_pages_with_snippets():
    assert len(PAGES) >= 4


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_has_the_options_shown(line):
    words = shlex.split(line.partition(" > ")[0], comments=True)[1:]
    command = typer.main.get_command(app)
    while words and hasattr(command, "commands"):
        if words[0].startswith("-"):
            break
        command = command.commands[words.pop(0)]
    if "--help" not in words:
        command.make_context(command.name, words)


def test_every_subcommand_is_shown():
    shown = {line.split()[1] for line in COMMANDS}
    assert shown >= set(typer.main.get_command(app).commands) - {"demo"}


def test_every_preset_and_every_setting_is_listed():
    """The tables themselves are generated, and compared by `test_results.py`."""
    assert re.findall(r"<!-- settings:(\w+) -->", TEXTS["docs/reference/settings.md"]) == GROUPS
    listed = re.findall(r"^\| `([\w.-]+)` \| \S+ \| [a-z-]+ \|", TEXTS["docs/reference/presets.md"], re.MULTILINE)
    assert sorted(listed) == sorted(PRESETS)


class TestReference:
    """The API reference is generated from docstrings: `::: NAME` on a page of docs/reference/ stands for an object."""

    DIRECTIVES = re.findall(r"^::: ([\w.]+)$", "".join(TEXTS.values()), re.MULTILINE)
    PACKAGES = sorted(f"iresnet.{path.parent.name}" for path in (ROOT / "iresnet").glob("*/__init__.py"))
    NAMES = sorted(set(iresnet.__all__) - {"__version__"})

    def test_every_directive_names_an_object(self):
        assert [
            name for name in self.DIRECTIVES if not _is_module(name) and not _has(iresnet, name.split(".")[1:])
        ] == []

    @pytest.mark.parametrize("package", [*PACKAGES, "iresnet.results"])
    def test_every_public_name_of_a_package_is_shown(self, package):
        module = importlib.import_module(package)
        public = {name: getattr(module, name) for name in getattr(module, "__all__", [])}
        assert not public or package in self.DIRECTIVES
        functions = [name for name, found in public.items() if inspect.isfunction(found)]
        classes = [name for name, found in public.items() if inspect.isclass(found)]
        assert [name for name in functions + classes if not public[name].__doc__] == []
        # A function with the name of its own file is hidden by the file, and needs a directive of its own.
        hidden = [f"{package}.{name}.{name}" for name in functions if _is_module(f"{package}.{name}")]
        assert set(hidden) <= set(self.DIRECTIVES)

    def test_every_name_of_the_library_is_in_the_overview(self):
        linked = re.findall(r"\[(\w+)\]\[iresnet\.(\w+)\]", TEXTS["docs/reference/index.md"])
        assert all(text == name for text, name in linked)
        assert sorted(name for _, name in linked) == self.NAMES

    def test_every_name_of_the_library_is_in_a_module_that_is_shown(self):
        modules = [importlib.import_module(name) for name in self.DIRECTIVES if _is_module(name)]
        shown = {id(found) for module in modules for found in [module, *vars(module).values()]}
        assert [name for name in self.NAMES if id(getattr(iresnet, name)) not in shown] == []


class TestMentions:
    """A name in backticks that looks like one of this project's exists."""

    PROSE = re.sub(
        r"^```.*?^```|^<!-- results.*?^<!-- /results -->",
        "",
        "\n".join([*TEXTS.values(), (ROOT / "CONTRIBUTING.md").read_text()]),
        flags=re.MULTILINE | re.DOTALL,
    )
    FILE = re.compile(r"\.(toml|json|csv|html|safetensors|npz|npy|pt2|onnx|txt|png|py|md|cff)$")

    def test_every_path_exists(self):
        paths = set(re.findall(r"`([\w./-]+\.py|[\w/]+/[\w.-]+\.\w+)`", self.PROSE))
        places = [ROOT, *(ROOT / place for place in ("iresnet", "tests", "docs", "benchmarks"))]
        made = ("runs/", "OUT/", ".venv/")  # by a command
        assert [p for p in sorted(paths) if not p.startswith(made) and not any((x / p).exists() for x in places)] == []

    def test_every_name_exists(self):
        names = set(re.findall(r"`(?:iresnet\.)?([A-Za-z_]\w*\.[A-Za-z_][\w.]*)(?:\([^`]*\))?`", self.PROSE))
        assert [name for name in sorted(names) if not self.FILE.search(name) and not self.exists(name)] == []

    def exists(self, name):
        """Whether a dotted name exists, as a setting, in a module or in a class; other libraries' names are skipped."""
        first, *rest = name.split(".")
        if first in GROUPS and rest[0] in {field.name for field in dataclasses.fields(getattr(Experiment(), first))}:
            return True
        owners = [importlib.import_module(f"iresnet.{first}")] if _is_module(f"iresnet.{first}") else []
        owners += _classes().get(first, []) + _classes().get(first.capitalize(), [])
        owners += [getattr(iresnet, first)] if hasattr(iresnet, first) else []
        return not owners or any(_has(owner, rest) for owner in owners)


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _has(owner: object, path: list[str]) -> bool:
    """Whether an attribute can be reached; of a class, also what its instances have."""
    for i, part in enumerate(path):
        found = getattr(owner, part, None)
        if inspect.ismodule(owner) and (found is None or (inspect.isfunction(found) and path[i + 1 :])):
            if not _is_module(f"{owner.__name__}.{part}"):
                return False
            found = sys.modules.get(f"{owner.__name__}.{part}") or importlib.import_module(f"{owner.__name__}.{part}")
        elif inspect.isclass(owner) and found is None:
            return any(part in getattr(c, "__annotations__", {}) or f"self.{part}" in _source(c) for c in owner.__mro__)
        if isinstance(found, property):
            return True  # what it returns is not known here
        owner = found
    return True


def _source(cls: type) -> str:
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):
        return ""


@cache
def _classes() -> dict[str, list[type]]:
    """Every class of the library, by name."""
    found: dict[str, list[type]] = {}
    for info in pkgutil.walk_packages(iresnet.__path__, "iresnet."):
        if "kernels" in info.name or "__main__" in info.name:
            continue
        for name, cls in inspect.getmembers(importlib.import_module(info.name), inspect.isclass):
            if cls.__module__ == info.name:
                found.setdefault(name, []).append(cls)
    return found


class TestFileMap:
    def test_the_layers_are_those_of_the_project(self):
        text = (ROOT / "pyproject.toml").read_text().partition("layers = [")[2]
        layers = re.findall(r'^    "([\w| ]+)",$', text, re.MULTILINE)
        rows = re.findall(r"^\| (`.*?`) \|", DESIGN, re.MULTILINE)
        shown = [re.findall(r"`(\w+)(?:\.py|/)`", row) for row in rows]
        assert shown == [layer.split(" | ") for layer in layers if layer != "__main__"]

    @pytest.mark.parametrize("package", re.findall(r"^- `(\w+)/`:", DESIGN, re.MULTILINE))
    def test_the_files_of_a_package_are_those_that_are_named(self, package):
        line = re.search(rf"^- `{package}/`: (.*?)(?=^- |^\n|\Z)", DESIGN, re.MULTILINE | re.DOTALL)
        named = set(re.findall(r"`(\w+)(?:/|\.toml)?`", line[1]))
        files = {p.stem for p in (ROOT / "iresnet" / package).iterdir() if p.suffix in (".py", ".toml") or p.is_dir()}
        assert {name for name in files - named if not name.startswith("__")} == set()
        module = importlib.import_module(f"iresnet.{package}")
        assert {name for name in named - files if not hasattr(module, name)} == set()


def test_every_test_on_the_map_exists():
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", TEXTS["docs/explanation/paper-map.md"])
    assert [name for name in named if f"def {name}(" not in tests] == []


def test_the_results_of_shipped_models_are_those_in_their_folders():
    assert ship.results() == read(ROOT / "results" / "shipped.json")


def test_every_image_of_the_documentation_is_shown_and_exists():
    shown = {
        (ROOT / name).parent / path for name, text in TEXTS.items() for path in re.findall(r"!\[.*?\]\((.*?)\)", text)
    }
    assert {path.resolve() for path in shown} == set((ROOT / "docs" / "images").iterdir())


def test_every_image_has_a_description():
    assert [name for name, text in TEXTS.items() if "![](" in text] == []


def test_every_link_of_the_readme_leads_to_a_file():
    links = re.findall(r"\]\((?!https?:)([^)#]+)", TEXTS["README.md"])
    assert [link for link in links if not (ROOT / link).exists()] == []


class TestGeneratedParts:
    def test_a_marker_without_matching_rows_is_refused(self):
        page = "<!-- results:table2 model=c=1.9 epochs -->\n<!-- /results -->"
        with pytest.raises(ValueError, match="no row of table2.json has model=c=1.9. Change the marker"):
            tables.render(page, ROOT / "results")

    def test_a_value_does_not_begin_a_line_where_markdown_would_end_the_paragraph(self):
        page = "- An error of\n  <!-- value:table2 paper dataset=cifar10 model=c=0.9 epochs=200 -->?<!-- /value --> %."
        with pytest.raises(ValueError, match="must not begin a line: Markdown would end the paragraph"):
            tables.render(page, ROOT / "results")

    def test_a_value_stands_inside_a_sentence(self):
        text = 'An error of <!-- value:table2 "error %" dataset=cifar10 model=ResNet-164 -->?<!-- /value --> %.'
        assert "-->9.12<!-- /value --> %." in tables.render(text, ROOT / "results")

    def test_a_value_needs_one_row(self):
        with pytest.raises(ValueError, match="a value needs one column and one row of table2.json; got 1 and"):
            tables.render("In <!-- value:table2 epochs dataset=cifar10 --><!-- /value -->", ROOT / "results")

    def test_a_column_can_have_another_heading(self):
        page = '<!-- results:table2 dataset=cifar10 "epochs as passes" -->\n<!-- /results -->'
        assert "| passes |" in tables.render(page, ROOT / "results")

    def test_settings_have_defaults_allowed_values_and_comments(self):
        table = tables.settings_table("network")
        assert '| `activation` | `"elu"` | `elu`, `lipswish`, `maxmin`, `sine`, `relu`, `softplus`, `tanh` |' in table
        assert re.search(r"^\| `lipschitz` \| `0\.9` \| number; in \(0, 1\) \| \w+", table, re.MULTILINE)

    @pytest.mark.parametrize("group", GROUPS)
    def test_every_setting_has_a_comment(self, group):
        assert re.findall(r"^\| `(\w+)` .*\|  \|$", tables.settings_table(group), re.MULTILINE) == []
