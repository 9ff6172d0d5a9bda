"""A few attacks by kills, damaged files and command lines, and tests that each of them can find a violation."""

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
from attack.forkserver import HUNG, Completed, fork_server
from attack.limits import MIB, limited
from attack.readers import DATA_READERS, RUN_READERS, Reader
from attack.run import Block, run_block

pytestmark = pytest.mark.no_cover

SENTENCE = "iresnet: there is no preset 'x'. Use another."


def cases(kind, count, seed=0):
    return run_block(Block(kind, seed, 0, count)).violations


class TestDamage:
    @pytest.mark.parametrize(
        "way", [*{*damage.BYTES, damage.corrupt_lines, damage.corrupt_cell}], ids=lambda w: w.__name__
    )
    def test_depends_on_the_random_generator_alone(self, way):
        content = b"a,b\n1,2\n3,4\n"
        made = [way(random.Random(i), content) for i in range(20)]
        assert made == [way(random.Random(i), content) for i in range(20)]
        assert any(m != content for m in made)

    def test_a_damaged_checkpoint_keeps_a_valid_header(self):
        content = containers.join_safetensors({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(8))
        header, data = containers.split_safetensors(containers.flip_tensor_bits(random.Random(0), content))
        assert header == containers.split_safetensors(content)[0]
        assert data != bytes(8)


class TestLimits:
    def test_cpu_time_and_waiting_are_limited(self):
        with (
            pytest.raises(Violation, match=r"it hangs: more than 0.05 s of waiting in test_attack_faults.py"),
            limited(0.05),
        ):
            time.sleep(5)
        with pytest.raises(Violation, match="it hangs: more than 0.05 s of (work|waiting)"), limited(0.05):
            any(False for _ in iter(int, 1))

    def test_memory_is_limited(self):
        code = "from attack.limits import MIB, limited\nwith limited(memory=8 * MIB): bytearray(b'x' * (12 * MIB))"
        fresh = [sys.executable, "-c", code]  # a new process has no freed memory to reuse
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
            (ValueError("damaged"), "the message names no file"),
            (ValueError("rows.csv\nis damaged"), "not one line"),
            (OSError(""), "not one line"),
        ],
    )
    def test_an_error_without_a_one_line_message_is_a_violation(self, error, sentence, tmp_path):
        def reads(folder):
            raise error

        with pytest.raises(Violation, match=sentence):
            files.check_reader(Reader("csv", "rows.csv", reads), tmp_path, tmp_path / "rows.csv", "flip", None)

    def test_an_accepted_file_must_give_the_original_value(self, tmp_path):
        reader, path = Reader("csv", "rows.csv", lambda folder: "other"), tmp_path / "rows.csv"
        with pytest.raises(Violation, match="read as if it were undamaged"):
            files.check_reader(reader, tmp_path, path, "flip", "sound")
        assert files.check_reader(reader, tmp_path, path, "flip", "other") == "read"

    def test_every_reader_has_files(self):
        for reader in (*RUN_READERS, *DATA_READERS):
            folder = files.fixture(reader.fixture)
            assert all(files.matching(folder, pattern) for pattern in reader.files.split())

    @pytest.mark.parametrize(("kind", "count"), [("data-files", 40), ("run-files", 15)])
    def test_nothing_is_found(self, kind, count):
        assert cases(kind, count) == []


class TestCommands:
    @pytest.mark.parametrize(
        ("ended", "sentence"),
        [
            (Completed(HUNG, "", ""), "it hangs"),
            (Completed(-signal.SIGXCPU, "", ""), "it hangs"),
            (Completed(OUTSIDE, "", "\nwrites to '/x'\n"), "outside its folder"),
            (Completed(1, "", "Traceback\nKeyError: 1"), "a traceback: KeyError: 1"),
            (Completed(3, "", SENTENCE), "exit code 3"),
            (Completed(2, "", ""), "without a message"),
            (Completed(2, "", "iresnet: "), "without a message"),
            (Completed(2, "", "iresnet: a\nb"), "more than one line"),
            (Completed(2, "", "iresnet: \x1b[31m"), "control characters"),
            (Completed(0, "", "a warning"), "exit code 0 with"),
        ],
    )
    def test_a_bad_exit_is_a_violation(self, ended, sentence):
        with pytest.raises(Violation, match=sentence):
            commands.check_exit(["train"], ended)

    def test_good_exits(self):
        assert commands.check_exit(["train"], Completed(2, "", f"{SENTENCE}\n")) == "exit code 2"
        assert commands.check_exit(["train"], Completed(2, "", "Usage: iresnet\n╭─ Error ─╮\n")) == "exit code 2"
        assert commands.check_exit(["train"], Completed(0, "done\n", "")) == "exit code 0"

    def test_every_command_is_attacked(self):
        assert {"train", "evaluate", "data verify"} <= {*commands.cli_commands()}


class TestProcesses:
    """Commands forked from one fork server, which one test file shares."""

    @pytest.mark.slow
    def test_a_write_outside_the_folder_is_a_violation(self, tmp_path):
        (tmp_path / "inside").mkdir()
        fault = Fault("confine", folder=str(tmp_path / "inside"))
        words = ("train", "points-density", "--set", "steps=1", "--out", str(tmp_path / "run"))
        ended = fork_server().call(*words, folder=tmp_path / "inside", fault=fault)
        with pytest.raises(Violation, match="writes to .* outside its folder"):
            commands.check_exit(["train"], ended)

    @pytest.mark.slow
    def test_nothing_is_found(self):
        assert cases("writes", 1) == []
        assert cases("commands", 1) == []

    @pytest.mark.slow
    def test_files_left_behind_are_a_violation(self, tmp_path):
        wanted = kills.undisturbed()
        for name, content in wanted.files.items():
            (tmp_path / name).write_bytes(content)
        (tmp_path / ".model.safetensors.17").touch()
        with pytest.raises(Violation, match=r"left behind: .model.safetensors.17"):
            kills._compare(tmp_path, wanted)
        (tmp_path / "certificate.json").unlink()
        with pytest.raises(Violation, match="certificate.json is missing after the run"):
            kills._compare(tmp_path, wanted)
