"""Words for messages: near, short, and harmless."""

import time

import numpy as np
import pytest

from iresnet.spelling import (
    CONTROLS,
    at_least,
    first_line,
    hint,
    listed,
    nearest,
    parts_hint,
    printable,
    quoted,
    shorten,
)


def deep(levels):
    made: list = []
    for _ in range(levels):
        made = [made]
    return made


@pytest.mark.parametrize("value", [2.0, 5.5, "2", None, (2,)], ids=str)
def test_a_number_of_things_is_whole(value):
    """Trap: 5.5 terms were taken, and torch's own message about 2.0 channels names no argument."""
    with pytest.raises(ValueError, match="^terms must be a whole number; got "):
        at_least(1, terms=value)
    at_least(1, terms=np.int64(2))


class TestNearest:
    def test_a_list_without_an_end(self):
        begin = time.process_time()
        assert nearest("kolumn7", (f"column{i}" for i in range(10**6))) == " Did you mean 'column7'?"
        assert nearest(200_000 * "a", ["a"]) == ""
        assert nearest("a", [200_000 * "a"]) == ""
        assert nearest("a" * 198 + "b", ["a" * 199 for _ in range(10**5)])
        assert time.process_time() - begin < 5

    def test_what_is_listed_is_short(self):
        words = [f"{i}{100_000 * 'a'}" for i in range(100)]
        assert len(hint("zebra", words)) < 24 * 85
        assert hint("zebra", words).endswith(", …")
        assert len(parts_hint(50_000 * "z-", ["toy-glow"], "iresnet presets")) < 100


class TestQuoted:
    @pytest.mark.parametrize(
        "value", ["a", "it's", 3, -1.5, True, None, [1, 2, 3], (1,), {"x": 1}, {"a": [1, {"b": "c"}]}, 2**100, "\x1b"]
    )
    def test_short_values_are_as_python_writes_them(self, value):
        assert quoted(value) == repr(value)

    @pytest.mark.parametrize(
        "value",
        [10_000 * "a", deep(10_000), [*range(10_000)], {i: i for i in range(999)}, 10**5000, -(1 << 10**6)],
        ids=str.split("text deep list table number bits"),
    )
    def test_others_are_cut(self, value):
        assert len(quoted(value)) <= 80

    def test_names(self):
        assert shorten(80 * "a") == 80 * "a"
        assert len(shorten(81 * "a")) == 80
        assert listed(["a", "b"]) == "a, b"
        assert listed(["a", "b", "c"], 2) == "a, b, …"
        assert len(listed(1000 * [1000 * "a"])) < 8 * 83

    def test_reasons(self):
        assert first_line(ValueError("one\ntwo")) == "one"
        assert first_line(MemoryError()) == "MemoryError"


class TestPrintable:
    def test_every_control_character(self):
        text = "".join(map(chr, range(0x100))) + "\u202e\u2066\u2028\ud800\udfff"
        assert not CONTROLS.search(printable(text))
        assert printable("\x1b[31m\x9b\x07\r\n\t\udce9") == r"\x1b[31m\x9b\x07\r\n\t\udce9"
        printable(text).encode()

    def test_other_text_stays(self):
        text = "größer 東京 ± … [a] :b: \\x1b '=1' 🙂"
        assert printable(text) == text
        assert printable("a\nb\x1b", lines=True) == "a\nb\\x1b"
