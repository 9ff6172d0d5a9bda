"""Read `#:` comments, which document the attribute below them; `tools/tables.py` and `tools/docstrings.py` use this."""


def comment_above(lines: list[str]) -> str:
    """The `#:` comment at the end of the given lines, as one paragraph; empty if there is none."""
    found: list[str] = []
    for line in reversed(lines):
        if not (text := line.strip()).startswith("#:"):
            break
        found.insert(0, text[2:].strip())
    return " ".join(found)
