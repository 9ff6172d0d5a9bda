"""Files against each other and against the model that they describe."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..lipschitz import Part
from ..residual import ResidualBlock
from .subject import Block, Skipped, Subject, Verdict, number

#: How far numbers that are computed again may be apart, relatively: another machine rounds otherwise.
CLOSE = 1e-4


@torch.no_grad()
def weights(s: Subject) -> Verdict:
    """Tensors are finite, the library loads them as they are, and W min(1, c / <W, G>) is what its layers use."""
    for name, tensor in s.tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            return False, f"{name} holds NaN or infinity"
    loaded, caps = s.run.model(), 0
    state, expected = loaded.state_dict(), s.model.state_dict()
    for name, tensor in expected.items():
        if not torch.equal(state[name], tensor):
            return False, f"the library loads {name} otherwise than it stands in the file"
    for name, layer in loaded.named_modules():
        if parametrize.is_parametrized(layer, "weight"):
            caps += 1
            used = cast(Tensor, layer.weight)
            if not torch.allclose(used, _constrained(s, name, layer), rtol=1e-5, atol=1e-9):
                return False, f"{name} does not use W min(1, c / <W, G>) of the file's W and G"
    return True, f"{len(s.tensors)} tensors finite and loaded as they are; {caps} constrained layers use W min(1, c/s)"


def _constrained(s: Subject, name: str, layer: nn.Module) -> Tensor:
    """The weight that the file's tensors stand for."""
    inside = f"weights/{name}.parametrizations.weight"
    w, g = s.tensors[f"{inside}.original"], s.tensors.get(f"{inside}.0.gradient")
    sigma = 0.0 if g is None else float((w.double() * g.double()).sum())
    coefficient = float(cast(Any, layer).parametrizations.weight[0].coefficient)
    return w * min(1.0, coefficient / sigma) if sigma > 0 else w


def digest(s: Subject) -> Verdict:
    """Files that name the weights they belong to name those that are there."""
    raise Skipped("not recorded")


def certificate(s: Subject) -> Verdict:
    """The numbers of certificate.json against bounds that are computed again."""
    blocks, stored = s.certified(), s.read("certificate.json")
    if not stored:
        raise Skipped("the folder has no certificate.json")
    inside = sum(isinstance(m, ResidualBlock) for m in s.model.modules())
    if len(stored["blocks"]) != inside or set(s.claims) != {b.name for b in blocks}:
        return False, f"certificate.json lists {len(stored['blocks'])} blocks; the model holds {inside}"
    done = off = 0.0
    for block in s.some(blocks, 0.15):
        done += 1
        off = max(off, _difference(s.claims[block.name], block))
    passed = all(b["proven"] and number(b["lipschitz"]) < 1 for b in s.claims.values())
    words = f"{done:.0f} of {inside} blocks computed again, at most {off:.1e} off the stored bounds"
    if stored["passed"] is not passed:
        return False, f"{words}; it says passed = {stored['passed']}, its blocks say {passed}"
    whole = s.model.transform.stretch(s.schema.shape) if done == inside and stored["stretch"] else None  # type: ignore[operator,union-attr]
    if whole is not None:
        pairs = ((stored["stretch"]["forward"], whole.forward), (stored["stretch"]["inverse"], whole.inverse))
        off = max(off, *(_apart(number(a), b) / (1 + inside) for a, b in pairs))
    return off <= CLOSE, words


def _difference(stored: dict[str, Any], block: Block) -> float:
    """The largest relative difference between a stored block and what is computed of it now."""
    parts: tuple[Part, ...] = block.bound.parts
    if stored["proven"] is not block.bound.proven or len(stored["layers"]) != len(parts):
        return math.inf
    pairs = [(number(stored["lipschitz"]), block.bound.value)]
    pairs += [(number(a["bound"]), b.bound) for a, b in zip(stored["layers"], parts, strict=True)]
    return max(_apart(a, b) for a, b in pairs)


def _apart(a: float, b: float) -> float:
    return 0.0 if a == b else abs(a - b) / max(abs(b), 1e-300) if math.isfinite(a) and math.isfinite(b) else math.inf


def evaluation(s: Subject) -> Verdict:
    """The likelihood in evaluation.json lies where those of validation rows lie that the model's file holds."""
    density, rows = s.read("evaluation.json").get("density"), s.tensors.get("reference/log_likelihood")
    if density is None or rows is None:
        raise Skipped("no likelihood is recorded beside those of validation rows")
    scale = 1.0 if s.schema.levels is None else s.schema.dimension * math.log(2)
    low, high = float(-rows.max()) / scale, float(-rows.min()) / scale
    words = f"{number(density['value']):.4f} {density['unit']} lies in {low:.3f} to {high:.3f} of validation rows"
    return low <= number(density["value"]) <= high, words
