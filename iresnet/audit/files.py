"""Files against each other and against the model that they describe."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..residual import ResidualBlock
from ..transform import Transform
from .subject import Block, Skipped, Subject, Verdict, number

#: How far numbers that are computed again may be apart, relatively: another machine rounds otherwise.
CLOSE = 1e-4


@torch.no_grad()
def weights(s: Subject) -> Verdict:
    """Tensors are finite, the library loads them as they are, and W min(1, c / <W, G>) is what its layers use."""
    tensors, loaded = s.tensors, s.run.model()
    state = {f"weights/{name}": tensor for name, tensor in loaded.state_dict().items()}
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            return False, f"{name} holds NaN or infinity"
        if name in state and not (state[name].dtype == tensor.dtype and torch.equal(state[name], tensor)):
            return False, f"the library loads {name} otherwise than it stands in the file"
    capped = [(n, layer) for n, layer in loaded.named_modules() if parametrize.is_parametrized(layer, "weight")]
    for name, layer in capped:
        expected = _constrained(tensors, f"weights/{name}.parametrizations.weight", layer)
        if not torch.allclose(cast(Tensor, layer.weight), expected, rtol=1e-5, atol=1e-9):
            return False, f"{name} does not use W min(1, c / <W, G>) of the file's W and G"
    return (
        True,
        f"{len(tensors)} tensors are finite and loaded as they are; {len(capped)} layers constrained anew agree",
    )


def _constrained(tensors: dict[str, Tensor], name: str, layer: nn.Module) -> Tensor:
    """The weight that the file's tensors stand for."""
    w, g = tensors[f"{name}.original"], tensors.get(f"{name}.0.gradient")
    sigma = 0.0 if g is None else float((w.double() * g.double()).sum())
    coefficient = float(cast(Any, layer).parametrizations.weight[0].coefficient)
    return w * min(1.0, coefficient / sigma) if sigma > 0 else w


def digest(s: Subject) -> Verdict:
    """Files that name the weights they belong to name those that are there."""
    header, tensors = s.file
    content = hashlib.sha256(json.dumps(header.get("state", {}), sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        content.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        content.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    named = {"model.safetensors": header.get("sha256")}
    named |= {name: s.read(name).get("model_sha256") for name in ("certificate.json", "evaluation.json")}
    named = {name: value for name, value in named.items() if value}
    if not named:
        raise Skipped("not recorded")
    wrong = [name for name, value in named.items() if value != content.hexdigest()]
    if wrong:
        return False, f"{' and '.join(wrong)} name other weights than those that are there"
    return True, f"{', '.join(named)}: the weights that are there, {content.hexdigest()[:12]}"


def certificate(s: Subject) -> Verdict:
    """The numbers of certificate.json against bounds that are computed again."""
    blocks, stored = s.blocks, s.read("certificate.json")
    if not stored:
        raise Skipped("the folder has no certificate.json")
    inside = sum(isinstance(m, ResidualBlock) for m in s.model.modules())
    if not len(stored["blocks"]) == len(blocks) == inside or not all(b.stored for b in blocks):
        return False, f"it lists {len(stored['blocks'])} blocks, the model {len(blocks)}, and {inside} are in it"
    again = [_difference(block) for block in s.subsample(0.15)]
    off = max(again)
    passed = all(b.stored["proven"] and number(b.stored["lipschitz"]) < 1 for b in blocks)
    if stored["passed"] is not passed:
        return False, f"it says passed = {stored['passed']}; its blocks say {passed}"
    if len(again) == len(blocks) and stored["stretch"]:
        whole = cast(Transform, s.model.transform).stretch(s.schema.shape)
        pairs = ((stored["stretch"]["forward"], whole.forward), (stored["stretch"]["inverse"], whole.inverse))
        off = max(off, *(_apart(number(a), b) / len(blocks) for a, b in pairs))
    return off <= CLOSE, f"{len(again)} of {inside} blocks bounded again: stored numbers are at most {off:.1e} off"


def _difference(block: Block) -> float:
    """The largest relative difference between a stored block and what is computed of it now."""
    parts, layers = block.bound.parts, block.stored["layers"]
    pairs = [(number(block.stored["lipschitz"]), block.bound.value)]
    if math.isfinite(block.bound.value):
        if block.stored["proven"] is not block.bound.proven or len(layers) != len(parts):
            return math.inf
        pairs += [(number(a["bound"]), b.bound) for a, b in zip(layers, parts, strict=True)]
    return max(_apart(a, b) for a, b in pairs)


def _apart(a: float, b: float) -> float:
    return 0.0 if a == b else abs(a - b) / max(abs(b), 1e-300) if math.isfinite(a) and math.isfinite(b) else math.inf


def evaluation(s: Subject) -> Verdict:
    """The likelihood in evaluation.json lies among those of validation rows in the model's file."""
    density, rows = s.read("evaluation.json").get("density"), s.tensors.get("reference/log_likelihood")
    if density is None or rows is None:
        raise Skipped("no likelihood is recorded")
    scale = 1.0 if s.schema.levels is None else s.schema.dimension * math.log(2)
    value, low, high = number(density["value"]), float(-rows.max()) / scale, float(-rows.min()) / scale
    return low <= value <= high, f"{value:.4f} {density['unit']}; those of validation rows are {low:.3f} to {high:.3f}"
