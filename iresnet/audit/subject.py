"""What is audited: a model built from its files, the same with plain float64 weights, rows, and a budget of time."""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias, TypeVar, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..certificate import residual_blocks
from ..lipschitz import Bound, unsettled
from ..preprocess import Logit, Standardise
from ..residual import ResidualBlock
from ..run import Run
from ..transform import Shape, Transform

T = TypeVar("T")

#: Whether a claim holds, and what was compared.
Verdict: TypeAlias = tuple[bool, str]

#: Rows that pass through the model.
ROWS = 4


class Skipped(Exception):  # noqa: N818
    """A check does not apply; the message says why."""


@dataclass(frozen=True)
class Finding:
    """One line of an audit; `holds` is None where the check does not apply."""

    name: str
    holds: bool | None
    words: str

    def __str__(self) -> str:
        return f"{self.name:<17}{'-' if self.holds is None else 'ok' if self.holds else 'FAILED':<8}{self.words}"


@dataclass(frozen=True)
class Block:
    """A residual block: as users call it, and with plain float64 weights."""

    name: str
    own: ResidualBlock
    plain: ResidualBlock
    shape: Shape

    @cached_property
    def bound(self) -> Bound:
        """What the library proves of it."""
        return self.own.bound(self.shape)


class Subject:
    """A run whose guarantees are to be checked; checks of many parts share `seconds`."""

    def __init__(self, run: Run, *, seed: int = 0, seconds: float = 10.0) -> None:
        self.run, self.seed, self.seconds, self.schema = run, seed, seconds, run.schema

    def read(self, name: str) -> dict[str, Any]:
        """A JSON file of the folder; empty where it is missing."""
        path = self.run.folder / name
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if not isinstance(content, dict):
            raise ValueError(f"{path} holds no object.")
        return content

    @cached_property
    def header(self) -> dict[str, Any]:
        """What the weights' file says of itself."""
        with safe_open(str(self.run.folder / "model.safetensors"), framework="pt") as file:
            return cast(dict[str, Any], json.loads((file.metadata() or {}).get("iresnet", "{}")))

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the weights' file, by their full names."""
        with safe_open(str(self.run.folder / "model.safetensors"), framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dictionary)

    @cached_property
    def model(self) -> nn.Module:
        """The model with the file's weights, put there without the library's loader."""
        with torch.random.fork_rng(devices=[]), unsettled():
            model = self.run.blank().eval()
        state = {name.removeprefix("weights/"): t for name, t in self.tensors.items() if name.startswith("weights/")}
        for name, value in model.state_dict().items():
            if name not in state and name.endswith(".parametrizations.weight.0.gradient"):
                state[name] = torch.zeros_like(value)  # a shipped file holds constrained weights as they are used
            elif name not in state and name.endswith(".parametrizations.weight.0.direction"):
                state[name] = value.new_empty(0)
        model.load_state_dict(state)
        return model

    @cached_property
    def plain(self) -> nn.Module:
        """The same function in float64: the weights that are used, as numbers of plain layers."""
        return released(self.model)

    @property
    def transform(self) -> Transform:
        """The map of the plain model."""
        return cast(Transform, self.plain.transform)

    @cached_property
    def blocks(self) -> list[Block]:
        """All residual blocks, in an order that the seed decides."""
        pairs = zip(*(residual_blocks(m, self.schema.shape) for m in (self.model, self.plain)), strict=True)
        found = [Block(name, own, plain, cast(Shape, shape)) for (name, own, shape), (_, plain, _) in pairs]
        return [found[i] for i in torch.randperm(len(found), generator=self.generator()).tolist()]

    @cached_property
    def claims(self) -> dict[str, dict[str, Any]]:
        """The blocks of certificate.json, by name."""
        return {block["name"]: block for block in self.read("certificate.json").get("blocks", [])}

    @cached_property
    def rows(self) -> Tensor:
        """Rows in the units of the data, in float64: where the model's own scaling expects them."""
        x = torch.randn(ROWS, *self.schema.shape, generator=self.generator(), dtype=torch.float64)
        first = next((m for m in self.transform.modules() if isinstance(m, Logit | Standardise)), None)
        x = x if first is None else first.inverse(x)
        if self.schema.levels is None:
            return x
        u = torch.rand(x.shape, generator=self.generator(), dtype=torch.float64)
        return x.floor().clamp(0, self.schema.levels - 1) + u

    @cached_property
    def states(self) -> dict[str, Tensor]:
        """What reaches every block when the rows pass through the model."""
        model, seen = copy.deepcopy(self.plain), dict[str, Tensor]()
        for name, block, _ in residual_blocks(model, self.schema.shape):
            block.register_forward_pre_hook(lambda _, inputs, name=name: seen.update({name: inputs[0].detach()}))
        with torch.no_grad():
            cast(Transform, model.transform)(self.rows)
        return seen

    def generator(self) -> torch.Generator:
        """Random numbers that the seed decides."""
        return torch.Generator().manual_seed(self.seed)

    def some(self, items: Sequence[T], share: float) -> Iterator[T]:
        """At least one of the items, and more of them while this share of the time lasts."""
        end = time.perf_counter() + share * self.seconds
        for position, item in enumerate(items):
            if position and time.perf_counter() > end:
                return
            yield item

    def certified(self) -> list[Block]:
        """The blocks, where there are any."""
        if not self.blocks:
            raise Skipped("the model holds no residual blocks, of which alone something is proven")
        return self.blocks


def released(module: nn.Module) -> nn.Module:
    """A float64 copy whose constrained weights are plain numbers, to the last bit those that are used."""
    plain = copy.deepcopy(module).requires_grad_(False)
    for layer in plain.modules():
        if parametrize.is_parametrized(layer, "weight"):
            parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)
    return plain.requires_grad_(False).double().eval()


def unit(v: Tensor) -> Tensor:
    """Every sample divided by its length."""
    return v / lengths(v).reshape(-1, *[1] * (v.dim() - 1)).clamp_min(torch.finfo(v.dtype).tiny)


def lengths(v: Tensor) -> Tensor:
    """The Euclidean length of every sample."""
    return cast(Tensor, torch.linalg.vector_norm(v.flatten(1), dim=1))


def number(value: object) -> float:
    """A number of a JSON file, where null stands for infinity."""
    return math.inf if value is None else float(cast(float, value))
