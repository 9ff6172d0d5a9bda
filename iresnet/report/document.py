"""The page: head, sections that have content, foot; and the file, written atomically."""

from __future__ import annotations

from pathlib import Path

from .. import atomic
from ..models import ORIGINS
from .anomalies import anomalies
from .contents import contents
from .curves import training
from .inverse import reconstructions
from .markup import Markup, joined, tag
from .masthead import kind, masthead
from .material import Material
from .proofs import certificate, singular_values
from .samples import interpolation, samples
from .scores import scores
from .settings import pictures, settings

PAPER = "https://proceedings.mlr.press/v97/behrmann19a.html"

#: Title of each section -> one sentence about it, and the function that renders it.
SECTIONS = {
    "Data": ("The table: source, rows, and columns with their kinds.", contents),
    "Training": ("Training and validation curves.", training),
    "Test metrics": ("Each metric with its error bar.", scores),
    "Samples": ("Codes drawn from the base distribution and decoded by the inverse network.", samples),
    "Reconstructions": (
        "Inputs encoded and decoded again, with proven, computed and measured errors.",
        reconstructions,
    ),
    "Interpolation": ("Straight lines between two codes, decoded by the inverse network.", interpolation),
    "Anomalies": ("Anomaly scores, relative to validation data.", anomalies),
    "Plots": ("Further plots of this run.", pictures),
    "Singular values": (
        "The spectrum of each constrained layer, its coefficient and its proven bound.",
        singular_values,
    ),
    "Certificate": ("A proven upper bound on the Lipschitz constant of every block.", certificate),
    "Settings": ("Everything needed to reproduce this run.", settings),
}


#: The order of the sections for a table: the data, how well they are fitted, what is unusual; then the inverse.
OF_TABLES = (
    "Data",
    "Test metrics",
    "Training",
    "Samples",
    "Anomalies",
    "Plots",
    "Reconstructions",
    "Interpolation",
    "Certificate",
    "Singular values",
    "Settings",
)


def page(material: Material) -> str:
    """Return the report as one self-contained HTML document."""
    order = SECTIONS if material.is_image else OF_TABLES
    made = {title: SECTIONS[title][1](material) for title in order}
    shown = {title: content for title, content in made.items() if content}
    body = [
        masthead(material),
        tag("nav", joined(tag("a", t, href=f"#{_slug(t)}") for t in shown), aria_label="Sections"),
        tag("main", joined(_section(title, content) for title, content in shown.items())),
        _foot(material),
    ]
    return f"<!doctype html>\n{tag('html', _head(material), tag('body', *body), lang='en')}\n"


def write(material: Material, path: str | Path) -> Path:
    """Write the page to `path` atomically: a reader sees the old file or the new one, never a part."""
    return atomic.write(path, page(material))


def _head(material: Material) -> Markup:
    style = Path(__file__).with_name("style.css").read_text(encoding="utf-8")
    # With this policy the browser refuses to fetch anything.
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{material.name}: {'an' if kind(material)[0] in 'ai' else 'a'} {kind(material)}"),
        tag("link", rel="icon", href="data:,"),
        tag("style", Markup(style)),
    )


def _section(title: str, content: Markup) -> Markup:
    heading = tag("div", tag("h2", title), tag("p", SECTIONS[title][0]), class_="side")
    return tag("section", heading, tag("div", content, class_="content"), id=_slug(title))


def _slug(title: str) -> str:
    return title.lower().replace(" ", "-")


def _foot(material: Material) -> Markup:
    link = tag("a", "Invertible Residual Networks", href=PAPER)
    paper = ["Behrmann, Grathwohl, Chen, Duvenaud and Jacobsen, ", link, ", ICML 2019. "]
    if material.family in ORIGINS:
        return tag("footer", tag("p", f"Method: {ORIGINS[material.family][1]}. Compared with in ", *paper))
    return tag("footer", tag("p", "Method: ", *paper, "Theorems and lemmas are numbered as there."))
