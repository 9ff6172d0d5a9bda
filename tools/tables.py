"""Rewrite the tables in README.md and docs/ from results/*.json, so that no number is typed by hand.

What stands between these two lines is made from `results/NAME.json`; without columns, all of them are shown. A word
`key=value` is no column: only rows with that value are shown (`yes` and `no` for booleans), and for `key!=value` only
the others.

    <!-- results:NAME column "column with spaces" key=value ... -->
    <!-- /results -->

`python tools/tables.py` rewrites the pages; with `--check` it changes nothing and exits 1 where one is out of date.
"""

import argparse
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from iresnet.results import cell, markdown_table, read

ROOT = Path(__file__).resolve().parent.parent
OPENING = re.compile(r"^<!-- results:", re.MULTILINE)
SECTION = re.compile(
    r"^(?P<opening><!-- results:(?P<name>[\w.-]+)(?P<columns>.*?) -->)\n(?s:.*?)^(?P<closing><!-- /results -->)$",
    re.MULTILINE,
)


def render(text: str, results: Path) -> str:
    """The page `text` with every marked table made anew from the folder `results`."""
    rendered, pairs = SECTION.subn(lambda section: _section(section, results), text)
    if pairs != (opened := len(OPENING.findall(text))):
        raise ValueError(f"Every '<!-- results:NAME -->' needs its '<!-- /results -->'; got {pairs} pairs of {opened}.")
    return rendered


def _section(section: re.Match[str], results: Path) -> str:
    path = results / f"{section['name']}.json"
    table = f"*`results/{path.name}`: not measured yet.*"
    if path.exists():
        words = shlex.split(section["columns"])
        wanted = dict(word.split("=", 1) for word in words if "=" in word.strip("<>= "))
        rows = [r for r in read(path).rows if all(_fits(r, key, value) for key, value in wanted.items())]
        if wanted and not rows:
            raise ValueError(f"no row of {path.name} has {wanted}. Change the marker, or measure such a row.")
        columns = [word for word in words if word.split("=", 1)[0] not in wanted]
        table = markdown_table(rows, columns or None)
    return f"{section['opening']}\n\n{table}\n\n{section['closing']}"


def _fits(row: dict[str, Any], key: str, value: str) -> bool:
    """Whether a row has this value; for a key that ends with "!", whether it has another."""
    return (cell(row.get(key.removesuffix("!"))) == value) != key.endswith("!")


def stale(root: Path) -> dict[Path, str]:
    """The pages under `root` whose tables are out of date, each with the text it should have."""
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    old = {page: page.read_text(encoding="utf-8") for page in pages if page.exists()}
    new = {page: render(text, root / "results") for page, text in old.items()}
    return {page: text for page, text in new.items() if text != old[page]}


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Rewrite or check every page; the exit status."""
    parser = argparse.ArgumentParser(description="Rewrite the tables in README.md and docs/ from results/*.json.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 where a table is out of date")
    check = parser.parse_args(arguments).check
    pages = stale(root)
    for page, text in pages.items():
        print(f"{page.relative_to(root)}: {'out of date; run `make tables`' if check else 'rewritten'}")
        if not check:
            page.write_text(text, encoding="utf-8")
    return 1 if check and pages else 0


if __name__ == "__main__":
    sys.exit(main())
