"""Locks: one holder at a time, none after a kill, and nothing left behind."""

import errno
import fcntl
import os
import signal
import subprocess
import sys

import pytest

from iresnet import lock
from tests.test_atomic import light


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_a_second_holder_is_refused_and_a_later_one_is_not(tmp_path):
    sentence = (
        r"run is in use: another process is training or tightening this run. Wait until it ends, or choose another"
    )
    for _ in range(2):
        with lock.lock_folder(tmp_path / "run"):
            assert names(tmp_path / "run") == ["lock"]
            with pytest.raises(ValueError, match=sentence), lock.lock_folder(tmp_path / "run"):
                pass
            assert names(tmp_path / "run") == ["lock"]
        assert names(tmp_path / "run") == []


def test_a_killed_process_releases_its_lock(tmp_path):
    code = (
        "import os, signal; from iresnet import lock\n"
        "with lock.lock_folder('run'): os.kill(os.getpid(), signal.SIGKILL)"
    )
    place = light(tmp_path / "light")
    killed = subprocess.run([sys.executable, "-S", "-c", code], cwd=place, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert names(place / "run") == ["lock"]
    with lock.lock_folder(place / "run"):
        pass
    assert names(place / "run") == []


def test_another_process_is_refused(tmp_path):
    code = "from iresnet import lock\nwith lock.lock_folder('run'): pass"
    place = light(tmp_path / "light")
    with lock.lock_folder(place / "run"):
        other = subprocess.run([sys.executable, "-S", "-c", code], cwd=place, check=False, capture_output=True)
    assert b"ValueError: run is in use" in other.stderr


def test_a_lock_file_that_was_removed_in_between_is_created_again(tmp_path, monkeypatch):
    """The earlier holder removes its file after the next one opened it: a lock on that would exclude nobody."""
    plain, calls = lock.try_lock, []

    def take(descriptor):
        if not calls:
            (tmp_path / "lock").unlink()
        calls.append(descriptor)
        return plain(descriptor)

    monkeypatch.setattr(lock, "try_lock", take)
    with lock.lock_folder(tmp_path):
        assert len(calls) == 2
        assert names(tmp_path) == ["lock"]


def test_a_folder_that_was_moved_and_recreated_keeps_the_other_lock(tmp_path):
    with lock.lock_folder(tmp_path / "run"):
        (tmp_path / "run").rename(tmp_path / "moved")
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "lock").touch()
    assert names(tmp_path / "run") == ["lock"]


def test_a_planted_symbolic_link_is_not_followed(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match=r"cannot write .*/lock: .*. Choose another folder."), lock.lock_folder(tmp_path):
        pass
    assert (tmp_path / "precious").read_text() == "mine"


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "run").touch()
    with pytest.raises(OSError, match="cannot write .*run/lock: File exists"), lock.lock_folder(tmp_path / "run"):
        pass


@pytest.mark.parametrize(
    ("number", "answer"),
    [(errno.EWOULDBLOCK, False), (errno.EACCES, False), (errno.ENOLCK, None), (errno.EINVAL, None)],
)
def test_error_codes_of_the_system(tmp_path, monkeypatch, number, answer):
    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with (tmp_path / "a").open("w") as file:
        assert lock.try_lock(file.fileno()) is answer


def test_without_locks_nothing_is_locked(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "fcntl", None)
    with lock.lock_folder(tmp_path), lock.lock_folder(tmp_path):
        assert names(tmp_path) == ["lock"]
