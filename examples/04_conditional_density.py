"""A conditional density p(x | c): one flow that changes shape with a context.

Run it with `python examples/04_conditional_density.py`. It takes some seconds.
"""

import math

import torch
from torch import Tensor

from iresnet import Sine, certify, mlp_flow

torch.manual_seed(0)
generator = torch.Generator().manual_seed(1)

# The data: a number x whose distribution depends on a number c in [-1, 1]. It has two modes, at +(1 + c) and -(1 + c),
# equally likely and of width 0.3. At c = -1 they coincide; the larger c is, the further apart they are.
# A regression would predict zero for every c. The true density is known, so the learned one can be compared with it.

WIDTH = 0.3


def draw(n: int) -> tuple[Tensor, Tensor]:
    """n pairs (x, c)."""
    c = 2 * torch.rand(n, 1, generator=generator) - 1
    sign = 2.0 * torch.randint(2, (n, 1), generator=generator) - 1
    return sign * (1 + c) + WIDTH * torch.randn(n, 1, generator=generator), c


def true_log_density(x: Tensor, c: Tensor) -> Tensor:
    """ln p(x | c)."""
    modes = torch.stack([-0.5 * ((x - s * (1 + c)) / WIDTH) ** 2 for s in (-1, 1)])
    return (modes.logsumexp(0) - math.log(2 * WIDTH * math.sqrt(2 * math.pi)))[:, 0]


# The flow. `context=1` gives every block a small unconstrained network of c that shifts its first hidden layer. The
# block must be a contraction in x only, for every fixed c, and is one by construction, whatever that network is.

flow = mlp_flow(1, blocks=5, hidden=(32,), lipschitz=0.9, activation=Sine, context=1)

# Training is maximum likelihood. In few dimensions the log-determinant is exact unless an estimator is given.

optimiser = torch.optim.Adam(flow.parameters(), lr=5e-3)
for step in range(300):
    for group in optimiser.param_groups:
        group["lr"] = 5e-3 * min(1.0, (300 - step) / 150)
    x, c = draw(512)
    loss = -flow(x, c).mean()
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
flow.eval()

x, c = draw(5_000)
with torch.no_grad():
    learned = -flow.log_prob(x, c)
    true = -true_log_density(x, c)
print(f"Negative log-likelihood of 5,000 new points: {float(learned.mean()):.3f} nats")
print(f"The same under the true density:             {float(true.mean()):.3f} nats")
print(f"\n{certify(flow).summary()}")

assert learned.mean() - true.mean() < 0.1

# `given` fixes contexts and returns a torch.distributions.Distribution whose batch has one distribution per context. It
# samples (every block's solve is proven) and computes log-densities.

contexts = torch.tensor([[-1.0], [0.0], [1.0]])
given = flow.given(contexts)
print(f"\nflow.given(contexts): batch shape {tuple(given.batch_shape)}, event shape {tuple(given.event_shape)}")

torch.manual_seed(2)
samples = given.sample((2_000,))  # (2000, 3, 1)
print("\n2,000 samples for each of three contexts; # is what was drawn, | is what the true density predicts\n")
edges = torch.linspace(-3, 3, 25)
middles = (edges[1:] + edges[:-1]) / 2
print(("     x" + "".join(f"{f' c = {float(value):g}':<26}" for value in contexts)).rstrip())
for low, high, middle in zip(edges[:-1], edges[1:], middles, strict=True):
    line = f"{float(middle):>6.2f}"
    for k in range(3):
        share = float(((samples[:, k] >= low) & (samples[:, k] < high)).float().mean())
        expected = float(true_log_density(middle.reshape(1, 1), contexts[k : k + 1]).exp()) * 0.25
        bar = list(("#" * round(60 * share)).ljust(25))
        bar[min(24, round(60 * expected))] = "|"
        line += " " + "".join(bar)
    print(line.rstrip())

# And log p for any x and c; here at the upper mode, x = 1 + c.

points = 1 + contexts
with torch.no_grad():
    values = given.log_prob(points)
expected = true_log_density(points, contexts)
print("\nlog p(x | c) at the upper mode\n")
print(f"{'c':>6}{'x':>8}{'learned':>12}{'true':>9}")
for k in range(3):
    print(f"{float(contexts[k]):>6.1f}{float(points[k]):>8.1f}{float(values[k]):>12.2f}{float(expected[k]):>9.2f}")
