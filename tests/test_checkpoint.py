"""Checkpoints: they are read bit for bit as written, and a damaged or foreign file raises a clear error."""

import json
import re
import struct

import pytest
import torch
from safetensors.torch import save as to_bytes
from safetensors.torch import save_file
from torch import nn

from iresnet import InvertibleConv1x1, LipschitzConv2d, Standardise, migration
from iresnet.migration import FORMAT
from iresnet.train import checkpoint
from iresnet.train.checkpoint import Checkpoint, check_tensors, check_weights

TENSORS = {
    "float32": torch.tensor([[1.5, -0.0], [float("inf"), float("nan")]]),
    "float64": torch.tensor([1 / 3], dtype=torch.float64),
    "bfloat16": torch.tensor([3.0, -2.0], dtype=torch.bfloat16),
    "int64": torch.tensor([-(2**62), 7]),
    "uint8": torch.arange(256, dtype=torch.uint8),  # what a generator's state is
    "bool": torch.tensor([True, False]),
    "no dimension": torch.tensor(4.0),
    "a flag": torch.tensor(True),
    "empty": torch.empty(0, 3),
}


def header_of(path):
    """The JSON that every reader of safetensors sees, read by hand."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return json.loads(file.read(length))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs" / "last.safetensors"


class TestRoundTrip:
    @pytest.mark.parametrize("name", TENSORS)
    def test_every_type_and_shape_comes_back(self, path, name):
        tensor = TENSORS[name]
        checkpoint.save(Checkpoint({"weights": {name: tensor}}), path, version="1.2")
        got = checkpoint.load(path).tensors["weights"][name]
        assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(got.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))  # NaN and -0 too

    def test_groups_names_and_state_come_back(self, path):
        groups = {"weights": {"a.b": torch.ones(1), "a/b": torch.zeros(2)}, "optimiser": {"0.step": torch.tensor(3.0)}}
        state = {"step": 7, "best": 0.1, "names": ["ü"], "nothing": None}
        assert checkpoint.save(Checkpoint(groups, state), path, version="1.2") == path
        got = checkpoint.load(path)
        assert {g: set(t) for g, t in got.tensors.items()} == {g: set(t) for g, t in groups.items()}
        assert got.state == state

    def test_weights_that_share_memory_or_are_views(self, path):
        """A model may tie its weights; safetensors alone would refuse them."""
        base = torch.arange(6.0)
        tied = {"a": base, "b": base, "turned": base.view(2, 3).T, "part": base[2:4], "grown": base[:1].expand(3)}
        checkpoint.save(Checkpoint({"weights": tied}), path, version="1.2")
        got = checkpoint.load(path).tensors["weights"]
        assert all(torch.equal(got[name], value) for name, value in tied.items())

    def test_a_parameter_is_saved_without_its_graph(self, path):
        weight = torch.nn.Parameter(torch.ones(2))
        checkpoint.save(Checkpoint({"weights": {"w": weight}}), path, version="1.2")
        assert not checkpoint.load(path).tensors["weights"]["w"].requires_grad

    def test_the_json_is_stored_in_the_header(self, path):
        checkpoint.save(Checkpoint({"weights": {"a": torch.ones(1)}}, {"step": 3}), path, version="1.2")
        header = header_of(path)
        ours = json.loads(header["__metadata__"]["iresnet"])
        assert re.fullmatch("[0-9a-f]{64}", ours.pop("sha256"))
        assert ours == {"format": FORMAT, "iresnet": "1.2", "state": {"step": 3}}
        assert set(header) == {"__metadata__", "weights/a"}

    def test_a_checkpoint_is_replaced_atomically(self, path):
        checkpoint.save(Checkpoint({"weights": {"a": torch.ones(1000)}}), path, version="1.2")
        old = checkpoint.load(path)
        checkpoint.save(Checkpoint({"weights": {"b": torch.zeros(1)}}), path, version="1.2")
        assert set(checkpoint.load(path).tensors["weights"]) == {"b"}
        assert torch.equal(old.tensors["weights"]["a"], torch.ones(1000))  # what was read stays what it was
        assert [p.name for p in path.parent.iterdir()] == [path.name]


class TestBadFiles:
    @pytest.fixture
    def good(self, path):
        checkpoint.save(Checkpoint({"weights": {"a": torch.ones(100)}}), path, version="1.2")
        return path

    @pytest.mark.parametrize("keep", [0, 5, 60, -1], ids=["empty", "in the length", "in the header", "the last byte"])
    def test_a_truncated_file_is_refused(self, good, keep):
        good.write_bytes(good.read_bytes()[:keep])
        with pytest.raises(
            ValueError, match=r"last.safetensors is damaged or not a checkpoint: .*Restore it, or train a"
        ):
            checkpoint.load(good)

    @pytest.mark.parametrize("content", [b"step,loss\n1,2.5\n", b"\x00" * 100, b"\x80\x04}q\x00."])
    def test_a_file_of_another_kind_is_refused(self, tmp_path, content):
        (tmp_path / "a").write_bytes(content)
        with pytest.raises(ValueError, match=r"/a is damaged or not a checkpoint: .*Restore it, or train again."):
            checkpoint.load(tmp_path / "a")

    @pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
    def test_a_safetensors_file_of_another_program_is_refused(self, tmp_path, metadata):
        save_file({"weight": torch.ones(2)}, tmp_path / "a.safetensors", metadata=metadata)
        sentence = (
            rf"a.safetensors was written by another program in format None; this version reads format {FORMAT}. "
            "Use the version that wrote it, or train again."
        )
        with pytest.raises(ValueError, match=sentence):
            checkpoint.load(tmp_path / "a.safetensors")

    def test_a_file_of_another_format_is_refused(self, path, monkeypatch):
        monkeypatch.setattr(migration, "FORMAT", FORMAT + 1)
        checkpoint.save(Checkpoint({}), path, version="9.9")
        monkeypatch.undo()
        sentence = f"was written by iresnet 9.9 in format {FORMAT + 1}; this version reads format {FORMAT}. Use the"
        with pytest.raises(ValueError, match=sentence):
            checkpoint.load(path)

    @pytest.mark.parametrize(
        ("metadata", "sentence"),
        [
            ("{", "a.safetensors is damaged or not a checkpoint: "),
            ("[1]", "a.safetensors was written by another program in format None"),
            ("3", "a.safetensors was written by another program in format None"),
        ],
    )
    def test_a_header_that_is_not_an_object_is_refused(self, tmp_path, metadata, sentence):
        save_file({"weight": torch.ones(2)}, tmp_path / "a.safetensors", metadata={"iresnet": metadata})
        with pytest.raises(ValueError, match=sentence):
            checkpoint.load(tmp_path / "a.safetensors")

    def test_a_missing_file_is_named(self, tmp_path):
        sentence = r"checkpoint .*last.safetensors does not exist. Train first, or name another run folder."
        with pytest.raises(FileNotFoundError, match=sentence):
            checkpoint.load(tmp_path / "last.safetensors")
        with pytest.raises(FileNotFoundError, match="does not exist"):
            checkpoint.load(tmp_path)

    def test_a_failed_write_keeps_the_old_checkpoint(self, good, monkeypatch):
        def full(descriptor):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="cannot write .*No space left on device"):
            checkpoint.save(Checkpoint({"weights": {"b": torch.ones(1)}}), good, version="1.2")
        assert set(checkpoint.load(good).tensors["weights"]) == {"a"}


def flipped(path, place):
    """The file with one bit of its tensors changed, `place` bytes from their beginning."""
    data = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    data[8 + length + place] ^= 1
    path.write_bytes(bytes(data))


def rewritten(path, change):
    """The file with our part of its header changed, and the tensors as they are."""
    header = json.loads(header_of(path)["__metadata__"]["iresnet"])
    change(header)
    groups = checkpoint.load(path).tensors
    flat = {f"{group}/{name}": t for group, named in groups.items() for name, t in named.items()}
    path.write_bytes(to_bytes(flat, metadata={"iresnet": json.dumps(header)}))


class TestDigest:
    """What is read is what was written: not a bit less, not a name more."""

    @pytest.fixture
    def good(self, path):
        weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([True, False]), "c": torch.zeros(3)}
        checkpoint.save(Checkpoint({"weights": weights}, {"step": 3, "names": ("ü", 1.5)}), path, version="1.2")
        return path

    @pytest.mark.parametrize("place", range(0, 38, 5))
    def test_one_flipped_bit_of_a_tensor_is_detected(self, good, place):
        flipped(good, place)
        sentence = (
            f"{good} is damaged: its content does not match the SHA-256 in its header. Restore it, or train again."
        )
        with pytest.raises(ValueError) as caught:  # noqa: PT011 (its whole text is compared)
            checkpoint.load(good)
        assert str(caught.value) == sentence

    def test_a_changed_state_is_detected(self, good):
        rewritten(good, lambda header: header["state"].update(step=4))
        with pytest.raises(ValueError, match="its content does not match"):
            checkpoint.load(good)

    def test_the_digest_covers_names_shapes_and_dtypes(self, path):
        same = [{"a": torch.zeros(4)}, {"b": torch.zeros(4)}, {"a": torch.zeros(2, 2)}, {"a": torch.zeros(4).int()}]
        digests = set()
        for weights in same:
            checkpoint.save(Checkpoint({"weights": weights}), path, version="1.2")
            digests.add(checkpoint.sha256(path))
        assert len(digests) == len(same)

    def test_the_same_content_has_the_same_digest(self, good, path):
        first, content = checkpoint.sha256(good), checkpoint.load(good)
        checkpoint.save(content, path, version="7")  # whichever version writes it
        assert checkpoint.sha256(path) == first

    def test_a_file_without_a_digest_is_read(self, good):
        digest = checkpoint.sha256(good)
        rewritten(good, lambda header: header.pop("sha256"))
        assert checkpoint.sha256(good) == digest  # that of its content
        assert checkpoint.load(good).state["step"] == 3


class TestState:
    @pytest.mark.parametrize("state", [[1], "x", 3, None])
    def test_a_state_that_is_not_an_object_is_refused(self, path, state):
        checkpoint.save(Checkpoint({}), path, version="1")
        rewritten(path, lambda header: header.update(state=state))
        with pytest.raises(ValueError, match="last.safetensors is damaged: its state must be an object; got "):
            checkpoint.load(path)

    def test_a_state_that_is_nested_too_deeply_is_refused(self, path):
        deep = "[" * 100_000 + "]" * 100_000
        path.parent.mkdir()
        path.write_bytes(to_bytes({"weights/a": torch.ones(1)}, metadata={"iresnet": deep}))
        with pytest.raises(ValueError, match="is damaged or not a checkpoint"):
            checkpoint.load(path)

    @pytest.mark.parametrize("value", [None, "3", True, [3], float("nan"), float("inf"), 10**400])
    def test_a_number_must_be_a_finite_number(self, value):
        with pytest.raises(ValueError, match=r"the checkpoint is damaged: step must be a number; got .*Restore it, or"):
            Checkpoint({}, {"step": value}).read_number("step")

    @pytest.mark.parametrize("value", [-1, 1.5, 1e20])
    def test_a_count_must_be_a_non_negative_integer(self, value):
        with pytest.raises(ValueError, match="step must be a non-negative integer; got "):
            Checkpoint({}, {"step": value}).read_count("step")

    def test_a_missing_number_is_the_default_or_an_error(self, tmp_path):
        assert Checkpoint({}).read_number("best", float("inf")) == float("inf")
        with pytest.raises(ValueError, match="/x is damaged: step is missing. Restore it, or train again."):
            Checkpoint({}, path=tmp_path / "x").read_count("step")


def check(found, expected, path=None):
    return check_tensors(Checkpoint({"weights": found}, path=path), "weights", expected, what="it", remedy="Do.")


GOOD = {"a": torch.ones(2, 3), "n": torch.tensor([1, 2])}


class TestChecked:
    """The one place that decides whether tensors may be put where they are to go."""

    def test_tensors_that_fit_pass(self):
        assert check(GOOD, GOOD) == GOOD

    @pytest.mark.parametrize(
        ("change", "why"),
        [
            ({"a": torch.ones(3, 2)}, r"does not fit it: weights/a must have shape \(2, 3\); got \(3, 2\). Do."),
            ({"a": torch.ones(1)}, r"weights/a must have shape \(2, 3\); got \(1,\)"),
            ({"a": torch.ones(2, 3, dtype=torch.int32)}, "weights/a must be float32; got int32"),
            ({"a": torch.ones(2, 3, dtype=torch.float64)}, "weights/a must be float32; got float64"),
            ({"n": torch.tensor([1.0, 2.0])}, "weights/n must be int64; got float32"),
            ({"n": torch.tensor([1, 2], dtype=torch.int32)}, "weights/n must be int64; got int32"),
            ({"a": torch.full((2, 3), float("nan"))}, "is damaged: weights/a has values that are not finite"),
            ({"a": torch.full((2, 3), -float("inf"))}, "weights/a has values that are not finite"),
            ({"z": torch.ones(1)}, "does not fit it: weights/z is unexpected. Do."),
        ],
        ids=str,
    )
    def test_tensors_that_do_not_fit_are_named(self, change, why, tmp_path):
        with pytest.raises(ValueError, match=f"{tmp_path}.*{why}") as caught:
            check({**GOOD, **change}, GOOD, tmp_path)
        assert "\n" not in str(caught.value)

    def test_missing_tensors_are_named(self):
        with pytest.raises(ValueError, match="the checkpoint does not fit it: weights/n is missing. Do."):
            check({"a": GOOD["a"]}, GOOD)

    @pytest.mark.parametrize("narrow", [torch.float16, torch.bfloat16])
    def test_a_narrower_float_is_accepted_for_a_wider_one(self, narrow):
        check({"a": torch.ones(2, dtype=narrow)}, {"a": torch.ones(2)})

    def test_a_mask_may_be_infinite_where_it_always_is(self):
        mask = torch.tensor([0.0, -float("inf")])
        check({"mask": mask}, {"mask": mask})


class TestCheckedWeights:
    """Values that a module would refuse, or fail with long after."""

    @pytest.mark.parametrize(
        ("model", "name", "value", "rule"),
        [
            (lambda: InvertibleConv1x1(3), "permutation", [0, 1, 5], "be a permutation"),
            (lambda: InvertibleConv1x1(3), "permutation", [0, 1, 1], "be a permutation"),
            (lambda: nn.Sequential(InvertibleConv1x1(1)), "0.permutation", [-1], "be a permutation"),
            (lambda: InvertibleConv1x1(2), "sign", [1.0, 0.0], "be 1 or -1"),
            (lambda: Standardise(torch.zeros(2), torch.ones(2)), "std", [1.0, 0.0], "be positive"),
            (lambda: LipschitzConv2d(1, 2, 3), "parametrizations.weight.0.size", [-1, 4], "not be negative"),
        ],
    )
    def test_invalid_buffers_are_refused(self, model, name, value, rule):
        model = model()
        state = dict(model.state_dict())
        state[name] = torch.tensor(value, dtype=state[name].dtype)
        with pytest.raises(ValueError, match=f"is damaged: weights/{name} must {rule}. Restore it"):
            check_weights(Checkpoint({"weights": state}), model, what="it", remedy="Do.")

    def test_the_direction_of_power_iteration_may_have_any_input_size(self):
        model, name = LipschitzConv2d(2, 3, 3), "parametrizations.weight.0.direction"
        before = dict(model.state_dict())
        model(torch.zeros(1, 2, 9, 9))
        for state in (before, dict(model.state_dict()), before | {name: torch.empty(0)}):
            assert check_weights(Checkpoint({"weights": state}), model, what="it", remedy="Do.") == state
        for shape in ((3, 9, 9), (2, 9), (2,)):
            with pytest.raises(ValueError, match=f"weights/{name} must have shape"):
                check_weights(
                    Checkpoint({"weights": before | {name: torch.zeros(shape)}}), model, what="it", remedy="Do."
                )
