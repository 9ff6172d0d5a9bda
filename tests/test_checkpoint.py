"""Checkpoints: what is read is what was written, bit for bit, and a file that is not one says so."""

import json
import re
import struct

import pytest
import torch
from safetensors.torch import save_file

from iresnet import checkpoint
from iresnet.checkpoint import FORMAT, Checkpoint

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

    def test_the_json_travels_in_the_header(self, path):
        checkpoint.save(Checkpoint({"weights": {"a": torch.ones(1)}}, {"step": 3}), path, version="1.2")
        header = header_of(path)
        ours = json.loads(header["__metadata__"]["iresnet"])
        assert re.fullmatch("[0-9a-f]{64}", ours.pop("sha256"))
        assert ours == {"format": FORMAT, "iresnet": "1.2", "state": {"step": 3}}
        assert set(header) == {"__metadata__", "weights/a"}

    def test_a_checkpoint_is_replaced_as_a_whole(self, path):
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
    def test_a_torn_file(self, good, keep):
        good.write_bytes(good.read_bytes()[:keep])
        with pytest.raises(ValueError, match=r"last.safetensors is damaged or no checkpoint: .*Restore it, or train a"):
            checkpoint.load(good)

    @pytest.mark.parametrize("content", [b"step,loss\n1,2.5\n", b"\x00" * 100, b"\x80\x04}q\x00."])
    def test_a_file_of_another_kind(self, tmp_path, content):
        (tmp_path / "a").write_bytes(content)
        with pytest.raises(ValueError, match=r"/a is damaged or no checkpoint: .*Restore it, or train again."):
            checkpoint.load(tmp_path / "a")

    @pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
    def test_a_safetensors_file_of_another_program(self, tmp_path, metadata):
        save_file({"weight": torch.ones(2)}, tmp_path / "a.safetensors", metadata=metadata)
        sentence = (
            rf"a.safetensors was written by another program in format None; this version reads format {FORMAT}. "
            "Use the version that wrote it, or train again."
        )
        with pytest.raises(ValueError, match=sentence):
            checkpoint.load(tmp_path / "a.safetensors")

    def test_another_format(self, path, monkeypatch):
        monkeypatch.setattr(checkpoint, "FORMAT", FORMAT + 1)
        checkpoint.save(Checkpoint({}), path, version="9.9")
        monkeypatch.undo()
        sentence = f"was written by iresnet 9.9 in format {FORMAT + 1}; this version reads format {FORMAT}. Use the"
        with pytest.raises(ValueError, match=sentence):
            checkpoint.load(path)

    @pytest.mark.parametrize(
        ("metadata", "sentence"),
        [
            ("{", "a.safetensors is damaged or no checkpoint: "),
            ("[1]", "a.safetensors was written by another program in format None"),
            ("3", "a.safetensors was written by another program in format None"),
        ],
    )
    def test_a_header_that_is_no_object(self, tmp_path, metadata, sentence):
        save_file({"weight": torch.ones(2)}, tmp_path / "a.safetensors", metadata={"iresnet": metadata})
        with pytest.raises(ValueError, match=sentence):
            checkpoint.load(tmp_path / "a.safetensors")

    def test_a_missing_file(self, tmp_path):
        sentence = r"there is no checkpoint .*last.safetensors. Train first, or name another run folder."
        with pytest.raises(FileNotFoundError, match=sentence):
            checkpoint.load(tmp_path / "last.safetensors")
        with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
            checkpoint.load(tmp_path)

    def test_a_failed_write_keeps_the_old_checkpoint(self, good, monkeypatch):
        def full(descriptor):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="cannot write .*No space left on device"):
            checkpoint.save(Checkpoint({"weights": {"b": torch.ones(1)}}), good, version="1.2")
        assert set(checkpoint.load(good).tensors["weights"]) == {"a"}
