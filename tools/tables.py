"""Write the generated parts of README.md and docs/, so that no number and no setting is typed by hand.

What stands between an opening and a closing marker is generated:

    <!-- results:NAME column "column as heading" key=value ... -->      a table of rows of results/NAME.json
    <!-- /results -->
    <!-- settings:network -->                                           a table of the fields of a group of settings
    <!-- /settings -->
    <!-- presets:flows -->                                              a table of the presets in presets/flows.toml
    <!-- /presets -->
    <!-- scaling:weak -->                                               a table that tools/scaling.py computes
    <!-- /scaling -->
    ... <!-- value:NAME "column" key=value ... -->5.83<!-- /value --> ...  one number inside a sentence

Without columns, a results table shows all of them. `key=value` selects the rows with that value (`yes` and `no` for
booleans), and `key!=value` the other rows. The column `seeds` is the number of seeds of a row, else of its run.

`python -m tools.tables` rewrites the pages; with `--check` it changes nothing and exits with 1 if one is out of date.
"""

import argparse
import ast
import dataclasses
import inspect
import re
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from iresnet import config
from iresnet.allowed import Rule
from iresnet.presets import PRESETS, Experiment
from iresnet.presets.reading import GROUPS
from iresnet.results import cell, markdown_table, read
from tools.comments import comment_above
from tools.scaling import scaling_table

ROOT = Path(__file__).resolve().parent.parent
OPENING = re.compile(r"<!-- (?:results|settings|presets|scaling|value):")
SECTION = re.compile(
    r"^(?P<opening><!-- (?P<kind>results|settings|presets|scaling):(?P<name>[\w.-]+)(?P<words>.*?) -->)\n"
    r"(?s:.*?)^(?P<closing><!-- /(?P=kind) -->)$",
    re.MULTILINE,
)
AT_LINE_START = re.compile(r"^\s*<!-- value:", re.MULTILINE)  # there Markdown ends the paragraph
VALUE = re.compile(r"(?P<opening><!-- value:(?P<name>[\w.-]+)(?P<words>.*?) -->).*?(?P<closing><!-- /value -->)")


def render(text: str, results: Path) -> str:
    """The page `text` with its generated parts; `results` is the folder of the results files."""
    if AT_LINE_START.search(text):
        raise ValueError("A '<!-- value:' must not begin a line: Markdown would end the paragraph. Move a word there.")
    opened = len(OPENING.findall(text))
    text, tables = SECTION.subn(lambda section: _section(section, results), text)
    text, values = VALUE.subn(lambda found: _value(found, results), text)
    if tables + values != opened:
        raise ValueError(
            f"Every '<!-- results:NAME -->' needs its '<!-- /results -->'; got {tables + values} pairs of {opened}."
        )
    return text


def _section(section: re.Match[str], results: Path) -> str:
    name, words = section["name"], shlex.split(section["words"])
    if section["kind"] == "settings":
        table = settings_table(name)
    elif section["kind"] == "presets":
        table = presets_table(name)
    elif section["kind"] == "scaling":
        table = scaling_table(name, results)
    else:
        table = results_table(results / f"{name}.json", words)
    return f"{section['opening']}\n\n{table}\n\n{section['closing']}"


def _value(found: re.Match[str], results: Path) -> str:
    """One number of a results file, inside a sentence."""
    path = results / f"{found['name']}.json"
    columns, rows = _select(path, shlex.split(found["words"]))
    if len(rows) != 1 or len(columns) != 1:
        raise ValueError(f"a value needs one column and one row of {path.name}; got {len(columns)} and {len(rows)}.")
    return f"{found['opening']}{cell(rows[0][columns[0]])}{found['closing']}"


def results_table(path: Path, words: list[str]) -> str:
    """A table of rows of a results file; `words` are those of its marker."""
    if not path.exists():
        return f"*`results/{path.name}`: not measured yet.*"
    columns, rows = _select(path, words)
    headings = {name: heading or name for name, _, heading in (column.partition(" as ") for column in columns)}
    if any(name != heading for name, heading in headings.items()):
        rows = [{headings.get(key, key): value for key, value in row.items()} for row in rows]
    return markdown_table(rows, list(headings.values()) or None)


def _select(path: Path, words: list[str]) -> tuple[list[str], list[dict[str, Any]]]:
    """The columns that a marker names, and the rows that it selects."""
    wanted = [word for word in words if "=" in word.strip("<>= ")]
    found = read(path)
    rows = [r for r in found.rows if all(_fits(r, *word.split("=", 1)) for word in wanted)]
    if wanted and not rows:
        raise ValueError(f"no row of {path.name} has {' '.join(wanted)}. Change the marker, or measure such a row.")
    columns = [word for word in words if word not in wanted]
    if "seeds" in columns:
        rows = [{"seeds": len(found.runs[row["run"]].get("seeds", [])), **row} for row in rows]
    return columns, rows


def _fits(row: dict[str, Any], key: str, value: str) -> bool:
    """Whether a row has this value; for a key that ends with "!", whether it has another."""
    return (cell(row.get(key.removesuffix("!"))) == value) != key.endswith("!")


def settings_table(group: str) -> str:
    """A table of the fields of a group of settings: default, allowed values, and the comment above the field."""
    settings = getattr(Experiment(), group)
    kinds, comments = get_type_hints(type(settings), include_extras=True), _comments(type(settings))
    defaults = dict(line.split(" = ", 1) for line in config.dump(settings).splitlines())
    lines = ["| key | default | allowed | meaning |", "| :-- | :-- | :-- | :-- |"]
    for field in dataclasses.fields(settings):
        allowed = _allowed(kinds[field.name]).replace("|", "\\|")
        lines.append(f"| `{field.name}` | `{defaults[field.name]}` | {allowed} | {comments[field.name]} |")
    return "\n".join(lines)


def _comments(cls: type) -> dict[str, str]:
    """The `#:` comment above every field of a class."""
    source = inspect.cleandoc(inspect.getsource(cls))
    lines, fields = source.splitlines(), ast.parse(source).body[0]
    assert isinstance(fields, ast.ClassDef)
    return {
        node.target.id: comment_above(lines[: node.lineno - 1]).replace("|", "\\|")
        for node in fields.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def _allowed(kind: Any) -> str:
    """What a field may be, in words. Limits that only catch slips of the hand ("at most 1,000") are left out."""
    if get_origin(kind) is Literal:
        return ", ".join(f"`{word}`" for word in get_args(kind))
    if get_origin(kind) is Annotated:
        inner, *rules = get_args(kind)
        words = [rule.words for rule in rules if isinstance(rule, Rule)]
        told = [
            re.sub(r"^(.*(?=in [\[(])|must be |must lie |must |is |are )", "", w) for w in words if " at most " not in w
        ]
        return "; ".join(filter(None, [_allowed(inner), *told])).replace("not be ", "not ")
    if get_origin(kind) is tuple:
        return "list of numbers"
    return {int: "integer", float: "number", int | float: "fraction, or count", str: "text"}.get(kind, "")


def presets_table(group: str) -> str:
    """A table of the presets of one file: data, objective, and what each is."""
    found = [(name, PRESETS[name]) for name in GROUPS[group] if name in PRESETS]
    lines = [f"| `{name}` | {e.data.source} | {e.objective.kind} | {cell(e.about)} |" for name, e in found]
    return "\n".join(["| preset | data | objective | network |", "| :-- | :-- | :-- | :-- |", *lines])


def stale(root: Path) -> dict[Path, str]:
    """The pages under `root` that are out of date, each with the text it should have."""
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    old = {page: page.read_text(encoding="utf-8") for page in pages if page.exists()}
    new = {page: render(text, root / "results") for page, text in old.items()}
    return {page: text for page, text in new.items() if text != old[page]}


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Rewrite or check every page; the exit status."""
    parser = argparse.ArgumentParser(description="Write the generated parts of README.md and docs/.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a page is out of date")
    check = parser.parse_args(arguments).check
    pages = stale(root)
    for page, text in pages.items():
        print(f"{page.relative_to(root)}: {'out of date; run `make tables`' if check else 'rewritten'}")
        if not check:
            page.write_text(text, encoding="utf-8")
    return 1 if check and pages else 0


if __name__ == "__main__":
    sys.exit(main())
