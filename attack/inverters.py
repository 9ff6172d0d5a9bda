"""Attacks on accelerated inverses: every precision and method of proof, against roots in long double."""

from __future__ import annotations

import random

import numpy as np
import torch

from iresnet import Chain, ResidualBlock
from iresnet.inverse import Arithmetic, Decoder, Inverter

from . import Violation, chains, kind, networks
from .inverses import check_error_bound, finite_
from .networks import log_uniform, one_line
from .reference import Composed, Residual, invert, lengths, long, maps


@kind("inverters", cases=1_500)
def inverters(r: random.Random) -> str:
    """Inverter with every arithmetic, and Decoder, against Newton's method in long double."""
    if r.random() < 0.3:
        return _decoded(r)
    problem = chains.draw_problem(r)
    if problem is None:
        return "overflow"
    chain, z = problem.chain, problem.z
    inverter = Inverter(chain, z, tolerance=r.choice([None, log_uniform(r, -9, -2)]), arithmetic=_arithmetic(r))
    s = inverter.solve(z)
    if not s.proven:
        raise Violation(f"a chain of supported parts is not proven: {chains.names(chain)}")
    roots = problem.roots()
    if roots is None:
        return "undecided"
    check_error_bound(s, roots, lambda: f"{inverter.arithmetic} {chains.names(chain)}")
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
    """Check the Decoder that flows sample with: one block, its error within the tolerance."""
    dtype = r.choice([torch.float32, torch.float64])
    g, shape, _ = networks.branch(r, dtype=dtype)
    finite_(g)
    try:
        chain = Chain(ResidualBlock(g)).eval()
    except ValueError:
        return "refused"
    x = networks.inputs(r, 3, shape, dtype, largest=1)
    truth = Residual(Composed(maps(g, shape)[0]))
    z = torch.from_numpy(truth.value(long(x)).astype(np.float64)).to(dtype).reshape(x.shape)
    tolerance = log_uniform(r, -6, -1) if dtype == torch.float32 else log_uniform(r, -12, -1)
    decoder = Decoder()
    try:
        with torch.no_grad():
            found = decoder(chain, z, tolerance=tolerance)
    except RuntimeError:  # a ConvergenceError
        return "not decoded"
    roots = invert(truth, long(z), long(x))
    if roots is None:
        return "undecided"
    error = float(lengths(long(found) - roots[0]).max())
    if error > tolerance * (1 + 1e-9) + roots[1]:
        raise Violation(f"decoded to {tolerance:.3g}, error {error:.3g} of {one_line(g)}")
    return "decoded"
