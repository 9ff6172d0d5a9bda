"""The log-determinant of a residual block three ways: exact, truncated with a bound, unbiased by roulette.

Run it with `python examples/03_log_determinant_three_ways.py`. It takes a few seconds.
"""

import torch
from torch import Tensor, nn

from iresnet import (
    Exact,
    PowerSeries,
    ResidualBlock,
    RussianRoulette,
    constrain_,
    mlp_flow,
    terms_needed,
    truncation_bound,
)

torch.manual_seed(0)

# A likelihood needs ln det(I + J), where J is the Jacobian of g at x. Here is a block on R^8, small enough to check
# everything, and nearly as hard as L = 0.9 allows: g(x) = -W' elu(W x) with W orthogonal, then scaled by the
# constraint, so that the eigenvalues of J reach from 0 to -0.9.

d, L = 8, 0.9
g = nn.Sequential(nn.Linear(d, d), nn.ELU(), nn.Linear(d, d))
with torch.no_grad():
    nn.init.orthogonal_(g[0].weight)
    g[2].weight.copy_(-g[0].weight.T)
block = ResidualBlock(constrain_(g, lipschitz=L)).eval()
x = torch.randn(1, d)

# ---------------------------------------------------------------------------------------------------------------------
# One: exactly, from the dense Jacobian. d vector-Jacobian products and a factorisation.

with torch.no_grad():
    exact = float(block.forward_and_logdet(x, estimator=Exact())[1])
print(f"Exact            ln det(I + J) = {exact:.5f}")

# ---------------------------------------------------------------------------------------------------------------------
# Two: as a power series, tr J - tr J^2 / 2 + tr J^3 / 3 - ..., cut after n terms, with traces from random probes.
# The probes add noise, which more probes reduce. Truncation adds a bias, which no number of probes reduces, but which
# Theorem 3 bounds. An estimator draws one probe per sample, so a point repeated 20,000 times gives 20,000 independent
# estimates.

many = x.expand(20_000, d)


def estimate(estimator: PowerSeries | RussianRoulette, seed: int) -> tuple[float, float, float]:
    """The mean of many estimates, its standard error, and the spread of a single one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        _, values = block.forward_and_logdet(many, estimator=estimator, generator=generator)
    spread = float(values.double().std())
    return float(values.double().mean()), spread / len(many) ** 0.5, spread


print("\nPower series\n")
print(f"{'terms':>7}{'mean':>12}{'standard error':>18}{'off by':>12}{'Theorem 3 allows':>20}{'spread of one':>17}")
for terms in (1, 2, 4, 8, 16, 32):
    mean, error, spread = estimate(PowerSeries(terms=terms), seed=terms)
    allowed = truncation_bound(L, d, terms)
    print(f"{terms:>7}{mean:>12.4f}{error:>18.4f}{mean - exact:>12.4f}{allowed:>20.4f}{spread:>17.2f}")
    assert abs(mean - exact) <= allowed + 4 * error

# The bound also answers the reverse question: how many terms does a given accuracy need?

print()
for tolerance in (1e-1, 1e-2, 1e-3):
    print(f"truncation error below {tolerance:g} nats for certain: {terms_needed(L, d, tolerance)} terms")

# ---------------------------------------------------------------------------------------------------------------------
# Three: without bias. The roulette draws the number of terms at random for every sample, and divides each term by the
# probability that it is reached. The mean is the whole series; bias is exchanged for noise. The library chooses the
# continuation probability above L^2, where the variance of the estimate and of its gradient is finite.

print("\nRussian roulette\n")
print(f"{'terms':>12}{'mean':>12}{'standard error':>18}{'off by':>12}{'spread of one':>17}")
for terms in (1, 4, 8):
    mean, error, spread = estimate(RussianRoulette(terms=terms), seed=100 + terms)
    print(f"{f'{terms} or more':>12}{mean:>12.4f}{error:>18.4f}{mean - exact:>12.4f}{spread:>17.2f}")
    assert abs(mean - exact) <= 4 * error

# A continuation probability that is too small for this L raises an error, because the variance could be infinite:

try:
    estimate(RussianRoulette(continuation=0.5), seed=0)
except ValueError as refusal:
    print(f"\nValueError: {refusal}")

# ---------------------------------------------------------------------------------------------------------------------
# A whole model. In 100 dimensions the exact determinant is no longer the default. `log_prob_with_error` takes the
# number of terms from the proven bounds and the number of passes, each with fresh probes, from a pilot run; it reports
# the two errors apart.

flow = mlp_flow(100, blocks=3, hidden=(100,), lipschitz=0.7).eval()
points = torch.randn(4, 100)


def shown(values: Tensor) -> str:
    """Format numbers in columns."""
    return "".join(f"{value:>12.4f}" for value in values.tolist())


with torch.no_grad():
    truth = flow.log_prob(points, estimator=Exact())
result = flow.log_prob_with_error(points, tolerance=0.5)
print("\nlog p of four points in 100 dimensions, in nats\n")
print(f"{'estimate':<32}{shown(result.value)}")
print(f"{'standard error':<32}{shown(result.standard_error)}")
print(f"{'truncation error, at most':<32}{shown(result.bias_bound)}")
print(f"{'exact':<32}{shown(truth)}")
print(f"\n{result.passes} passes. In bits per dimension: {shown(result.bits_per_dim().value).strip()}")

assert ((result.value - truth).abs() <= result.bias_bound + 4 * result.standard_error).all()
