"""Data sets, batches, augmentation and splits: what is promised about every row."""

import hashlib
import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from iresnet.data import Augment, Batches, Dataset, Schema, Splits, subsample
from iresnet.data.labels import class_name, class_names, encode_labels
from iresnet.data.sampling import seeded_generator
from iresnet.data.split import held_out_count, hold_out, hold_out_last, keep_labels
from iresnet.spelling import hint

POINT = Schema((1,))
TWO = Schema((1,), classes=("cat", "dog"))


def numbered(n, y=None, classes=("cat", "dog")):
    """Row i holds the number i."""
    schema = replace(POINT, classes=classes) if y is not None else POINT
    return Dataset(torch.arange(n, dtype=torch.float32)[:, None], y, schema)


def values(batch):
    return batch[0].flatten().int().tolist()


class TestTargets:
    COLUMNS = Schema((3,), columns=("a", "b", "c"), targets=("c", "a"))

    def test_survive_json_and_leave_other_schemas_as_they_were(self):
        assert Schema.from_dict(json.loads(json.dumps(self.COLUMNS.to_dict()))) == self.COLUMNS
        assert "targets" not in Schema((3,)).to_dict()

    def test_some_columns_have_a_schema(self):
        assert self.COLUMNS.select(("c", "b")) == Schema((2,), columns=("c", "b"))

    @pytest.mark.parametrize("targets", [("d",), ("a", "b", "c")])
    def test_they_are_some_of_the_columns(self, targets):
        with pytest.raises(ValueError, match="targets must be some of the columns, and not all; got"):
            replace(self.COLUMNS, targets=targets)
        with pytest.raises(ValueError, match="targets must be different names"):
            replace(self.COLUMNS, targets=("a", "a"))


class TestSchema:
    @pytest.mark.parametrize(
        "schema",
        [
            Schema((1, 8, 8), 17, classes=("0", "1")),
            Schema((2,), columns=("a", "b"), label="kind", classes=("cat", "dog")),
            Schema((3,)),
        ],
    )
    def test_survives_json(self, schema):
        assert Schema.from_dict(json.loads(json.dumps(schema.to_dict()))) == schema

    def test_a_schema_prints_the_format_of_a_sample(self):
        assert Schema((3, 32, 32), 256).is_image
        assert Schema((3, 32, 32), 256).dimension == 3072
        assert not Schema((5,)).is_image
        assert Schema((2,)).names == ("x0", "x1")
        assert Schema((1,), columns=("age",)).names == ("age",)
        assert str(Schema((1,), columns=("age",))) == "rows of 1 numbers (age)"
        assert str(Schema((9,), columns=tuple("abcdefghi"))).endswith("g, h, …)")

    @pytest.mark.parametrize(
        ("wrong", "sentence"),
        [
            ({"shape": (8, 8)}, r"shape must be \(C, H, W\) or \(D,\), of positive integers; got \(8, 8\)."),
            ({"shape": (0,)}, r"positive integers; got \(0,\)."),
            ({"shape": (1.5,)}, r"positive integers; got \(1.5,\)."),
            ({"shape": (1, 8, 8)}, "levels of an image must lie in 2 .. 256; got None. Use 256 for bytes."),
            ({"shape": (1, 8, 8), "levels": 1000}, "levels of an image must lie in 2 .. 256; got 1000."),
            ({"shape": (2,), "levels": 256}, r"levels are for images; got 256 for samples of shape \(2,\). Use None."),
            ({"shape": (2,), "columns": ("a", "a")}, "columns must be different names; got 'a', 'a'."),
            ({"shape": (2,), "classes": (0, 1)}, "classes must be different names; got 0, 1."),
            ({"shape": (2,), "columns": ("a",)}, r"columns must name every number of a sample, \(2,\); got 1 names."),
            ({"shape": (2,), "label": 3}, "label must be a column's name or empty; got 3."),
            (
                {"shape": (10**9,)},
                r"a sample may hold at most 67,108,864 numbers; got \(1000000000,\). Use smaller samples.",
            ),
            ({"shape": (3, 10**30, 10**30), "levels": 256}, "a sample may hold at most 67,108,864 numbers"),
            ({"shape": (2,), "classes": tuple(map(str, range(70_000)))}, "at most 65,536 classes; got 70,000."),
            ({"shape": (2,), "columns": ("a",) * 50}, "columns must be different names; got 'a', .*, ….$"),
        ],
    )
    def test_refuses(self, wrong, sentence):
        with pytest.raises(ValueError, match=sentence):
            Schema(**wrong)

    @pytest.mark.parametrize(
        ("content", "sentence"),
        [
            ([1, 8, 8], "a schema is an object with the keys shape, levels, .*, one_hot, constants; got"),
            ({"levels": 17}, "a schema is an object with the keys"),
            ({"shape": [2], "colunms": []}, "a schema has no key 'colunms'. Did you mean 'columns'?"),
            ({"shape": 2}, "shape of a schema cannot be 2. Write it with Schema.to_dict."),
            ({"shape": [2], "label": ["a"]}, r"label of a schema cannot be \['a'\]"),
        ],
    )
    def test_refuses_a_file_that_is_none(self, content, sentence):
        with pytest.raises(ValueError, match=sentence):
            Schema.from_dict(content)

    def test_content_that_is_deep_or_long_gets_a_short_sentence(self):
        deep: list = []
        for _ in range(5000):
            deep = [deep]
        for content in (deep, {"shape": deep}, {"shape": [2], "label": deep}, {"shape": [2], 9999 * "a": 1}):
            with pytest.raises(ValueError, match="schema|shape") as error:
                Schema.from_dict(content)
            assert len(str(error.value)) < 300


class TestDataset:
    def test_take_keeps_the_order_of_the_indices(self):
        data = numbered(5, torch.tensor([0, 1, 0, 1, -1]))
        part = data.take([4, 0])
        assert (len(data), len(part)) == (5, 2)
        assert values((part.x,)) == [4, 0]
        assert part.y.tolist() == [-1, 0]
        assert numbered(3).take(torch.tensor([2])).y is None

    def test_moves_to_a_device(self):
        data = numbered(3, torch.tensor([0, 1, 0]))
        splits = Splits(data, data, data).to("cpu")
        assert splits.test.x.device.type == "cpu"
        assert splits.schema == data.schema
        assert numbered(3).to("cpu").y is None

    @pytest.mark.parametrize(
        ("x", "y", "schema", "sentence"),
        [
            (torch.zeros(3, 2), None, POINT, r"must come as float32 of shape \(N, 1\); got float32 of shape \(3, 2\)."),
            (torch.zeros(3, 1).double(), None, POINT, r"as float32 of shape \(N, 1\); got float64 of shape \(3, 1\)."),
            (torch.zeros(2, 1, 4, 4), None, Schema((1, 4, 4), 17), "with 17 levels must come as uint8 of shape"),
            (torch.zeros(0, 1), None, POINT, "a dataset needs at least one sample; got none."),
            (
                torch.tensor([[0.0], [float("nan")]]),
                None,
                POINT,
                "numbers must be finite; got nan in row 1, column 'x0'.",
            ),
            (
                torch.tensor([[0.0], [float("inf")]]),
                None,
                Schema((1,), columns=("age",)),
                "inf in row 1, column 'age'",
            ),
            (
                torch.full((2, 1, 2, 2), 17, dtype=torch.uint8),
                None,
                Schema((1, 2, 2), 17),
                "pixels must lie in 0 .. 16; got 17 in image 0.",
            ),
            (
                torch.zeros(2, 1),
                torch.zeros(3).long(),
                TWO,
                r"labels must be int64, one per sample; got int64 \(3,\) for 2",
            ),
            (torch.zeros(2, 1), torch.zeros(2), TWO, "labels must be int64, one per sample; got float32"),
            (
                torch.zeros(2, 1),
                torch.tensor([0, 2]),
                TWO,
                "labels of 2 classes must lie in 0 .. 1, or be -1 where one is missing; got 2 for sample 1",
            ),
            (torch.zeros(2, 1), torch.tensor([0, -2]), TWO, "got -2 for sample 1"),
            (
                torch.zeros(2, 1),
                torch.tensor([0, 0]),
                POINT,
                "a dataset with labels needs a schema with classes; got none.",
            ),
        ],
    )
    def test_refuses(self, x, y, schema, sentence):
        with pytest.raises(ValueError, match=sentence):
            Dataset(x, y, schema)

    def test_names_stay_with_their_rows(self):
        data = replace(numbered(3), names=("a", "b", "c"))
        assert data.take([2, 0]).names == ("c", "a")
        assert data.take(torch.tensor([-1])).names == ("c",)
        assert data.to("cpu").names == ("a", "b", "c")
        assert numbered(3).take([0]).names == ()
        with pytest.raises(ValueError, match="there must be one name per sample; got 2 for 3. Give all, or none."):
            replace(data, names=("a", "b"))

    def test_fingerprint(self):
        data = Dataset(torch.tensor([[1.0], [2.0]]), torch.tensor([1, -1]), TWO)
        content = bytes.fromhex("0000803f00000040" + "01" + 7 * "00" + 8 * "ff")  # 1 and 2; 1 and -1
        schema = '{"classes": ["cat", "dog"], "columns": [], "label": "", "levels": null, "shape": [1]}'
        assert data.fingerprint() == hashlib.sha256(content + schema.encode()).hexdigest()[:16]
        rest = hashlib.sha256(content[:8] + schema.encode()).hexdigest()[:16]
        assert replace(data, y=None).fingerprint() == rest

    def test_a_fingerprint_tells_data_apart(self):
        data = numbered(4, torch.tensor([0, 1, 0, 1]))
        others = [
            data.take([0, 1, 2]),
            data.take([1, 0, 2, 3]),
            replace(data, y=torch.tensor([0, 1, 0, 0])),
            replace(data, schema=replace(data.schema, classes=("cat", "cow"))),
        ]
        assert len({d.fingerprint() for d in [data, *others]}) == 5
        assert replace(data, x=data.x.repeat(1, 2)[:, :1], names=tuple("abcd")).fingerprint() == data.fingerprint()

    def test_weights_go_with_their_samples(self):
        data = replace(numbered(4), weights=torch.tensor([0.0, 1.0, 2.0, 1.0], dtype=torch.float64))
        assert data.take([2, 1]).weights.tolist() == [2, 1]
        assert data.to("cpu").weights.tolist() == [0, 1, 2, 1]
        assert data.fingerprint() != numbered(4).fingerprint()

    @pytest.mark.parametrize(
        ("weights", "sentence"),
        [
            ([1.0, 2.0], r"weights must be float64, one per sample; got float64 \(2,\) for 3 samples"),
            ([0.0, 0.0, 0.0], "not negative, and one of them positive; got 0 to 0"),
            ([1.0, -1.0, 0.0], "not negative, and one of them positive; got -1 to 1"),
            ([1.0, float("nan"), 0.0], "weights must be finite"),
        ],
    )
    def test_wrong_weights_are_refused(self, weights, sentence):
        with pytest.raises(ValueError, match=sentence):
            replace(numbered(3), weights=torch.tensor(weights, dtype=torch.float64))

    def test_repeated_samples_are_in_proportion_to_their_weights(self):
        data = replace(numbered(4), weights=torch.tensor([0.0, 1.0, 2.0, 0.5], dtype=torch.float64))
        counts = data.repeated(at_least=1000).x.flatten().int().bincount(minlength=4)
        assert counts.sum() == 1000
        assert (counts - 1000 / 3.5 * data.weights).abs().max() < 1
        assert data.repeated().weights is None
        assert len(data.repeated(at_least=5)) == 8
        assert (plain := numbered(4)).repeated() is plain

    def test_splits_have_one_schema(self):
        with pytest.raises(
            ValueError, match="all splits must have one schema; train has .*, test has rows of 2 numbers."
        ):
            Splits(numbered(2), numbered(2), Dataset(torch.zeros(1, 2), None, Schema((2,))))


class TestBatches:
    @given(st.lists(st.integers(0, 4), min_size=2, max_size=8).filter(any), st.integers(0, 5), st.integers(0, 3))
    def test_a_sample_is_drawn_as_often_as_its_weight_says(self, weights, epoch, seed):
        w, n = torch.tensor(weights, dtype=torch.float64), len(weights)
        batches = Batches(replace(numbered(n), weights=w), 1, seed=seed)
        seen = torch.tensor([i for t in range(epoch * n, (epoch + 1) * n) for i in values(batches[t])])
        counts, expected = seen.bincount(minlength=n), n * w / w.sum()
        assert ((counts - expected).abs() < 1 + 1e-9).all()
        assert counts[w == 0].sum() == 0

    def test_on_average_the_weights_are_exact(self):
        w = torch.tensor([0.3, 1.0, 2.2], dtype=torch.float64)
        batches = Batches(replace(numbered(3), weights=w), 3)
        seen = torch.tensor([i for t in range(3000) for i in values(batches[t])])
        shares = seen.bincount(minlength=3) / len(seen)
        assert (shares - w / w.sum()).abs().max() < 4 * 0.5 / 3000**0.5 / 3  # a count varies by less than one

    @given(st.integers(1, 30), st.integers(1, 40), st.integers(0, 2**40), st.integers(0, 5))
    def test_an_epoch_visits_every_row_at_most_once(self, n, size, seed, epoch):
        batches = Batches(numbered(n), size, seed=seed)
        per = batches.per_epoch
        seen = [i for t in range(epoch * per, (epoch + 1) * per) for i in values(batches[t])]
        assert len(seen) == len(set(seen)) == n // min(n, size) * min(n, size)
        assert all(len(batches[t][0]) == min(n, size) for t in range(epoch * per, (epoch + 1) * per))

    @given(st.integers(0, 10), st.lists(st.integers(0, 40), min_size=1, max_size=6))
    def test_a_batch_depends_on_seed_and_step_alone(self, seed, steps):
        x = torch.arange(7 * 16, dtype=torch.uint8).view(7, 1, 4, 4)
        data = Dataset(x, torch.arange(7), Schema((1, 4, 4), 256, classes=tuple("abcdefg")))
        batches = Batches(data, 3, seed=seed, augment=Augment(shift=1, flip=True))
        for t in steps:  # in any order, from one stream or a fresh one
            fresh = Batches(data, 3, seed=seed, augment=Augment(shift=1, flip=True))
            for mine, theirs in zip(batches[t], fresh[t], strict=True):
                assert torch.equal(mine, theirs)

    def test_a_resumed_run_sees_what_it_would_have_seen(self):
        batches = Batches(numbered(10), 3, seed=1)
        whole = [values(b) for b, _ in zip(batches.starting_at(0), range(20), strict=False)]
        rest = [values(b) for b, _ in zip(Batches(numbered(10), 3, seed=1).starting_at(7), range(13), strict=False)]
        assert rest == whole[7:]
        assert [values(b) for b, _ in zip(batches, range(20), strict=False)] == whole

    def test_epochs_and_seeds_have_orders_of_their_own(self):
        a, b = (Batches(numbered(50), 50, seed=seed) for seed in (0, 1))
        orders = [values(stream[t]) for stream in (a, b) for t in (0, 1)]
        assert len({tuple(order) for order in orders}) == 4

    def test_labels_stay_with_their_rows(self):
        x, y = Batches(numbered(6, torch.tensor([0, 1, 0, 1, 0, 1])), 4)[3]
        assert torch.equal(x.flatten().long() % 2, y)
        assert x.dtype == torch.float32

    def test_every_batch_can_have_samples_with_a_label(self):
        y = torch.full((50,), -1)
        y[[3, 4, 8, 11, 20]] = torch.tensor([1, 0, 0, 1, 0])
        plain, more = Batches(numbered(50, y), 10, seed=1), Batches(numbered(50, y), 10, seed=1, labelled=2)
        assert (more.per_epoch, more.labelled.size) == (plain.per_epoch, 2)
        seen = []
        for t in range(4):
            (x, labels), (own, own_labels) = more[t], plain[t]
            assert torch.equal(x[:10], own)
            assert torch.equal(labels[:10], own_labels)
            assert torch.equal(labels[10:], y[x[10:].flatten().long()])
            seen.append(x[10:].flatten().tolist())
        assert len({*seen[0], *seen[1]}) == 4  # an epoch of their own: none twice
        assert {i for pair in seen for i in pair} <= {3, 4, 8, 11, 20}
        assert len(Batches(numbered(50, y), 10, labelled=99)[0][0]) == 15  # all that there are

    def test_large_steps_and_sizes(self):
        batches = Batches(numbered(4), 100)
        assert (batches.size, batches.per_epoch) == (4, 1)
        assert sorted(values(batches[10**9])) == [0, 1, 2, 3]

    def test_refuses(self):
        with pytest.raises(ValueError, match="the batch size must be at least 1; got 0."):
            Batches(numbered(3), 0)
        for y in (None, torch.full((3,), -1)):
            with pytest.raises(
                ValueError,
                match="batches with labelled samples need data with labels; got none. Set labelled_batch = 0.",
            ):
                Batches(numbered(3, y), 1, labelled=2)
        with pytest.raises(ValueError, match="step must be at least 0; got -1."):
            Batches(numbered(3), 1)[-1]
        with pytest.raises(ValueError, match=r"shift, flip and cutout are for images; got samples of shape \(1,\)."):
            Batches(numbered(3), 1, augment=Augment(flip=True))

    def test_generators_of_different_keys_are_independent(self):
        draws = {
            torch.rand((), generator=seeded_generator(*key)).item()
            for key in [(0, "a"), (0, "b"), (1, "a"), (0, "a", 1)]
        }
        assert len(draws) == 4
        assert torch.rand((), generator=seeded_generator(0, "a")).item() in draws


class TestAugment:
    IMAGE = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]], dtype=torch.uint8).view(1, 1, 3, 3)

    def test_a_shift_mirrors_at_the_border(self):
        seen = set()
        for seed in range(60):
            y = Augment(shift=1)(self.IMAGE, torch.Generator().manual_seed(seed))
            seen.add(tuple(y.flatten().tolist()))
        assert len(seen) == 9
        assert tuple(self.IMAGE.flatten().tolist()) in seen
        assert (4, 5, 6, 1, 2, 3, 4, 5, 6) in seen  # one down
        assert (2, 1, 2, 5, 4, 5, 8, 7, 8) in seen  # one to the right

    def test_a_flip_mirrors_the_columns_half_the_time(self):
        x = self.IMAGE.expand(1000, 1, 3, 3)
        y = Augment(flip=True)(x, torch.Generator().manual_seed(0))
        flipped = (y == x.flip(3)).flatten(1).all(dim=1)
        assert bool((flipped | (y == x).flatten(1).all(dim=1)).all())
        assert abs(flipped.float().mean().item() - 0.5) < 4 * 0.5 / 1000**0.5
        assert y.dtype == torch.uint8
        assert y.is_contiguous()

    def test_every_image_draws_its_own_and_channels_move_together(self):
        x = torch.arange(36, dtype=torch.uint8).view(1, 1, 6, 6).repeat(64, 3, 1, 1)
        x[:, 1] += 100
        y = Augment(shift=2, flip=True)(x, torch.Generator().manual_seed(0))
        assert torch.equal(y[:, 1], y[:, 0] + 100)
        assert torch.equal(y[:, 2], y[:, 0])
        assert len({tuple(image.flatten().tolist()) for image in y}) > 20

    def test_shifts_do_not_depend_on_flips(self):
        x = torch.randint(256, (32, 1, 8, 8), dtype=torch.uint8)
        plain, flipped = (Augment(2, flip)(x, torch.Generator().manual_seed(5)) for flip in (False, True))
        same = (plain == flipped).flatten(1).all(dim=1) | (plain == flipped.flip(3)).flatten(1).all(dim=1)
        assert bool(same.all())

    def test_a_blank_border_moves_in(self):
        seen = set()
        for seed in range(60):
            y = Augment(shift=1, border="blank")(self.IMAGE, torch.Generator().manual_seed(seed))
            seen.add(tuple(y.flatten().tolist()))
        assert len(seen) == 9
        assert (0, 0, 0, 1, 2, 3, 4, 5, 6) in seen  # one down
        assert (0, 1, 2, 0, 4, 5, 0, 7, 8) in seen  # one to the right
        assert y.dtype == torch.uint8

    def test_a_blank_border_goes_with_the_flip(self):
        x = torch.randint(1, 256, (64, 1, 8, 8), dtype=torch.uint8)
        plain, flipped = (Augment(2, f, border="blank")(x, torch.Generator().manual_seed(5)) for f in (False, True))
        same = (plain == flipped).flatten(1).all(dim=1) | (plain == flipped.flip(3)).flatten(1).all(dim=1)
        assert bool(same.all())

    def test_only_a_part_is_shifted(self):
        x = self.IMAGE.expand(4000, 1, 3, 3)
        y = Augment(shift=1, shifted=0.3)(x, torch.Generator().manual_seed(0))
        moved = float((y != x).flatten(1).any(dim=1).double().mean())
        expected = 0.3 * 8 / 9  # one move in nine is none
        assert abs(moved - expected) < 4 * (expected * (1 - expected) / 4000) ** 0.5

    def test_cutout_hides_a_square_behind_the_mean(self):
        x = torch.randint(256, (400, 2, 7, 9), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
        y = Augment(cutout=3)(x, torch.Generator().manual_seed(1))
        mean = x.double().mean(dim=(2, 3), keepdim=True).round()
        corners = set()
        for image, made, m in zip(x, y, mean, strict=True):
            hidden = ((made.double() == m) & (image.double() != m)).any(dim=0)
            rows, columns = hidden.any(1).nonzero().flatten().tolist(), hidden.any(0).nonzero().flatten().tolist()
            assert len(rows) <= 3
            assert len(columns) <= 3
            assert torch.equal(made[:, ~hidden], image[:, ~hidden])
            corners.add((rows[0], columns[0], len(rows), len(columns)))
        middles = {c[:2] for c in corners if c[2:] == (3, 3)}
        assert middles >= {(i, j) for i in range(1, 4) for j in range(1, 6)}  # everywhere inside
        assert any(c[0] == 0 and c[2] == 2 for c in corners)  # a middle on the border: part of the square is outside
        assert y.dtype == torch.uint8

    @pytest.mark.parametrize("size", [2, 3, 4])
    def test_a_cutout_has_the_size_of_the_setting(self, size):
        x = torch.arange(100, dtype=torch.uint8).view(1, 1, 10, 10).expand(300, 1, 10, 10)
        changed = (Augment(cutout=size)(x, torch.Generator().manual_seed(0)) != x).flatten(1).sum(dim=1)
        assert int(changed.max()) == size * size

    def test_a_cutout_leaves_the_other_draws_as_they_are(self):
        x = torch.randint(1, 256, (64, 1, 8, 8), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
        settings = {"shift": 2, "flip": True, "shifted": 0.5}
        plain, cut = (Augment(**settings, cutout=n)(x, torch.Generator().manual_seed(5)) for n in (0, 2))
        same = (plain == cut).flatten(1).sum(dim=1)
        assert bool((same >= 60).all())
        assert int(same.min()) < 64

    @pytest.mark.gpu
    def test_batches_are_the_same_on_every_device(self):
        x = torch.randint(256, (60, 3, 8, 8), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
        data = Dataset(x, None, Schema((3, 8, 8), 256))
        augment = Augment(shift=2, flip=True, shifted=0.5, cutout=3)
        here, there = (Batches(d, 16, augment=augment) for d in (data, data.to("cuda")))
        assert all(torch.equal(here[t][0], there[t][0].cpu()) for t in range(8))

    def test_nothing_to_do_changes_nothing(self):
        x = torch.zeros(3, 2)
        assert Augment()(x, torch.Generator()) is x

    def test_refuses(self):
        with pytest.raises(ValueError, match="shift must be at least 0 pixels; got -1."):
            Augment(shift=-1)
        with pytest.raises(ValueError, match="shift must be smaller than the image; got 3 for 3 x 3."):
            Augment(shift=3)(self.IMAGE, torch.Generator())
        with pytest.raises(
            ValueError, match=r"shifted is the fraction of the images that is shifted, in \[0, 1\]; got 2"
        ):
            Augment(shift=1, shifted=2)
        with pytest.raises(ValueError, match="border must be mirror or blank; got 'red'"):
            Augment(shift=1, border="red")
        with pytest.raises(
            ValueError, match="cutout is the side of a square in pixels and must be at least 0; got -1."
        ):
            Augment(cutout=-1)
        with pytest.raises(
            ValueError, match=r"shift, flip and cutout are for images; got samples of shape \(2,\). Set shift"
        ):
            Augment(cutout=2)(torch.zeros(3, 2), torch.Generator())


class TestSplit:
    @given(st.lists(st.integers(-1, 3), min_size=2, max_size=60), st.data())
    def test_held_out_rows_are_disjoint_stratified_and_repeatable(self, labels, data):
        n = data.draw(st.integers(1, len(labels) - 1))
        whole = numbered(len(labels), torch.tensor(labels), classes=tuple("abcd"))
        kept, held = hold_out(whole, n, seeded_generator(0))
        rows = values((kept.x,)), values((held.x,))
        assert sorted(rows[0] + rows[1]) == list(range(len(labels)))
        assert len(rows[1]) == n
        for label in set(labels):  # every class gives its share, rounded up or down
            assert abs(int((held.y == label).sum()) - n * labels.count(label) / len(labels)) < 1
        assert values((hold_out(whole, n, seeded_generator(0))[1].x,)) == rows[1]

    def test_every_row_has_the_same_chance(self):
        y = torch.tensor([0] * 7 + [1] * 3)
        counts = torch.zeros(10)
        for seed in range(1000):
            counts[values((hold_out(numbered(10, y), 3, seeded_generator(seed))[1].x,))] += 1
        assert (counts / 1000 - 0.3).abs().max() < 4 * (0.3 * 0.7 / 1000) ** 0.5

    def test_without_labels(self):
        kept, held = hold_out(numbered(10), 4, seeded_generator(0))
        assert sorted(values((kept.x,)) + values((held.x,))) == list(range(10))
        assert held.y is None

    def test_the_last_rows(self):
        kept, held = hold_out_last(numbered(5), 2)
        assert (values((kept.x,)), values((held.x,))) == ([0, 1, 2], [3, 4])

    @given(st.integers(1, 40), st.integers(1, 40))
    def test_a_subsample_keeps_the_order_of_the_file(self, rows, n):
        data = numbered(rows)
        part = values((subsample(data, n).x,))
        assert len(part) == min(rows, n)
        assert part == sorted({*part})
        assert part == values((subsample(data, n).x,))
        assert n < rows or subsample(data, n) is data

    def test_a_subsample_is_not_the_first_samples(self):
        order = torch.randperm(1000, generator=seeded_generator(0, "some"))[:100].tolist()
        part = subsample(numbered(1000, torch.arange(1000) // 500), 100)
        assert values((part.x,)) == sorted(order)
        assert 30 < int(part.y.sum()) < 70
        with pytest.raises(ValueError, match="the number of samples must be at least 1; got 0."):
            subsample(numbered(3), 0)

    @given(st.integers(0, 20))
    def test_kept_labels_are_right_and_of_every_class(self, seed):
        y = torch.tensor([0, 1] * 20 + [-1] * 5)
        kept = keep_labels(numbered(45, y), 0.25, seeded_generator(seed)).y
        assert int((kept >= 0).sum()) == 10
        assert bool(((kept == y) | (kept == -1)).all())
        assert (kept == 0).sum() == (kept == 1).sum() == 5

    @given(st.integers(2, 40), st.integers(0, 20))
    def test_a_number_of_labels_is_kept_in_turn(self, n, seed):
        y = torch.tensor([0, 1] * 15 + [0] * 10 + [-1] * 5)
        kept = keep_labels(numbered(45, y), n, seeded_generator(seed)).y
        assert bool(((kept == y) | (kept == -1)).all())
        zeros, ones = (int((kept == label).sum()) for label in (0, 1))
        assert (zeros + ones, ones) == (n, min(n // 2, 15))

    def test_all_labels_kept_is_no_change(self):
        data = numbered(3)
        assert keep_labels(data, 1, seeded_generator(0)) is data

    def test_refuses(self):
        sentence = "validation holds out 5 of 5 samples.* Lower it, e.g. --set data.validation=0.15, or add samples."
        with pytest.raises(ValueError, match=sentence):
            held_out_count("validation", 5, 5)
        with pytest.raises(ValueError, match="labelled must be 1 for data without labels; got 0.5. Set labelled = 1."):
            keep_labels(numbered(3), 0.5, seeded_generator(0))
        with pytest.raises(ValueError, match="labelled = 11 exceeds the 10 labels of the training data. Lower it."):
            keep_labels(numbered(10, torch.tensor([0, 1] * 5)), 11, seeded_generator(0))
        with pytest.raises(
            ValueError, match=r"labelled = 0.1 keeps no label of class '(cat|dog)' out of 10 labels. Raise it."
        ):
            keep_labels(numbered(10, torch.tensor([0, 1] * 5)), 0.1, seeded_generator(0))

    def test_a_part_is_never_empty(self):
        assert held_out_count("test", 0.01, 5) == 1


class TestLabels:
    def test_a_long_list_is_cut(self):
        assert hint("zzz", map(str, range(100))).endswith("22, 23, …")

    def test_numbers_are_sorted_as_numbers_and_names_as_names(self):
        assert class_names(["10", "-1", "9", ""]) == ("-1", "9", "10")
        assert class_names(["b", "a", "10"]) == ("10", "a", "b")
        assert class_names([]) == ()

    def test_long_numbers_are_left_alone(self):
        assert class_name("12345678901234567890") == "12345678901234567890"

    def test_a_missing_label_is_minus_one(self):
        assert encode_labels(["b", "", "a"], ("a", "b"), str).tolist() == [1, -1, 0]

    @pytest.mark.parametrize("cell", ["nan", "NaN", " NA ", "n/a", "N/A", "null", "NULL", "None", "none", "  "])
    def test_words_for_a_missing_label(self, cell):
        assert class_name(cell) == ""

    def test_words_for_a_class(self):
        assert [class_name(cell) for cell in ("-1", "nano", "nothing", "0")] == ["-1", "nano", "nothing", "0"]

    def test_an_unknown_label_names_its_place(self):
        with pytest.raises(
            ValueError, match="labels must be among the 2 known classes; got 'lion' in line 1. Use one of cat, dog."
        ):
            encode_labels(["cat", "lion"], ("cat", "dog"), lambda i: f"line {i}")
