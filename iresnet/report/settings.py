"""Settings: configuration, environment of the run, and further plots."""

from __future__ import annotations

from typing import Any

from ..plots import raster
from .markup import Markup, figure, joined, pairs, scroller, tag
from .material import Material
from .tiles import picture
from .words import duration

PICTURES, WIDTH = 4, 1400
BUDGET = 250_000  # bytes of all pictures together


def pictures(material: Material) -> Markup:
    """Embed further plots, reduced in size."""
    chosen = material.pictures[:PICTURES]
    frames = []
    for title, path, caption in chosen:
        content, size = _reduced(path, BUDGET // len(chosen))
        words = joined([tag("b", title), f". {caption}" if caption else ""])
        frames.append(figure(picture(content, title, size=size), words, kind="picture"))
    return joined(frames)


def _reduced(path: Any, budget: int) -> tuple[bytes, tuple[int, int]]:
    """The largest of a few sizes that keeps the budget, else the smallest."""
    for width in (WIDTH, 1000, 700, 480):
        content, size = raster.shrink_png(path, width)
        if len(content) <= budget:
            break
    return content, size


def settings(material: Material) -> Markup:
    """Render the configuration and the environment of the run."""
    facts = [(name, _words(name, value)) for name, value in material.environment.items() if value not in (None, {}, [])]
    facts.append(("parameters", f"{material.parameters:,}"))
    if material.sha256:
        facts.append(("SHA-256 of the model", tag("code", material.sha256)))
    content = [pairs(dict(facts).items(), kind="facts-list")]
    if material.config.strip():
        content.append(tag("h3", "Configuration"))
        content.append(scroller(tag("pre", tag("code", material.config.strip())), "Configuration"))
    return joined(content)


def _words(name: str, value: Any) -> object:
    if name == "command":
        return tag("code", value)
    if name == "seconds" and isinstance(value, int | float):
        return f"{value:,.1f} ({duration(value)})" if value >= 60 else f"{value:.1f}"
    if isinstance(value, dict):
        return ", ".join(f"{k} {_words(k, v)}" for k, v in value.items() if v is not None)
    if isinstance(value, list | tuple):
        return ", ".join(str(_words("", v)) for v in value)
    return str(value)
