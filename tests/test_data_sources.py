"""Where data come from: the files are written here byte by byte, so every row is known."""

import gzip
import io
import re
import struct
import sys
import tarfile
import types
import zipfile
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from iresnet.data import Dataset, DataSettings, Schema, load, names, read, toy

IRIS = Schema((2,), columns=("length", "width"), label="kind", classes=("rose", "tulip"))


def all_rows(splits):
    return torch.cat([splits.train.x, splits.validation.x, splits.test.x])


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_mnist(folder, *, packed=True, train=20, test=5):
    folder.mkdir(parents=True, exist_ok=True)
    for prefix, n in (("train", train), ("t10k", test)):
        images = np.arange(n, dtype=np.uint8)[:, None, None] + np.zeros((n, 28, 28), np.uint8)
        labels = np.arange(n, dtype=np.uint8) % 10
        for name, content in (("images-idx3", idx(images)), ("labels-idx1", idx(labels))):
            path = folder / f"{prefix}-{name}-ubyte{'.gz' if packed else ''}"
            path.write_bytes(gzip.compress(content) if packed else content)


def cifar_records(n, *, label_bytes=1, first=0):
    rows = np.zeros((n, label_bytes + 3072), np.uint8)
    rows[:, :label_bytes] = np.arange(n)[:, None] % 10
    rows[:, label_bytes:] = (np.arange(n) + first)[:, None]
    rows[:, label_bytes] = 200  # the first pixel of red
    return rows.tobytes()


def cifar10_files(n=3):
    files = {f"cifar-10-batches-bin/data_batch_{i}.bin": cifar_records(n, first=10 * i) for i in range(1, 6)}
    return files | {"cifar-10-batches-bin/test_batch.bin": cifar_records(n)}


def write_tar(path, files):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def write_files(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


class TestSettings:
    @pytest.mark.parametrize(
        ("wrong", "sentence"),
        [
            ({"source": ""}, "source must be a dataset or a path; got ''. Use one of digits, mnist"),
            (
                {"validation": 0},
                r"validation must be a fraction in \(0, 1\) or a number of samples; got 0. Use e.g. 0.15",
            ),
            ({"test": 1.5}, r"test must be a fraction in \(0, 1\) or a number of samples; got 1.5."),
            ({"validation": float("nan")}, "validation must be a fraction"),
            *(
                (
                    {"labelled": wrong},
                    r"labelled must be a fraction of the labels in \(0, 1\], or their number from 2 on; "
                    rf"got {wrong}. Use e.g. 0.1 or 100.",
                )
                for wrong in (0, -3, 2.5, float("inf"))
            ),
            ({"size": -1}, "size is that of an image, or 0 to keep it; got -1."),
            ({"shift": -1}, "shift must be at least 0 pixels; got -1."),
        ],
    )
    def test_refuses(self, wrong, sentence):
        with pytest.raises(ValueError, match=sentence):
            DataSettings(**wrong)

    def test_augment(self):
        augment = DataSettings(shift=2, flip=True).augment
        assert (augment.shift, augment.flip) == (2, True)

    @pytest.mark.parametrize(
        ("settings", "sentence"),
        [
            (DataSettings("moons", label="y"), "label is a column of a table; got 'y' for moons. Leave it empty."),
            (DataSettings("moons", size=8), "size is for a folder of images; got 8 for moons. Set size = 0."),
            (DataSettings("moons", flip=True), "shift, flip and cutout are for images"),
            (
                DataSettings("moons", labelled=0.5),
                "labelled must be 1 for data without labels; got 0.5. Set labelled = 1.",
            ),
            (DataSettings("moons", validation=50_000), "validation holds out 50000 of 50000 samples"),
        ],
    )
    def test_refuses_what_the_source_has_no_use_for(self, settings, sentence):
        with pytest.raises(ValueError, match=sentence):
            load(settings)

    def test_an_unknown_name_gets_the_nearest(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "flowers.csv").write_text("a\n1\n")
        with pytest.raises(FileNotFoundError, match="no dataset, file or folder 'mnits'. Did you mean 'mnist'?"):
            load(DataSettings("mnits"))
        with pytest.raises(FileNotFoundError, match="'flower.csv'. Did you mean 'flowers.csv'?"):
            load(DataSettings("flower.csv"))
        with pytest.raises(FileNotFoundError, match="'no/such/zzz'. Use one of digits, mnist, fashion-mnist"):
            read("no/such/zzz", IRIS)

    def test_the_placeholder_of_a_preset(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        sentence = r"give your table: --data FILE \(.csv, .tsv, .npy, .npz, .parquet\)"
        for settings in (DataSettings("table.csv"), DataSettings("table.csv").resolved()):
            with pytest.raises(FileNotFoundError, match=sentence):
                load(settings)
        with pytest.raises(FileNotFoundError, match="no dataset, file or folder 'sub/table.csv'"):
            load(DataSettings("sub/table.csv"))
        (tmp_path / "table.csv").write_text("a\n" + "\n".join(map(str, range(9))))
        assert len(all_rows(load(DataSettings("table.csv")))) == 9
        assert DataSettings("table.csv").resolved().source == str(tmp_path / "table.csv")

    def test_absolute_paths(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HOME", "/home/me")
        resolved = DataSettings("./digits", folder="~/data", seed=3).resolved()
        assert resolved == DataSettings(str(tmp_path / "digits"), folder="/home/me/data", seed=3)
        assert resolved.resolved() == resolved
        assert DataSettings("~/a.csv").resolved().source == "/home/me/a.csv"
        assert DataSettings("mnist").resolved() == DataSettings("mnist", folder=str(tmp_path / "data"))

    def test_another_kind_of_file(self, tmp_path):
        (tmp_path / "a.docx").write_text("")
        with pytest.raises(ValueError, match="must be a folder of images or a table .*csv, .tsv, .npy, .npz, .parquet"):
            load(DataSettings(str(tmp_path / "a.docx")))


class TestDigits:
    def test_the_test_part_is_the_published_one(self):
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        x, y = load_digits(return_X_y=True)
        train, test = train_test_split(np.arange(1797), test_size=360, random_state=0, stratify=y)
        splits = load(DataSettings())
        assert torch.equal(splits.test.x.flatten(1).double(), torch.from_numpy(x[test]))
        assert splits.test.y.tolist() == y[test].tolist()
        assert splits.schema == Schema((1, 8, 8), 17, classes=tuple("0123456789"))
        assert sorted(torch.cat([splits.train.y, splits.validation.y]).tolist()) == sorted(y[train].tolist())

    def test_validation_is_carved_by_the_seed_and_test_is_not(self):
        first, again, other = (load(DataSettings(seed=seed)) for seed in (0, 0, 1))
        assert len(first.validation) == round(0.15 * 1437)
        assert torch.equal(first.validation.x, again.validation.x)
        assert not torch.equal(first.validation.x, other.validation.x)
        assert torch.equal(first.test.x, other.test.x)
        counts = first.validation.y.bincount(minlength=10)
        assert int(counts.max() - counts.min()) <= 2

    def test_few_labels(self):
        splits = load(DataSettings(labelled=0.1))
        assert int((splits.train.y >= 0).sum()) == 122
        assert bool((splits.validation.y >= 0).all())
        counts = splits.train.y[splits.train.y >= 0].bincount()
        assert 11 <= int(counts.min()) <= int(counts.max()) <= 14

    def test_a_number_of_labels_is_balanced_and_drawn_by_the_seed(self):
        ten, hundred, other = (
            load(DataSettings(labelled=n, seed=seed)).train for n, seed in ((10, 0), (100, 0), (10, 1))
        )
        assert sorted(ten.y[ten.y >= 0].tolist()) == list(range(10))
        assert hundred.y[hundred.y >= 0].bincount().tolist() == [10] * 10
        assert bool((hundred.y[ten.y >= 0] >= 0).all())  # ten of the hundred
        assert not torch.equal(ten.x[ten.y >= 0], other.x[other.y >= 0])

    def test_read_for_a_model(self):
        schema = load(DataSettings()).schema
        assert len(read("digits", schema)) == 360
        assert len(read("digits", schema, part="train")) == 1437
        assert read("digits", replace(schema, classes=("even", "odd"))).y is None
        with pytest.raises(ValueError, match=r"the model takes rows of 2 numbers \(length, width\); digits has images"):
            read("digits", IRIS)
        with pytest.raises(ValueError, match="part must be one of train, validation, test; got 'tset'."):
            read("digits", schema, part="tset")
        with pytest.raises(ValueError, match="digits has no validation split of its own, only train and test. Choose"):
            read("digits", schema, part="validation")

    def test_read_without_labels(self):
        data = read("digits", load(DataSettings()).schema, labels=False)
        assert (len(data), data.y) == (360, None)


class TestToy:
    def test_points_of_a_density(self):
        splits = load(DataSettings("moons", validation=5_000))
        assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [45_000, 5_000, 10_000]
        assert splits.train.y is None
        assert splits.schema == Schema((2,), columns=("x0", "x1"))
        surprise = -toy.log_density("moons", splits.test.x).mean().item()
        assert surprise == pytest.approx(toy.entropy("moons"), abs=0.03)

    def test_the_seed_decides_what_is_trained_on_alone(self):
        first, other = (load(DataSettings("rings", seed=seed)) for seed in (0, 1))
        assert not torch.equal(first.train.x, other.train.x)
        assert torch.equal(first.test.x, other.test.x)
        assert torch.equal(read("rings", first.schema).x, first.test.x)

    def test_names(self):
        assert names()[:5] == ["digits", "mnist", "fashion-mnist", "cifar10", "cifar100"]
        assert set(toy.names()) < set(names())


class TestMnist:
    @pytest.mark.parametrize("packed", [True, False])
    @pytest.mark.parametrize("layout", [".", "mnist", "MNIST/raw"])
    def test_is_found_and_validation_is_the_last_rows(self, tmp_path, layout, packed):
        write_mnist(tmp_path / layout, packed=packed)
        splits = load(DataSettings("mnist", folder=str(tmp_path), validation=5))
        assert splits.train.x[:, 0, 27, 27].tolist() == list(range(15))
        assert splits.validation.x[:, 0, 0, 0].tolist() == list(range(15, 20))
        assert splits.train.y.tolist() == [i % 10 for i in range(15)]
        assert splits.test.x.shape == (5, 1, 28, 28)

    def test_fashion_has_names_for_its_classes(self, tmp_path):
        write_mnist(tmp_path / "FashionMNIST" / "raw")
        part = read("fashion-mnist", Schema((1, 28, 28), 256), folder=str(tmp_path))
        assert part.y is None  # the model knows no classes
        splits = load(DataSettings("fashion-mnist", folder=str(tmp_path)))
        assert splits.schema.classes[0] == "T-shirt/top"
        assert splits.schema.classes[9] == "Ankle boot"

    def test_absent(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="mnist: train-images-idx3-ubyte.gz was not found in") as error:
            load(DataSettings("mnist", folder=str(tmp_path)))
        assert str(tmp_path / "mnist") in str(error.value)
        remedy = "Run `iresnet data download mnist`, or set the dataset directory: --data-dir FOLDER."
        assert remedy in str(error.value)

    @pytest.mark.parametrize(
        ("content", "sentence"),
        [
            (b"\0\0", r"train-images-idx3-ubyte must start with the bytes 0 0 8; got 0 0."),
            (b"PK\3\4", r"must start with the bytes 0 0 8; got 80 75 3."),
            (b"\0\0\x08\3\0\0", "ends inside its header, after 6 bytes."),
            (
                idx(np.zeros((20, 28, 28), np.uint8))[:-7],
                r"must hold 15680 bytes, \(20, 28, 28\); got 15673. Remove the file and run `iresnet data down",
            ),
            (idx(np.zeros((19, 28, 28), np.uint8)), r"images of shape \(19, 28, 28\) do not match labels of shape"),
            (idx(np.zeros((20, 784), np.uint8)), r"images of shape \(20, 784\) do not match"),
            (idx(np.zeros((20, 8, 8), np.uint8)), r"mnist: images of shape \(1, 28, 28\) .*; got uint8 of shape \(20"),
        ],
    )
    def test_damaged(self, tmp_path, content, sentence):
        write_mnist(tmp_path, packed=False)
        (tmp_path / "train-images-idx3-ubyte").write_bytes(content)
        with pytest.raises(ValueError, match=sentence):
            load(DataSettings("mnist", folder=str(tmp_path)))

    def test_truncated_gzip(self, tmp_path):
        write_mnist(tmp_path)
        path = tmp_path / "train-images-idx3-ubyte.gz"
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(ValueError, match=r"ubyte.gz is damaged \(.*\). Remove the file and run"):
            load(DataSettings("mnist", folder=str(tmp_path)))
        path.write_bytes(b"hello")
        with pytest.raises(ValueError, match="is damaged"):
            load(DataSettings("mnist", folder=str(tmp_path)))

    def test_a_label_out_of_range(self, tmp_path):
        write_mnist(tmp_path, packed=False)
        (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.full(20, 12, np.uint8)))
        with pytest.raises(ValueError, match="mnist: labels of 10 classes must lie in 0 .. 9, .*; got 12 for sample 0"):
            load(DataSettings("mnist", folder=str(tmp_path)))


class TestCifar:
    def test_loose_batches(self, tmp_path):
        write_files(tmp_path, cifar10_files())
        splits = load(DataSettings("cifar10", folder=str(tmp_path), validation=3))
        assert splits.train.x[:, 2, 31, 31].tolist() == [10 * i + j for i in range(1, 5) for j in range(3)]
        assert splits.train.x[0, 0, 0, 0] == 200
        assert splits.train.x[0, 1, 0, 0] == 10
        assert splits.train.y.tolist() == [0, 1, 2] * 4
        assert splits.schema.classes[3] == "cat"

    def test_straight_from_the_archive(self, tmp_path):
        write_files(tmp_path / "loose", cifar10_files())
        write_tar(
            tmp_path / "cifar10" / "cifar-10-binary.tar.gz",
            {"cifar-10-batches-bin/readme.html": b"hello"} | cifar10_files(),
        )
        a, b = (load(DataSettings("cifar10", folder=str(f))) for f in (tmp_path / "loose", tmp_path))
        assert torch.equal(all_rows(a), all_rows(b))
        assert sorted(p.name for p in (tmp_path / "cifar10").iterdir()) == ["cifar-10-binary.tar.gz"]

    def test_the_fine_labels_of_cifar100(self, tmp_path):
        record = np.zeros((5, 3074), np.uint8)
        record[:, 0], record[:, 1] = 19, [0, 99, 50, 3, 7]
        write_files(
            tmp_path, {"cifar-100-binary/train.bin": record.tobytes(), "cifar-100-binary/test.bin": record.tobytes()}
        )
        splits = load(DataSettings("cifar100", folder=str(tmp_path), validation=1))
        assert splits.test.y.tolist() == [0, 99, 50, 3, 7]
        assert [splits.schema.classes[i] for i in (0, 3, 50, 99)] == ["apple", "bear", "mouse", "worm"]
        assert len(splits.schema.classes) == 100

    def test_damaged(self, tmp_path):
        files = cifar10_files()
        files["cifar-10-batches-bin/data_batch_3.bin"] += b"x"
        write_files(tmp_path / "a", files)
        with pytest.raises(
            ValueError, match="data_batch_3.bin must hold records of 3073 bytes; got 9220 bytes in all."
        ):
            load(DataSettings("cifar10", folder=str(tmp_path / "a")))
        del files["cifar-10-batches-bin/data_batch_3.bin"]
        archive = tmp_path / "b" / "cifar-10-binary.tar.gz"
        write_tar(archive, files)
        with pytest.raises(ValueError, match="tar.gz holds no cifar-10-batches-bin/data_batch_3.bin. Remove the file"):
            load(DataSettings("cifar10", folder=str(tmp_path / "b")))
        archive.write_bytes(archive.read_bytes()[:-300])
        with pytest.raises(ValueError, match=r"cifar-10-binary.tar.gz is damaged \("):
            load(DataSettings("cifar10", folder=str(tmp_path / "b")))


def paint(path, value, size=(4, 6), mode="L", **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, (size[1], size[0]), value).save(path, **options)


class TestImageFolder:
    def test_sub_folders_are_classes(self, tmp_path):
        for i in range(10):
            paint(tmp_path / ("cat" if i % 2 else "dog") / f"{i}.png", i)
        (tmp_path / ".hidden").mkdir()
        (tmp_path / "cat" / "notes.txt").write_text("")
        splits = load(DataSettings(str(tmp_path), test=2, validation=2))
        assert splits.schema == Schema((1, 4, 6), 256, classes=("cat", "dog"))
        assert sorted(all_rows(splits)[:, 0, 0, 0].tolist()) == list(range(10))
        for part in (splits.train, splits.validation, splits.test):
            assert torch.equal(part.x[:, 0, 0, 0].long() % 2, 1 - part.y)

    def test_a_flat_folder_has_no_labels_and_keeps_its_colours(self, tmp_path):
        for i in range(5):
            paint(tmp_path / f"{i}.webp", (i, 20, 30), mode="RGB", lossless=True)
        splits = load(DataSettings(str(tmp_path)))
        assert splits.train.y is None
        assert splits.schema == Schema((3, 4, 6), 256)
        assert sorted(all_rows(splits)[:, 0, 0, 0].tolist()) == [0, 1, 2, 3, 4]
        assert bool((all_rows(splits)[:, 2] == 30).all())

    def test_grey_images_saved_in_colour_are_grey(self, tmp_path):
        for i in range(4):
            paint(tmp_path / f"{i}.png", (i, i, i), mode="RGB")
        paint(tmp_path / "palette.png", 1, mode="P")
        assert load(DataSettings(str(tmp_path))).schema.shape == (1, 4, 6)

    def test_train_and_test_are_respected(self, tmp_path):
        for i in range(6):
            paint(tmp_path / "train" / ("a" if i % 2 else "b") / f"{i}.png", i)
        paint(tmp_path / "test" / "b" / "9.png", 9)
        splits = load(DataSettings(str(tmp_path), validation=2))
        assert splits.test.x[:, 0, 0, 0].tolist() == [9]
        assert splits.test.y.tolist() == [1]
        assert read(tmp_path, splits.schema).x.shape[0] == 1
        assert read(tmp_path, splits.schema, part="train").x.shape[0] == 6

    def test_train_alone_gives_its_own_test_part(self, tmp_path):
        for i in range(6):
            paint(tmp_path / "train" / f"{i}.png", i)
        splits = load(DataSettings(str(tmp_path)))
        assert len(splits.test) == 1
        with pytest.raises(ValueError, match="has no sub-folder 'test'. Give the folder that holds the images."):
            read(tmp_path, splits.schema)

    def test_a_class_may_be_called_train(self, tmp_path):
        for i in range(6):
            paint(tmp_path / ("train" if i % 2 else "plane") / f"{i}.png", i)
        assert load(DataSettings(str(tmp_path))).schema.classes == ("plane", "train")

    def test_images_are_resized_if_size_is_set(self, tmp_path):
        for i in range(4):
            paint(tmp_path / f"{i}.png", 10 * i, size=(4 + i, 9))
        splits = load(DataSettings(str(tmp_path), size=5))
        assert splits.schema.shape == (1, 5, 5)
        assert sorted(all_rows(splits)[:, 0, 2, 2].tolist()) == [0, 10, 20, 30]
        assert read(tmp_path, splits.schema, size=5).x.shape == (4, 1, 5, 5)

    def test_read_for_a_model(self, tmp_path):
        schema = Schema((1, 4, 6), 256, classes=("cat", "dog"))
        paint(tmp_path / "cat" / "1.png", 7)
        paint(tmp_path / "dog" / "1.png", 8)
        both = read(tmp_path, schema)
        assert both.x[:, 0, 0, 0].tolist() == [7, 8]
        assert both.y.tolist() == [0, 1]
        one = read(tmp_path / "dog" / "1.png", schema)
        assert (len(one), one.y) == (1, None)
        assert read(tmp_path, replace(schema, classes=())).y is None
        assert read(tmp_path, Schema((3, 4, 6), 256)).x.shape == (2, 3, 4, 6)

    @pytest.mark.parametrize(
        ("shape", "classes", "sentence"),
        [
            ((1, 4, 4), (), r"1.png is 4 x 6; the model takes 4 x 4. Resize the images."),
            ((1, 4, 6), (), r"2.png is in colour; the model takes greyscale images. Convert it."),
            (
                (3, 4, 6),
                ("cats",),
                "labels must be among the 1 known classes; got 'cat' in .*1.png. Did you mean 'cats'?",
            ),
        ],
    )
    def test_images_that_do_not_fit_the_model(self, tmp_path, shape, classes, sentence):
        paint(tmp_path / "cat" / "1.png", 7)
        paint(tmp_path / "cat" / "2.png", (1, 2, 3), mode="RGB")
        with pytest.raises(ValueError, match=sentence):
            read(tmp_path, Schema(shape, 256, classes=classes))

    def test_images_are_no_table(self, tmp_path):
        with pytest.raises(ValueError, match=r"the model takes rows of 2 numbers \(length, width\); .* holds images."):
            read(tmp_path, IRIS)

    def test_empty(self, tmp_path):
        with pytest.raises(ValueError, match=f"{tmp_path} holds no image .*png.*. Name a folder that does."):
            load(DataSettings(str(tmp_path)))
        paint(tmp_path / "cat" / "1.png", 1)
        (tmp_path / "dog").mkdir()
        with pytest.raises(ValueError, match="dog holds no image"):
            load(DataSettings(str(tmp_path)))

    def test_images_beside_sub_folders(self, tmp_path):
        paint(tmp_path / "cat" / "1.png", 1)
        paint(tmp_path / "2.png", 1)
        with pytest.raises(
            ValueError, match="holds both 2.png and sub-folders of images. Move it into one of them, or remove it."
        ):
            load(DataSettings(str(tmp_path)))

    def test_mixed_sizes(self, tmp_path):
        paint(tmp_path / "1.png", 1)
        paint(tmp_path / "2.png", 1, size=(5, 5))
        with pytest.raises(ValueError, match="2.png is 5 x 5, but 1.png is 4 x 6. Set size = 4, or resize."):
            load(DataSettings(str(tmp_path)))

    def test_unreadable(self, tmp_path):
        paint(tmp_path / "1.png", 1)
        (tmp_path / "2.png").write_bytes((tmp_path / "1.png").read_bytes()[:40])
        with pytest.raises(ValueError, match=r"2.png cannot be read as an image \(\w+\). Replace or remove it."):
            load(DataSettings(str(tmp_path)))

    def test_sixteen_bits(self, tmp_path):
        Image.fromarray(np.zeros((4, 4), np.uint16)).save(tmp_path / "1.png")
        with pytest.raises(
            ValueError, match="1.png must have 8 bits per channel; got pixels of mode I;16. Convert it."
        ):
            load(DataSettings(str(tmp_path)))

    def test_a_label_column_is_for_tables(self, tmp_path):
        with pytest.raises(ValueError, match="label is a column of a table"):
            load(DataSettings(str(tmp_path), label="kind"))


FLOWERS = "length,width,kind\n1.5,2,rose\n3,4e0,tulip\n5,6,rose\n7,8,\n9,10,tulip\n11,12,rose\n"


class TestText:
    def write(self, folder, text, name="table.csv", encoding="utf-8"):
        path = folder / name
        path.write_text(text, encoding=encoding)
        return path

    def load(self, folder, text, **settings):
        return load(DataSettings(str(self.write(folder, text)), **settings))

    @pytest.mark.parametrize(
        "text",
        [
            pytest.param(FLOWERS, id="comma"),
            pytest.param(FLOWERS.replace(",", ";"), id="semicolon"),
            pytest.param(FLOWERS.replace(",", "\t"), id="tab"),
            pytest.param(FLOWERS.replace("\n", "\r\n"), id="windows"),
            pytest.param("\ufeff" + FLOWERS, id="bom"),
            pytest.param(FLOWERS.replace(",", ", ").replace("\n3", "\n\n3"), id="blanks"),
            pytest.param(FLOWERS.replace("rose", '"rose"'), id="quotes"),
        ],
    )
    def test_header_numbers_and_labels(self, tmp_path, text):
        splits = self.load(tmp_path, text, label="kind", test=1, validation=1)
        assert splits.schema == IRIS
        labels = torch.cat([splits.train.y, splits.validation.y, splits.test.y]).tolist()
        rows = dict(zip(map(tuple, all_rows(splits).tolist()), labels, strict=True))
        assert rows == {(1.5, 2): 0, (3, 4): 1, (5, 6): 0, (7, 8): -1, (9, 10): 1, (11, 12): 0}

    def test_without_a_header(self, tmp_path):
        splits = self.load(tmp_path, "1,2,0\n3,4,1\n5,6,0\n7,8,1\n", label="x2", test=1, validation=1)
        assert splits.schema == Schema((2,), columns=("x0", "x1"), label="x2", classes=("0", "1"))
        splits = self.load(tmp_path, "1,2,a\n3,4,b\n5,6,a\n7,8,b\n", label="x2", test=1, validation=1)
        assert splits.schema.classes == ("a", "b")
        assert all_rows(splits).sum().item() == 36

    def test_a_first_column_without_a_name_numbers_the_rows(self, tmp_path):
        """As pandas writes the index."""
        text = ",a,kind\n0,1.0,x\n1,2.0,y\n2,3.0,x\n3,4.0,y\n"
        splits = self.load(tmp_path, text, label="kind", test=1, validation=1)
        assert (splits.schema.columns, splits.schema.classes) == (("a",), ("x", "y"))
        assert sorted(all_rows(splits).flatten().tolist()) == [1, 2, 3, 4]
        (tmp_path / "new.csv").write_text(",a\n17,5\n3,6\n")
        assert read(tmp_path / "new.csv", splits.schema).x.flatten().tolist() == [5, 6]

    @pytest.mark.parametrize("train", [("False", "True"), ("false", "true"), ("0", "1")])
    @pytest.mark.parametrize("new", [("False", "True"), ("FALSE", "TRUE"), ("0", "1")])
    def test_booleans_in_every_spelling(self, tmp_path, train, new):
        rows = "".join(f"{i},{train[i % 2]},{train[i % 2]}\n" for i in range(60))
        splits = self.load(tmp_path, "a,b,kind\n" + rows, label="kind", kinds=["b=category"])
        text = f"a,b,kind\n1,{new[0]},{new[1]}\n2,{new[1]},{new[0]}\n"
        data = read(self.write(tmp_path, text), splits.schema)
        assert data.x[:, 1].tolist() == [0, 1]
        assert data.y.tolist() == [1, 0]

    def test_a_header_of_numbers_is_known_by_the_label(self, tmp_path):
        splits = self.load(tmp_path, "0,1,kind\n1,2,a\n3,4,b\n5,6,a\n7,8,b\n", label="kind", test=1, validation=1)
        assert splits.schema.columns == ("0", "1")

    @pytest.mark.parametrize("missing", ["", "NA", "nan", "?"])
    def test_a_missing_label_in_the_first_line_makes_no_header(self, tmp_path, missing):
        splits = self.load(tmp_path, f"1,2,{missing}\n3,4,1\n5,6,0\n7,8,1\n", label="x2", test=1, validation=1)
        assert len(all_rows(splits)) == 4

    def test_splits_are_disjoint_and_repeatable(self, tmp_path):
        text = "a\n" + "\n".join(map(str, range(40)))
        first, again, other = (self.load(tmp_path, text, seed=seed) for seed in (0, 0, 1))
        assert sorted(all_rows(first).flatten().tolist()) == list(range(40))
        assert [len(first.train), len(first.validation), len(first.test)] == [27, 5, 8]
        assert torch.equal(all_rows(first), all_rows(again))
        assert torch.equal(first.test.x, other.test.x)
        assert not torch.equal(first.validation.x, other.validation.x)

    @pytest.mark.parametrize(
        ("text", "settings", "sentence"),
        [
            ("", {}, "table.csv is empty. Give a table with at least one row."),
            ("a,b\n", {}, "table.csv has no rows. Give at least one."),
            ("a,b\n1,2\n3,x\n", {}, "'x' is not a number in line 3, column 'b'. Correct it, or remove the row"),
            ("a,b\n1,2\n\n3,\n", {}, "a number is missing in line 4, column 'b'."),
            ("a,b\n1,2\n3,nan\n", {}, "numbers must be finite and fit float32; got nan in line 3, column 'b'."),
            (
                "a,b\n1,2\n3,1e39\n",
                {},
                "numbers must be finite and fit float32; got 1e\\+39 in line 3, column 'b'. Fill it in",
            ),
            ("a,b\n1,2\n3\n", {}, "line 3 has 1 cells; those above have 2."),
            (
                "# by x\na,b\n1,2\n",
                {},
                "line 2 has 2 cells; .* 1. Lines that begin with # are not skipped: remove them.$",
            ),
            ("a,a\n1,2\n", {}, "two columns are called 'a'. Give every column a unique name."),
            (",a\nx,1\ny,2\n", {}, "column 1 has no name. Name it, or remove it if it only numbers the rows."),
            ("a,\n0,1\n1,2\n", {}, "column 2 has no name. Name it, or remove it if it only numbers the rows."),
            (
                "a,w,m\n" + "1,x,2\n" * 60 + "1,x,\n1,,\n",
                {"kinds": ["w=category"]},
                "3 cells in 2 rows are missing; --missing drop leaves these rows out",
            ),
            ("a,m\n1,\n2,\n3,\n", {}, "a number is missing in line 2, column 'm'.* It has none: --drop m."),
            (FLOWERS, {"label": "kid"}, "has no column 'kid' for the labels. Did you mean 'kind'?"),
            ("kind\nrose\n", {"label": "kind"}, "has no column of numbers beside the labels 'kind'."),
            ("a,kind\n1,\n2,\n", {"label": "kind"}, "has no label in column 'kind'. Add some, or set label = ''."),
            (
                "a,b\n1,2\n3,2\n4,2\n5,2\n",
                {},
                "column 'b' is 2 in all 2 training rows, so its density has no upper bound",
            ),
            ("a\n0.1\n0.1\n0.1\n0.1\n", {}, "column 'a' is 0.1 in all 2"),
            ("a,b\n1,2\n3,1\n2,2\n", {}, "only 1 row is left to train on. Add rows, or hold out fewer"),
            (
                "t\n" + "\n".join(str(1_700_000_000 + i) for i in range(20)),
                {},
                "column 't' holds numbers like 1700000000, whose differences do not fit float32. Subtract an offset",
            ),
            (
                "n\n" + "\n".join(str(12_000_000 + i) for i in range(20)),
                {"kinds": ["n=integer"]},
                "column 'n' holds numbers like 12000000, whose noise, as integer, does not fit float32. Subtract an",
            ),
            (
                "a,id\n" + "\n".join(f"{i},n{i}" for i in range(20)),
                {"label": "id"},
                "has 20 different labels in 20 rows of column 'id'; labels must be classes.",
            ),
            ("a\n1\n", {}, "test holds out 1 of 1 samples, which leaves none to train on."),
            (FLOWERS, {"label": "kind", "size": 3}, "size is for a folder of images; got 3"),
            ('a\n"' + "x" * 200_000, {}, r"cannot be read as CSV \(line 2: field larger than field limit"),
        ],
    )
    def test_refuses(self, tmp_path, text, settings, sentence):
        with pytest.raises(ValueError, match=sentence):
            self.load(tmp_path, text, **settings)

    HINT = " If it holds the classes, name it: --label "

    @pytest.mark.parametrize(
        ("text", "place", "name"),
        [
            ("a,species\n1,rose\n2,tulip\n", "'rose' is not a number in line 2, column 'species'", "species"),
            ("a,species\n1,\n2,tulip\n3,rose\n", "a number is missing in line 2, column 'species'", "species"),
            ("a,species\n1,nan\n2,tulip\n3,rose\n", "'tulip' is not a number in line 3, column", "species"),
            ("a,the kind\n1,b\n2,c\n", "'b' is not a number in line 2, column 'the kind'", "'the kind'"),
            ("1,b\n2,c\n", "'b' is not a number in line 1, column 'x1'", "x1"),
            ("a,b\n1,7\n" + 10 * "2,rose\n", "'rose' is not a number in line 3, column 'b'", "b"),
        ],
    )
    def test_a_column_of_text_may_be_the_labels(self, tmp_path, text, place, name):
        with pytest.raises(ValueError, match=place) as error:
            self.load(tmp_path, text)
        more = f" If it is data, a category: --kind {name}=category. Else leave it out: --drop {name}."
        assert str(error.value).endswith(f". Correct it, or remove the row or the column.{self.HINT}{name}.{more}")

    def test_a_cell_of_text_is_not(self, tmp_path):
        texts = ("a,b\n1,x\n2,3\n3,4\n", "a,b\n1,2\n2,x\n3,y\n4,5\n", "a,b\n1,x\n")
        for text in texts:
            with pytest.raises(ValueError, match="Correct it, or remove the row or the column.$"):
                self.load(tmp_path, text)

    def test_one_column_holds_the_labels_already(self, tmp_path):
        text = "a,b,kind\n1,x,rose\n2,y,tulip\n"
        remedy = "If it is data, a category: --kind b=category. Else leave it out: --drop b."
        with pytest.raises(ValueError, match=f"'x' is not a number .* the column. {remedy}$"):
            self.load(tmp_path, text, label="kind")
        with pytest.raises(ValueError, match="'x' is not a number .* the column.$"):
            read(self.write(tmp_path, text), Schema((2,), columns=("a", "b")))

    def test_words_for_a_missing_label(self, tmp_path):
        text = "a,kind\n" + "".join(f"{i},{word}\n" for i, word in enumerate(("x", "NA", "null", "None", "-1", "n/a")))
        data = read(self.write(tmp_path, text), Schema((1,), columns=("a",), label="kind", classes=("-1", "x")))
        assert data.y.tolist() == [1, -1, -1, -1, 0, -1]
        splits = self.load(tmp_path, text + "7,x\n8,x\n", label="kind", test=1, validation=1)
        assert splits.schema.classes == ("-1", "x")

    def test_read_without_labels(self, tmp_path):
        path = self.write(tmp_path, "length,width,kind\n1,2,orchid\n")
        data = read(path, IRIS, labels=False)
        assert (data.x.tolist(), data.y, data.schema) == ([[1, 2]], None, IRIS)

    def test_another_encoding(self, tmp_path):
        path = self.write(tmp_path, "höhe\n1\n", encoding="latin-1")
        with pytest.raises(ValueError, match="table.csv must be text in UTF-8; line 1 is not. Save it as UTF-8."):
            load(DataSettings(str(path)))

    def test_whole_numbers_that_float32_holds_are_fine(self, tmp_path):
        text = "t\n" + "\n".join(str(1_700_000_000 + 1_000_000 * i) for i in range(20))
        assert all_rows(self.load(tmp_path, text)).min() > 1.6e9

    def test_read_for_a_model(self, tmp_path):
        def rows(text, schema=IRIS):
            return read(self.write(tmp_path, text), schema)

        data = rows("id,kind,width,length\nn1,tulip,2,1\nn2,,4,3\n")  # any order; what is more is ignored
        assert data.x.tolist() == [[1, 2], [3, 4]]
        assert data.y.tolist() == [1, -1]
        assert data.schema == IRIS
        assert rows("width,length\n2,1\n").y is None
        assert rows("1,2\n3,4\n").x.tolist() == [[1, 2], [3, 4]]  # no names: by position
        assert rows("x1,x0\n1,2\n", Schema((2,))).x.tolist() == [[2, 1]]
        assert rows("length,width\n1,2\n", replace(IRIS, label="", classes=())).y is None

    @pytest.mark.parametrize(
        ("text", "sentence"),
        [
            ("length,widht\n1,2\n", "has no column 'width', which the model needs. Did you mean 'widht'?"),
            ("length\n1\n", "has no column 'width', which the model needs. Use one of length."),
            ("1,2,3\n", r"has 3 columns and no header; the model takes rows of 2 numbers \(length, width\), in this"),
            (
                "length,width,kind\n1,2,rsoe\n",
                "labels must be among the 2 known classes; got 'rsoe' in .*table.csv, line 2. Did you mean",
            ),
            ("length,width\n", "has no rows"),
            ("length,width\n1,inf\n", "inf in line 2, column 'width'"),
        ],
    )
    def test_rows_that_do_not_fit_the_model(self, tmp_path, text, sentence):
        with pytest.raises(ValueError, match=sentence):
            read(self.write(tmp_path, text), IRIS)

    def test_a_table_is_no_image(self, tmp_path):
        path = self.write(tmp_path, FLOWERS, "table.TSV")
        with pytest.raises(ValueError, match=r"the model takes images of shape .*; .*table.TSV holds a table."):
            read(path, Schema((1, 8, 8), 17))


class TestArrays:
    X = np.arange(20.0).reshape(10, 2)

    def test_npy(self, tmp_path):
        path = tmp_path / "a.npy"
        np.save(path, self.X)
        splits = load(DataSettings(str(path)))
        assert splits.schema == Schema((2,), columns=("x0", "x1"))
        assert sorted(all_rows(splits).flatten().tolist()) == list(range(20))
        np.save(path, np.column_stack([self.X, np.arange(10) % 2]))
        assert load(DataSettings(str(path), label="x2")).schema.classes == ("0", "1")
        assert read(path, Schema((2,), label="x2", classes=("0", "1"))).y.tolist() == [0, 1] * 5

    def test_npz_with_labels(self, tmp_path):
        path = tmp_path / "a.npz"
        np.savez(path, x=self.X.astype(np.int32), y=np.array(["b", "a"] * 5))
        splits = load(DataSettings(str(path)))
        assert (splits.schema.label, splits.schema.classes) == ("y", ("a", "b"))
        assert read(path, IRIS_AB).y.tolist() == [1, 0] * 5  # columns by position
        assert read(path, replace(IRIS_AB, classes=(), label="")).y is None
        np.savez(path, x=self.X, y=np.array([0.0, np.nan] * 5))
        assert read(path, replace(IRIS_AB, classes=("0",))).y.tolist() == [0, -1] * 5
        with pytest.raises(ValueError, match="has its labels in 'y'; got label = 'x1'. Leave it empty."):
            load(DataSettings(str(path), label="x1"))

    def test_npz_with_one_array(self, tmp_path):
        np.savez(tmp_path / "a.npz", points=self.X)
        assert len(all_rows(load(DataSettings(str(tmp_path / "a.npz"))))) == 10

    def test_images(self, tmp_path):
        path = tmp_path / "a.npz"
        x = np.random.default_rng(0).integers(0, 17, (10, 8, 8), dtype=np.uint8)
        np.savez(path, x=x, y=np.arange(10) % 2)
        splits = load(DataSettings(str(path)))
        assert splits.schema == Schema((1, 8, 8), 256, classes=("0", "1"))
        schema = Schema((1, 8, 8), 17)
        assert torch.equal(read(path, schema).x, torch.from_numpy(x)[:, None])
        with pytest.raises(
            ValueError, match=r"a.npz: images of shape \(3, 8, 8\) .* got uint8 of shape \(10, 1, 8, 8\)"
        ):
            read(path, Schema((3, 8, 8), 256))
        with pytest.raises(ValueError, match="the model takes rows of 2 numbers .* holds images. Choose other data."):
            read(path, IRIS)
        np.savez(path, x=self.X)
        with pytest.raises(ValueError, match="the model takes images .* holds a table"):
            read(path, schema)

    @pytest.mark.parametrize(("top", "advice"), [(17, "np.floor(x).clip(0, 16)"), (1, "(16 * x).round()")])
    def test_numbers_for_a_model_of_few_levels(self, tmp_path, top, advice):
        np.save(tmp_path / "a.npy", np.full((2, 4, 4), top - 0.01))
        with pytest.raises(ValueError, match=re.escape(f'Save {advice}.astype("uint8").') + "$"):
            read(tmp_path / "a.npy", Schema((1, 4, 4), 17))

    @pytest.mark.parametrize(("channels", "shape"), [(1, (4, 4)), (3, (3, 4, 4))])
    def test_one_image(self, tmp_path, channels, shape):
        x, schema = np.zeros(shape, np.uint8), Schema((channels, 4, 4), 256)
        np.save(tmp_path / "a.npy", x)
        with pytest.raises(
            ValueError, match=re.escape(f"one image, uint8 {shape}. Save x[None], of shape {(1, *shape)}")
        ):
            read(tmp_path / "a.npy", schema)
        np.save(tmp_path / "a.npy", x[None])
        assert len(read(tmp_path / "a.npy", schema)) == 1

    @pytest.mark.parametrize(("channels", "shape"), [(1, "N, 4, 4"), (3, "N, 3, 4, 4")])
    def test_rows_of_pixels_for_a_model_of_images(self, tmp_path, channels, shape):
        np.save(tmp_path / "a.npy", np.zeros((5, 16 * channels), np.uint8))
        with pytest.raises(ValueError, match=rf"holds uint8 \(5, {16 * channels}\). Reshape to \({shape}\), as uint8."):
            read(tmp_path / "a.npy", Schema((channels, 4, 4), 256))

    @pytest.mark.parametrize(
        ("arrays", "sentence"),
        [
            ({"x": np.zeros(3)}, r"must hold numbers \(N, D\), or images as uint8 \(N, C, H, W\); got float64 \(3,\)."),
            ({"x": np.zeros((2, 4, 4))}, r'float64 \(2, 4, 4\). Save \(255 \* x\).round\(\).astype\("uint8"\).$'),
            (
                {"x": np.full((2, 4, 4), 256.006)},
                r'got float64 \(2, 4, 4\). Save np.floor\(x\).clip\(0, 255\).astype\("uint8"\).$',
            ),
            ({"x": np.array([["a"]])}, r"got <U1 \(1, 1\)"),
            ({"x": np.zeros((2, 2)), "y": np.zeros(3)}, r"one label per sample; got y of shape \(3,\) for 2 samples."),
            ({"a": np.zeros(3), "b": np.zeros(3)}, "must hold 'x' and optionally 'y', or one array; got a, b."),
            (
                {"x": np.zeros((2, 8, 8, 3), np.uint8)},
                r"1 or 3 channels, \(N, C, H, W\); got \(2, 8, 8, 3\). Transpose",
            ),
            ({"x": np.array([[0.0, np.nan]])}, "nan in row 0, column 'x1'"),
        ],
    )
    def test_refuses(self, tmp_path, arrays, sentence):
        np.savez(tmp_path / "a.npz", **arrays)
        with pytest.raises(ValueError, match=sentence):
            load(DataSettings(str(tmp_path / "a.npz")))

    @pytest.mark.parametrize("name", ["a.npy", "a.npz"])
    def test_nothing_is_unpickled_and_damage_is_reported(self, tmp_path, name):
        path = tmp_path / name
        save = np.save if name == "a.npy" else np.savez
        save(path, np.array([{}], dtype=object))
        with pytest.raises(ValueError, match=r"cannot be read as an array \(Object arrays cannot be loaded"):
            load(DataSettings(str(path)))
        save(path, self.X)
        path.write_bytes(path.read_bytes()[:150])
        with pytest.raises(ValueError, match="cannot be read as an array"):
            load(DataSettings(str(path)))
        path.write_bytes(b"")
        with pytest.raises(ValueError, match=r"cannot be read as an array \(No data left in file\). Save it again."):
            load(DataSettings(str(path)))

    def test_a_damaged_archive(self, tmp_path):
        path = tmp_path / "a.npz"
        np.savez_compressed(path, x=np.random.default_rng(0).normal(size=(50, 2)))
        whole = path.read_bytes()
        for start in (60, 300):  # in the compressed numbers
            path.write_bytes(whole[:start] + 30 * b"\xff" + whole[start + 30 :])
            with pytest.raises(ValueError, match=r"a.npz cannot be read as an array \(.+\). Save it again."):
                load(DataSettings(str(path)))

    @pytest.mark.parametrize(
        ("error", "why"),
        [
            (zlib.error("Error -3"), "Error -3"),
            (zipfile.BadZipFile("Bad CRC-32"), "Bad CRC-32"),
            (OSError("Failed"), "Failed"),
            (EOFError(), "EOFError"),
        ],
    )
    def test_whatever_numpy_raises(self, tmp_path, monkeypatch, error, why):
        def broken(*args, **options):
            raise error

        np.savez(tmp_path / "a.npz", x=self.X)
        monkeypatch.setattr(np.lib.format, "read_array", broken)
        with pytest.raises(ValueError, match=rf"a.npz cannot be read as an array \({why}\). Save it again."):
            load(DataSettings(str(tmp_path / "a.npz")))

    def test_read_without_labels(self, tmp_path):
        path = tmp_path / "a.npz"
        np.savez(path, x=self.X, y=np.array([{}] * 3, dtype=object))  # is not even looked at
        assert read(path, IRIS, labels=False).y is None
        np.savez(path, x=np.zeros((2, 8, 8), np.uint8), y=np.array(["c", "d"]))
        assert read(path, Schema((1, 8, 8), 17, classes=("a", "b")), labels=False).y is None
        np.savez(path, x=np.column_stack([self.X, np.arange(10)]))
        assert read(path, Schema((2,), label="x2", classes=("0",)), labels=False).y is None


IRIS_AB = replace(IRIS, classes=("a", "b"))


class Series(list):
    """As much of pandas as is used, for where it is not installed."""

    def to_numpy(self):
        return np.array(self, dtype=object if any(isinstance(v, str) or v is None for v in self) else None)

    def astype(self, kind):
        return self

    def where(self, keep, other):
        return Series(v if k else other for v, k in zip(self, keep, strict=True))

    def notna(self):
        return [v is not None for v in self]


class Frame(dict):
    columns = property(list)


class TestParquet:
    @pytest.fixture
    def path(self, tmp_path):
        (tmp_path / "a.parquet").write_bytes(b"")
        return tmp_path / "a.parquet"

    def pandas(self, monkeypatch, answer):
        def read_parquet(path):
            if isinstance(answer, Exception):
                raise answer
            return answer

        module = types.ModuleType("pandas")
        module.read_parquet = read_parquet
        monkeypatch.setitem(sys.modules, "pandas", module)
        monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)  # these files are empty

    def test_columns_and_labels(self, path, monkeypatch):
        frame = Frame(
            length=Series([1.0, 3.0, 5.0, 7.0]),
            width=Series([2, 4, 6, 8]),
            kind=Series(["tulip", None, "rose", "rose"]),
        )
        self.pandas(monkeypatch, frame)
        data = read(path, IRIS)
        assert data.x.tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]]
        assert data.y.tolist() == [1, -1, 0, 0]
        assert load(DataSettings(str(path), label="kind", test=1, validation=1)).schema == IRIS

    def test_bad_cells(self, path, monkeypatch):
        self.pandas(monkeypatch, Frame(length=Series([1.0, 3.0]), width=Series(["2", "wide"])))
        with pytest.raises(
            ValueError, match="'wide' is not a number in row 1, column 'width'. Correct it, or remove the"
        ):
            load(DataSettings(str(path)))
        self.pandas(monkeypatch, Frame(length=Series([1.0, 3.0]), width=Series(["2", None])))
        with pytest.raises(ValueError, match="nan in row 1, column 'width'"):
            load(DataSettings(str(path)))

    def test_a_column_of_text_may_be_the_labels(self, path, monkeypatch):
        self.pandas(monkeypatch, Frame(length=Series([1.0, 3.0, 4.0]), species=Series([None, "rose", "tulip"])))
        with pytest.raises(ValueError, match="'rose' is not a number in row 1, column 'species'.") as error:
            load(DataSettings(str(path)))
        assert str(error.value).endswith(
            " Correct it, or remove the row or the column. If it holds the classes, name it: --label species. "
            "If it is data, a category: --kind species=category. Else leave it out: --drop species."
        )
        with pytest.raises(ValueError, match="remove the row or the column.$"):
            read(path, Schema((2,), columns=("length", "species")))
        self.pandas(monkeypatch, Frame(length=Series([1.0, 3.0]), width=Series(["2", "wide"])))
        with pytest.raises(ValueError, match="remove the row or the column.$"):
            load(DataSettings(str(path)))

    def test_read_without_labels(self, path, monkeypatch):
        frame = Frame(length=Series([1.0]), width=Series([2.0]), kind=Series(["orchid"]))
        self.pandas(monkeypatch, frame)
        assert read(path, IRIS, labels=False).y is None

    def test_what_to_install(self, path, monkeypatch):
        monkeypatch.setitem(sys.modules, "pandas", None)
        with pytest.raises(ValueError, match="Parquet files need pandas. Run `pip install pandas pyarrow`."):
            load(DataSettings(str(path)))
        self.pandas(monkeypatch, ImportError())
        with pytest.raises(ValueError, match="pandas needs pyarrow to read Parquet. Run `pip install pyarrow`."):
            load(DataSettings(str(path)))

    def test_damaged(self, path, monkeypatch):
        self.pandas(monkeypatch, RuntimeError())
        with pytest.raises(ValueError, match=r"a.parquet cannot be read as Parquet \(RuntimeError\). Save it again."):
            load(DataSettings(str(path)))


def test_the_file_that_sampling_writes_can_be_read_back(tmp_path):
    x = torch.randint(17, (3, 1, 8, 8), dtype=torch.uint8)
    np.savez_compressed(tmp_path / "samples.npz", x=x.numpy())
    back = read(tmp_path / "samples.npz", Schema((1, 8, 8), 17, classes=tuple("0123456789")))
    assert isinstance(back, Dataset)
    assert torch.equal(back.x, x)
    assert back.y is None
