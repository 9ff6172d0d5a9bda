"""Attacks on the accelerated inverses: every precision and every way to prove, against roots in long double."""

from __future__ import annotations

import random

import numpy as np
import torch

from iresnet import Chain, ResidualBlock
from iresnet.inverse import Arithmetic, Decoder, Inverter

from . import Violation, chains, kind, networks
from .inverses import compare, finite_
from .networks import power
from .reference import Composed, Map, Residual, invert, lengths, long, maps


@kind("inverters", cases=1_500)
def inverters(r: random.Random) -> str:
    """Inverter with all arithmetics, and Decoder, against Newton's method in long double."""
    if r.random() < 0.3:
        return _decoded(r)
    chain, shape, dtype = chains.draw(r)
    steps, at = list[Map](), shape
    for t in chains.flat(chain):
        steps.append(chains.truth(t, at))
        at = t.output_shape(at)
    x = chains.start(r, chain, shape, dtype)
    states = [long(x)]
    with np.errstate(all="ignore"):
        for step in steps:
            states.append(step.value(states[-1]))
    z = torch.from_numpy(states[-1].astype(np.float64)).to(dtype).reshape(len(x), *at)
    if not bool(z.isfinite().all()) or not len(chain):
        return "overflow"
    inverter = Inverter(chain, z, tolerance=r.choice([None, power(r, -9, -2)]), arithmetic=_arithmetic(r))
    s = inverter.solve(z)
    if not s.proven:
        raise Violation(f"a chain of supported parts is not proven: {chains.names(chain)}")
    roots = chains.root(steps, states, long(z))
    if roots is None:
        return "undecided"
    compare(s, roots, lambda: f"{inverter.arithmetic} {chains.names(chain)}")
    return "not accelerated" if inverter.reason else "accelerated"


def _arithmetic(r: random.Random) -> Arithmetic:
    return Arithmetic(
        working=r.choice(["float16", "bfloat16", "float32"]),
        exact=r.choice(["auto", "native", "im2col", "im2col_by_row", "shift_and_add"]),
        graph=False,
        code=r.choice(["float64", "none"]),
        proof=r.choice(["forward", "residual"]),
    )


def _decoded(r: random.Random) -> str:
    """What flows sample by: one block, its error within the tolerance."""
    dtype = r.choice([torch.float32, torch.float64])
    g, shape, _ = networks.branch(r, dtype=dtype)
    finite_(g)
    try:
        chain = Chain(ResidualBlock(g)).eval()
    except ValueError:
        return "refused"
    x = networks.points(r, 3, shape, dtype, largest=1)
    truth = Residual(Composed(maps(g, shape)[0]))
    z = torch.from_numpy(truth.value(long(x)).astype(np.float64)).to(dtype).reshape(x.shape)
    tolerance = power(r, -6, -1) if dtype == torch.float32 else power(r, -12, -1)
    decoder = Decoder()
    try:
        with torch.no_grad():
            found = decoder(chain, z, tolerance=tolerance)
    except RuntimeError:  # a ConvergenceError: nothing is returned
        return "not decoded"
    roots = invert(truth, long(z), long(x))
    if roots is None:
        return "undecided"
    error = float(lengths(long(found) - roots[0]).max())
    if error > tolerance * (1 + 1e-9) + roots[1]:
        raise Violation(f"decoded to {tolerance:.3g}, error {error:.3g} of {' '.join(str(g).split())}")
    return "decoded"
