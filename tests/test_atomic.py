"""Atomic writes: the new file or the old one, never a part, and nothing left behind."""

import errno
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from iresnet import atomic, certify, lock, mlp_flow


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def light(folder):
    """A folder with a package `iresnet` of nothing but what writes files, which is imported in no time."""
    (folder / "iresnet").mkdir(parents=True)
    (folder / "iresnet" / "__init__.py").touch()
    for module in (atomic, lock):
        shutil.copy(module.__file__, folder / "iresnet" / Path(module.__file__).name)
    return folder


class TestWrite:
    def test_text_is_utf_8_and_bytes_are_bytes(self, tmp_path):
        assert atomic.write(tmp_path / "a.txt", "Lip(g) ≤ 1\n") == tmp_path / "a.txt"
        assert (tmp_path / "a.txt").read_bytes() == "Lip(g) ≤ 1\n".encode()
        atomic.write(str(tmp_path / "b.bin"), b"\x00\xff\r\n")
        assert (tmp_path / "b.bin").read_bytes() == b"\x00\xff\r\n"
        assert names(tmp_path) == ["a.txt", "b.bin"]

    def test_folders_are_created(self, tmp_path):
        atomic.write(tmp_path / "runs" / "one" / "a.txt", "x")
        assert (tmp_path / "runs" / "one" / "a.txt").read_text() == "x"

    def test_a_file_that_was_there_is_replaced(self, tmp_path):
        (tmp_path / "a.txt").write_text("old and longer")
        atomic.write(tmp_path / "a.txt", "new")
        assert (tmp_path / "a.txt").read_text() == "new"

    def test_it_is_synced_to_disk_before_it_is_renamed(self, tmp_path, monkeypatch):
        """The order of a crash-safe write: all bytes, sync, rename, sync of the folder."""
        seen, plain = [], os.fsync

        def fsync(descriptor):
            folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
            written = [p.read_bytes() for p in tmp_path.iterdir() if p.name != "a.txt"]
            seen.append((folder, written, (tmp_path / "a.txt").read_text()))
            plain(descriptor)

        (tmp_path / "a.txt").write_text("old")
        monkeypatch.setattr(os, "fsync", fsync)
        atomic.write(tmp_path / "a.txt", "new")
        assert seen == [(False, [b"new"], "old"), (True, [], "new")]

    @pytest.mark.parametrize("mode", [0o600, 0o640, 0o444, 0o755], ids=oct)
    def test_a_file_that_is_replaced_keeps_its_permissions(self, tmp_path, mode):
        (tmp_path / "a.txt").write_text("old")
        (tmp_path / "a.txt").chmod(mode)
        atomic.write(tmp_path / "a.txt", "new")
        assert stat.S_IMODE((tmp_path / "a.txt").stat().st_mode) == mode

    def test_the_replacement_of_a_private_file_is_private_from_the_start(self, tmp_path):
        (tmp_path / "a.txt").write_text("old")
        (tmp_path / "a.txt").chmod(0o600)
        with atomic.replacing(tmp_path / "a.txt") as temporary:
            assert stat.S_IMODE(temporary.stat().st_mode) == 0o600
            temporary.write_text("new")

    @pytest.mark.parametrize("mask", [0o022, 0o077], ids=oct)
    def test_a_new_file_has_the_permissions_that_the_umask_leaves(self, tmp_path, mask):
        before = os.umask(mask)
        try:
            atomic.write(tmp_path / "a.txt", "new")
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / "a.txt").stat().st_mode) == 0o666 & ~mask

    def test_an_empty_file_is_one_too(self, tmp_path):
        atomic.write(tmp_path / "a.txt", "")
        assert (tmp_path / "a.txt").read_bytes() == b""


class TestTemporaryFiles:
    """What stands beside the target for a moment: nobody can foresee it, and a kill leaves nothing for long."""

    def test_a_planted_symbolic_link_is_not_followed(self, tmp_path):
        (tmp_path / "precious.txt").write_text("mine")
        (tmp_path / f".a.txt.{os.getpid()}").symlink_to(tmp_path / "precious.txt")
        atomic.write(tmp_path / "a.txt", "new")
        assert (tmp_path / "precious.txt").read_text() == "mine"
        assert (tmp_path / "a.txt").read_text() == "new"

    def test_even_one_under_the_very_name(self, tmp_path, monkeypatch):
        (tmp_path / "precious.txt").write_text("mine")
        (tmp_path / ".a.txt.0000000000000000").symlink_to(tmp_path / "precious.txt")
        monkeypatch.setattr(atomic.secrets, "token_hex", lambda n: "00" * n)
        with pytest.raises(OSError, match="cannot write .*a.txt: File exists"):
            atomic.write(tmp_path / "a.txt", "new")
        assert (tmp_path / "precious.txt").read_text() == "mine"

    def test_names_differ_from_write_to_write(self, tmp_path):
        with atomic.replacing(tmp_path / "a") as one, atomic.replacing(tmp_path / "a") as other:
            assert one != other
            one.write_text("1")
            other.write_text("2")
        assert (tmp_path / "a").read_text() == "1"  # the outer block ends last

    def test_leftovers_of_a_kill_are_removed_by_the_next_write(self, tmp_path):
        code = (
            "import os, signal; from pathlib import Path; from iresnet import atomic\n"
            f"with atomic.replacing(Path({str(tmp_path)!r}) / 'a.txt') as temporary:\n"
            "    temporary.write_text('half'); os.kill(os.getpid(), signal.SIGKILL)"
        )
        killed = subprocess.run([sys.executable, "-S", "-c", code], cwd=light(tmp_path / "light"), check=False)
        assert killed.returncode == -signal.SIGKILL
        assert len(names(tmp_path)) == 2  # what was half written, and the package
        (tmp_path / ".b.txt.0123456789abcdef").write_text("of another target")
        (tmp_path / ".a.txt.mine").write_text("of another naming")
        atomic.write(tmp_path / "a.txt", "new")
        assert names(tmp_path) == [".a.txt.mine", ".b.txt.0123456789abcdef", "a.txt", "light"]

    def test_a_file_that_another_process_is_writing_stays(self, tmp_path):
        with atomic.replacing(tmp_path / "a.txt") as slow:
            slow.write_text("slow")
            atomic.write(tmp_path / "a.txt", "fast")
            assert (tmp_path / "a.txt").read_text() == "fast"
        assert (tmp_path / "a.txt").read_text() == "slow"
        assert names(tmp_path) == ["a.txt"]

    def test_a_file_that_is_removed_before_it_is_locked_is_created_again(self, tmp_path, monkeypatch):
        plain, calls = lock.try_lock, []

        def take(descriptor):
            if not calls:
                next(p for p in tmp_path.iterdir() if p.name.startswith(".")).unlink()
            calls.append(descriptor)
            return plain(descriptor)

        monkeypatch.setattr(lock, "try_lock", take)
        atomic.write(tmp_path / "a.txt", "new")
        assert len(calls) == 2
        assert names(tmp_path) == ["a.txt"]

    def test_without_locks_no_leftovers_are_removed(self, tmp_path, monkeypatch):
        (tmp_path / ".a.txt.0123456789abcdef").write_text("perhaps in use")
        monkeypatch.setattr(lock, "try_lock", lambda descriptor: None)
        atomic.write(tmp_path / "a.txt", "new")
        assert names(tmp_path) == [".a.txt.0123456789abcdef", "a.txt"]


class TestFailure:
    @pytest.fixture
    def target(self, tmp_path):
        (tmp_path / "a.txt").write_text("old")
        return tmp_path / "a.txt"

    def check_untouched(self, target):
        assert target.read_text() == "old"
        assert names(target.parent) == ["a.txt"]

    def test_a_full_disk_leaves_the_old_file(self, target, monkeypatch):
        def full(descriptor):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", full)
        sentence = (
            f"cannot write {target}: No space left on device. "
            "Free disk space or choose another folder; the old file is unchanged."
        )
        with pytest.raises(OSError) as caught:  # noqa: PT011 (its whole text is compared)
            atomic.write(target, "new")
        assert str(caught.value) == sentence
        self.check_untouched(target)

    def test_a_write_that_the_system_cuts_short_leaves_the_old_file(self, target):
        """No patch: the kernel stops the file at 4096 bytes, in the middle of writing."""
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        try:
            with pytest.raises(OSError, match=r"cannot write .*a.txt: File too large. Free disk space"):
                atomic.write(target, b"x" * 100_000)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        self.check_untouched(target)

    def test_a_folder_that_is_a_file(self, target):
        with pytest.raises(
            OSError, match=r"cannot write .*a.txt/b.txt: (File exists|Not a directory). Free disk space or"
        ):
            atomic.write(target / "b.txt", "new")
        self.check_untouched(target)

    def test_a_file_that_is_a_folder(self, tmp_path):
        (tmp_path / "a").mkdir()
        with pytest.raises(OSError, match=r"cannot write .*/a: it is a folder. Name a file in it."):
            atomic.write(tmp_path / "a", "new")
        assert names(tmp_path) == ["a"]

    def test_a_name_that_is_too_long(self, tmp_path):
        """The temporary name is longer still: looking for it in order to remove it must not hide the sentence."""
        with pytest.raises(
            OSError, match="cannot write .*: File name too long. Free disk space or choose another folder"
        ):
            atomic.write(tmp_path / ("a" * 252), "new")
        assert names(tmp_path) == []

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
    @pytest.mark.parametrize("mode", [0o500, 0o600], ids=["read-only", "not to be entered"])
    def test_a_folder_without_permission(self, tmp_path, mode):
        folder = tmp_path / "closed"
        folder.mkdir()
        folder.chmod(mode)
        try:
            with pytest.raises(OSError, match=r"cannot write .*: Permission denied."):
                atomic.write(folder / "a.txt", "new")
        finally:
            folder.chmod(0o700)
        assert names(folder) == []

    @pytest.mark.parametrize("error", [RuntimeError("of the writer"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
    def test_any_other_failure_passes_through(self, target, error):
        with pytest.raises(type(error)) as caught, atomic.replacing(target) as temporary:  # noqa: PT012
            temporary.write_text("half")
            raise error
        assert caught.value is error
        self.check_untouched(target)


def test_replacing_gives_a_path_beside_the_target_that_takes_its_place(tmp_path):
    with atomic.replacing(tmp_path / "new" / "a.txt") as temporary:
        temporary.write_text("x")
        assert temporary.parent == tmp_path / "new"  # one file system: a rename, not a copy
        assert names(tmp_path / "new") == [temporary.name]
    assert names(tmp_path / "new") == ["a.txt"]


def test_a_block_that_writes_nothing_raises(tmp_path):
    with pytest.raises(OSError, match="cannot write .*a.txt: No such file"), atomic.replacing(tmp_path / "a.txt"):
        pass


class TestWhatIsNoPlainFile:
    @pytest.mark.parametrize("there", [True, False], ids=["to a file", "to nothing"])
    def test_a_link_stays_and_what_it_points_to_is_replaced(self, tmp_path, there):
        (tmp_path / "far").mkdir()
        if there:
            (tmp_path / "far" / "a.txt").write_text("old")
        (tmp_path / "link").symlink_to(tmp_path / "far" / "a.txt")
        assert atomic.write(tmp_path / "link", "new") == tmp_path / "link"
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "far" / "a.txt").read_text() == "new"
        assert names(tmp_path / "far") == ["a.txt"]

    @pytest.mark.parametrize("linked", [False, True], ids=["itself", "by a link"])
    def test_a_pipe_is_written_to_and_stays_one(self, tmp_path, linked):
        os.mkfifo(tmp_path / "pipe")
        if linked:
            (tmp_path / "link").symlink_to(tmp_path / "pipe")
        read = []
        reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()), daemon=True)
        reader.start()
        atomic.write(tmp_path / ("link" if linked else "pipe"), "new")
        reader.join(timeout=120)
        assert read == ["new"]
        assert (tmp_path / "pipe").is_fifo()
        assert names(tmp_path) == ["link", "pipe"] if linked else ["pipe"]


def test_a_certificate_is_written_atomically(tmp_path, monkeypatch):
    certificate = certify(mlp_flow(2, blocks=1, hidden=(4,)))
    text = certificate.to_json(tmp_path / "c.json")
    assert (tmp_path / "c.json").read_text() == text + "\n"

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="cannot write .*c.json: No space left on device"):
        certificate.to_json(tmp_path / "c.json")
    assert (tmp_path / "c.json").read_text() == text + "\n"
    assert names(tmp_path) == ["c.json"]
