"""Check the files of a run against each other and against the model."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..residual import ResidualBlock
from .subject import Block, Skipped, Subject, Verdict, json_number

#: The allowed relative difference of recomputed numbers: other machines round differently.
CLOSE = 1e-4


@torch.no_grad()
def check_weights(s: Subject) -> Verdict:
    """Tensors are finite, loaded unchanged, and the layers use W min(1, c / <W, G>)."""
    tensors, loaded = s.tensors, s.run.model()
    state = {f"weights/{name}": tensor for name, tensor in loaded.state_dict().items()}
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            return False, f"{name} contains NaN or infinity"
        if name in state and not _same_values(state[name], tensor):
            return False, f"the library loads {name} with other values than the file has"
    constrained = [(n, layer) for n, layer in loaded.named_modules() if parametrize.is_parametrized(layer, "weight")]
    for name, layer in constrained:
        expected = _constrained_weight(tensors, f"weights/{name}.parametrizations.weight", layer)
        if not torch.allclose(cast(Tensor, layer.weight), expected, rtol=1e-5, atol=1e-9):
            return False, f"{name} does not use W min(1, c / <W, G>) with the W and G of the file"
    return (
        True,
        f"{len(tensors)} tensors are finite and loaded unchanged; {len(constrained)} constrained weights recomputed",
    )


def _same_values(loaded: Tensor, stored: Tensor) -> bool:
    """Whether the values are equal bit for bit; weights may be stored as float16, which float32 holds exactly."""
    narrower = stored.dtype == torch.float16 and loaded.dtype == torch.float32
    return (narrower or loaded.dtype == stored.dtype) and torch.equal(loaded, stored.to(loaded.dtype))


def _constrained_weight(tensors: dict[str, Tensor], name: str, layer: nn.Module) -> Tensor:
    """The constrained weight, computed from the tensors of the file."""
    w = tensors[f"{name}.original"].to(cast(Tensor, layer.weight).dtype)
    g = tensors.get(f"{name}.0.gradient")
    sigma = 0.0 if g is None else float((w.double() * g.double()).sum())
    coefficient = float(cast(Any, layer).parametrizations.weight[0].coefficient)
    return w * min(1.0, coefficient / sigma) if sigma > 0 else w


def check_digest(s: Subject) -> Verdict:
    """The digests of the weights in the files match the weights."""
    header, tensors = s.file
    content = hashlib.sha256(json.dumps(header.get("state", {}), sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        content.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        content.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    if (certificate := s.read("certificate.json")) and not certificate.get("model_sha256"):
        return False, "certificate.json does not say which weights it describes; iresnet certify recreates it"
    named = {"model.safetensors": header.get("sha256")}
    named |= {name: s.read(name).get("model_sha256") for name in ("certificate.json", "evaluation.json")}
    named = {name: value for name, value in named.items() if value}
    if not named:
        raise Skipped("no digest is recorded")
    wrong = [name for name, value in named.items() if value != content.hexdigest()]
    if wrong:
        return False, f"{' and '.join(wrong)} do not match the weights"
    return True, f"{', '.join(named)} match the weights, {content.hexdigest()[:12]}"


def check_certificate(s: Subject) -> Verdict:
    """The numbers of certificate.json against recomputed bounds."""
    blocks, stored = s.blocks, s.read("certificate.json")
    if not stored:
        raise Skipped("the folder has no certificate.json")
    inside = sum(isinstance(m, ResidualBlock) for m in s.model.modules())
    if not len(stored["blocks"]) == len(blocks) == inside or not all(b.stored for b in blocks):
        return False, f"it lists {len(stored['blocks'])} blocks; the model lists {len(blocks)} and contains {inside}"
    if not all(block.stored.keys() >= {"proven", "lipschitz", "layers"} for block in blocks):
        return False, "an entry of a block lacks its bound or its layers"
    differences = [_block_difference(block) for block in s.within_time(0.15)]
    largest = max(differences)
    passed = all(b.stored["proven"] and json_number(b.stored["lipschitz"]) < 1 for b in blocks)
    if stored["passed"] is not passed:
        return False, f"it says passed = {stored['passed']}; its blocks say {passed}"
    if len(differences) == len(blocks) and stored["stretch"]:
        whole = s.model.transform.stretch(s.schema.shape)
        pairs = ((stored["stretch"]["forward"], whole.forward), (stored["stretch"]["inverse"], whole.inverse))
        largest = max(largest, *(_relative_difference(json_number(a), b) / len(blocks) for a, b in pairs))
    return (
        largest <= CLOSE,
        f"{len(differences)} of {inside} blocks recomputed; relative differences up to {largest:.1e}",
    )


def _block_difference(block: Block) -> float:
    """The largest relative difference between the stored and the recomputed numbers of a block."""
    parts, layers = block.bound.parts, block.stored["layers"]
    pairs = [(json_number(block.stored["lipschitz"]), block.bound.value)]
    if math.isfinite(block.bound.value):
        if block.stored["proven"] is not block.bound.proven or len(layers) != len(parts):
            return math.inf
        pairs += [(json_number(a["bound"]), b.bound) for a, b in zip(layers, parts, strict=True)]
    return max(_relative_difference(a, b) for a, b in pairs)


def _relative_difference(a: float, b: float) -> float:
    if a == b:
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(b), 1e-300)


def check_evaluation(s: Subject) -> Verdict:
    """The likelihood in evaluation.json lies in the range of the validation likelihoods in the model's file."""
    density, reference = s.read("evaluation.json").get("density"), s.tensors.get("reference/log_likelihood")
    if density is None or reference is None:
        raise Skipped("no likelihood is recorded")
    scale = 1.0 if s.schema.levels is None else s.schema.dimension * math.log(2)
    value = json_number(density["value"])
    low = float(-reference.max()) / scale
    high = float(-reference.min()) / scale
    return low <= value <= high, f"{value:.4f} {density['unit']}; validation samples have {low:.3f} to {high:.3f}"
