"""Damage to files: bytes, text, JSON, TOML and tables. Each function maps the content of a file to damaged content.

`attack.containers` damages the content of archives and checkpoints, `attack.replacements` replaces whole files.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any, TypeAlias

#: From the content of a file to damaged content.
Damage: TypeAlias = Callable[[random.Random, bytes], bytes]

#: Values of unexpected types and sizes.
UNEXPECTED: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 17, 10**9, 2**63, -(2**63) - 1, 10**30, 10**400, 0.5, -0.0, 1e-320, 1e308, -1e308,
    float("nan"), float("inf"), "", "a", "1", "nan", "../../x", "/etc/passwd", "<script>", "=1+1", "é\u202e\x00\n",
    "x" * 10_000, [], {}, [[]], [None], {"": 0}, [1, "a"], [0] * 5000,
)  # fmt: skip

#: Cells of tables and values of settings, as text.
CELLS = (
    "", " ", "nan", "inf", "-inf", "1e400", "1e308", "-1e308", "1e39", "0x10", "1_000", "٣", "１", "None", "true",
    "1,5", '"', "''", "=1+1", "@x", "\x00", "\r", "a\nb", "9" * 5000, "1" * 400, "é", "\u202e", "-", "+", ".", "1e",
    "[1", "{}", "1979-05-27", "[[1]]", '"""', "\\u0000", "[" * 2000,
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ any bytes


def flip(r: random.Random, content: bytes) -> bytes:
    """Flip up to eight bits."""
    changed = bytearray(content or b"\x00")
    for _ in range(r.randint(1, 8)):
        changed[r.randrange(len(changed))] ^= 1 << r.randrange(8)
    return bytes(changed)


def truncate(r: random.Random, content: bytes) -> bytes:
    """Cut off the end or the beginning."""
    at = r.randint(0, len(content))
    return content[:at] if r.random() < 0.8 else content[at:]


def splice(r: random.Random, content: bytes) -> bytes:
    """Copy a piece of the file to another position."""
    a, b = sorted(r.randint(0, len(content)) for _ in range(2))
    at = r.randint(0, len(content))
    return content[:at] + content[a:b] + content[at + (b - a if r.random() < 0.5 else 0) :]


def insert(r: random.Random, content: bytes) -> bytes:
    """Insert bytes, some of which have a meaning in a file format."""
    at, length = r.randint(0, len(content)), r.choice((1, 4, 1000))
    what = r.choice((b"\x00", b"\xff", b"\xfe\xff", b"\xef\xbb\xbf", b"\xc3", b"\n", b'"', b"[", r.randbytes(4)))
    return content[:at] + what * length + content[at:]


def replace(r: random.Random, content: bytes) -> bytes:
    """Replace the whole content."""
    return r.choice(
        (b"", b"\x00" * 100, r.randbytes(300), b"PK\x03\x04", b"\x1f\x8b", b"\x93NUMPY", b"{}", b"\xff\xfe")
    )


def nest_deeply(r: random.Random, content: bytes) -> bytes:
    """Nest brackets more deeply than a recursive parser can follow."""
    return r.choice((b"[" * 100_000, b'{"a":' * 100_000, b"[" * 50_000 + b"]" * 50_000, b"a = " + b"[" * 100_000))


# ----------------------------------------------------------------------------------------------------------------- JSON


def corrupt_json(r: random.Random, content: bytes) -> bytes:
    """Replace, remove, rename or repeat one value of a JSON file."""
    value = json.loads(content)
    for _ in range(r.randint(1, 2)):
        value = _altered(r, value)
    return json.dumps(value).encode()


def _altered(r: random.Random, value: Any) -> Any:
    """The value with one change at a random place."""
    if not isinstance(value, dict | list) or not value or r.random() < 0.15:
        return r.choice(UNEXPECTED)
    value = value.copy()
    keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
    key, chance = r.choice(keys), r.random()
    if chance < 0.1:
        del value[key]
    elif chance < 0.15 and isinstance(value, dict):
        value[r.choice(("", "a", key + "x", "é", "__proto__"))] = value.pop(key)
    elif chance < 0.2 and isinstance(value, list):
        value.extend(value[key : key + 1] * r.choice((1, 1000)))
    else:
        value[key] = _altered(r, value[key])
    return value


def duplicate_json(r: random.Random, content: bytes) -> bytes:
    """Duplicate a key, or the whole value."""
    return content + content if r.random() < 0.5 else content.replace(b"{", b'{"shape": 3, "passed": 1, ', 1)


# ----------------------------------------------------------------------------------------------- lines: TOML and tables


def corrupt_lines(r: random.Random, content: bytes) -> bytes:
    """Remove, repeat, move or join lines."""
    lines = content.splitlines(keepends=True) or [b""]
    for _ in range(r.randint(1, 3)):
        i, way = r.randrange(len(lines)), r.random()
        if way < 0.3 and len(lines) > 1:
            del lines[i]
        elif way < 0.6:
            lines.insert(r.randint(0, len(lines)), lines[i])
        elif way < 0.8:
            lines[i] = lines[i].rstrip(b"\n")
        else:
            lines[i] = lines[i][: r.randint(0, len(lines[i]))] + b"\n"
    return b"".join(lines)


def corrupt_cell(r: random.Random, content: bytes) -> bytes:
    """Replace one cell of a table or one word of a text."""
    text = content.decode(errors="replace")
    places = list(re.finditer(r"[^,;\t\n]+", text))
    return _with(r, text, places, r.choice(CELLS))


def corrupt_setting(r: random.Random, content: bytes) -> bytes:
    """Replace the value or the name of one setting of a TOML file."""
    text = content.decode(errors="replace")
    if r.random() < 0.2:
        return _with(
            r, text, list(re.finditer(r"(?m)^\w+", text)), r.choice(("", "a", "steps", "a.b", "[x]", "a" * 9999))
        )
    strange = (json.dumps(r.choice(UNEXPECTED)), r.choice(CELLS), str(r.choice(UNEXPECTED)))
    return _with(r, text, list(re.finditer(r"(?m)(?<== ).+$", text)), r.choice(strange))


def dotted_keys(r: random.Random, content: bytes) -> bytes:
    """Append a key with very many dots, or very many tables."""
    return content + r.choice(
        (b"\n" + b"a." * 30_000 + b"a = 1\n", b"\n[" + b"a." * 30_000 + b"a]\n", b"\n[[a]]" * 20_000)
    )


def _with(r: random.Random, text: str, places: list[re.Match[str]], what: str) -> bytes:
    start, end = r.choice([place.span() for place in places] or [(0, 0)])
    return (text[:start] + what + text[end:]).encode(errors="surrogatepass")


def many_columns(r: random.Random, content: bytes) -> bytes:
    """A table with very many columns, with different names or all with the same."""
    columns = r.choice((20_000, 200_000))
    names = ",".join(f"c{i}" for i in range(columns)) if r.random() < 0.7 else ",".join("c" for _ in range(columns))
    return f"{names}\n{','.join('1' for _ in range(columns))}\n".encode()


BYTES: tuple[Damage, ...] = (flip, flip, truncate, truncate, splice, insert, replace)
TEXT: tuple[Damage, ...] = (*BYTES, corrupt_lines)
JSON: tuple[Damage, ...] = (*TEXT, nest_deeply, duplicate_json, *[corrupt_json] * 12)
TOML: tuple[Damage, ...] = (*TEXT, nest_deeply, dotted_keys, *[corrupt_setting] * 10)
TABLE: tuple[Damage, ...] = (*TEXT, nest_deeply, many_columns, *[corrupt_cell] * 8)
