"""Folders of images: their parts, the names of their rows, and rows read without labels."""

import pytest
from PIL import Image

from iresnet.data import DataSettings, Schema, load, read

CATS = Schema((1, 4, 6), 256, classes=("cat", "dog"))


def paint(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (6, 4), value).save(path)


def pixels(dataset):
    return dataset.x[:, 0, 0, 0].tolist()


def paint_parts(folder, **parts):
    """Images of the given pixels in a folder for each part; even ones are cats, odd ones dogs."""
    for part, values in parts.items():
        for value in values:
            paint(folder / part / ("dog" if value % 2 else "cat") / f"{value}.png", value)


class TestParts:
    @pytest.mark.parametrize("name", ["val", "valid", "validation"])
    def test_three_sub_folders_are_three_parts(self, tmp_path, name):
        paint_parts(tmp_path, **{"train": range(6), name: [10, 11, 12], "test": [20, 21]})
        splits = load(DataSettings(str(tmp_path), validation=5))  # what is there is not carved
        assert splits.schema == CATS
        assert sorted(pixels(splits.train)) == [0, 1, 2, 3, 4, 5]
        assert sorted(pixels(splits.validation)) == [10, 11, 12]
        assert splits.test.y.tolist() == [0, 1]
        assert [pixels(read(tmp_path, CATS, part=part))[0] for part in ("train", "validation", "test")] == [0, 10, 20]

    def test_without_test_it_is_carved_from_train(self, tmp_path):
        paint_parts(tmp_path, train=range(6), val=[10, 11])
        splits = load(DataSettings(str(tmp_path), test=2))
        assert sorted(pixels(splits.train) + pixels(splits.test)) == [0, 1, 2, 3, 4, 5]
        assert splits.test.y.tolist() == [0, 1]  # its share of every class
        assert pixels(splits.validation) == [10, 11]
        with pytest.raises(ValueError, match="has no sub-folder 'test'. Give the folder that holds the images."):
            read(tmp_path, splits.schema)

    def test_without_validation_it_is_carved_from_train(self, tmp_path):
        paint_parts(tmp_path, train=range(6), test=[20, 21])
        splits = load(DataSettings(str(tmp_path), validation=2))
        assert sorted(pixels(splits.train) + pixels(splits.validation)) == [0, 1, 2, 3, 4, 5]
        with pytest.raises(ValueError, match="has no sub-folder 'validation'. Give the folder"):
            read(tmp_path, splits.schema, part="validation")

    @pytest.mark.parametrize("classes", [("plane", "train", "val"), ("test", "val"), ("extra", "test", "train", "val")])
    def test_other_sub_folders_are_classes(self, tmp_path, classes):
        for i in range(12):
            paint(tmp_path / classes[i % len(classes)] / f"{i}.png", i)
        assert load(DataSettings(str(tmp_path))).schema.classes == classes

    def test_two_for_validation(self, tmp_path):
        paint_parts(tmp_path, train=range(6), val=[10], valid=[11])
        with pytest.raises(ValueError, match="one sub-folder for validation; got val and valid. Keep one."):
            load(DataSettings(str(tmp_path)))

    def test_a_class_that_training_does_not_have(self, tmp_path):
        paint_parts(tmp_path, train=range(6))
        paint(tmp_path / "val" / "lion" / "1.png", 1)
        with pytest.raises(
            ValueError, match="labels must be among the 2 known classes; got 'lion' in .*1.png. Use one of cat, dog."
        ):
            load(DataSettings(str(tmp_path)))


class TestNames:
    def test_are_paths_below_the_folder(self, tmp_path):
        paint_parts(tmp_path, train=[0, 1, 2], test=[20, 21])
        assert read(tmp_path, CATS).names == ("test/cat/20.png", "test/dog/21.png")
        assert read(tmp_path / "test", CATS).names == ("cat/20.png", "dog/21.png")
        assert read(tmp_path / "test" / "cat", CATS).names == ("20.png",)
        assert read(tmp_path / "test" / "cat" / "20.png", CATS).names == ("20.png",)

    def test_stay_with_their_rows_in_a_split(self, tmp_path):
        for i in range(10):
            paint(tmp_path / f"{i}.png", i)
        splits = load(DataSettings(str(tmp_path)))
        for part in (splits.train, splits.validation, splits.test):
            assert part.names == tuple(f"{i}.png" for i in pixels(part))


class TestWithoutLabels:
    def test_classes_that_the_model_does_not_know(self, tmp_path):
        paint(tmp_path / "lion" / "1.png", 1)
        paint(tmp_path / "dog" / "2.png", 2)
        data = read(tmp_path, CATS, labels=False)
        assert (pixels(data), data.y, data.schema) == ([2, 1], None, CATS)
        assert data.names == ("dog/2.png", "lion/1.png")

    def test_sub_folders_mean_nothing(self, tmp_path):
        paint(tmp_path / "lion" / "1.png", 1)
        paint(tmp_path / "2.png", 2)
        (tmp_path / "empty").mkdir()
        paint(tmp_path / ".hidden" / "3.png", 3)
        paint(tmp_path / "__MACOSX" / "4.png", 4)
        assert read(tmp_path, CATS, labels=False).names == ("2.png", "lion/1.png")

    def test_nothing_there(self, tmp_path):
        (tmp_path / "empty").mkdir()
        with pytest.raises(ValueError, match=f"{tmp_path} holds no image"):
            read(tmp_path, CATS, labels=False)
