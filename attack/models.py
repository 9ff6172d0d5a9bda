"""Attacks on whole models (`transforms`): certificates, solves and likelihoods.

The claims about a transform F: `certify` passes only if every residual block inside is a contraction and Lip(F) is as
stated; the bound of `solve` fits the residual of the live model; the error of a log-likelihood is as claimed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from iresnet import DiagonalNormal, Flow, ResidualBlock, Transform, certify

from . import Violation, kind, networks, tricks
from .branches import REFUSALS
from .networks import one_line
from .search import branch_of, largest_ratio, norms
from .transforms import MAKERS, UserTransform

# ------------------------------------------------------------------------------------------------- the attack


@kind("models", cases=3_000)
def models(r: random.Random) -> str:
    """Certificates, solves and likelihoods of chains with hidden blocks, hooks and user-defined transforms."""
    shape = r.choice([(2,), (3,), (4,), (6,), (2, 4)])
    maker = r.choice(MAKERS)
    name = maker.__name__.strip("_")
    try:
        model = maker(r, shape).eval()
    except tricks.NotApplicable:
        return "unfit"
    x = networks.inputs(r, 3, shape, torch.float64, largest=0.5)
    with torch.no_grad():
        z = model(x.clone())
    proven = check_certificate(r, model, x, name)
    proven |= check_solve(model, x, z, name)
    if r.random() < 0.5:
        proven |= check_likelihood(r, model, x, z, name)
    return "proven" if proven else "not proven"


def check_certificate(r: random.Random, model: Transform, x: Tensor, name: str) -> bool:
    """Check that, if a certificate passes, every block is a contraction and Lip(F) is as stated."""
    shape = tuple(x.shape[1:])
    holder: Any = r.choice(
        [lambda: model, lambda: Flow(model, DiagonalNormal((math.prod(shape),)), event_shape=shape)]
    )()
    try:
        certificate = certify(holder, shape)
    except REFUSALS:
        return False
    if not certificate.passed:
        return False
    blocks = [m for m in model.modules() if isinstance(m, ResidualBlock)]
    if len(certificate.blocks) < len(blocks):
        raise Violation(f"{name}: PASSED {len(certificate.blocks)} of {len(blocks)} blocks: {one_line(model)}")
    for inner in blocks:
        at = _input_of(model, inner, x)
        if at is not None:
            ratio = largest_ratio(partial(branch_of, inner), at, r, steps=3)
            if not ratio < 1 + 1e-6:
                raise Violation(f"{name}: PASSED, but a block has a ratio of {ratio:.4g}: {one_line(inner)}")
    stretch = certificate.stretch
    if stretch is not None and stretch.proven:
        ratio = largest_ratio(lambda t: model(t.clone()), x, r, steps=3)
        if not ratio <= stretch.forward * (1 + 1e-6) + 1e-9:
            raise Violation(f"{name}: Lip(F) <= {stretch.forward:.5g} proven, found {ratio:.5g}: {one_line(model)}")
    return True


def _input_of(model: nn.Module, inner: nn.Module, x: Tensor) -> Tensor | None:
    """The input of a block when the model runs on x."""
    seen = list[Tensor]()
    handle = inner.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].detach().clone()))
    try:
        with torch.no_grad():
            model(x.clone())
    finally:
        handle.remove()
    return seen[0] if seen else None


def check_solve(model: Transform, x: Tensor, z: Tensor, name: str) -> bool:
    """Check the proven bound of a solve against the distance to the x that produced the code."""
    try:
        s: Any = model.solve(z)
    except Exception as error:
        if isinstance(error, REFUSALS) and any(isinstance(m, UserTransform) for m in model.modules()):
            return False  # a user-defined inverse may raise an error with a reason
        raise Violation(f"{name}: solve raises {type(error).__name__}: {error}") from error
    good = s.error_bound.isfinite()
    if not (s.proven and bool(good.any())):
        return False
    if _has_unproven(model):
        raise Violation(f"{name}: solve is proven although a part is asserted or not proven: {one_line(model)}")
    with torch.no_grad():
        residual = norms(model(s.x.clone()) - z)
    most = 1e3 * s.error_bound + 1e-9 * (1 + norms(z) + norms(s.x))
    if bool((residual > most)[good].any()):
        raise Violation(
            f"{name}: solve proven to {float(s.error_bound[good].max()):.3g}, "
            f"residual {float(residual[good].max()):.3g}: {one_line(model)}"
        )
    off = norms(s.x - x)
    if bool((off > s.error_bound * (1 + 1e-6) + 1e-9 * (1 + norms(x)))[good].any()):
        raise Violation(
            f"{name}: solve proven to {float(s.error_bound[good].max()):.3g}, error {float(off[good].max()):.3g}"
        )
    return True


def _has_unproven(model: nn.Module) -> bool:
    return any(
        getattr(m, "asserted", None) is not None or (isinstance(m, UserTransform) and not m.proven)
        for m in model.modules()
    )


def check_likelihood(r: random.Random, model: Transform, x: Tensor, z: Tensor, name: str) -> bool:
    """Check the claimed errors of a log-likelihood; with an asserted or unknown part it must claim nothing."""
    base = DiagonalNormal(tuple(z.shape[1:])).double()
    flow = Flow(model, base, event_shape=tuple(x.shape[1:])).eval()
    try:
        found = flow.log_prob_with_error(x)
    except REFUSALS:
        return False
    if name.startswith("asserted"):  # nothing is proven, but the value must still be correct
        off = (found.value - base.log_prob(z) - _logdet(model, x)).abs()
        if bool((off > 1e-6 * (1 + found.value.abs())).any()):
            raise Violation(f"{name}: log p is off by {float(off.max()):.3g}: {one_line(model)}")
    claims = bool(getattr(found, "proven", True)) and bool(found.bias_bound.isfinite().all())
    if not claims:
        return False
    if _has_unproven(model):
        raise Violation(f"{name}: log_prob_with_error is proven although a part is asserted: {one_line(model)}")
    exact = base.log_prob(z) + _logdet(model, x)
    off = (found.value - exact).abs()
    most = found.bias_bound + 6 * found.standard_error + 1e-9 * (1 + exact.abs())
    if bool((off > most).any()):
        raise Violation(
            f"{name}: log p claims {float(most.max()):.3g}, is off by {float(off.max()):.3g}: {one_line(model)}"
        )
    return True


def _logdet(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """ln |det| of the live function, from its Jacobian by autograd, sample by sample."""
    found = []
    for row in x:
        j = torch.autograd.functional.jacobian(
            lambda t, like=row: f(t.reshape(1, *like.shape)).flatten(), row.flatten()
        )
        found.append(torch.linalg.slogdet(cast(Tensor, j))[1])
    return torch.stack(found)
