"""Downloads and `iresnet data`, against a server on this machine."""

import functools
import hashlib
import http.server
import threading

import pytest

from iresnet import cli
from iresnet.data import download as files
from iresnet.data.download import Remote

CONTENT = {"a.gz": b"first file" * 1000, "b.gz": b"second"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = tmp_path_factory.mktemp("server")
    for name, content in CONTENT.items():
        (root / name).write_bytes(content)

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *words):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=root)) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


@pytest.fixture
def registry(server, monkeypatch):
    """One set of two files; `registry["toys"]` may be changed."""
    sets = {
        "toys": tuple(
            Remote(f"{server}/{name}", hashlib.md5(content).hexdigest(), len(content), {name[0]: 3})
            for name, content in CONTENT.items()
        )
    }
    monkeypatch.setattr(files, "REGISTRY", sets)
    return sets


def everything_in(folder):
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*"))


class TestDownload:
    def test_fetches_reports_and_does_not_fetch_again(self, registry, tmp_path):
        calls = []
        paths = files.download("toys", tmp_path / "data", lambda *call: calls.append(call))
        assert [p.read_bytes() for p in paths] == list(CONTENT.values())
        assert everything_in(tmp_path) == ["data", "data/toys", "data/toys/a.gz", "data/toys/b.gz"]
        assert calls[-1] == ("b.gz", 6, 6)
        assert ("a.gz", 10_000, 10_000) in calls
        assert files.is_present("toys", tmp_path / "data")
        calls.clear()
        files.download("toys", tmp_path / "data", lambda *call: calls.append(call))
        assert calls == []

    def test_replaces_a_corrupt_file(self, registry, tmp_path):
        (tmp_path / "toys").mkdir()
        (tmp_path / "toys" / "a.gz").write_bytes(b"rubbish")
        files.download("toys", tmp_path)
        assert (tmp_path / "toys" / "a.gz").read_bytes() == CONTENT["a.gz"]

    def test_a_wrong_checksum_leaves_nothing(self, registry, tmp_path):
        registry["toys"] = (Remote(registry["toys"][0].url, "0" * 32, 6, {}),)
        with pytest.raises(RuntimeError, match="toys: the file from http.*a.gz has a wrong checksum and was not kept"):
            files.download("toys", tmp_path / "data")
        assert everything_in(tmp_path) == []

    def test_a_file_without_an_end_is_not_kept(self, registry, tmp_path, monkeypatch):
        monkeypatch.setattr(files, "CHUNK", 100)  # 10,000 bytes come, and 6 are known
        registry["toys"] = (Remote(registry["toys"][0].url, "0" * 32, 6, {}),)
        with pytest.raises(OSError, match=r"a.gz could not be saved .*the server sends more than its 6 bytes"):
            files.download("toys", tmp_path / "data")
        assert everything_in(tmp_path) == []

    def test_a_missing_file_leaves_nothing(self, registry, server, tmp_path):
        registry["toys"] = (Remote(f"{server}/none.gz", "0" * 32, 6, {}),)
        with pytest.raises(
            OSError, match=r"none.gz could not be saved to .*toys \(the server answered 404\). Try again"
        ):
            files.download("toys", tmp_path / "data")
        assert everything_in(tmp_path) == []

    def test_no_network(self, registry, tmp_path):
        registry["toys"] = (Remote("http://127.0.0.1:9/a.gz", "0" * 32, 6, {}),)
        with pytest.raises(OSError, match=r"a.gz could not be saved to .*toys \(ConnectionError\). Try again, or copy"):
            files.download("toys", tmp_path)
        assert everything_in(tmp_path) == []
        assert tmp_path.is_dir()  # it was there before

    def test_a_folder_that_is_a_file(self, registry, tmp_path):
        (tmp_path / "data").write_text("")
        with pytest.raises(OSError, match=r"could not be saved to .*\(Not a directory\)"):
            files.download("toys", tmp_path / "data")

    def test_an_unknown_name(self):
        with pytest.raises(
            ValueError, match="name must be a dataset that can be downloaded; got 'mnits'. Did you mean 'mnist'?"
        ):
            files.download("mnits", "data")


class TestVerify:
    def verdicts(self, folder):
        return [(c.file, c.verdict) for c in files.verify("toys", folder)]

    def test_packed(self, registry, tmp_path):
        assert self.verdicts(tmp_path) == [("a.gz", files.ABSENT), ("b.gz", files.ABSENT)]
        files.download("toys", tmp_path)
        assert self.verdicts(tmp_path) == [("a.gz", files.RIGHT), ("b.gz", files.RIGHT)]
        (tmp_path / "toys" / "b.gz").write_bytes(b"rubbish")
        assert self.verdicts(tmp_path) == [("a.gz", files.RIGHT), ("b.gz", files.CORRUPT)]

    def test_unpacked_files_are_verified_by_their_size(self, registry, tmp_path):
        registry["toys"] = (Remote("http://x/c.tar.gz", "", 0, {"c/1": 3, "c/2": 3, "c/3": 3}),)
        (tmp_path / "c").mkdir()
        (tmp_path / "c" / "1").write_bytes(b"abc")
        (tmp_path / "2").write_bytes(b"abcd")
        assert self.verdicts(tmp_path) == [("c/1", files.SIZE_ONLY), ("c/2", files.CORRUPT), ("c/3", files.ABSENT)]
        assert not files.is_present("toys", tmp_path)
        (tmp_path / "c.tar.gz").write_bytes(b"")  # what is packed need not lie there unpacked
        assert [verdict for _, verdict in self.verdicts(tmp_path)] == [files.CORRUPT, files.SIZE_ONLY, files.CORRUPT]
        assert files.is_present("toys", tmp_path)

    def test_the_files_of_fashion_mnist_are_not_taken_for_those_of_mnist(self, tmp_path):
        ours, theirs = (files.REGISTRY[name][1] for name in ("mnist", "fashion-mnist"))
        assert ours.file == theirs.file
        (tmp_path / ours.file).write_bytes(b"x" * theirs.size)
        assert files.locate_file("mnist", tmp_path, ours.file) is None
        assert files.locate_file("fashion-mnist", tmp_path, ours.file) == tmp_path / ours.file

    def test_the_registry_is_whole(self):
        for name in files.REGISTRY:
            for remote in files.remote_files(name):
                assert len(remote.md5) == 32
                assert remote.url.startswith("http")
                assert remote.size > 1000
                assert all(size > 1000 for size in remote.unpacked.values())


class TestCommand:
    def run(self, *words):
        with pytest.raises(SystemExit) as stop:
            cli.main(["data", *words])
        return stop.value.code

    def test_list(self, capsys, tmp_path, monkeypatch):
        monkeypatch.setenv("COLUMNS", "80")
        assert self.run("list", "--data-dir", str(tmp_path)) == 0
        out = capsys.readouterr().out
        lines = {line.split()[0]: line for line in out.splitlines() if line.split()}
        assert lines["digits"].split() == ["digits", "1,437", "360", "1", "x", "8", "x", "8", "10", "built", "in"]
        assert lines["cifar100"].split()[-3:] == ["missing,", "169", "MB"]
        assert "moons" in lines
        assert "…" not in out

    def test_download_then_list_then_verify(self, registry, capsys, tmp_path):
        assert self.run("download", "toys", "--data-dir", str(tmp_path)) == 0
        assert f"toys: complete in {tmp_path / 'toys'}" in capsys.readouterr().out
        assert self.run("verify", "--data-dir", str(tmp_path)) == 0
        assert capsys.readouterr().out.count("checksum right") == 2

    def test_present(self, capsys, tmp_path):
        for remote in files.remote_files("cifar100"):
            (tmp_path / remote.file).write_bytes(b"")
        assert self.run("list", "--data-dir", str(tmp_path)) == 0
        assert capsys.readouterr().out.count("present") == 1

    def test_corrupt_is_exit_1(self, registry, capsys, tmp_path):
        (tmp_path / "a.gz").write_bytes(b"rubbish")
        assert self.run("verify", "--data-dir", str(tmp_path)) == 1
        captured = capsys.readouterr()
        assert f"iresnet: a.gz of toys is corrupt. Remove {tmp_path / 'a.gz'} and run" in captured.err
        assert "corrupt" in captured.out

    def test_a_named_set_must_be_there(self, registry, capsys, tmp_path):
        assert self.run("verify", "--data-dir", str(tmp_path)) == 0
        assert self.run("verify", "toys", "--data-dir", str(tmp_path)) == 1
        assert "a.gz of toys is not there. Run `iresnet data download toys`." in capsys.readouterr().err

    def test_an_unknown_set_is_exit_2_before_anything_is_fetched(self, registry, capsys, tmp_path):
        assert self.run("download", "toys", "tyos", "--data-dir", str(tmp_path)) == 2
        assert "Did you mean 'toys'?" in capsys.readouterr().err
        assert everything_in(tmp_path) == []

    def test_a_failed_download_is_exit_2(self, registry, capsys, tmp_path):
        registry["toys"] = (Remote("http://127.0.0.1:9/a.gz", "0" * 32, 6, {}),)
        assert self.run("download", "toys", "--data-dir", str(tmp_path)) == 2
        assert "could not be saved" in capsys.readouterr().err

    @pytest.mark.parametrize("command", ["list", "download", "verify"])
    def test_help_has_an_example(self, capsys, command):
        assert self.run(command, "--help") == 0
        assert f"Example: iresnet data {command}" in capsys.readouterr().out
