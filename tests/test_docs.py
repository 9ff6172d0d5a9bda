"""What the README and the documentation show runs as it is shown, and what they list is what there is."""

import inspect
import re
import shlex
from pathlib import Path

import pytest
import typer.main

import iresnet
from iresnet import config
from iresnet.cli import app
from iresnet.presets import Experiment
from iresnet.results import read
from tools import ship, tables

ROOT = Path(__file__).resolve().parent.parent
TEXTS = {p.relative_to(ROOT).as_posix(): p.read_text() for p in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))}
PAGES = sorted(name for name, text in TEXTS.items() if "```python" in text)
CONSOLE = "".join(TEXTS.values()).replace("\\\n", " ")  # a line that ends in a backslash goes on
COMMANDS = sorted(set(re.findall(r"^ *\$ (iresnet .*)$", CONSOLE, re.MULTILINE)))
SIGNATURES = re.findall(r"`([\w.]+)\(([^`]*)\)`", "".join(re.findall(r"^- .*$", TEXTS["docs/api.md"], re.MULTILINE)))


@pytest.mark.parametrize("page", PAGES)
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


@pytest.mark.parametrize("table", ["data", "network", "objective", "training", "acceleration"])
def test_settings_are_listed_with_their_defaults(table):
    section = TEXTS["docs/guide/train.md"].partition(f"\n### {table}\n")[2].partition("\n### ")[0]
    listed = re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", section, re.MULTILINE)
    assert [f"{name} = {default}" for name, default in listed] == config.dump(getattr(Experiment(), table)).splitlines()


def test_the_reference_names_everything():
    text = TEXTS["docs/api.md"]
    assert [name for name in iresnet.__all__ if not re.search(rf"`{name}\b", text)] == ["__version__"]


@pytest.mark.parametrize(("name", "arguments"), SIGNATURES, ids=[name for name, _ in SIGNATURES])
def test_the_reference_has_the_signatures_of_the_code(name, arguments):
    found: object = iresnet
    for part in name.split("."):
        if inspect.ismodule(found) and not hasattr(found, part):
            found = __import__(f"{found.__name__}.{part}", fromlist=["_"])
        found = getattr(found, part)
    if arguments == "...":
        return
    plain = re.sub(r"\([^()]*\)|'[^']*'", "", arguments)  # commas inside a default separate nothing
    listed = [a.partition("=")[0].strip() for a in plain.split(",") if not a.strip().startswith("*")]
    parameters = inspect.signature(found).parameters.values()
    assert [n for n in listed if n] == [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def test_the_layers_are_those_of_the_project():
    layers = re.findall(
        r'^    "([\w| ]+)",$', (ROOT / "pyproject.toml").read_text().partition("layers = [")[2], re.MULTILINE
    )
    rows = re.findall(r"^\| (`.*?`) \|", TEXTS["docs/design.md"], re.MULTILINE)
    shown = [re.findall(r"`(\w+)(?:\.py|/)`", row) for row in rows]
    assert shown == [layer.split(" | ") for layer in layers if layer != "__main__"]


def test_every_test_on_the_map_exists():
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", TEXTS["docs/paper-map.md"])
    assert [name for name in named if f"def {name}(" not in tests] == []


def test_the_results_of_shipped_models_are_those_in_their_folders():
    assert ship.results() == read(ROOT / "results" / "shipped.json")


def test_every_picture_of_the_documentation_is_shown_and_exists():
    shown = {
        (ROOT / name).parent / path for name, text in TEXTS.items() for path in re.findall(r"!\[.*?\]\((.*?)\)", text)
    }
    assert {path.resolve() for path in shown} == set((ROOT / "docs" / "images").iterdir())


def test_a_marker_for_rows_that_there_are_not_is_refused():
    page = "<!-- results:table2 model=c=1.9 epochs -->\n<!-- /results -->"
    with pytest.raises(ValueError, match="no row of table2.json has {'model': 'c=1.9'}. Change the marker"):
        tables.render(page, ROOT / "results")
