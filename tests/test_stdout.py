"""Standard output that fails: nothing that was computed is lost, and there is one sentence at most."""

import errno
import io
import json
import os
import sys
import warnings

import pytest

from iresnet import cli
from iresnet.cli.stdout import PLAIN, Steady, plain_warnings, steady
from tests.runs import copy_of, trained


class Failing(io.RawIOBase):
    """A file that takes so many bytes, and then no more."""

    def __init__(self, number, room=0):
        super().__init__()
        self.number, self.room, self.content = number, room, b""

    def writable(self):
        return True

    def write(self, data):
        if self.room < len(data):
            raise OSError(self.number, os.strerror(self.number))
        self.room -= len(data)
        self.content += bytes(data)
        return len(data)


@pytest.fixture
def folder(tmp_path):
    return copy_of(trained("points-density"), tmp_path / "run")


def run(monkeypatch, capsys, stream, *words):
    """The exit code, and what is said on standard error, where standard output is this stream."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        with pytest.raises(SystemExit) as stop:
            cli.main([str(w) for w in words])
        assert sys.stdout is stream
    return stop.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "room", "code", "said"),
    [
        (errno.ENOSPC, 0, 2, "iresnet: cannot print: No space left on device. Saved files are complete.\n"),
        (errno.ENOSPC, 20, 2, "iresnet: cannot print: No space left on device. Saved files are complete.\n"),
        (errno.EPIPE, 0, 1, ""),
    ],
)
def test_a_full_disk_or_a_reader_that_has_gone_loses_nothing(monkeypatch, capsys, folder, number, room, code, said):
    stream = io.TextIOWrapper(Failing(number, room), encoding="utf-8", write_through=True)
    words = ("evaluate", folder, "--rows", 20, "--draws", 2, "--protocol", "--limit", 1)
    assert run(monkeypatch, capsys, stream, *words) == (code, said)
    kept = json.loads((folder / "evaluation.json").read_text())
    assert {"density", "inverse", "protocol"} <= kept.keys()


def test_standard_output_that_is_closed(monkeypatch, capsys, folder):
    assert run(monkeypatch, capsys, None, "evaluate", folder, "--rows", 20, "--draws", 2) == (0, "")
    assert "density" in json.loads((folder / "evaluation.json").read_text())


def test_a_terminal_that_knows_ascii_alone(monkeypatch, capsys, folder):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    code, said = run(monkeypatch, capsys, stream, "evaluate", folder, "--rows", 20, "--draws", 2)
    assert (code, said) == (0, "")
    assert "nats (+/- " in raw.getvalue().decode("ascii")
    assert "density" in json.loads((folder / "evaluation.json").read_text())


def test_figures_are_kept_before_they_are_said(monkeypatch, capsys, folder):
    """Whatever goes wrong with the printing: the file is there at the first line."""
    seen = []

    class Watching(io.StringIO):
        def write(self, text):
            seen.append((folder / "evaluation.json").is_file())
            return super().write(text)

    assert run(monkeypatch, capsys, Watching(), "evaluate", folder, "--rows", 20, "--draws", 2)[0] == 0
    assert seen
    assert all(seen)


def test_a_failed_check_keeps_its_exit_code(monkeypatch, capsys):
    stream = io.TextIOWrapper(Failing(errno.ENOSPC), encoding="utf-8", write_through=True)
    code, said = run(monkeypatch, capsys, stream, "evaluate", "nowhere")
    assert code == 2
    assert "nowhere does not exist" in said


def test_characters_have_a_plain_form():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        with steady():
            print("".join(PLAIN), "é", "\udcff", end="")
    stream.seek(0)
    assert stream.read() == "".join(PLAIN.values()) + " ? ?"


def test_after_its_first_failure_a_stream_is_left_alone():
    raw = Failing(errno.EIO)
    out = Steady(io.TextIOWrapper(raw, encoding="utf-8", write_through=True))
    assert out.write("abc") == 3
    assert out.error.errno == errno.EIO
    raw.room = 10
    out.write("abc")
    out.flush()
    assert raw.content == b""


def test_a_mistake_of_ours_is_said_in_a_sentence(call, monkeypatch):
    monkeypatch.setattr(cli, "app", lambda **_: [][1])
    assert call("presets") == (
        1,
        "iresnet: internal error (IndexError: list index out of range). Please report it, "
        "with the output of --debug.\n",
    )
    with pytest.raises(IndexError):
        cli.main(["presets", "--debug"])


def test_a_warning_is_one_sentence():
    before = warnings.formatwarning
    with plain_warnings():
        shown = warnings.formatwarning(UserWarning("the disk is full\x1b[31m."), UserWarning, "file.py", 1)
    assert shown == "iresnet: the disk is full\\x1b[31m.\n"
    assert warnings.formatwarning is before
