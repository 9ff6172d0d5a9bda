"""The model under audit: built from its files, and copied with plain float64 weights; samples; and a time budget."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias, cast

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.utils import parametrize

from .. import migration
from ..batch import Shape
from ..branch import Bound
from ..certificate import residual_blocks
from ..lipschitz import defer_norms
from ..model import Model
from ..residual import ResidualBlock
from ..run import Run
from ..spectral import NoBoundKnown
from ..transform import Transform
from ..transforms.columns import ColumnTransform
from ..transforms.preprocess import Logit, Standardise

#: Whether a claim holds, and a description of what was compared.
Verdict: TypeAlias = tuple[bool, str]

#: Samples that pass through the model.
SAMPLES = 4


class Skipped(Exception):
    """Raised if a check does not apply; the message says why."""


@dataclass(frozen=True)
class Finding:
    """The result of one check; `holds` is None if the check does not apply."""

    name: str
    holds: bool | None
    words: str

    def __str__(self) -> str:
        return f"{self.name:<17}{'-' if self.holds is None else 'ok' if self.holds else 'FAILED':<8}{self.words}"


@dataclass(frozen=True)
class Block:
    """A residual block, its copy with plain float64 weights, and its entry in certificate.json."""

    name: str
    own: ResidualBlock
    plain: ResidualBlock
    shape: Shape
    stored: dict[str, Any]

    @cached_property
    def bound(self) -> Bound:
        """The bound that the library proves now."""
        try:
            return self.own.bound(self.shape)
        except NoBoundKnown:
            return Bound(math.inf, False)

    @property
    def claim(self) -> float:
        """The claimed Lip(g): the smaller of the file's and the library's."""
        return min(self.bound.value, json_number(self.stored.get("lipschitz")))


class Subject:
    """A run to be audited; checks over many blocks share `seconds`."""

    def __init__(self, run: Run, *, seed: int = 0, seconds: float = 8.0) -> None:
        self.run, self.seed, self.seconds, self.schema = run, seed, seconds, run.schema

    def read(self, name: str) -> dict[str, Any]:
        """Read a JSON file of the folder; empty if it is missing."""
        path = self.run.folder / name
        try:
            content = dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from None
        return migration.migrate_json(content, path)

    @cached_property
    def file(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The header and the tensors of the weights file, unchanged."""
        with safe_open(str(self.run.folder / "model.safetensors"), framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("iresnet", "{}"))
            return header, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dictionary)

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The same tensors with the current names."""
        header, tensors = self.file
        written = migration.read_format(header, self.run.folder / "model.safetensors")
        return migration.migrate(tensors, migration.TENSORS, written)

    @property
    def takes_context(self) -> bool:
        """Whether the model depends on a context."""
        return self.model.transform.takes_context

    @cached_property
    def model(self) -> Model:
        """The model with the weights of the file, loaded without the library's loader."""
        with torch.random.fork_rng(devices=[]), defer_norms():
            model = self.run.untrained_model().eval()
        state = {name.removeprefix("weights/"): t for name, t in self.tensors.items() if name.startswith("weights/")}
        for name, value in model.state_dict().items():  # a shipped file holds the constrained weights, without G
            if name not in state and name.endswith(".parametrizations.weight.0.gradient"):
                state[name] = torch.zeros_like(value)
            elif name not in state and name.endswith(".parametrizations.weight.0.direction"):
                state[name] = value.new_empty(0)
        model.load_state_dict(state)
        return model

    @cached_property
    def plain(self) -> Model:
        """The same function in float64: constrained weights as plain ones, equal to the last bit."""
        plain = copy.deepcopy(self.model).requires_grad_(False)
        for layer in plain.modules():
            if parametrize.is_parametrized(layer, "weight"):
                parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)
        return plain.requires_grad_(False).double().eval()

    @property
    def transform(self) -> Transform:
        """The transform of the plain model."""
        return self.plain.transform

    @cached_property
    def blocks(self) -> list[Block]:
        """All residual blocks, in a random order given by the seed; raise `Skipped` if there are none."""
        stored = {b["name"]: b for b in self.read("certificate.json").get("blocks", [])}
        pairs = zip(*(residual_blocks(m, self.schema.shape) for m in (self.model, self.plain)), strict=True)
        found = [Block(n, own, plain, cast(Shape, at), stored.get(n, {})) for (n, own, at), (_, plain, _) in pairs]
        if not found:
            raise Skipped("the model has no residual blocks, and nothing is proven about others")
        return [found[i] for i in torch.randperm(len(found), generator=self.generator("order")).tolist()]

    def within_time(self, share: float) -> Iterator[Block]:
        """Iterate over at least one block, and over more until this share of the time is used."""
        end = time.perf_counter() + share * self.seconds
        for position, block in enumerate(self.blocks):
            if position and time.perf_counter() > end:
                return
            yield block

    def contractions(self, share: float) -> Iterator[Block]:
        """Iterate over the blocks of `within_time` that are claimed to be contractions."""
        none = True
        for block in self.within_time(share):
            if block.claim < 1:
                none = False
                yield block
        if none:
            raise Skipped("no block is claimed to be a contraction")

    @cached_property
    def samples(self) -> Tensor:
        """Synthetic samples in the units of the data, in float64, around the mean that the model's scaling expects."""
        x = torch.randn(SAMPLES, *self.schema.shape, generator=self.generator("rows"), dtype=torch.float64)
        first = next(
            (m for m in self.transform.modules() if isinstance(m, ColumnTransform | Logit | Standardise)), None
        )
        x = x if first is None else first.inverse(x)
        if self.schema.levels is None:
            return x
        u = torch.rand(x.shape, generator=self.generator("noise"), dtype=torch.float64)
        return x.floor().clamp(0, self.schema.levels - 1) + u

    @property
    def columns(self) -> ColumnTransform | None:
        """The preprocessing of a table whose columns have kinds; None for other data."""
        return next((m for m in self.transform.modules() if isinstance(m, ColumnTransform)), None)

    def clamp(self, x: Tensor) -> Tensor:
        """Move inputs to where the model is defined, and its bounds are claimed."""
        if self.schema.levels is not None:
            return x.clamp(0, self.schema.levels)
        return x if self.columns is None else self.columns.clamp(x)

    @cached_property
    def block_inputs(self) -> dict[str, Tensor]:
        """The input of every block when the samples pass through the model."""
        model, seen = copy.deepcopy(self.plain), dict[str, Tensor]()
        for name, block, _ in residual_blocks(model, self.schema.shape):
            block.register_forward_pre_hook(lambda _, inputs, name=name: seen.update({name: inputs[0].detach()}))
        with torch.no_grad():
            model.transform(self.samples)
        return seen

    def generator(self, purpose: str) -> torch.Generator:
        """Create a generator from the seed, with other random numbers for every purpose."""
        digest = hashlib.sha256(f"{self.seed} {purpose}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def normalise(v: Tensor) -> Tensor:
    """Divide every sample by its length."""
    return v / lengths(v).reshape(-1, *[1] * (v.dim() - 1)).clamp_min(torch.finfo(v.dtype).tiny)


def lengths(v: Tensor) -> Tensor:
    """Compute the Euclidean length of every sample."""
    length: Tensor = v.flatten(1).norm(dim=1)
    return length


def json_number(value: object) -> float:
    """Convert a number of a JSON file, where null means infinity."""
    return math.inf if value is None else float(cast(float, value))
