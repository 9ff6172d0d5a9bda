"""A few of the attacks by kills, damaged files and command lines, and that each of them can find something."""

import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from attack import Violation, commands, containers, damage, files, kills
from attack.faults import OUTSIDE, Fault
from attack.limits import MIB, limited
from attack.nursery import HUNG, Ended, nursery
from attack.readers import DATA_READERS, RUN_READERS, Reader
from attack.run import Block, attack

pytestmark = pytest.mark.no_cover

SENTENCE = "iresnet: there is no preset 'x'. Use another."


def cases(kind, count, seed=0):
    return attack(Block(kind, seed, 0, count)).violations


class TestDamage:
    @pytest.mark.parametrize(
        "way", [*{*damage.BYTES, damage.strange_lines, damage.strange_cell}], ids=lambda w: w.__name__
    )
    def test_is_drawn_by_the_source_of_randomness_alone(self, way):
        content = b"a,b\n1,2\n3,4\n"
        made = [way(random.Random(i), content) for i in range(20)]
        assert made == [way(random.Random(i), content) for i in range(20)]
        assert any(m != content for m in made)

    def test_a_checkpoint_is_sound_outside_and_changed_inside(self):
        content = containers.joined({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(8))
        header, data = containers.parts_of(containers.flipped_tensor(random.Random(0), content))
        assert header == containers.parts_of(content)[0]
        assert data != bytes(8)


class TestLimits:
    def test_work_and_waiting(self):
        with (
            pytest.raises(Violation, match=r"it hangs: more than 0.05 s of waiting in test_attack_faults.py"),
            limited(0.05),
        ):
            time.sleep(5)
        with pytest.raises(Violation, match="it hangs: more than 0.05 s of (work|waiting)"), limited(0.05):
            any(False for _ in iter(int, 1))

    def test_memory(self):
        code = "from attack.limits import MIB, limited\nwith limited(memory=8 * MIB): bytearray(b'x' * (12 * MIB))"
        fresh = [sys.executable, "-c", code]  # in which no memory lies about that was given back
        found = subprocess.run(fresh, capture_output=True, text=True, check=False, cwd=Path(__file__).parent.parent)
        assert re.search(r"Violation: it takes \d+ MiB", found.stderr)
        with pytest.raises(MemoryError), limited(memory=8 * MIB):
            bytearray(1024 * MIB)


class TestFiles:
    @pytest.mark.parametrize(
        ("error", "sentence"),
        [
            (KeyError("x"), "KeyError"),
            (RecursionError("x"), "RecursionError"),
            (ValueError("damaged"), "the sentence names no file"),
            (ValueError("rows.csv\nis damaged"), "not one line"),
            (OSError(""), "not one line"),
        ],
    )
    def test_what_is_no_sentence_is_a_violation(self, error, sentence, tmp_path):
        def reads(folder):
            raise error

        with pytest.raises(Violation, match=sentence):
            files.verdict(Reader("csv", "rows.csv", reads), tmp_path, tmp_path / "rows.csv", "flip", None)

    def test_what_is_accepted_must_be_what_it_was(self, tmp_path):
        reader, path = Reader("csv", "rows.csv", lambda folder: "other"), tmp_path / "rows.csv"
        with pytest.raises(Violation, match="read as if it were sound"):
            files.verdict(reader, tmp_path, path, "flip", "sound")
        assert files.verdict(reader, tmp_path, path, "flip", "other") == "read"

    def test_every_file_of_every_reader_is_there(self):
        for reader in (*RUN_READERS, *DATA_READERS):
            folder = files.made(reader.fixture)
            assert all(files.matching(folder, pattern) for pattern in reader.files.split())

    @pytest.mark.parametrize(("kind", "count"), [("data-files", 40), ("run-files", 15)])
    def test_nothing_is_found(self, kind, count):
        assert cases(kind, count) == []


class TestCommands:
    @pytest.mark.parametrize(
        ("ended", "sentence"),
        [
            (Ended(HUNG, "", ""), "it hangs"),
            (Ended(-signal.SIGXCPU, "", ""), "it hangs"),
            (Ended(OUTSIDE, "", "\nwrites to '/x'\n"), "outside of its folder"),
            (Ended(1, "", "Traceback\nKeyError: 1"), "a traceback: KeyError: 1"),
            (Ended(3, "", SENTENCE), "exit code 3"),
            (Ended(2, "", ""), "without a sentence"),
            (Ended(2, "", "iresnet: "), "without a sentence"),
            (Ended(2, "", "iresnet: a\nb"), "more than one line"),
            (Ended(2, "", "iresnet: \x1b[31m"), "control characters"),
            (Ended(0, "", "a warning"), "exit code 0 with"),
        ],
    )
    def test_what_is_no_answer_is_a_violation(self, ended, sentence):
        with pytest.raises(Violation, match=sentence):
            commands.verdict(["train"], ended)

    def test_answers(self):
        assert commands.verdict(["train"], Ended(2, "", f"{SENTENCE}\n")) == "exit code 2"
        assert commands.verdict(["train"], Ended(2, "", "Usage: iresnet\n╭─ Error ─╮\n")) == "exit code 2"
        assert commands.verdict(["train"], Ended(0, "done\n", "")) == "exit code 0"

    def test_every_command_is_attacked(self):
        assert {"train", "evaluate", "data verify"} <= {*commands.definition()}


class TestProcesses:
    """What is forked from one process that is kept, so all of it is in one test file."""

    @pytest.mark.slow
    def test_a_write_outside_of_the_folder_is_noticed(self, tmp_path):
        (tmp_path / "inside").mkdir()
        fault = Fault("confine", folder=str(tmp_path / "inside"))
        words = ("train", "points-density", "--set", "steps=1", "--out", str(tmp_path / "run"))
        ended = nursery().call(*words, folder=tmp_path / "inside", fault=fault)
        with pytest.raises(Violation, match="writes to .* outside of its folder"):
            commands.verdict(["train"], ended)

    def test_nothing_is_found(self):
        assert cases("writes", 1) == []
        assert cases("commands", 1) == []

    def test_what_is_left_behind_is_a_violation(self, tmp_path):
        wanted = kills.undisturbed()
        for name, content in wanted.files.items():
            (tmp_path / name).write_bytes(content)
        (tmp_path / ".model.safetensors.17").touch()
        with pytest.raises(Violation, match=r"left behind: .model.safetensors.17"):
            kills._compare(tmp_path, wanted)
        (tmp_path / "certificate.json").unlink()
        with pytest.raises(Violation, match="certificate.json is missing after the run"):
            kills._compare(tmp_path, wanted)
