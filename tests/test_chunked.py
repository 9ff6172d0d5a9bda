"""Reading in chunks: the samples, and the sentences about what is wrong, are those of reading at once."""

import io
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from iresnet.data import ColumnKind, Schema, read
from iresnet.data import arrow as fast
from iresnet.data.arrays import column_table
from iresnet.data.choice import choose_schema_columns
from iresnet.data.chunked import ChunkedSource
from iresnet.data.dataset import concatenate
from iresnet.data.npy import ArrayFile, save_npz_chunks
from iresnet.data.split import RandomRows
from tests.peak import LINUX, peak_memory

COLOURS = ColumnKind.category(("red", "sky, blue"))
SCHEMA = Schema((3,), columns=("a", "b", "c"), kinds=(ColumnKind(), ColumnKind("integer", None, None, 1.0), COLOURS))
NUMBERS = Schema((2,), columns=("a", "b"))
SIZES = [1, 7, 50, 1000]


def rows(n=60):
    return [(i / 8 - 3, i % 5, "red" if i % 3 else '"sky, blue"') for i in range(n)]


def write(path, text):
    path.write_text(text, encoding="utf-8", newline="")
    return path


def both(path, schema, size, **options):
    """The dataset as it is read at once, and as the concatenation of its chunks; or the errors of both."""

    def chunked():
        chunks = [chunk.data for chunk in ChunkedSource(str(path), schema, size, **options)]
        return concatenate([chunk for chunk in chunks if chunk is not None])

    found = []
    for function in (lambda: read(path, schema, **{"labels": False, **options}), chunked):
        try:
            found.append(function())
        except ValueError as error:
            found.append(str(error))
    return found


def assert_same(path, schema, size, **options):
    whole, joined = both(path, schema, size, **options)
    assert torch.equal(whole.x, joined.x)
    assert whole.x.is_contiguous()  # so that scores do not depend on how a file stores its rows
    assert whole.names == joined.names
    assert (whole.rows or tuple(range(len(whole)))) == joined.rows
    assert (whole.y is None and joined.y is None) or torch.equal(whole.y, joined.y)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("newline", ["\n", "\r\n", "\n\n"])
def test_chunks_of_text(tmp_path, size, newline):
    lines = ["a,id,b,c", *(f'{a},"row\n{i}",{b},{c}' for i, (a, b, c) in enumerate(rows()))]
    assert_same(write(tmp_path / "t.csv", newline.join(lines)), SCHEMA, size, id="id")


@pytest.mark.parametrize("with_arrow", [True, False])
def test_chunks_with_and_without_pyarrow(tmp_path, monkeypatch, with_arrow):
    if with_arrow:
        pytest.importorskip("pyarrow")
    else:
        monkeypatch.setattr(fast, "parse_block", lambda *_: None)
    path = write(tmp_path / "t.tsv", "b\ta\tc\n" + "".join(f"{b}\t{a}\tred\n\n" for a, b, _ in rows()))
    assert_same(path, SCHEMA, 9)


@pytest.mark.parametrize("size", SIZES)
def test_decimal_commas(tmp_path, size):
    assert_same(write(tmp_path / "t.csv", "a;b\n" + "".join(f"{i},5;{i}\n" for i in range(30))), NUMBERS, size)


@pytest.mark.parametrize("with_arrow", [True, False])
def test_decimal_commas_after_points_are_refused(tmp_path, monkeypatch, with_arrow):
    if not with_arrow:
        monkeypatch.setattr(fast, "parse_block", lambda *_: None)
    lines = [*(f"{i};{i}\n" for i in range(10)), *(f"{i}.5;{i}\n" for i in range(10)), "1,5;2\n"]
    whole, chunked = both(write(tmp_path / "t.csv", "a;b\n" + "".join(lines)), NUMBERS, 4)
    assert whole == chunked
    assert "'1,5' may have a decimal comma or separate thousands; '0.5' has a decimal point" in whole


def test_compressed_text_and_the_standard_input(tmp_path, monkeypatch):
    import gzip

    text = "a,b\n" + "".join(f"{i},{-i}\n" for i in range(20))
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(text.encode()))
    assert_same(tmp_path / "t.csv.gz", NUMBERS, 6)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    chunks = list(ChunkedSource("-", NUMBERS, 6))
    assert [len(chunk.data) for chunk in chunks] == [6, 6, 6, 2]
    assert chunks[-1].data.rows == (18, 19)
    assert chunks[-1].fraction is None


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("size", SIZES)
def test_chunks_of_arrays(tmp_path, size, order):
    np.save(tmp_path / "t.npy", np.asarray(np.random.default_rng(0).normal(size=(60, 2)), order=order))
    assert_same(tmp_path / "t.npy", NUMBERS, size)
    images = np.asarray(np.random.default_rng(0).integers(0, 17, (12, 2, 3)).astype("uint8"), order=order)
    np.save(tmp_path / "i.npy", images)
    assert_same(tmp_path / "i.npy", Schema((1, 2, 3), 17), size)
    np.savez(tmp_path / "t.npz", x=np.arange(6.0).reshape(3, 2))
    assert_same(tmp_path / "t.npz", NUMBERS, size)


def test_rows_of_an_array_file(tmp_path):
    x = np.arange(48).reshape(6, 2, 4)
    for order in "CF":
        np.save(tmp_path / "x.npy", np.asarray(x, order=order))
        assert np.array_equal(ArrayFile(tmp_path / "x.npy").read(2, 99), x[2:])


def test_an_archive_is_written_in_chunks(tmp_path):
    x = np.arange(24.0).reshape(4, 2, 3)
    path = save_npz_chunks(tmp_path / "x.npz", x.shape, x.dtype, [x[:3], x[3:]])
    assert np.array_equal(np.load(path)["x"], x)


@pytest.mark.parametrize("size", SIZES)
def test_chunks_of_parquet(tmp_path, size):
    pytest.importorskip("pyarrow")
    import pandas as pd

    frame = pd.DataFrame(rows(), columns=["a", "b", "c"]).assign(id=[f"r{i}" for i in range(60)], other=0)
    frame["c"] = frame["c"].str.strip('"')
    frame.to_parquet(tmp_path / "t.parquet", row_group_size=25)
    assert_same(tmp_path / "t.parquet", SCHEMA, size, id="id")
    source = ChunkedSource(str(tmp_path / "t.parquet"), SCHEMA, size)
    assert (source.rows, source.count()) == (60, -(-60 // size))


def test_names_of_rows_are_those_of_a_text_file(tmp_path):
    names = ["0012", "12", "1.0", "NA", "none"]
    path = write(tmp_path / "t.csv", "id,a,b\n" + "".join(f"{name},1,2\n" for name in names))
    columns = {"id": np.array([*names[:4], " none"], dtype=object), "a": np.ones(5), "b": np.ones(5)}
    table = column_table(tmp_path / "t.parquet", columns, choose_schema_columns(NUMBERS, id="id"))
    assert table.ids == list(read(path, NUMBERS, id="id").names) == names
    columns["id"] = np.array([7.0, 8.0, 9.0, 10.0, np.nan])
    assert column_table(tmp_path / "t.parquet", columns, choose_schema_columns(NUMBERS, id="id")).ids[:2] == ["7", "8"]


def test_the_digest_of_a_folder_includes_the_names(tmp_path):
    for name, level in (("a.png", 10), ("c.png", 20)):
        Image.fromarray(np.full((2, 2), level, dtype="uint8")).save(tmp_path / name)
    schema = Schema((1, 2, 2), 256)
    before = ChunkedSource(str(tmp_path), schema, 1).digest()
    assert ChunkedSource(str(tmp_path), schema, 1).digest() == before
    (tmp_path / "a.png").rename(tmp_path / "b.png")
    assert ChunkedSource(str(tmp_path), schema, 1).digest() != before


def test_labels(tmp_path):
    schema = Schema((1,), columns=("a",), label="y", classes=("no", "yes"))
    path = write(tmp_path / "t.csv", "a,y\n" + "".join(f"{i},{['no', 'yes', ''][i % 3]}\n" for i in range(20)))
    assert_same(path, schema, 6, labels=True)


@pytest.mark.parametrize("suffix", ["csv", "npy", "parquet"])
def test_rows_with_missing_cells_are_left_out(tmp_path, suffix):
    x = np.arange(40.0).reshape(20, 2)
    x[[2, 8, 9, 10, 11, 17], 1] = np.nan  # with chunks of 4, one has no row left
    path = save(tmp_path / f"t.{suffix}", x)
    assert_same(path, NUMBERS, 4, skip_missing=True)
    assert sum(chunk.data is None for chunk in ChunkedSource(str(path), NUMBERS, 4, skip_missing=True)) == 1


def save(path, x):
    if path.suffix == ".npy":
        np.save(path, x)
    elif path.suffix == ".parquet":
        pytest.importorskip("pyarrow")
        import pandas as pd

        pd.DataFrame(x, columns=["a", "b"]).to_parquet(path)
    else:
        write(path, "a,b\n" + "".join(f"{a},{'' if np.isnan(b) else b}\n" for a, b in x))
    return path


@pytest.mark.parametrize("suffix", ["csv", "npy", "parquet"])
@pytest.mark.parametrize("bad", [[15], [15, 16, 33], [39]])
def test_missing_cells_are_refused_in_the_same_words(tmp_path, suffix, bad):
    x = np.arange(80.0).reshape(40, 2)
    x[bad, 1] = np.nan
    whole, chunked = both(save(tmp_path / f"t.{suffix}", x), NUMBERS, 4)
    assert whole == chunked
    assert f"row {bad[0]}," in whole or f"line {bad[0] + 2}," in whole
    assert "--missing drop" in whole


@pytest.mark.parametrize("line", ["1,two,red", "1,2", "1,inf,red", "1,2,", "1,1e99,red"])
def test_bad_lines_are_refused_in_the_same_words(tmp_path, line):
    good = [f"{i},{i},red" for i in range(30)]
    path = write(tmp_path / "t.csv", "\n".join(["a,b,c", *good, line, *good, "9,9,", ""]))
    whole, chunked = both(path, SCHEMA, 7)
    assert isinstance(whole, str)
    assert whole == chunked


def test_an_unknown_given_category_is_counted_in_all_chunks(tmp_path):
    schema = SCHEMA.given_others(["a", "b"])
    path = write(
        tmp_path / "t.csv", "a,b,c\n" + "".join(f"{i},{i},{'green' if i in (9, 20) else 'red'}\n" for i in range(25))
    )
    whole, chunked = both(path, schema, 4)
    assert whole == chunked
    assert "in line 11, of which the model knows nothing. Remove the row. There are 2 such rows." in whole


def test_a_file_without_rows(tmp_path):
    whole, chunked = both(write(tmp_path / "t.csv", "a,b\n"), NUMBERS, 4)
    assert whole == chunked


@pytest.mark.parametrize("suffix", ["csv", "npy"])
def test_any_chunk_can_come_first(tmp_path, suffix):
    source = ChunkedSource(str(save(tmp_path / f"t.{suffix}", np.arange(40.0).reshape(20, 2))), NUMBERS, 6)
    assert source.count() == 4
    chunks = list(source)
    assert [chunk.rows for chunk in chunks] == [6, 6, 6, 2]
    assert chunks[-1].fraction == 1
    later = list(source.starting_at(2))
    assert [chunk.data.rows for chunk in later] == [chunk.data.rows for chunk in chunks[2:]]


class TestRandomRows:
    def test_few_rows_are_all_kept_in_order(self, tmp_path):
        drawn = draw(tmp_path, 6, 50)
        assert drawn.x[:, 0].tolist() == list(range(0, 40, 2))

    def test_the_rows_do_not_depend_on_the_chunks(self, tmp_path):
        assert torch.equal(draw(tmp_path, 6, 5).x, draw(tmp_path, 20, 5).x)

    def test_all_rows_are_equally_likely(self):
        from iresnet.data import Dataset

        x = torch.arange(1000.0)[:, None]
        data, counts = Dataset(x, None, Schema((1,))), torch.zeros(10)
        for seed in range(200):
            rows = RandomRows(5)
            rows.generator.manual_seed(seed)
            for part in x.split(300):
                rows.add(replace(data, x=part))
            counts += torch.bincount((rows.dataset.x[:, 0] / 100).long(), minlength=10)
        assert (counts - 100).abs().max() < 4 * np.sqrt(1000 * 0.1 * 0.9)


def draw(folder, size, n):
    rows = RandomRows(n)
    for chunk in ChunkedSource(str(save(folder / "t.npy", np.arange(40.0).reshape(20, 2))), NUMBERS, size):
        rows.add(chunk.data)
    return rows.dataset


MEASURE = """
import sys
from iresnet.data import Schema
from iresnet.data.chunked import ChunkedSource
for chunk in ChunkedSource(sys.argv[1], Schema((4,)), 20_000):
    pass
"""


@LINUX
@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["csv", "npy", "parquet"])
def test_memory_does_not_grow_with_the_rows(tmp_path, suffix):
    x, peaks = np.random.default_rng(0).normal(size=(2_000_000, 4)).astype("float32"), []
    for rows in (200_000, 2_000_000):
        path = tmp_path / f"{rows}.{suffix}"
        if suffix == "npy":
            np.save(path, x[:rows])
        elif suffix == "csv":
            block = "".join(f"{a:.6g},{b:.6g},{c:.6g},{d:.6g}\n" for a, b, c, d in x[:100_000].tolist())
            path.write_text(rows // 100_000 * block)
        else:
            pytest.importorskip("pyarrow")
            import pandas as pd

            pd.DataFrame(x[:rows], columns=["x0", "x1", "x2", "x3"]).to_parquet(path, row_group_size=100_000)
        peaks.append(peak_memory(MEASURE, path))
    assert peaks[1] < peaks[0] + 50  # MiB
