"""A griffe extension for the API reference: `#:` comments document attributes, and doctests are shown as code.

mkdocstrings reads docstrings only. In this project a comment above a field documents a setting, and examples are
doctests without a heading, which Markdown would take for quotations.
"""

import re
from typing import Any

from griffe import Attribute, Docstring, Extension, Object

from tools.comments import comment_above

#: A doctest: from the first prompt to the next empty line.
DOCTEST = re.compile(r"^>>> .*\n?(?:^(?!\s*$).*\n?)*", re.MULTILINE)


class Comments(Extension):  # type: ignore[misc]  # griffe is installed for the documentation only
    """Use `#:` comments as docstrings, and fence doctests."""

    def on_attribute(self, *, attr: Attribute, **_: Any) -> None:
        """Give an attribute without a docstring the comment above it.

        A constant of a module is shown even without a comment: its name and value say enough.
        """
        if attr.docstring is None and attr.lineno:
            text = comment_above(attr.lines_collection[attr.filepath][: attr.lineno - 1])
            if text or (attr.parent.is_module and not attr.name.startswith("_")):
                attr.docstring = Docstring(text or "&nbsp;", parent=attr)

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Show doctests as code."""
        if obj.docstring is not None and ">>> " in obj.docstring.value:
            obj.docstring.value = DOCTEST.sub(lambda m: f"```pycon\n{m[0].rstrip()}\n```\n", obj.docstring.value)
