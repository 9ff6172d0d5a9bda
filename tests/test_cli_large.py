"""`score`, `sample` and `evaluate` in chunks: the same results as at once, in constant memory; resumed, and shared."""

import io
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
import torch

from iresnet import data, lock, run
from iresnet.cli import output
from iresnet.data import DataSettings
from iresnet.data.chunked import ChunkedSource
from iresnet.evaluate import evaluate, evaluate_chunks, log_prob_draws, shared_log_prob_draws
from iresnet.evaluate.draws import Likelihoods
from iresnet.evaluate.moments import Moments
from iresnet.logdet import PowerSeries
from iresnet.run import Run, Scorer
from iresnet.train import distributed
from iresnet.train.distributed import Group
from tests.peak import LINUX, peak_memory
from tests.runs import tiny
from tests.runs import trained as images

SAMPLE = sys.modules["iresnet.cli.sample"]

ROWS = 230


def table(rows=ROWS, seed=0):
    """Two real columns, whole numbers, which get noise, and two categories."""
    generator = np.random.default_rng(seed)
    a = generator.normal(size=rows)
    return a, a + 0.1 * generator.normal(size=rows), generator.poisson(4, rows), np.where(a > 0, "up", "down")


def write(path, rows=ROWS, seed=0):
    lines = (
        f"{a:.6g},{b:.6g},{n},{word},r{i}\n" for i, (a, b, n, word) in enumerate(zip(*table(rows, seed), strict=True))
    )
    path.write_text("a,b,n,word,name\n" + "".join(lines))
    return path


@cache
def trained():
    folder = Path(mkdtemp())
    settings = DataSettings(str(write(folder / "train.csv", 400)), id="name")
    run.start(replace(tiny("table-density"), data=settings), folder / "run")
    return folder / "run"


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "t.csv", seed=1)


@pytest.fixture
def chunks(monkeypatch):
    """Set the number of rows in a chunk."""

    def set_rows(rows):
        for module in (output, SAMPLE):
            monkeypatch.setattr(module, "chunk_rows", lambda *_: rows)

    return set_rows


def scores(call, chunks, file, out, *words, rows=50):
    chunks(rows)
    code, text = call("score", trained(), file, "--out", out, *words)
    assert code == 0, text
    assert not list(out.parent.glob("*.part*"))
    return out.read_bytes()


@pytest.mark.parametrize("words", [(), ("--id", "word"), ("--explain", 2, "--draws", 3)], ids=str)
def test_scores_do_not_depend_on_the_chunks(call, chunks, file, tmp_path, words):
    whole = scores(call, chunks, file, tmp_path / "whole.csv", *words, rows=1000)
    assert scores(call, chunks, file, tmp_path / "parts.csv", *words) == whole
    assert whole.count(b"\n") == ROWS + 1
    assert call("score", trained(), file, *words)[1].encode() == whole


def test_rows_with_missing_cells_are_left_out(call, chunks, file, tmp_path):
    lines = file.read_text().splitlines()
    for i in (3, *range(51, 101), 200):
        lines[i] = lines[i].replace(lines[i].split(",")[0], "", 1)
    file.write_text("\n".join(lines))
    whole = scores(call, chunks, file, tmp_path / "whole.csv", "--missing", "drop", rows=1000)
    assert scores(call, chunks, file, tmp_path / "parts.csv", "--missing", "drop") == whole
    assert whole.count(b"\n") == ROWS - 52 + 1
    file.write_text("a,b,n,word,name\n,1,2,up,r\n")
    code, text = call("score", trained(), file, "--missing", "drop", "--out", tmp_path / "none.csv")
    assert code == 2
    assert "every row has a missing cell, so none is left" in text
    assert not list(tmp_path.glob("none*"))


def interrupted(monkeypatch, call, file, out, *words, after=3, folder=None):
    """Score until a chunk is interrupted."""
    score, calls = Scorer.score, []

    def stop(self, data):
        calls.append(len(data))
        if len(calls) > after:
            raise KeyboardInterrupt
        return score(self, data)

    monkeypatch.setattr(Scorer, "score", stop)
    code, text = call("score", folder or trained(), file, "--out", out, *words)
    monkeypatch.setattr(Scorer, "score", score)
    assert code == 130
    assert not out.exists()
    return text


class TestResume:
    @pytest.fixture(autouse=True)
    def small(self, chunks):
        chunks(50)

    def test_the_same_command_continues(self, call, chunks, file, tmp_path, monkeypatch):
        whole, out = scores(call, chunks, file, tmp_path / "whole.csv"), tmp_path / "scores.csv"
        text = interrupted(monkeypatch, call, file, out)
        assert "Stopped. 150 rows are done; the same command resumes after them." in text
        with (tmp_path / "scores.csv.part").open("ab") as part:
            part.write(b"half a li")  # a chunk that was not finished
        seen = []
        score = Scorer.score
        monkeypatch.setattr(Scorer, "score", lambda self, data: seen.append(len(data)) or score(self, data))
        code, text = call("score", trained(), file, "--out", out)
        assert code == 0
        assert f"Resuming after 150 rows, which are in {out}.part." in text
        assert f"{ROWS} samples scored in {out}" in text
        assert seen == [50, 30]
        assert out.read_bytes() == whole
        assert not list(tmp_path.glob("*.part*"))

    def test_the_count_of_impossible_values_is_resumed_too(self, call, file, tmp_path, monkeypatch):
        file.write_text(file.read_text().replace(",up,r", ",sideways,r", 1))
        interrupted(monkeypatch, call, file, tmp_path / "scores.csv")
        assert (
            f"1 of {ROWS} samples hold a value that its column cannot have"
            in call("score", trained(), file, "--out", tmp_path / "scores.csv")[1]
        )

    @pytest.mark.parametrize(
        ("what", "words"), [("file time", ()), ("options", ("--draws", 3)), ("file size", ()), ("damaged", ())]
    )
    def test_another_command_starts_anew(self, call, chunks, file, tmp_path, monkeypatch, what, words):
        out = tmp_path / "scores.csv"
        interrupted(monkeypatch, call, file, out)
        if what == "file time":
            os.utime(file, ns=(1, 1))
        if what == "file size":
            write(file, ROWS + 9, seed=1)
        if what == "damaged":
            (tmp_path / "scores.csv.part.json").write_text("{")
        code, text = call("score", trained(), file, "--out", out, *words)
        assert code == 0
        assert (
            "is damaged; starting anew" in text if what == "damaged" else f"from another {what}; starting anew" in text
        )
        assert out.read_bytes() == scores(call, chunks, file, tmp_path / "whole.csv", *words)

    def test_the_standard_input_starts_anew(self, call, chunks, file, tmp_path, monkeypatch):
        def give():
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(file.read_bytes())))

        out = tmp_path / "scores.csv"
        give()
        interrupted(monkeypatch, call, "-", out)
        give()
        code, text = call("score", trained(), "-", "--out", out)
        assert code == 0
        assert "was made from another standard input; starting anew" in text
        assert out.read_bytes() == scores(call, chunks, file, tmp_path / "whole.csv")

    def test_a_dataset_resumes_too(self, call, chunks, tmp_path, monkeypatch):
        chunks(100)
        of_images = images("digits-density")
        words = ("score", of_images, "digits", "--draws", 2, "--out", tmp_path / "s.csv")
        call(*words)
        whole = (tmp_path / "s.csv").read_bytes()
        (tmp_path / "s.csv").unlink()
        interrupted(monkeypatch, call, "digits", tmp_path / "s.csv", "--draws", 2, folder=of_images)
        assert "Resuming after 300 rows" in call(*words)[1]
        assert (tmp_path / "s.csv").read_bytes() == whole

    def test_bad_input_leaves_nothing(self, call, file, tmp_path):
        lines = file.read_text().splitlines()
        lines[180] = lines[180].replace(",", ",x", 1)
        file.write_text("\n".join(lines))
        code, text = call("score", trained(), file, "--out", tmp_path / "scores.csv")
        assert code == 2
        assert "is not a number in line 181, column 'b'" in text
        assert not list(tmp_path.glob("scores*"))

    def test_a_second_process_is_refused(self, call, file, tmp_path, monkeypatch):
        monkeypatch.setattr("iresnet.lock.try_lock", lambda _: False)
        code, text = call("score", trained(), file, "--out", tmp_path / "s.csv")
        assert code == 2
        assert "is being written by another process. Wait for it, or choose another --out." in text

    def test_a_process_that_finishes_meanwhile_is_no_part_of_the_result(
        self, call, chunks, file, tmp_path, monkeypatch
    ):
        out, try_lock, other = tmp_path / "s.csv", lock.try_lock, []
        interrupted(monkeypatch, call, file, out)

        def finish_and_lock(descriptor):
            if not other:
                other.append(out.with_suffix(".csv.part").rename(out))
                out.with_suffix(".csv.part.json").unlink()
            return try_lock(descriptor)

        monkeypatch.setattr("iresnet.lock.try_lock", finish_and_lock)
        assert call("score", trained(), file, "--out", out)[0] == 0
        assert other
        assert out.read_bytes() == scores(call, chunks, file, tmp_path / "whole.csv")

    def test_a_closed_standard_input_is_a_sentence(self, call, monkeypatch):
        monkeypatch.setattr(sys, "stdin", None)
        code, text = call("score", trained(), "-")
        assert code == 2
        assert "the standard input is closed. Give a file" in text

    def test_a_device_is_written_to_as_it_is(self, call, file):
        assert call("score", trained(), file, "--out", "/dev/null")[0] == 0

    def test_a_link_and_permissions_stay(self, call, file, tmp_path):
        target, link = tmp_path / "target.csv", tmp_path / "link.csv"
        target.write_text("old")
        target.chmod(0o600)
        link.symlink_to(target)
        assert call("score", trained(), file, "--out", link)[0] == 0
        assert link.is_symlink()
        assert target.stat().st_mode & 0o777 == 0o600
        assert target.read_text().startswith("row,name,")

    def test_a_failure_to_write_is_a_sentence(self, call, file, tmp_path):
        (tmp_path / "f").write_text("")
        code, text = call("score", trained(), file, "--out", tmp_path / "f" / "s.csv")
        assert code == 2
        assert "cannot write" in text


@pytest.mark.parametrize("n", [2, pytest.param(7, marks=pytest.mark.slow)])
def test_parts_of_several_processes_concatenate(call, chunks, file, tmp_path, monkeypatch, n):
    whole = scores(call, chunks, file, tmp_path / "whole.csv")
    drawn = sampled(call, tmp_path / "drawn")
    for name, value in (("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1"), ("WORLD_SIZE", n)):
        monkeypatch.setenv(name, str(value))
    for rank in reversed(range(n)):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        code, text = call("score", trained(), file, "--out", tmp_path / "scores.csv")
        assert code == 0
        assert (tmp_path / f"scores.part-{rank:03}-of-{n:03}.csv").is_file()
        joining = f"cat {tmp_path}/scores.part-*-of-{n:03}.csv > {tmp_path}/scores.csv"
        assert (joining in text) == (rank == 0)
        assert call("sample", trained(), "-n", 120, "--out", tmp_path / "more")[0] == 0
    assert joined(tmp_path, "scores.part-*.csv", n) == whole
    assert joined(tmp_path, "more.part-*.csv", n) == drawn
    code, text = call("score", trained(), "-", "--out", tmp_path / "s.csv")
    assert code == 2
    assert "under torchrun, every process reads the data; got '-'. Give a file." in text
    monkeypatch.setenv("RANK", "1")
    for alone in (["--data", "-"], []):
        assert call("evaluate", trained(), *alone) == (0, "")  # rank 0 does it


def test_the_first_part_has_the_header_also_without_rows(call, chunks, file, tmp_path, monkeypatch):
    lines = file.read_text().splitlines()
    lines[1:150] = [f",{line.split(',', 1)[1]}" for line in lines[1:150]]
    file.write_text("\n".join(lines))
    whole = scores(call, chunks, file, tmp_path / "whole.csv", "--missing", "drop")
    values = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "WORLD_SIZE": "2"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert call("score", trained(), file, "--missing", "drop", "--out", tmp_path / "s.csv")[0] == 0
    assert (tmp_path / "s.part-000-of-002.csv").read_text().count("\n") == 1
    assert joined(tmp_path, "s.part-*.csv", 2) == whole


def joined(folder, pattern, n):
    parts = sorted(folder.glob(pattern))
    assert len(parts) == n
    return b"".join(part.read_bytes() for part in parts)


def sampled(call, out, *words):
    assert call("sample", trained(), "-n", 120, "--out", out, *words)[0] == 0
    return out.with_suffix(".csv").read_bytes()


class TestSamples:
    def test_each_chunk_is_a_function_of_the_seed_and_its_number(self, call, chunks, tmp_path):
        chunks(50)
        whole = sampled(call, tmp_path / "a")
        assert whole.count(b"\n") == 121
        assert call("sample", trained(), "-n", 120, "--out", "-")[1].encode() == whole
        assert call("sample", trained(), "-n", 50, "--out", tmp_path / "b")[0] == 0
        assert whole.startswith((tmp_path / "b.csv").read_bytes())
        lines = whole.splitlines()
        assert lines[1:51] != lines[51:101]
        assert sampled(call, tmp_path / "c", "--seed", 1) != whole

    def test_the_same_command_continues(self, call, chunks, tmp_path, monkeypatch):
        chunks(50)
        whole, chunk, calls = sampled(call, tmp_path / "a"), SAMPLE.Drawing.chunk, []

        def stop(self, k):
            calls.append(k)
            if k == 2 and calls.count(2) == 1:
                raise KeyboardInterrupt
            return chunk(self, k)

        monkeypatch.setattr(SAMPLE.Drawing, "chunk", stop)
        code, text = call("sample", trained(), "-n", 120, "--out", tmp_path / "b")
        assert code == 130
        assert "100 rows are done" in text
        assert not (tmp_path / "b.csv").exists()
        assert sampled(call, tmp_path / "b") == whole
        assert calls == [0, 1, 2, 0, 2]  # the first are drawn again for the plot

    def test_images_are_written_in_chunks(self, call, chunks, tmp_path):
        chunks(4)
        assert call("sample", images("digits-density"), "-n", 6, "--out", tmp_path / "x")[0] == 0
        x = np.load(tmp_path / "x.npz")["x"]
        assert (x.shape, x.dtype) == ((6, 1, 8, 8), np.float64)
        assert len(np.unique(x.reshape(6, -1), axis=0)) == 6


class TestEvaluate:
    def test_sums_over_chunks_are_the_metrics_of_all(self, file, monkeypatch):
        monkeypatch.setattr(sys.modules["iresnet.evaluate.baselines"], "COMPONENTS", (2,))
        opened = Run.open(trained())
        model, splits, whole = opened.model(), opened.splits(), data.read(file, opened.schema)
        at_once = evaluate(model, whole, draws=3, fitting=splits)
        parts = (whole.take(range(i, min(i + 50, ROWS))) for i in range(0, ROWS, 50))
        in_chunks = evaluate_chunks(model, parts, draws=3, fitting=splits)
        assert_close(in_chunks.pop("inverse"), at_once.pop("inverse"), 1e-4)
        assert_close(in_chunks, at_once, 1e-6)

    def test_errors_are_counted(self):
        opened = Run.open(images())
        model, whole = opened.model(), opened.splits().test.take(range(100))
        at_once = evaluate(model, whole, draws=2)
        in_chunks = evaluate_chunks(model, (whole.take(range(i, i + 50)) for i in (0, 50)), draws=2)
        for name in ("error", "confusion"):
            assert in_chunks[name] == at_once[name]

    def test_the_command(self, call, chunks, file, monkeypatch):
        monkeypatch.setattr(sys.modules["iresnet.cli.evaluate"], "fitting_splits", lambda *_: None)
        chunks(1000)
        code, whole = call("evaluate", trained(), "--data", file)
        assert code == 0
        assert f"samples  {ROWS} of {ROWS}" in whole
        chunks(50)
        assert call("evaluate", trained(), "--data", file) == (0, whole)
        assert f"samples  60 of {ROWS}" in call("evaluate", trained(), "--data", file, "--rows", 60)[1]

    def test_impossible_values_are_counted_in_all_chunks(self, call, chunks, file, monkeypatch):
        monkeypatch.setattr(sys.modules["iresnet.cli.evaluate"], "fitting_splits", lambda *_: None)
        chunks(50)
        file.write_text(file.read_text().replace(",up,r2", ",sideways,r2"))
        code, text = call("evaluate", trained(), "--data", file)
        assert code == 2
        whole = data.read(file, Run.open(trained()).schema)
        outside = int((~whole.schema.inside(whole.x)).sum())
        assert f"{outside} of {ROWS} rows hold values that a column of the model cannot have" in text

    def test_moments(self):
        values = 1e6 + torch.randn(1000, dtype=torch.float64)
        moments = Moments()
        for part in values.split([1, 499, 500]):
            moments.add(part)
        assert moments.mean == pytest.approx(float(values.mean()), abs=1e-9)
        assert moments.standard_error == pytest.approx(float(values.std()) / 1000**0.5, rel=1e-9)


def parts_of(path, schema, size=50):
    return [chunk.data for chunk in ChunkedSource(str(path), schema, size, labels=True)]


class Passed(Exception):
    """A simulated rank has passed what rank 0 gathers."""


def simulate(function, n):
    """The result of rank 0 of n simulated ranks, which call a function of their group, the last one first."""
    passed = []

    class Simulated(Group):
        def gather(self, content):
            passed.insert(0, pickle.loads(pickle.dumps(content)))
            if self.rank:
                raise Passed
            return passed

    for number in reversed(range(1, n)):
        with pytest.raises(Passed):
            function(Simulated(number, n))
    return function(Simulated(0, n))


def evaluate_shared(model, parts, n, **options):
    def evaluate_own(group):
        first, end = (number * len(parts) // n for number in (group.rank, group.rank + 1))
        return evaluate_chunks(model, parts[first:end], group=group, size=len(parts[0]), **options)

    return simulate(evaluate_own, n)


class TestEvaluateShared:
    """Ranks share the chunks: counts and the inverse are those of one process, means up to rounding."""

    @pytest.mark.parametrize("n", [2, 3, 7])
    def test_a_table_with_noise_and_baselines(self, file, monkeypatch, n):
        monkeypatch.setattr(sys.modules["iresnet.evaluate.baselines"], "COMPONENTS", (2,))
        opened = Run.open(trained())
        model, parts = opened.model(), parts_of(file, opened.schema)
        options = {"draws": 3, "rows": 60, "fitting": opened.splits()}
        alone, shared = evaluate_chunks(model, parts, **options), evaluate_shared(model, parts, n, **options)
        assert shared["rows"] == ROWS
        assert shared.pop("inverse") == alone.pop("inverse")
        assert_close(shared, alone, 1e-12)

    def test_images_with_labels(self):
        opened = Run.open(images())
        model, whole = opened.model(), opened.splits().test.take(range(110))
        parts = [replace(whole.take(rows), rows=tuple(rows)) for rows in (range(50), range(50, 100), range(100, 110))]
        alone, shared = (f(model, parts, draws=2, rows=20) for f in (evaluate_chunks, partial(evaluate_shared, n=2)))
        for name in ("error", "confusion", "inverse"):
            assert shared.pop(name) == alone.pop(name)
        assert_close(shared, alone, 1e-12)

    def test_impossible_values_of_all_ranks_are_counted(self, file):
        file.write_text(file.read_text().replace(",up,r2", ",sideways,r2"))
        opened = Run.open(trained())
        model, parts = opened.model(), parts_of(file, opened.schema)
        outside = sum(int((~part.schema.inside(part.x)).sum()) for part in parts)
        with pytest.raises(ValueError, match=f"{outside} of {ROWS} rows hold values"):
            evaluate_shared(model, parts, 2)

    def test_estimated_likelihoods_cannot_skip_samples(self, file):
        opened = Run.open(trained())
        model, (part, *_) = opened.model(), parts_of(file, opened.schema)
        likelihoods = Likelihoods(model, part.schema, part.x.device, range(2))
        likelihoods.estimator = PowerSeries(2)
        with pytest.raises(ValueError, match="the probes of samples that are skipped are not known. Give all samples."):
            likelihoods.skip(part, 10, 5)

    @pytest.mark.parametrize("n", [2, 5])
    def test_drawn_samples_share_their_draws(self, file, n):
        """Five ranks of three draws: some have none."""
        opened = Run.open(trained())
        model, whole = opened.model(), data.read(file, opened.schema)
        found = simulate(lambda group: shared_log_prob_draws(model, whole, 3, group), n)
        assert torch.equal(found, log_prob_draws(model, whole, 3))

    @pytest.mark.parametrize("words", [(), ("--rows", 60)], ids=str)
    def test_the_command_is_that_of_one_process(self, call, chunks, file, two_ranks, words):
        chunks(50)
        alone = json.loads(call("evaluate", trained(), "--data", file, "--json", *words)[1].splitlines()[0])
        shared = two_ranks("evaluate", trained(), "--data", file, "--json", *words)
        assert shared.pop("inverse") == alone.pop("inverse")
        assert_close(shared, alone, 1e-12)

    @pytest.mark.parametrize(("line", "number"), [(200, "1"), (3, "0")])
    def test_bad_input_is_the_sentence_of_its_process(self, call, chunks, file, two_ranks, monkeypatch, line, number):
        chunks(50)
        lines = file.read_text().splitlines()
        lines[line] = lines[line].replace(",", ",x", 1)
        file.write_text("\n".join(lines))
        monkeypatch.setattr(sys.modules["iresnet.cli.ranks"], "GRACE", 0.0)
        two_ranks.become(number)
        code, text = call("evaluate", trained(), "--data", file)
        assert code == 2
        assert text.startswith("rank 1: iresnet: " if number == "1" else "iresnet: ")
        assert f"is not a number in line {line + 1}, column 'b'" in text

    def test_baselines_are_of_all_rows_or_of_none(self, chunks, file, two_ranks, monkeypatch):
        chunks(50)
        monkeypatch.setattr(two_ranks.group, "any", lambda self, flag: True)
        assert "baselines" not in two_ranks("evaluate", trained(), "--data", file, "--json")


@pytest.fixture
def two_ranks(call, monkeypatch):
    """Call a command as rank 1 of two, which is silent, and as rank 0; return what rank 0 prints."""
    monkeypatch.setattr(sys.modules["iresnet.evaluate.baselines"], "COMPONENTS", (2,))
    passed = []

    class Simulated(Group):
        def any(self, flag):
            return flag

        def gather(self, content):
            passed.insert(0, content)
            return passed

    def become(number):
        values = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
        for name, value in {**values, "MASTER_PORT": "1"}.items():
            monkeypatch.setenv(name, value)

    def run(*words):
        passed.clear()
        for number in ("1", "0"):
            become(number)
            code, text = call(*words)
            assert code == 0, text
            assert (text == "") == (number == "1")
        return json.loads(text.splitlines()[0])

    run.group, run.become = Simulated, become
    joined = lambda device: nullcontext(Simulated(distributed.rank(), distributed.world_size()))  # noqa: E731
    monkeypatch.setattr(sys.modules["iresnet.cli.evaluate"], "joined", joined)
    return run


def assert_close(a, b, relative):
    for name, value in a.items():
        if isinstance(value, dict):
            assert_close(value, b[name], relative)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for one, other in zip(value, b[name], strict=True):
                assert_close(one, other, relative)
        else:
            assert value == (b[name] if not isinstance(value, float) else pytest.approx(b[name], rel=relative)), name


# ------------------------------------------------------------------------------------------- as a user would, slowly


def start(*words):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "iresnet", *map(str, words)], env=environment, stdout=subprocess.PIPE
    )


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_a_killed_command_is_resumed(tmp_path, sent):
    file, out = write(tmp_path / "t.csv", 110_000, seed=1), tmp_path / "scores.csv"
    with start("score", trained(), file, "--out", out) as process:
        while not (tmp_path / "scores.csv.part.json").exists() and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(sent)
    assert process.returncode == (130 if sent == signal.SIGINT else -signal.SIGKILL)
    assert not out.exists()
    assert b"Resuming after 50,000 rows" in start("score", trained(), file, "--out", out).communicate()[0]
    start("score", trained(), file, "--out", tmp_path / "whole.csv").communicate()
    assert out.read_bytes() == (tmp_path / "whole.csv").read_bytes()


MEASURE = """
import contextlib, sys
from iresnet import cli
with contextlib.suppress(SystemExit):
    cli.main(sys.argv[1:])
"""


@LINUX
@pytest.mark.slow
@pytest.mark.parametrize("command", ["score", "sample", "evaluate"])
def test_memory_does_not_grow_with_the_rows(tmp_path, command):
    run.start(tiny("toy-iresnet"), tmp_path / "run")
    peaks = []
    for rows in (200_000, 2_000_000):
        np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(rows, 2)).astype("float32"))
        words = {
            "score": ["score", "x.npy", "--out", "s.csv"],
            "sample": ["sample", "-n", str(rows), "--out", "s"],
            "evaluate": ["evaluate", "--data", "x.npy"],
        }[command]
        peaks.append(peak_memory(MEASURE, words[0], "run", *words[1:], cwd=tmp_path))
    assert peaks[1] < peaks[0] + 80  # MiB


def test_the_note_says_what_a_part_is_made_from(call, chunks, file, tmp_path, monkeypatch):
    chunks(50)
    interrupted(monkeypatch, call, file, tmp_path / "s.csv", after=1)
    note = json.loads((tmp_path / "s.csv.part.json").read_text())
    assert note["made_from"]["model"] == Run.open(trained()).sha256()
    assert note["totals"] == {"rows": 50, "samples": 50, "impossible": 0}
    assert note["bytes"] == (tmp_path / "s.csv.part").stat().st_size
