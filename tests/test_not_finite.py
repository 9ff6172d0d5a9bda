"""Nothing is proven of a function that is not finite: settings, weights and scales that are NaN, infinite or zero."""

import math
from contextlib import suppress

import pytest
import torch
from torch import nn

from iresnet import (
    ActNorm,
    Chain,
    LipSwish,
    Logit,
    NoBoundKnown,
    ResidualBlock,
    Sine,
    Standardise,
    certify,
    contractive_mlp,
)
from iresnet.branch import lipschitz_bound
from iresnet.lipschitz import ACTIVATIONS, lipschitz_constant
from iresnet.lipschitz.activations import STRING_SETTINGS
from tests.zoo import ZOO, normal

NAN, INF = math.nan, math.inf

#: Activations, a setting, and values for which the function is not finite, or not computed as it should be.
SETTINGS = [
    (nn.ELU, "alpha", (NAN, INF, -INF)),
    (nn.CELU, "alpha", (NAN, INF, 0.0, -1.0, 1e-310)),
    (nn.LeakyReLU, "negative_slope", (NAN, INF)),
    (lambda: nn.Softplus(threshold=40), "beta", (NAN, INF, -INF, 0.0, 1e-310)),
    (lambda: nn.Softplus(threshold=40), "threshold", (NAN, 39.0)),
    (nn.Hardtanh, "min_val", (NAN,)),
    (nn.ReLU6, "max_val", (NAN,)),
    (Sine, "frequency", (NAN, INF, -INF, 0.0, 1e-310, 1e300)),
]


def claims_a_proof(transform, z):
    """Whether a solve says of any sample that it is proven."""
    try:
        report = transform.solve(z)
    except (ValueError, RuntimeError):  # torch refuses some settings by itself
        return False
    return report.proven and bool(report.converged.any())


@pytest.mark.parametrize(
    ("make", "name", "value"), [(make, name, value) for make, name, values in SETTINGS for value in values]
)
def test_a_setting_without_a_finite_function_has_no_bound(make, name, value):
    """Set after construction, since constructors refuse some of them: a proof is about the object as it is."""
    g = nn.Sequential(nn.Linear(2, 2), make(), nn.Linear(2, 2)).double()
    with torch.no_grad():
        for layer in (g[0], g[2]):
            nn.init.eye_(layer.weight).mul_(0.5)
    block = ResidualBlock(g).eval()
    assert certify(block, input_shape=(2,)).passed
    setattr(g[1], name, value)
    certificate = certify(block, input_shape=(2,))
    assert not certificate.passed, certificate
    assert not claims_a_proof(block, normal(3, 2))


def test_every_numeric_setting_of_every_activation_refuses_nan():
    seen = 0
    for record in ACTIVATIONS.values():
        for name in {*record.settings} - STRING_SETTINGS:
            layer = nn.Unflatten(1, (2, 1)) if record.kind is nn.Unflatten else record.kind()
            setattr(layer, name, NAN)
            with pytest.raises(NoBoundKnown, match=f"{name} must be a number; got nan"):
                lipschitz_constant(layer)
            seen += 1
    assert seen >= 9


@pytest.mark.parametrize(("layer", "name", "value"), [(nn.ELU(), "alpha", "1"), (nn.GELU(), "approximate", 1.0)])
def test_a_setting_of_another_kind_is_refused(layer, name, value):
    setattr(layer, name, value)
    with pytest.raises(NoBoundKnown, match=f"{name} must be a (number|string); got {value!r}"):
        lipschitz_constant(layer)


def test_a_learned_number_that_is_not_finite_is_refused():
    g = nn.Sequential(nn.Linear(2, 2), LipSwish(), nn.Linear(2, 2))
    g[1].raw_beta.data.fill_(INF)
    with pytest.raises(ValueError, match="raw_beta of LipSwish"):
        lipschitz_bound(g)


def block():
    return ResidualBlock(contractive_mlp(2, (4,), lipschitz=0.5))


def spoilt(transform, name, value):
    getattr(transform, name).data.flatten()[0] = value
    return transform


@pytest.mark.parametrize("name", ["log_scale", "shift"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_scaling_that_is_not_finite_does_not_pass(name, value):
    chain = Chain(spoilt(ActNorm(2), name, value), block()).eval()
    certificate = certify(chain, input_shape=(2,))
    assert not certificate.passed
    assert "ActNorm holds NaN or infinity" in str(certificate)


def test_a_scaling_by_zero_does_not_pass():
    scaling = Standardise(torch.zeros(2), torch.ones(2))
    assert certify(Chain(scaling, block()).eval(), input_shape=(2,)).passed
    scaling.std.zero_()
    assert not certify(Chain(scaling, block()).eval(), input_shape=(2,)).passed


def test_a_setting_of_a_closed_form_that_is_not_finite_does_not_pass():
    logit = Logit(256)
    logit.alpha = NAN
    assert not certify(Chain(logit, block()).eval(), input_shape=(2,)).passed


#: One chain, one coupling; the others are slow tests.
QUICK = {"chain", "affine"}
CASES = [
    pytest.param(case, id=case.name, marks=[] if case.name in QUICK else pytest.mark.slow)
    for case in ZOO
    if case.proven and case.context is None
]


@pytest.mark.parametrize("case", CASES)
def test_a_nan_anywhere_is_never_part_of_a_proof(case):
    """One NaN in each tensor in turn: the certificate fails or refuses, and no sample's solve is proven."""
    zeros, seen = torch.zeros_like(case.build()(case.x(2))).detach(), 0
    for name, tensor in dict((*case.build().named_parameters(), *case.build().named_buffers())).items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        transform = case.build().eval()
        dict((*transform.named_parameters(), *transform.named_buffers()))[name].data.flatten()[0] = NAN
        if not code_is_nan(transform, case.x(2)):
            continue  # the function does not read it, such as the vectors of power iteration
        seen += 1
        with suppress(ValueError, torch.linalg.LinAlgError):
            assert not certify(transform, input_shape=case.shape).passed, name
        assert not claims_a_proof(transform, zeros), name
    assert seen or not any(True for _ in case.build().parameters())


def code_is_nan(transform, x):
    try:
        with torch.no_grad():
            return bool(transform(x).isnan().any())
    except ValueError:  # a later part refuses what an earlier one made
        return True
