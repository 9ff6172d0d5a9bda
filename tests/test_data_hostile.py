"""Files that were made to harm: every one is refused by a sentence that names it, in little memory and time."""

import bz2
import csv
import gzip
import io
import pickle
import re
import struct
import sys
import tarfile
import time
import tracemalloc
import types
import zipfile
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from iresnet.data import DataSettings, Schema, arrays, delimited, images, lines, load, npy, packed, read
from iresnet.data.choice import ColumnChoice
from iresnet.data.labels import class_name, class_names
from iresnet.data.numerals import is_number
from tests.test_data_sources import cifar10_files, idx, paint, write_mnist, write_tar

MIB = 2**20
BATCH = "cifar-10-batches-bin/data_batch_1.bin"


@contextmanager
def refused(*words):
    """A sentence, alone on its line, that holds these words; and neither a trace of Python's nor a long text."""
    with pytest.raises(ValueError, match=re.escape(words[0])) as error:
        yield
    text = str(error.value)
    assert type(error.value) is ValueError
    assert all(word in text for word in words)
    assert text.endswith(".")
    assert "\n" not in text
    assert len(text) < 1000


def refused_within(most, read, *words):
    """`read()` is refused, and takes at most so many bytes of Python's and numpy's memory at a time.

    The count is of the whole process: what the test runner's own threads take is in it now and then. What `read` takes
    is in every try, so the least of three is at least that.
    """
    assert min(peak(read, words) for _ in range(3)) < most


def peak(read, words):
    tracemalloc.start()
    try:
        with refused(*words):
            read()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


class TestGzip:
    def test_more_than_the_published_file_is_not_unpacked(self, tmp_path):
        write_mnist(tmp_path)
        path = tmp_path / "train-labels-idx1-ubyte.gz"
        path.write_bytes(gzip.compress(idx(np.zeros(8 * MIB, np.uint8)), 1))
        refused_within(
            4 * MIB,
            lambda: load(DataSettings("mnist", folder=str(tmp_path))),
            str(path),
            "it must hold at most 60,008 bytes, and holds more",
            "mnist: ",
        )

    def test_nor_read_where_it_lies_unpacked(self, tmp_path):
        write_mnist(tmp_path, packed=False)
        path = tmp_path / "train-labels-idx1-ubyte"
        with path.open("r+b") as file:
            file.truncate(2**30)
        refused_within(
            4 * MIB, lambda: load(DataSettings("mnist", folder=str(tmp_path))), str(path), "at most 60,008 bytes"
        )

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (gzip.compress(idx(np.zeros(20, np.uint8))), "must start with the bytes 0 0 8; got 31 139 8"),
            (bytes([0, 0, 8, 200]) + 800 * b"\0\0\0\1" + b"\0", "must hold an array of up to 3 dimensions; got 200"),
            (bytes([0, 0, 8, 3]) + 12 * b"\xff", "); got 0."),
            (idx(np.zeros((0, 28, 28), np.uint8)), "do not match labels of shape (20,), in train-images-idx3-ubyte"),
            (b"", "must start with the bytes 0 0 8"),
        ],
        ids=["gz in gz", "dimensions", "header", "no images", "empty"],
    )
    def test_other_content(self, tmp_path, content, words):
        write_mnist(tmp_path)
        (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(content))
        with refused(words, "train-images-idx3-ubyte", "mnist: "):
            load(DataSettings("mnist", folder=str(tmp_path)))

    def test_labels_that_are_wrong_name_their_files(self, tmp_path):
        write_mnist(tmp_path)
        (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.full(20, 12, np.uint8))))
        with refused("got 12 for sample 0", "The files are train-images-idx3-ubyte, train-labels-idx1-ubyte."):
            load(DataSettings("mnist", folder=str(tmp_path)))

    def test_a_file_that_may_not_be_read_is_not_called_damaged(self, tmp_path):
        with pytest.raises(IsADirectoryError, match=re.escape(str(tmp_path))):
            packed.read_limited(tmp_path, 10)


def header(name, *, kind=tarfile.REGTYPE, size=0, link=""):
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.size = kind, link, size
    return member.tobuf(tarfile.GNU_FORMAT)


def raw_tar(path, *blocks):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(b"".join(blocks) + bytes(1024), 1))
    return path


def negative(name):
    """A header that says: go back 1024 bytes after this one."""
    block = bytearray(header(name))
    block[124:136] = (2**96 - 1024).to_bytes(12, "big")
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


class TestArchive:
    @pytest.fixture
    def path(self, tmp_path):
        return tmp_path / "cifar-10-binary.tar.gz"

    def load(self, path):
        return load(DataSettings("cifar10", folder=str(path.parent)))

    @pytest.mark.parametrize(
        "kind",
        [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE],
        ids=["link", "hard link", "folder", "pipe", "device", "block device"],
    )
    @pytest.mark.parametrize("target", [BATCH, "/etc/passwd", "nowhere"])
    def test_a_batch_is_a_plain_file(self, path, kind, target):
        raw_tar(path, header(BATCH, kind=kind, link=target))
        with refused(str(path), f"{BATCH} must be a regular file, not a link, folder or device", "cifar10: "):
            self.load(path)

    def test_nor_is_it_sparse(self, path):
        block = bytearray(header(BATCH, kind=tarfile.GNUTYPE_SPARSE))
        block[483:495] = b"77777777777\0"  # the size it would have, 8 GiB of zeros
        block[148:156] = b" " * 8
        block[148:156] = b"%06o\0 " % sum(block)
        raw_tar(path, bytes(block))
        refused_within(4 * MIB, lambda: self.load(path), str(path), "must be a regular file")

    def test_a_batch_that_is_too_large(self, path):
        write_tar(path, {BATCH: bytes(30_730_001)})
        with refused(str(path), f"{BATCH}: it must hold at most 30,730,000 bytes, and holds more"):
            self.load(path)

    def test_a_batch_that_says_it_is_much_larger(self, path):
        raw_tar(path, header(BATCH, size=2**33 - 1), bytes(MIB))
        refused_within(8 * MIB, lambda: self.load(path), str(path), "unexpected end of data")

    @pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME], ids=["pax", "long name"])
    def test_a_header_that_is_too_long(self, path, kind):
        raw_tar(path, header("h", kind=kind, size=16 * MIB), bytes(16 * MIB))
        refused_within(4 * MIB, lambda: self.load(path), str(path), "one of its headers is too long")

    def test_headers_of_headers(self, path):
        raw_tar(path, 3000 * (header("h", kind=tarfile.GNUTYPE_LONGNAME, size=1) + bytes(512)))
        with refused(str(path), "is damaged"):
            self.load(path)

    def test_a_member_that_leads_back(self, path):
        raw_tar(path, header("a"), negative("b"))
        with refused(str(path), "it must hold at most 1,000 files, of sizes of at least 0"):
            self.load(path)

    def test_very_many_files(self, path):
        raw_tar(path, *(header(str(i)) for i in range(1001)))
        with refused(str(path), "at most 1,000 files"):
            self.load(path)

    def test_a_batch_that_is_there_twice(self, path):
        raw_tar(path, header(BATCH), header(BATCH))
        with refused(str(path), f"it holds {BATCH} twice"):
            self.load(path)

    def test_much_beside_what_is_known(self, path):
        raw_tar(path, header("a", size=3 * MIB), bytes(3 * MIB), header("b"))
        with refused(str(path), f"it must hold at most {MIB + 1000:,} bytes, and holds more"):
            packed.read_tar_members(path, {"b": 0}, 1000)
        assert packed.read_tar_members(path, {"b": 0}, 3 * MIB) == {"b": b""}

    def test_the_names_of_links_are_not_looked_up(self, path):
        """As `tarfile` does, which raises a KeyError where there is none."""
        write_tar(path, {"readme": b"", **cifar10_files()})
        assert self.load(path).schema.shape == (3, 32, 32)

    def test_no_archive(self, path):
        for content in (b"", b"\x1f\x8b", gzip.compress(b""), gzip.compress(b"no tar" * 100), b"PK\3\4"):
            path.write_bytes(content)
            with refused(str(path)):
                self.load(path)


def npy_bytes(shape, descr="<f8", data=b"", version=1, head=None):
    text = (head or f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}").encode() + b"\n"
    length = struct.pack("<H" if version == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes([version, 0]) + length + text + data


def zipped(**members):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name.replace("_npy", ".npy"), content)
    return file.getvalue()


def saved(packing=zipfile.ZIP_DEFLATED, **members):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", packing) as archive:
        for name, array in members.items():
            content = io.BytesIO()
            np.save(content, array)
            archive.writestr(f"{name}.npy", content.getvalue())
    return file.getvalue()


X = np.arange(20.0).reshape(10, 2)


class TestNumpy:
    @pytest.fixture(params=["a.npz", "a.npy"])
    def path(self, request, tmp_path):
        return tmp_path / request.param

    def test_zeros_that_pack_well(self, tmp_path):
        path = tmp_path / "a.npz"
        path.write_bytes(saved(x=np.zeros((72, MIB), np.uint8)))
        refused_within(
            4 * MIB,
            lambda: load(DataSettings(str(path))),
            str(path),
            "x.npy unpacks from 7",
            "above 67,108,864 bytes it may unpack to 100 times its size",
        )

    def test_what_is_not_packed_has_no_limit(self, tmp_path, monkeypatch):
        monkeypatch.setattr(npy, "FREE", 1000)
        x = np.zeros((1000, 2)) + np.arange(2000).reshape(1000, 2)
        for packing in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # and what packs as numbers do
            (tmp_path / "a.npz").write_bytes(saved(packing, x=x))
            assert len(load(DataSettings(str(tmp_path / "a.npz"))).train) > 500

    def test_a_size_that_is_a_lie(self, tmp_path, monkeypatch):
        """The archive says that the packed array is as large as the whole one; the file is not that large."""
        monkeypatch.setattr(npy, "FREE", 1000)
        content = bytearray(saved(x=np.zeros((1000, 100))))
        entry = content.index(b"PK\1\2")
        content[entry + 20 : entry + 24] = content[entry + 24 : entry + 28]
        (tmp_path / "a.npz").write_bytes(content)
        with refused(str(tmp_path / "a.npz"), "unpacks from"):
            load(DataSettings(str(tmp_path / "a.npz")))

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (
                npy_bytes((10**12, 2)),
                "its header says (1000000000000, 2) float64, 16,000,000,000,000 bytes; it holds 0",
            ),
            (npy_bytes((2**32, 2**32)), "it holds 0"),
            (npy_bytes((4,), data=bytes(24)), "32 bytes; it holds 24"),
            (npy_bytes((4,), data=bytes(40)), "32 bytes; it holds 40"),
            (npy_bytes((-1, -1), data=bytes(8)), "it must hold an array of numbers or text; got float64 (-1, -1)"),
            (npy_bytes((10**15, 0)), "holds no numbers; got float64 (1000000000000000, 0)"),
            (npy_bytes((1, 2), [("a", "<f8")], bytes(16)), "it must hold an array of numbers or text"),
            (npy_bytes((1, 2), ("<f8", (1000,)), bytes(16000)), "it must hold an array of numbers or text"),
            (npy_bytes((1,), "|O", pickle.dumps(print)), "Object arrays cannot be loaded"),
            (npy_bytes((1, 2), version=3, data=bytes(16)), "it has version 3 of the format"),
            (npy_bytes((1, 2), version=9, data=bytes(16)), "it has version 9"),
            (npy_bytes(0, head="(" * 5000), "cannot be read as an array"),
            (npy_bytes(0, head="{" + "[" * 900), "cannot be read as an array"),
            (npy_bytes(0, head="x" * 20_000), "cannot be read as an array"),
            (npy_bytes((1, 2), "<U100000000", bytes(16)), "it holds 16"),
            (pickle.dumps({"x": 1}), "cannot be read as an array"),
            (b"\x93NUMPY", "cannot be read as an array"),
            (b"x", "cannot be read as an array"),
            (b"", "No data left in file"),
        ],
        ids=str.split(
            "long product cut longer negative no-columns fields subarray objects version-3 version-9 parentheses "
            "brackets long-header text pickle magic byte empty"
        ),
    )
    def test_a_header_that_is_a_lie(self, path, content, words):
        path.write_bytes(zipped(x_npy=content) if path.suffix == ".npz" else content)
        refused_within(8 * MIB, lambda: load(DataSettings(str(path))), str(path), words)

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (zipped(readme=b"hello"), "must hold 'x' and optionally 'y', or one array; got none"),
            (zipped(x=b"hello"), "got none"),
            (zipped(x=b"hello", y_npy=npy_bytes((1,), data=bytes(8))), "got float64 (1,)"),
            (zipped(**{f"array{i}_npy": b"" for i in range(3000)}), "got array0, array1, "),
            (zipped(**{1000 * name + "_npy": b"" for name in "ab"}), "got aaaa"),
            (saved(zipfile.ZIP_BZIP2, x=X), "x.npy has a compression that numpy does not write"),
            (saved(zipfile.ZIP_LZMA, x=X), "x.npy has a compression that numpy does not write"),
            (saved(x=X).replace(b"PK\1\2\x14\3\x14\0\0\0", b"PK\1\2\x14\3\x14\0\1\0"), "encrypted"),
            (saved(x=np.zeros((0, 2))), "holds no numbers"),
            (saved(x=X, y=np.zeros(9)), "one label per sample; got y of shape (9,) for 10 samples"),
            (b"PK\3\4", "cannot be read as an array"),
            (saved(x=X)[:-30], "cannot be read as an array"),
        ],
        ids=str.split("other no-npy labels-alone many-names long-names bzip2 lzma encrypted no-rows labels mark cut"),
    )
    def test_an_archive_of_other_things(self, tmp_path, content, words):
        path = tmp_path / "a.npz"
        path.write_bytes(content)
        with refused(str(path), words):
            load(DataSettings(str(path)))

    @pytest.mark.filterwarnings("ignore:Duplicate name")
    def test_an_array_that_is_there_twice(self, tmp_path):
        with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
            for _ in range(2):
                archive.writestr("x.npy", npy_bytes((1, 2), data=bytes(16)))
        with refused(str(tmp_path / "a.npz"), "it holds x twice"):
            load(DataSettings(str(tmp_path / "a.npz")))

    @pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "C:\\x", "\x1b[2J"])
    def test_nothing_is_unpacked_to_the_disk(self, tmp_path, name):
        folder = tmp_path / "a" / "b"
        folder.mkdir(parents=True)
        (folder / "a.npz").write_bytes(saved(**{name: X, "readme": X}) if name == "x" else saved(**{name: X}))
        assert len(load(DataSettings(str(folder / "a.npz"))).train) == 7
        assert sorted(p.name for p in tmp_path.rglob("*")) == ["a", "a.npz", "b"]

    def test_other_members_beside_x(self, tmp_path):
        (tmp_path / "a.npz").write_bytes(zipped(x_npy=npy_bytes((9, 1), data=X[1:].tobytes()[:72]), readme=b"hello"))
        assert read(tmp_path / "a.npz", Schema((1,))).x.shape == (9, 1)

    def test_numbers_of_any_precision_and_byte_order(self, path):
        for kind in (">f8", "<f2", np.longdouble, "u8", ">i2"):
            np.savez(path, x=X.astype(kind)) if path.suffix == ".npz" else np.save(path, X.astype(kind))
            assert read(path, Schema((2,))).x.tolist() == X.tolist()

    @pytest.mark.skipif(np.finfo(np.longdouble).max == np.finfo(float).max, reason="long double is double here")
    def test_a_number_beyond_float64(self, tmp_path):
        np.save(tmp_path / "a.npy", np.array([[1, np.finfo(np.longdouble).max]]))
        with refused(str(tmp_path / "a.npy"), "inf in row 0, column 'x1'"):
            read(tmp_path / "a.npy", Schema((2,)))

    def test_labels_of_many_kinds(self, tmp_path):
        path = tmp_path / "a.npz"
        path.write_bytes(saved(x=X, y=np.array(["=1+1", "@a"] * 5)))
        assert load(DataSettings(str(path))).schema.classes == ("=1+1", "@a")

    def test_an_npy_file_alone(self, tmp_path):
        path = tmp_path / "codes.npy"
        np.save(path, X)
        assert np.array_equal(npy.load_array(path), X)
        for content in (saved(x=X), b"", npy_bytes((10**12, 2)), npy_bytes((1,), "|O", pickle.dumps(print))):
            path.write_bytes(content)
            with refused(f"{path} must be a .npy file with an array of numbers ("):
                npy.load_array(path)


class TestParquet:
    def test_few_bytes_for_very_many_cells(self, tmp_path, monkeypatch):
        def read_metadata(path):
            return types.SimpleNamespace(num_rows=10**9, num_columns=7)

        engine, pandas = types.ModuleType("pyarrow.parquet"), types.ModuleType("pandas")
        engine.read_metadata = read_metadata
        monkeypatch.setitem(sys.modules, "pyarrow.parquet", engine)
        monkeypatch.setitem(sys.modules, "pandas", pandas)
        path = tmp_path / "a.parquet"
        path.write_bytes(b"x")
        with refused(
            f"{path} holds 1,000,000,000 rows of 7 columns in 1 bytes; above 67,108,864 bytes it may unpack to 100"
        ):
            load(DataSettings(str(path)))

    def test_two_columns_of_one_name(self, tmp_path, monkeypatch):
        pandas = types.ModuleType("pandas")
        pandas.read_parquet = lambda path: types.SimpleNamespace(columns=["a", "a"])
        monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
        monkeypatch.setitem(sys.modules, "pandas", pandas)
        (tmp_path / "a.parquet").write_bytes(b"")
        with refused(f"{tmp_path / 'a.parquet'}: two columns are called 'a'"):
            load(DataSettings(str(tmp_path / "a.parquet")))


NOT_NUMBERS = [
    "1_000",
    "٣",
    "１２",
    "१.५",
    "1e٣",
    "0x10",
    "1,5"[::2] + "_5",
    "\u00a01",
    "½",
    "⁵",
    "--1",
    "1e",
    "1 0",
    "١_٠",
]


class TestNumbers:
    @pytest.mark.parametrize("cell", NOT_NUMBERS)
    def test_what_only_python_takes_for_a_number(self, tmp_path, cell):
        assert not is_number(cell)
        path = tmp_path / "a.csv"
        path.write_text(f"a,b\n1,2\n3,{cell}\n", encoding="utf-8")
        with refused(str(path), "is not a number in line 3, column 'b'"):
            load(DataSettings(str(path)))

    @pytest.mark.parametrize("cell", ["1", "-1.5", "+.5", "5.", "1e-3", "1E+3", " 7 ", "007"])
    def test_numbers(self, tmp_path, cell):
        (tmp_path / "a.csv").write_text(f"a,b\n1,2\n3,{cell}\n", encoding="utf-8")
        assert read(tmp_path / "a.csv", Schema((2,), columns=("a", "b"))).x[1, 1] == float(cell)

    @pytest.mark.parametrize("cell", ["inf", "-Infinity", "nan", "NaN", "1e999"])
    def test_numbers_that_are_none(self, tmp_path, cell):
        (tmp_path / "a.csv").write_text(f"a,b\n1,2\n3,{cell}\n", encoding="utf-8")
        with refused("in line 3, column 'b'. Fill it in"):
            load(DataSettings(str(tmp_path / "a.csv")))

    @given(st.text("019eE+-._ infa\u0663\t\x1c", max_size=6))
    def test_a_cell_is_a_number_only_if_all_of_it_is(self, cell):
        if is_number(cell):
            assert re.fullmatch(
                r"\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?\s*|\s*[+-]?(inf|infinity|nan)\s*", cell, re.I | re.A
            )

    def test_a_cell_of_a_parquet_file(self, tmp_path):
        for cell in ("1_000", "٣", 10**400):
            column = np.array(["1", cell], dtype=object)
            with refused(str(tmp_path), "is not a number in row 1, column 'a'"):
                arrays._numbers(tmp_path, "a", column, "row {}".format, ColumnChoice([0], None))

    def test_labels(self):
        assert [class_name(cell) for cell in ("٣", "1_0", "3.0")] == ["٣", "1_0", "3"]
        assert class_names(["3.0000000000000000000", "2"]) == ("2", "3.0000000000000000000")
        assert class_names([5000 * "1", "2"]) == (5000 * "1", "2")
        assert class_names(["7", "07", "007", "5"]) == ("5", "007", "07", "7")  # whatever the order of a set


class TestText:
    @pytest.fixture
    def path(self, tmp_path):
        return tmp_path / "a.csv"

    @pytest.mark.parametrize("count", [30_000])
    def test_names_of_very_many_columns(self, path, count):
        names = [f"column{i}" for i in range(count)]
        numbers = ",".join("1" for _ in names)
        schema, begin = Schema((count,), columns=tuple(names)), time.process_time()
        path.write_text(f"{','.join(reversed(names))}\n{numbers}\n")
        assert read(path, schema).x.shape == (1, count)
        path.write_text(f"{','.join(names[:-1])},columm7\n{numbers}\n")
        with refused(str(path), "has no column 'column29999'"):
            read(path, schema)
        path.write_text(f"{','.join(names[:-1])},column7\n{numbers}\n")
        with refused(str(path), "two columns are called 'column7'"):
            load(DataSettings(str(path)))
        assert time.process_time() - begin < 10

    def test_long_names_are_cut(self, path):
        path.write_text(f"{100_000 * 'a'},b\n1,2\n3,x\n")
        with refused(str(path)):
            read(path, Schema((2,)))
        path.write_text(f"b,{100_000 * 'a'}\n1,2\n3,x\n")
        with refused(str(path), "'x' is not a number"):
            load(DataSettings(str(path)))
        path.write_text(f"b\n1\n{100_000 * 'x'}\n")
        with refused(str(path), "is not a number in line 3"):
            load(DataSettings(str(path)))

    def test_a_line_without_an_end(self, path, monkeypatch):
        monkeypatch.setattr(lines, "LINE_LENGTH", 1000)
        path.write_text(f"a\n1\n{1001 * ','}\n")
        with refused(str(path), "line 3 is longer than 1,000 characters"):
            load(DataSettings(str(path)))

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (b"", "is empty"),
            (b"\xef\xbb\xbf", "is empty"),
            (b"\n\r\n\n", "is empty"),
            (b"a,b\n1,2\n1,\x002\n", "line"),
            (1000 * b"\0", "a.csv"),
            (b"a,b\n1,2,3\n", "line 2 has 3 cells; those above have 2"),
            (b"a,b\n1,2\n" + b"," * 5000, "line 3 has 5001 cells; those above have 2"),
            (b"\xff\xfea\0,\0b\0", "must be text in UTF-8"),
            (b"a,b\n1,\xd9\n", "must be text in UTF-8"),
            (b"a,b\n" + 40_000 * b"1,2\n" + b"1,\xd9\n", "must be text in UTF-8; line 40002 is not"),
            (b'a,b\n1,"2\n' + 200_000 * b"x", "line 2: field larger than field limit"),
            (b"a,\x1b[2Jb\n1,x\n", r"'\x1b[2Jb'"),
        ],
        ids=str.split("empty mark blank nul nuls row long-row utf-16 bytes far-bytes field escape"),
    )
    def test_odd_bytes(self, path, content, words):
        path.write_bytes(content)
        with refused(str(path), words):
            load(DataSettings(str(path)))


NASTY = [
    "=1+1", "+1+1", "-1+1", "@SUM(A1)", "\tx", "\rx", "\nx", "＝1", "'=x", "''=x", "'x", "-", "=",
    'say "x"', "a,b", "a;b;c;d", "a\tb", "a\rb", "a\nb", "a\r\nb", "  x", "ü", "\x1b[2J", "\udce9", "a\0b",
]  # fmt: skip


class TestWriting:
    @pytest.mark.parametrize("text", NASTY)
    def test_a_cell_is_no_formula_and_comes_back(self, text):
        made = delimited.format_csv(["kind", "x"], [[text, 0.5]])
        (_, (cell, number)) = csv.reader(io.StringIO(made, newline=""))
        assert not re.match("[=+\\-@\t\r\n\uff1d]", cell)
        assert number == "0.5"
        assert delimited._unescape(cell) == text.encode("utf-8", "backslashreplace").decode()

    @pytest.mark.parametrize(
        ("value", "cell"), [(-1.5, "-1.5"), ("-1", "-1"), ("+3", "+3"), (-7, "-7"), (True, "True")]
    )
    def test_numbers_stay(self, value, cell):
        assert delimited.format_csv(["x"], [[value]]) == f"x\n{cell}\n"

    def test_every_float32_comes_back(self):
        x = np.random.default_rng(0).normal(size=100).astype(np.float32)
        made = delimited.format_csv(["x"], [[v] for v in x.tolist()])
        assert np.array_equal(np.array(made.split()[1:], np.float32), x)

    def test_a_table_that_was_written_is_read(self, tmp_path):
        """Columns and classes with names that are formulas, or hold what separates cells."""
        names = tuple(dict.fromkeys(n.strip() for n in NASTY if n.isprintable()))
        kinds = [n for n in names if class_name(n)]
        schema = Schema((len(names),), columns=names, label="kind", classes=class_names(kinds))
        rows = [[*np.arange(len(names)) + 0.5, kind] for kind in kinds]
        (tmp_path / "a.csv").write_text(delimited.format_csv([*names, "kind"], rows), encoding="utf-8")
        data = read(tmp_path / "a.csv", schema)
        assert [schema.classes[i] for i in data.y.tolist()] == kinds
        assert data.x[0].tolist() == [i + 0.5 for i in range(len(names))]


class TestImages:
    def test_too_many_pixels(self, tmp_path, monkeypatch):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
        for side in (12, 40):  # Pillow warns of the first and refuses the second
            paint(tmp_path / "1.png", 0, size=(side, side))
            with refused(f"{tmp_path / '1.png'} must have at most 100 pixels; it has more"):
                load(DataSettings(str(tmp_path)))

    @pytest.mark.parametrize("size", [(2**31 - 1, 1), (1, 2**31 - 1), (2**31 - 1, 2**31 - 1), (0, 5)])
    def test_sizes_that_are_lies(self, tmp_path, size):
        paint(tmp_path / "1.png", 0)
        content = bytearray((tmp_path / "1.png").read_bytes())
        content[16:24] = struct.pack(">II", *size)
        (tmp_path / "1.png").write_bytes(content)
        refused_within(8 * MIB, lambda: load(DataSettings(str(tmp_path))), str(tmp_path / "1.png"))

    def test_more_images_than_fit_the_memory(self, tmp_path, monkeypatch):
        paint(tmp_path / "1.png", 0)
        paint(tmp_path / "2.png", 0)
        assert images._memory() > 2**28
        monkeypatch.setattr(images, "_memory", lambda: 100.0)
        with refused(f"2 images like {tmp_path / '1.png'}, 4 x 6, take 0 GB; this machine has 0 GB. Set size"):
            load(DataSettings(str(tmp_path)))
        monkeypatch.undo()
        monkeypatch.delattr("os.sysconf")
        assert images._memory() == float("inf")

    def test_what_is_called_an_image_and_is_a_program(self, tmp_path):
        (tmp_path / "1.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\nshowpage\n")
        with refused(f"{tmp_path / '1.png'} cannot be read as an image (UnidentifiedImageError)"):
            load(DataSettings(str(tmp_path)))

    def test_a_class_that_is_a_link_to_all_classes(self, tmp_path):
        paint(tmp_path / "cat" / "1.png", 0)
        (tmp_path / "dog").symlink_to(tmp_path)
        with refused(f"{tmp_path / 'dog'} is a link to a folder that contains it. Remove the link."):
            load(DataSettings(str(tmp_path)))
        (tmp_path / "dog").unlink()
        (tmp_path / "dog").symlink_to(tmp_path / "cat")  # a folder elsewhere is fine
        (tmp_path / "cat" / "2.png").symlink_to("2.png")  # a link to itself is no image
        assert images.find_images(tmp_path)[1] == ["cat", "dog"]

    def test_folders_that_are_too_deep(self, tmp_path, monkeypatch):
        def deep(*words):
            raise RecursionError

        paint(tmp_path / "cat" / "1.png", 0)
        monkeypatch.setattr(type(tmp_path), "rglob", deep)
        with refused(f"{tmp_path / 'cat'} has sub-folders nested too deeply to be read"):
            load(DataSettings(str(tmp_path)))

    @pytest.mark.parametrize(
        "content", [b"", b"\x89PNG\r\n\x1a\n", 100 * b"\0", bz2.compress(b"x"), b"GIF89a"], ids="abcde"
    )
    def test_thousands_of_broken_files_take_no_longer_than_one(self, tmp_path, content):
        for i in range(200):
            (tmp_path / f"{i:03}.png").write_bytes(content)
        with refused(f"{tmp_path / '000.png'} cannot be read as an image"):
            load(DataSettings(str(tmp_path)))


class TestSource:
    @pytest.mark.parametrize("address", ["https://example.org/a.csv", "s3://bucket/a.npz", "file:///etc/passwd"])
    def test_an_address(self, address):
        with pytest.raises(FileNotFoundError, match=f"data must be files on this machine; got the address '{address}'"):
            load(DataSettings(address))

    @pytest.mark.parametrize("path", ["a\0b", "a\udce9", 5000 * "a"])
    @pytest.mark.parametrize("name", ["source", "folder"])
    def test_no_path(self, name, path):
        with refused(f"{name} must be a path of at most 4096 characters, in UTF-8; got '"):
            DataSettings(**{name: path})

    def test_a_size(self):
        with refused("size is that of an image, or 0 to keep it; got 4097. Use up to 4096."):
            DataSettings(size=4097)

    def test_rows_that_cannot_be_split_name_their_file(self, tmp_path):
        (tmp_path / "a.csv").write_text("a\n1\n")
        with refused(f"{tmp_path / 'a.csv'}: test holds out 1 of 1 samples"):
            load(DataSettings(str(tmp_path / "a.csv")))

    def test_very_many_classes(self, tmp_path, monkeypatch):
        monkeypatch.setattr("iresnet.data.schema.CLASSES", 3)
        rows = "".join(f"{i},k{i % 4}\n" for i in range(20))
        (tmp_path / "a.csv").write_text(f"a,kind\n{rows}")
        (tmp_path / "a.npz").write_bytes(saved(x=np.zeros((9, 4, 4), np.uint8), y=np.arange(9) % 4))
        for name, label in (("a.csv", "kind"), ("a.npz", "")):
            with refused(f"{tmp_path / name}: there may be at most 3 classes; got 4. Use fewer."):
                load(DataSettings(str(tmp_path / name), label=label))
        for i in range(4):
            paint(tmp_path / "images" / str(i) / "1.png", i)
        with refused(f"{tmp_path / 'images'}: there may be at most 3 classes"):
            load(DataSettings(str(tmp_path / "images")))
