"""Damage to the content of containers: checkpoints (safetensors), arrays (NPY, NPZ), gz, tar and images.

A container is unpacked, one of its members is changed, and it is packed again. The container stays valid, so the damage
reaches the code that reads its content.
"""

from __future__ import annotations

import gzip
import io
import json
import random
import struct
import tarfile
import zipfile
import zlib
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import safetensors.torch
from numpy.typing import NDArray

from iresnet.train import checkpoint

from .damage import BYTES, UNEXPECTED, Damage, corrupt_json, flip

Tensors: TypeAlias = dict[str, dict[str, Any]]

DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL", "F8_E4M3", "X")

#: The uncompressed size of a decompression bomb in bytes: more than a case may use. Tests make it small.
BOMB = 256 * 2**20


# ---------------------------------------------------------------------------------------------------------- checkpoints


def split_safetensors(content: bytes) -> tuple[Tensors, bytes]:
    """The header and the data of a safetensors file."""
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def join_safetensors(header: Any, data: bytes) -> bytes:
    """A safetensors file of a header and data."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def flip_tensor_bits(r: random.Random, content: bytes) -> bytes:
    """Flip bits of the data only: a valid file with other weights."""
    header, data = split_safetensors(content)
    return join_safetensors(header, flip(r, data))


def fill_tensor(r: random.Random, content: bytes) -> bytes:
    """Fill a tensor with NaN, infinity, zeros or huge numbers."""
    header, data = split_safetensors(content)
    begin, end = header[_tensor(r, header)]["data_offsets"]
    word = r.choice((float("nan"), float("inf"), 0.0, 1e38, 1e-42))
    filling = struct.pack("<f", word) * (1 + (end - begin) // 4)
    return join_safetensors(header, data[:begin] + filling[: end - begin] + data[end:])


def change_tensor_entry(r: random.Random, content: bytes) -> bytes:
    """Change the dtype, shape, name or offsets of a tensor, or remove it."""
    header, data = split_safetensors(content)
    name, other, way = _tensor(r, header), _tensor(r, header), r.randrange(7)
    entry = header[name]
    if way == 0:
        entry["dtype"] = r.choice(DTYPES)
    elif way == 1:
        entry["shape"] = r.choice(
            ([], [1], entry["shape"][::-1], [*entry["shape"], 1], [2**62, 4], [-1], [0], UNEXPECTED[-1])
        )
    elif way == 2:
        header[r.choice(("weights/x", "x", "", "/", "optimiser/-1.exp_avg", "optimiser/999.exp_avg"))] = header.pop(
            name
        )
    elif way == 3:
        entry["data_offsets"] = r.choice((header[other]["data_offsets"], [0, 2**63], [0, 0], [-1, 4], ["a", None]))
    elif way == 4:
        header[name], header[other] = header[other], header[name]
    elif way == 5:
        del header[name]
    else:
        header["weights/foreign"] = {"dtype": "F32", "shape": [0], "data_offsets": [len(data), len(data)]}
    return join_safetensors(header, data)


def resize_tensor(r: random.Random, content: bytes) -> bytes:
    """Make a tensor smaller or larger in an otherwise valid file."""
    header, data = split_safetensors(content)
    name = _tensor(r, header)
    arrays = {n: (e, data[slice(*e["data_offsets"])]) for n, e in header.items() if n != "__metadata__"}
    entry, old = arrays[name]
    count = max(1, int(np.prod(entry["shape"])))
    new, size = r.choice((0, 1, max(1, count // 2), count + 1, 2 * count)), max(1, len(old) // count)
    arrays[name] = ({**entry, "shape": r.choice(([new], [1, new], [new, 1]))}, (old + bytes(new * size))[: new * size])
    return _pack(header.get("__metadata__"), arrays)


def convert_tensor(r: random.Random, content: bytes) -> bytes:
    """Store a tensor with another dtype in an otherwise valid file."""
    header, data = split_safetensors(content)
    arrays = {n: (e, data[slice(*e["data_offsets"])]) for n, e in header.items() if n != "__metadata__"}
    floats = [n for n, (e, _) in arrays.items() if e["dtype"] == "F32"]
    name, (word, dtype) = r.choice(floats), r.choice((("F64", "<f8"), ("F16", "<f2"), ("I32", "<i4"), ("I64", "<i8")))
    values = np.frombuffer(arrays[name][1], "<f4")
    with np.errstate(all="ignore"):
        arrays[name] = ({**arrays[name][0], "dtype": word}, values.astype(dtype).tobytes())
    return _pack(header.get("__metadata__"), arrays)


def change_metadata(r: random.Random, content: bytes) -> bytes:
    """Change the metadata in the header: step, format, version, tightened layers."""
    header, data = split_safetensors(content)
    words = header.get("__metadata__", {}).get("iresnet", "{}")
    said: Any = corrupt_json(r, words.encode()).decode()
    header["__metadata__"] = r.choice(
        ({"iresnet": said}, {"iresnet": said}, {"iresnet": "[" * 99_999}, {}, UNEXPECTED[5])
    )
    return join_safetensors(header, data)


def with_digest(content: bytes) -> bytes:
    """The same file with a recomputed digest in its header, as an attacker would write it, if it can be read."""
    try:
        header, data = split_safetensors(content)
        said = json.loads(header["__metadata__"]["iresnet"])
        said["sha256"] = checkpoint.digest(safetensors.torch.load(content), said["state"])
    except Exception:
        return content
    return join_safetensors({**header, "__metadata__": {"iresnet": json.dumps(said)}}, data)


def _pack(metadata: Any, arrays: dict[str, tuple[dict[str, Any], bytes]]) -> bytes:
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    data = b""
    for name, (entry, content) in arrays.items():
        header[name] = {**entry, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    return join_safetensors(header, data)


def _tensor(r: random.Random, header: Tensors) -> str:
    return r.choice([name for name in header if name != "__metadata__"])


# --------------------------------------------------------------------------------------------------------------- arrays


def change_array(r: random.Random, content: bytes) -> bytes:
    """Change the dtype, shape or size of an array, or store objects."""
    x = np.load(io.BytesIO(content), allow_pickle=False)
    return to_npy(_other(r, x))


def change_npy_header(r: random.Random, content: bytes) -> bytes:
    """Replace the header: a version, shape or dtype that does not match the data."""
    headers = (
        b"{'descr': '<f8', 'fortran_order': False, 'shape': (%d, 2), }" % r.choice((10**6, 10**12, 10**30)),
        b"{'descr': '|O', 'fortran_order': False, 'shape': (3, 2), }",
        b"{'descr': [('a', '<f8')], 'fortran_order': 1, 'shape': (-3,), }",
        b"(" * 3000,
        b"{'shape': (" + b"1," * 3000 + b")}",
    )
    text = r.choice(headers)
    return b"\x93NUMPY" + bytes([r.choice((1, 2, 3, 9)), 0]) + struct.pack("<H", len(text)) + text + content[-64:]


def change_npz_member(r: random.Random, content: bytes) -> bytes:
    """Rename, repeat, add, empty, swap or damage a member of an NPZ file."""
    members, way = _unzip(content), r.randrange(8)
    name = r.choice(list(members))
    if way == 0:
        members[r.choice(("z.npy", "../x.npy", "x", "x.npy/", "é.npy"))] = members.pop(name)
    elif way == 1:
        members["readme.txt"] = b"not an array"
    elif way == 2:
        members[name] = r.choice(BYTES)(r, members[name])
    elif way == 3:
        members[name] = change_npy_header(r, members[name])
    elif way == 4:
        members[name] = to_npy(_other(r, np.load(io.BytesIO(members[name]))))
    elif way == 5:
        members = {n: members[o] for n, o in zip(members, reversed(list(members)), strict=True)}
    elif way == 6:
        members = {}
    else:
        return _zip([*members.items(), (name, to_npy(np.zeros(3)))])
    return _zip(list(members.items()))


def zip_bomb(r: random.Random, content: bytes) -> bytes:
    """Add a huge member, or make a member much larger than its array."""
    members = _unzip(content)
    name = r.choice(list(members))
    return _zip(
        [*members.items(), ("huge.npy", bytes(BOMB))] if r.random() < 0.5 else [(name, members[name] + bytes(BOMB))]
    )


def to_npy(x: NDArray[Any]) -> bytes:
    """The bytes of an NPY file."""
    file = io.BytesIO()
    np.save(file, x, allow_pickle=True)
    return file.getvalue()


def _other(r: random.Random, x: NDArray[Any]) -> NDArray[Any]:
    kinds = ("f2", "f4", "f8", "i1", "i8", "u1", "u8", "?", "c8", "O", "S4", "U4", "M8[s]", "f4,i4", "g")
    with np.errstate(all="ignore"):
        changed = x.astype(r.choice(kinds)) if r.random() < 0.6 and x.dtype.kind in "biuf" else x.copy()
    if r.random() < 0.4:
        views = (
            changed[:0],
            changed[:1],
            changed[None],
            changed.T,
            changed.ravel(),
            changed[..., :0],
            changed.ravel()[0],
        )
        changed = np.asarray(r.choice(views))  # one entry of an object array is a number of Python
    if changed.dtype.kind == "f" and changed.size and r.random() < 0.5:
        changed = changed.copy()
        changed.flat[r.randrange(changed.size)] = r.choice((np.nan, np.inf, 65504.0, -1.0))
    return np.asarray(changed)


def _unzip(content: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _zip(members: list[tuple[str, bytes]]) -> bytes:
    import warnings

    file = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        warnings.simplefilter("ignore")  # a duplicate name is the damage
        for name, content in members:
            archive.writestr(name, content)
    return file.getvalue()


# ----------------------------------------------------------------------------------------------------------- gz and tar


def damage_gz_content(r: random.Random, content: bytes) -> bytes:
    """Damage the uncompressed content, and compress it again."""
    return _gz(r.choice(BYTES)(r, gzip.decompress(content)))


def gz_bomb(r: random.Random, content: bytes) -> bytes:
    """Append a huge number of zeros, or replace the content by them."""
    return content + bomb() if r.random() < 0.5 else bomb()


def change_idx_header(r: random.Random, content: bytes) -> bytes:
    """Change the type, the number of dimensions or a size in an idx file."""
    inside = bytearray(gzip.decompress(content))
    inside[r.randrange(2, 8)] = r.choice((0, 1, 8, 13, 127, 255))
    return _gz(bytes(inside))


def change_tar_member(r: random.Random, content: bytes) -> bytes:
    """Turn a member of an archive into a link, a folder or a device, rename, damage, empty or blow it up."""
    file = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as old, tarfile.open(fileobj=file, mode="w") as new:
        members = [m for m in old.getmembers() if m.isfile()]
        chosen = r.choice(members)
        for member in members:
            data = old.extractfile(member)
            inside = data.read() if data else b""
            new.addfile(*_member(r, member, inside) if member is chosen else (member, io.BytesIO(inside)))
    return _gz(file.getvalue())


def _member(r: random.Random, member: tarfile.TarInfo, inside: bytes) -> tuple[tarfile.TarInfo, io.BytesIO]:
    way = r.randrange(5)
    if way == 0:
        member.type = r.choice((tarfile.SYMTYPE, tarfile.LNKTYPE))
        member.linkname, inside = (
            r.choice((member.name, "/etc/passwd", "../x", "cifar-10-batches-bin/test_batch.bin", "")),
            b"",
        )
    elif way == 1:
        member.type, inside = r.choice((tarfile.DIRTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE)), b""
    elif way == 2:
        member.name = r.choice(("x", "../x", "/x", "cifar-10-batches-bin/test_batch.bin"))
    elif way == 3:
        inside = r.choice(BYTES)(r, inside)
    else:
        inside = bytes(BOMB) if r.random() < 0.2 else b""
    member.size = len(inside)
    return member, io.BytesIO(inside)


def _gz(content: bytes) -> bytes:
    return gzip.compress(content, compresslevel=1)


@cache
def bomb() -> bytes:
    """A small gz stream of BOMB zeros."""
    return _gz(bytes(BOMB))


# --------------------------------------------------------------------------------------------------------------- images


def change_png_header(r: random.Random, content: bytes) -> bytes:
    """Change the size, depth or colour type in the header of a PNG file, with a valid checksum."""
    if content[:4] != b"\x89PNG":
        return flip(r, content)
    header = bytearray(content[16:29])
    if r.random() < 0.6:
        header[:8] = struct.pack(">II", *(r.choice((0, 1, 7, 8, 9, 10_000, 30_000, 2**31 - 1)) for _ in range(2)))
    else:
        header[r.randrange(8, 13)] = r.choice((0, 1, 2, 3, 4, 6, 8, 16, 255))
    return content[:16] + bytes(header) + struct.pack(">I", zlib.crc32(b"IHDR" + header)) + content[33:]


CHECKPOINT: tuple[Damage, ...] = (
    *BYTES, *[flip_tensor_bits] * 4, fill_tensor, *[change_tensor_entry] * 4, *[resize_tensor] * 3,
    *[convert_tensor] * 2, *[change_metadata] * 4,
)  # fmt: skip
NPY: tuple[Damage, ...] = (*BYTES, *[change_array] * 4, *[change_npy_header] * 2)
NPZ: tuple[Damage, ...] = (*BYTES, *[change_npz_member] * 8)
GZ: tuple[Damage, ...] = (*BYTES, *[damage_gz_content] * 3, *[change_idx_header] * 2)
TAR: tuple[Damage, ...] = (*BYTES, damage_gz_content, *[change_tar_member] * 5)
IMAGE: tuple[Damage, ...] = (*BYTES, *[change_png_header] * 3)
BOMBS: dict[str, Damage] = {".npz": zip_bomb, ".gz": gz_bomb}
