"""A griffe extension for the API reference: docstrings as they are written here become Markdown.

- A `#:` comment above a field documents it; mkdocstrings reads docstrings only.
- Doctests have no heading, and Markdown would take them for quotations: they become code.
- A paragraph of aligned columns, a term and what it means, becomes a table.
"""

import re
from typing import Any

from griffe import Attribute, Docstring, Extension, Module, Object

from tools.comments import comment_above

#: A doctest: from the first prompt to the next empty line.
DOCTEST = re.compile(r"^>>> .*\n?(?:^(?!\s*$).*\n?)*", re.MULTILINE)


#: A line of aligned columns: a term, at least two spaces, and what it means.
COLUMNS = re.compile(r"^(\S(?:.*?\S)?) {2,}(\S.*)$")


class Comments(Extension):  # type: ignore[misc]  # griffe is installed for the documentation only
    """Use `#:` comments as docstrings, and show doctests as code and columns as tables."""

    def on_attribute(self, *, attr: Attribute, **_: Any) -> None:
        """Give an attribute without a docstring the comment above it."""
        if attr.docstring is None and attr.lineno:
            lines = attr.lines_collection[attr.filepath][: attr.lineno - 1]
            attr.docstring = Docstring(text, parent=attr) if (text := comment_above(lines)) else None

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        """Show constants that a package exports even without a comment: their name and value say enough."""
        for module in [pkg, *pkg.modules.values()]:
            for name in map(str, module.exports or []):
                found = module.members.get(name.strip("'"))
                found = found.final_target if found is not None and found.is_alias else found
                if found is not None and found.is_attribute and found.docstring is None:
                    found.docstring = Docstring("&nbsp;", parent=found)

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Turn doctests and aligned columns into Markdown."""
        if obj.docstring is not None:
            text = DOCTEST.sub(lambda m: f"```pycon\n{m[0].rstrip()}\n```\n", obj.docstring.value)
            obj.docstring.value = "\n\n".join(as_table(paragraph) for paragraph in text.split("\n\n"))


def as_table(paragraph: str) -> str:
    """A paragraph of aligned columns as a Markdown table; any other paragraph as it is."""
    rows: list[list[str]] = []
    for line in paragraph.splitlines():
        if found := COLUMNS.match(line):
            rows.append([found[1], found[2]])
        elif rows and line.startswith("    "):
            rows[-1][1] += " " + line.strip()
        else:
            return paragraph
    if len(rows) < 2:
        return paragraph
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(["| | |", "| :-- | :-- |", *(f"| {term} | {text} |" for term, text in cells)])
