"""Training on a table that is larger than memory: all rows in an epoch, each batch of (seed, step), bounded memory."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from iresnet import run
from iresnet.data import Batches, DataSettings, blocks, large_table, load
from iresnet.run import Run
from iresnet.train import checkpoint
from tests.peak import LINUX, peak_memory
from tests.runs import tiny

ROWS = 3000


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Blocks of 100 rows, windows of 300, and few rows held out and sampled."""
    monkeypatch.setattr(blocks, "BLOCK", 100)
    monkeypatch.setattr(blocks, "WINDOW", 600)
    monkeypatch.setattr(large_table, "HELD_OUT", 150)
    monkeypatch.setattr(large_table, "SAMPLE", 400)


def numbers(rows=ROWS):
    """A column that numbers the rows, and a normal one."""
    return np.stack([np.arange(rows) + 0.5, np.random.default_rng(0).normal(size=rows)], axis=1)


def settings(path, **options):
    return DataSettings(str(path), in_memory=1e-6, **options)


@pytest.fixture(params=["npy", "parquet"])
def file(request, tmp_path):
    return save(tmp_path / f"t.{request.param}", numbers())


def save(path, x, **columns):
    if path.suffix == ".npy":
        np.save(path, x)
        return path
    pytest.importorskip("pyarrow")
    import pandas as pd

    frame = pd.DataFrame({f"x{i}": column for i, column in enumerate(x.T)} | columns)
    frame.to_parquet(path, row_group_size=130)
    return path


def ids(x):
    return (x[:, 0] - 0.5).round().long().tolist()


def test_an_epoch_visits_every_training_row_once(file):
    splits = load(settings(file))
    batches = Batches(splits.train, 64, seed=3)
    assert splits.train.total == ROWS - 300
    assert batches.per_epoch == (ROWS - 300) // 64
    seen = [i for t in range(batches.per_epoch) for i in ids(batches[t][0])]
    held = ids(splits.validation.x) + ids(splits.test.x)
    assert (len(splits.validation), len(splits.test)) == (150, 150)
    assert len(set(seen)) == len(seen) == 64 * batches.per_epoch
    assert not set(seen) & set(held)
    assert len(set(held)) == 300


def test_a_batch_is_a_function_of_the_seed_and_the_step(file):
    train = load(settings(file)).train
    batches, again = Batches(train, 64, seed=3), Batches(load(settings(file)).train, 64, seed=3)
    expected = [batches[t][0] for t in range(90)]
    for t in (89, 3, 50, 4, 41, 42, 0):
        assert torch.equal(again[t][0], expected[t])
    assert not torch.equal(expected[0], expected[batches.per_epoch])
    assert not torch.equal(Batches(train, 64, seed=4)[0][0], expected[0])
    assert torch.equal(Batches(pickle.loads(pickle.dumps(train)), 64, seed=3)[7][0], expected[7])


def test_rows_of_distant_blocks_are_shuffled_together(file):
    batches = Batches(load(settings(file)).train, 100)
    places = np.array(ids(batches[0][0]))
    assert len(set((places // 130).tolist())) >= 3
    assert (np.diff(places) < 0).sum() > 20  # not in the order of the file


def test_the_values_are_those_of_the_file(file):
    x, y = Batches(load(settings(file)).train, 64)[5]
    assert y is None
    assert torch.equal(x, torch.from_numpy(numbers()[ids(x)].astype("float32")))


def test_kinds_and_classes_are_those_of_the_table_in_memory(tmp_path):
    generator = np.random.default_rng(0)
    x = np.stack([generator.poisson(3, ROWS), np.exp(generator.normal(size=ROWS)), generator.normal(size=ROWS)], axis=1)
    words = np.where(np.arange(ROWS) == 2222, "rare", np.where(x[:, 2] > 0, "up", "down"))
    path = save(tmp_path / "t.parquet", x, word=words, label=np.where(np.arange(ROWS) == 2900, "c", "b"), one=1.0)
    whole = load(DataSettings(str(path), label="label")).train.schema
    splits = load(settings(path, label="label"))
    assert splits.schema == whole
    assert whole.kinds[3].categories == ("down", "rare", "up")
    assert whole.classes == ("b", "c")
    assert whole.constants == ("one",)
    _, y = Batches(splits.train, 64)[0]
    assert y.shape == (64,)
    with pytest.raises(
        ValueError, match=r"labelled must be 1 for a table that is read in blocks; got 0.5. Raise data.in"
    ):
        load(settings(path, label="label", labelled=0.5))


@pytest.mark.parametrize("suffix", ["npy", "parquet"])
def test_missing_cells(tmp_path, suffix):
    x = numbers()
    x[[7, 250, *range(1000, 1300)], 1] = np.nan
    path = save(tmp_path / f"t.{suffix}", x)
    with pytest.raises(ValueError, match=r"got nan in row 7, column 'x1'. .* 302 cells in 302 rows are missing"):
        load(settings(path))
    splits = load(settings(path, missing="drop"))
    batches = Batches(splits.train, 1)
    seen = {i for t in range(batches.per_epoch) for i in ids(batches[t][0])}
    held = {*ids(splits.validation.x), *ids(splits.test.x)}
    assert seen | held == set(range(ROWS)) - {7, 250, *range(1000, 1300)}
    assert not seen & held


def test_a_value_that_the_sample_does_not_show_is_refused(tmp_path):
    x = np.random.default_rng(0).poisson(3, (ROWS, 2)).astype(float)
    x[1234, 1] = 2.5
    path = save(tmp_path / "t.npy", x)
    with pytest.raises(
        ValueError, match=r"column 'x1' is integer:0 in a sample of the rows; got 2.5 in .* --kind x1=real"
    ):
        load(settings(path))
    assert load(settings(path, kinds=("x1=real",))).schema.kinds[1].name == "real"


def test_only_large_tables_are_read_in_blocks(file):
    assert load(DataSettings(str(file))).train.blocks is None
    assert load(settings(file)).train.blocks is not None
    assert load(settings(file, test=0)).held_out is None
    with pytest.raises(ValueError, match=r"in_memory must be positive, in GiB; got 0.0. Use e.g. 1."):
        settings("t.npy").__class__("t.npy", in_memory=0.0)


def test_rows_are_drawn_without_repetition():
    for rows, n in ((40, 10), (10**6, 500)):
        drawn = large_table._draw(rows, n, torch.Generator(), np.arange(5))
        assert len(set(drawn.tolist())) == n
        assert drawn.min() >= 5
        assert drawn.tolist() == sorted(drawn.tolist())


@pytest.mark.slow
def test_a_resumed_training_is_the_same(tmp_path, file):
    experiment = replace(tiny("table-density"), data=settings(file))
    short = replace(experiment, training=replace(experiment.training, steps=6))
    whole = run.start(short, tmp_path / "whole")
    run.start(short, tmp_path / "parts", stop=stop_after(3))
    resumed = run.resume(tmp_path / "parts")
    assert (whole.finished, resumed.finished, resumed.step) == (True, True, 6)
    first, second = (checkpoint.load(tmp_path / name / "model.safetensors").tensors for name in ("whole", "parts"))
    assert all(torch.equal(t, second["weights"][name]) for name, t in first["weights"].items())
    assert Run.open(tmp_path / "parts").splits().train.total == ROWS - 300
    save(file, numbers()[::-1].copy())
    with pytest.raises(ValueError, match="have changed since it was trained"):
        Run.open(tmp_path / "parts").splits()


def stop_after(calls):
    left = iter(range(calls))
    return lambda: next(left, None) is None


MEASURE = """
import sys
from iresnet.data import Batches, DataSettings, load
batches = Batches(load(DataSettings(sys.argv[1], in_memory=0.001)).train, 256)
for t in range(0, batches.per_epoch, 5):
    batches[t]
"""


@LINUX
@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["npy", "parquet"])
def test_memory_does_not_grow_with_the_rows(tmp_path, suffix):
    x, peaks = np.random.default_rng(0).normal(size=(6_000_000, 4)).astype("float32"), []
    for rows in (600_000, 6_000_000):
        path = tmp_path / f"{rows}.{suffix}"
        if suffix == "npy":
            np.save(path, x[:rows])
        else:
            pytest.importorskip("pyarrow")
            import pandas as pd

            pd.DataFrame(x[:rows], columns=["a", "b", "c", "d"]).to_parquet(path, row_group_size=100_000)
        peaks.append(peak_memory(MEASURE, path))
    assert peaks[1] < peaks[0] + 60  # MiB; the rows alone take 92 in float32
