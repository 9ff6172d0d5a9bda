"""Run the commands that pages show, and write what they print into them: python -m tools.console [--check] PAGE ...

A console block after the line `<!-- console -->` is generated: its commands run in order, in one empty folder per page,
after the page's Python snippets above them, and the lines below each command are what it printed, wrapped. A text block
after `<!-- file:NAME -->` is written to that file first.

With `--check` nothing is rewritten; it exits with 1 if a page shows other words. Numbers are not compared: they depend
on the machine.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PART = re.compile(
    r"^```python\n(?P<snippet>.*?)^```$|^<!-- file:(?P<file>[\w.-]+) -->\n\n?```text\n(?P<content>.*?)^```$"
    r"|^(?P<opening><!-- console -->\n\n?```console\n)(?P<console>.*?)(?P<closing>^```)$",
    re.MULTILINE | re.DOTALL,
)
COMMAND = re.compile(r"^\$ (?:.*\\\n)*.*\n", re.MULTILINE)
NUMBER = re.compile(r"[-+]?\b\d(?:[\d.,]*\d)?(?:e[-+]?\d+)?|\binf\b")
BAR = re.compile("[━╸╺]+")
WIDTH = 78


def render(text: str, folder: Path) -> str:
    """Return a page with the outputs of its commands, run in a folder."""
    names: dict[str, object] = {}

    def part(found: re.Match[str]) -> str:
        if found["snippet"] is not None:
            _in_folder(found["snippet"], names, folder)
        elif found["file"] is not None:
            (folder / found["file"]).write_text(found["content"], encoding="utf-8")
        else:
            commands = COMMAND.findall(found["console"])
            return found["opening"] + "".join(c + output(c.removeprefix("$ "), folder) for c in commands) + "```"
        return found[0]

    return PART.sub(part, text)


def output(command: str, folder: Path) -> str:
    """Return what a command prints, in lines of at most `WIDTH` characters where they have spaces."""
    script = f'iresnet() {{ "{sys.executable}" -m iresnet "$@"; }}\n{command}'
    wanted = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "80", "NO_COLOR": "1", "MPLBACKEND": "Agg"}
    made = subprocess.run(
        ["bash", "-c", script], cwd=folder, env={**os.environ, **wanted}, text=True, check=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return "".join(f"{_wrapped(line)}\n" for line in made.stdout.splitlines())


def without_numbers(text: str) -> str:
    """Return the words of a text, without progress bars, for comparing outputs of different machines."""
    return " ".join(BAR.sub("", NUMBER.sub("#", text)).split())


def _wrapped(line: str) -> str:
    return textwrap.fill(line, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _in_folder(snippet: str, names: dict[str, object], folder: Path) -> None:
    before = Path.cwd()
    os.chdir(folder)
    try:
        exec(compile(snippet, "<snippet>", "exec"), names)
    finally:
        os.chdir(before)


def main(arguments: list[str] | None = None) -> int:
    """Rewrite or check pages; the exit status."""
    parser = argparse.ArgumentParser(description="Write the outputs of the commands that pages show.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a page shows other words")
    parser.add_argument("pages", nargs="+", type=Path)
    options, wrong = parser.parse_args(arguments), 0
    for page in options.pages:
        old = page.read_text(encoding="utf-8")
        with tempfile.TemporaryDirectory() as folder:
            new = render(old, Path(folder))
        if options.check:
            wrong += without_numbers(new) != without_numbers(old)
        else:
            page.write_text(new, encoding="utf-8")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
