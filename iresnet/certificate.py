"""Certificates: what is proven about a model, per layer and per block, as a table and as JSON.

A certificate consists of upper bounds for the function with the stored weights in real arithmetic: Lip(g_t) < 1 for
every block (Theorem 1), hence Lip(F) and Lip(F^-1) (Lemma 2) and the range of ln det (Lemma 7). It does not cover
rounding in the forward pass. An asserted constant is shown but never passes. Neither does anything that `trust` does
not know: a block that no transform lists among its parts, a user's own transform, a hook.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from . import atomic
from . import lipschitz as lip
from .batch import Shape
from .branch import LayerBound, lipschitz_bound
from .branch import tighten_layers_ as tighten_branch
from .residual import ResidualBlock
from .spelling import round_down, round_up
from .transform import Stretch, Transform, stretch_of, why_unproven
from .trust import BUFFER_DTYPES, REAL_DTYPES, NoBoundKnown, unwrap, unwrap_unmodified, why_untrusted


@dataclass(frozen=True)
class BlockCertificate:
    """The bound Lip(g) <= lipschitz of one residual block, proven or asserted; `remark` says why there is none."""

    name: str
    lipschitz: float
    proven: bool
    input_shape: Shape | None
    layers: tuple[LayerBound, ...] = ()
    remark: str = ""

    @property
    def passed(self) -> bool:
        return self.proven and self.lipschitz < 1

    @property
    def status(self) -> str:
        """One of "proven", "asserted", "not proven (bound >= 1)", "no bound known"."""
        if self.remark:
            return "no bound known"
        if not self.proven:
            return "asserted"
        return "proven" if self.passed else "not proven (bound >= 1)"


@dataclass(frozen=True)
class Certificate:
    """The result of `certify`. `passed`: every block is a proven contraction, and all other parts are known.

    `stretch` bounds the whole map; it is None if what happens between the blocks is unknown, because the model is
    neither a Transform nor one of this library's that has one (then only its blocks are certified). `unknown` lists why
    other parts of the model are unknown.
    """

    blocks: tuple[BlockCertificate, ...]
    stretch: Stretch | None
    input_shape: Shape | None
    unknown: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return bool(self.blocks) and all(b.passed for b in self.blocks) and not self.unknown

    @property
    def lipschitz(self) -> dict[str, float]:
        """The bound of Lip(g) per block, by name."""
        return {b.name: b.lipschitz for b in self.blocks}

    @property
    def layers(self) -> tuple[LayerBound, ...]:
        """All linear layers of all blocks."""
        return tuple(part for b in self.blocks for part in b.layers if part.estimate is not None)

    def __str__(self) -> str:
        lines = [f"{'block':<18}{'layer':<12}{'kind':<18}{'coefficient':>12}{'estimate':>10}{'bound':>9}  status"]
        for b in self.blocks:
            lines.append(f"{b.name:<18}{'':<12}{'':<18}{'':>12}{'':>10}{round_up(b.lipschitz, '.4f'):>9}  {b.status}")
            lines += [_layer_line(part) for part in b.layers if part.estimate is not None]
            if b.remark:
                lines.append(f"  {b.remark}")
        return "\n".join([*lines, *(f"unknown: {reason}" for reason in self.unknown), self.summary()])

    def summary(self) -> str:
        """Return the result in words."""
        good = sum(b.passed for b in self.blocks)
        largest = max((b.lipschitz for b in self.blocks), default=math.nan)
        text = "Blocks invertible" if self.passed and self.stretch is None else "Invertible"
        text += f": {'proven' if self.passed else 'not proven'}. {good} of {len(self.blocks)} blocks proven "
        text += f"contractive, largest Lip(g) <= {round_up(largest, '.4f')}"
        if self.unknown:
            text += f"; unknown: {self.unknown[0].rstrip('.')}"
        elif self.stretch is not None:
            forward, inverse = (round_up(value, ".3g") for value in (self.stretch.forward, self.stretch.inverse))
            text += f"; Lip(F) <= {forward}, Lip(F^-1) <= {inverse}"
            if self.stretch.logdet is not None and math.isfinite(self.stretch.logdet[1]):
                low, high = self.stretch.logdet
                text += f"; ln det in [{round_down(low, '.4g')}, {round_up(high, '.4g')}]"
        return text + "."

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the certificate as JSON, and write it to `path` if given. Infinity and NaN become null."""
        content = {
            "passed": self.passed,
            "summary": self.summary(),
            "input_shape": self.input_shape,
            "stretch": None if self.stretch is None else asdict(self.stretch),
            "blocks": [asdict(b) | {"verdict": b.status} for b in self.blocks],
            "unknown": list(self.unknown),
        }
        text = json.dumps(_nulls_for_infinite(content), indent=1, allow_nan=False)
        if path is not None:
            atomic.write(path, text + "\n")
        return text


def _nulls_for_infinite(value: object) -> object:
    match value:
        case float() if not math.isfinite(value):
            return None
        case dict():
            return {k: _nulls_for_infinite(v) for k, v in value.items()}
        case list() | tuple():
            return [_nulls_for_infinite(v) for v in value]
        case _:
            return value


def _layer_line(part: LayerBound) -> str:
    coefficient = "" if part.coefficient is None else f"{part.coefficient:.4f}"
    return (
        f"{'':<18}{part.name:<12}{part.kind:<18}{coefficient:>12}{part.estimate:>10.4f}{round_up(part.bound, '.4f'):>9}"
    )


def certify(model: nn.Module, input_shape: Shape | None = None) -> Certificate:
    """Certify a model made of residual blocks, in any nesting: prove that each of them is a contraction.

    `input_shape` is the shape of one input, without the batch. Without it, the bound of a layer holds for the largest
    input size it has seen; if it has seen none, or has circular padding, for all sizes.

    >>> from iresnet import mlp_flow
    >>> certify(mlp_flow(2, blocks=2, hidden=(8,))).passed
    True
    """
    modified, model = tuple(_modified_wrappers(model)), unwrap(model)
    shape = _input_shape(model, input_shape)
    root = transform_of(model)
    with torch.no_grad():
        blocks = [_certify_block(name, block, at) for name, block, at in residual_blocks(model, shape)]
        blocks += [_certify_unlisted(name) for name in unlisted_blocks(model)]
        unknown = () if root is None else (*modified, *unknown_parts(root))
        whole = root is model or not why_untrusted(model)  # a user's own module may do more than its transform
        known = root is not None and whole and not unknown and not any(b.remark for b in blocks)
        stretch = stretch_of(root, shape) if known and root is not None else None
    if not blocks:
        raise ValueError(f"nothing to certify: {type(model).__name__} contains no ResidualBlock.")
    return Certificate(tuple(blocks), stretch, shape, unknown)


def _modified_wrappers(model: nn.Module) -> Iterator[str]:
    """Yield why the transform of a model is another function than what is inside its wrappers."""
    inner = unwrap(model)
    transform = model if isinstance(inner, Transform) else getattr(inner, "transform", None)
    if isinstance(transform, nn.Module):
        try:
            unwrap_unmodified(transform)
        except NoBoundKnown as error:
            yield str(error)


def _input_shape(model: nn.Module, input_shape: Shape | None) -> Shape | None:
    return getattr(model, "event_shape", None) if input_shape is None else tuple(input_shape)


def _certify_block(name: str, block: ResidualBlock, shape: Shape | None) -> BlockCertificate:
    if reason := why_untrusted(block):
        return BlockCertificate(name, math.inf, False, shape, remark=reason)
    if block.asserted is not None:
        return BlockCertificate(name, block.asserted, False, shape)
    try:
        b = lipschitz_bound(block.g, shape, estimate=True)
    except NoBoundKnown as error:
        return BlockCertificate(name, math.inf, False, shape, remark=str(error))
    return BlockCertificate(name, b.value, True, shape, b.parts)


def _certify_unlisted(name: str) -> BlockCertificate:
    remark = "It is inside a transform that does not list it in parts(), so its input is unknown."
    return BlockCertificate(name, math.inf, False, None, remark=remark)


def unlisted_blocks(model: nn.Module) -> Iterator[str]:
    """Yield the names of residual blocks of the model that no transform lists among its parts."""
    listed = {id(block) for _, block, _ in residual_blocks(model, None)}
    for name, module in model.named_modules():
        if isinstance(module, ResidualBlock) and id(module) not in listed:
            yield name


def unknown_parts(transform: Transform) -> Iterator[str]:
    """Yield why a transform or one of its parts is unknown; residual blocks, which have a remark, are left out."""
    parts, is_block = transform.parts(), isinstance(transform, ResidualBlock)
    if not is_block and (reason := _why_unknown(transform) or ("" if parts else _why_not_bijective(transform))):
        yield reason
    for _, part, _ in parts:
        yield from unknown_parts(part)


def _why_unknown(transform: Transform) -> str:
    return why_unproven(transform) or type(transform).why_changing(transform)


def _why_not_bijective(transform: Transform) -> str:
    """Why a transform in closed form is not known to be a bijection; empty if it is."""
    attributes = [t for t in vars(transform).values() if isinstance(t, Tensor)]  # in place of a parameter, say
    tensors = [
        t
        for t in (*transform.parameters(), *transform.buffers(), *attributes)
        if t.dtype not in BUFFER_DTYPES - REAL_DTYPES
    ]
    settings = (value for value in vars(transform).values() if isinstance(value, float))
    if not all(t.is_floating_point() and bool(t.isfinite().all()) for t in tensors) or not all(
        map(math.isfinite, settings)
    ):
        return f"{type(transform).__name__} holds NaN or infinity, or complex numbers. Restore it from a checkpoint."
    try:
        proven = transform.stretch().proven
    except ArithmeticError:  # a scale of zero
        proven = False
    return "" if proven else f"no Lipschitz constant is known for {type(transform).__name__}."


def tighten_(model: nn.Module, input_shape: Shape | None = None) -> list[str]:
    """Rescale the layers whose proven bound exceeds their coefficient, and no others; return their names.

    Afterwards a model whose coefficients multiply to less than one in every block passes `certify`. A block without
    constrained layers has no coefficients and is not changed.
    """
    changed = []
    for name, block, at in residual_blocks(model, _input_shape(unwrap(model), input_shape)):
        if block.asserted is None and any(lip.cap_of(layer) is not None for layer in block.g.modules()):
            changed += [f"{name}.g.{layer}".removesuffix(".") for layer in tighten_branch(block.g, at)]
    return changed


def transform_of(model: nn.Module) -> Transform | None:
    """Return the transform of a model: the model itself, or its attribute `transform`; None if there is none."""
    if isinstance(model, Transform):
        return model
    inner = getattr(model, "transform", None)
    inner = unwrap(inner) if isinstance(inner, nn.Module) else None
    return inner if isinstance(inner, Transform) else None


def residual_blocks(model: nn.Module, shape: Shape | None) -> Iterator[tuple[str, ResidualBlock, Shape | None]]:
    """Yield (name, block, input shape) of every residual block, in the order of the forward pass if it is known."""
    model = unwrap(model)
    root = transform_of(model)
    if root is not None:
        yield from _blocks_in("" if root is model else "transform", root, shape)
        return
    for name, module in model.named_modules():
        if isinstance(module, ResidualBlock):
            yield name, module, None


def _blocks_in(name: str, t: Transform, shape: Shape | None) -> Iterator[tuple[str, ResidualBlock, Shape | None]]:
    if isinstance(t, ResidualBlock):
        yield name or "block", t, shape
    for child, part, at in t.parts(shape):
        yield from _blocks_in(f"{name}.{child}" if name else child, part, at)
