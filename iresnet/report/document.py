"""The page: a head, the sections that have material, a foot; and the file, written whole or not at all."""

from __future__ import annotations

from pathlib import Path

from .. import atomic
from ..models import ORIGINS
from .anomalies import anomalies
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

#: The title of each section, what it shows in a sentence, and the function that makes it.
SECTIONS = {
    "Training": ("What was minimised, and how it went on rows that were not trained on.", training),
    "Test figures": ("Each number beside its error bar, and what the bar is.", scores),
    "Samples": ("Codes drawn from the base, sent through the inverse.", samples),
    "Reconstructions": ("From row to code and back. Three numbers, which say different things.", reconstructions),
    "Interpolation": ("Straight lines between two codes, sent through the inverse.", interpolation),
    "Anomalies": ("The likelihood of rows that were changed, among those of held-out rows.", anomalies),
    "Pictures": ("What was drawn beside this page.", pictures),
    "Singular values": ("What the constraint does to each layer, and what is proven of it.", singular_values),
    "Certificate": ("An upper bound for every block, computed from its weights.", certificate),
    "Settings": ("What it takes to make this network again.", settings),
}


def page(material: Material) -> str:
    """The report as one HTML document that needs nothing else."""
    made = {title: make(material) for title, (_, make) in SECTIONS.items()}
    shown = {title: content for title, content in made.items() if content}
    body = [
        masthead(material),
        tag("nav", joined(tag("a", t, href=f"#{_slug(t)}") for t in shown), aria_label="Sections"),
        tag("main", joined(_section(title, content) for title, content in shown.items())),
        _foot(material),
    ]
    return f"<!doctype html>\n{tag('html', _head(material), tag('body', *body), lang='en')}\n"


def write(material: Material, path: str | Path) -> Path:
    """Write the page to `path`; a reader sees the old file or the new one, never a part."""
    return atomic.write(path, page(material))


def _head(material: Material) -> Markup:
    style = Path(__file__).with_name("style.css").read_text(encoding="utf-8")
    # The policy makes the promise to fetch nothing one that the browser keeps.
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
