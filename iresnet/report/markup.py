"""HTML that is balanced and escaped by construction.

`tag` escapes what it is given unless it is `Markup`, which only functions here and literals of this package make. So a
text from a user, whatever it holds, is shown and never read as HTML.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

VOID = {"img", "link", "meta", "br", "col"}


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def escape(content: object) -> Markup:
    """The content as HTML text; Markup stays as it is."""
    return content if isinstance(content, Markup) else Markup(html.escape(str(content)))


def tag(element: str, *content: object, **attributes: object) -> Markup:
    """One element. An attribute that is None or False is left out; `class_` is class, `aria_label` is aria-label.

    >>> tag("p", "a < b", tag("b", "!"), class_="note", id=None)
    '<p class="note">a &lt; b<b>!</b></p>'
    """
    head = element
    for name, value in attributes.items():
        if value is True:
            head += f" {name.rstrip('_')}"
        elif value is not None and value is not False:
            head += f' {name.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
    if element in VOID:
        return Markup(f"<{head}>")
    return Markup(f"<{head}>{joined(content)}</{element}>")


def joined(parts: Iterable[object], between: str = "") -> Markup:
    """Parts, one after another."""
    return Markup(between.join(escape(part) for part in parts))


def figure(content: object, caption: object = "", *, kind: str | None = None) -> Markup:
    """Something to look at, and the words under it."""
    below = tag("figcaption", caption) if caption else Markup("")
    return tag("figure", content, below, class_=kind)


def table(caption: str, head: Sequence[object], rows: Sequence[Sequence[object]], *, kind: str | None = None) -> Markup:
    """A table whose first column names the rows. It scrolls by itself where it is wider than the page."""
    top = tag("tr", joined(tag("th", cell, scope="col") for cell in head))
    body = joined(
        tag("tr", tag("th", row[0], scope="row"), joined(tag("td", cell) for cell in row[1:])) for row in rows
    )
    inner = tag("table", tag("caption", caption), tag("thead", top), tag("tbody", body), class_=kind)
    return scroller(inner, caption)


def scroller(content: object, name: str) -> Markup:
    """A frame that scrolls sideways, also by keyboard, when its content is too wide."""
    return tag("div", content, class_="scroll", tabindex="0", role="region", aria_label=name)


def more(summary: object, content: object) -> Markup:
    """Content that is there when asked for."""
    return tag("details", tag("summary", summary), content)


def pairs(items: Iterable[tuple[object, object]], *, kind: str | None = None) -> Markup:
    """Terms and what they are."""
    rows = joined(tag("div", tag("dt", term), tag("dd", content)) for term, content in items)
    return tag("dl", rows, class_=kind)
