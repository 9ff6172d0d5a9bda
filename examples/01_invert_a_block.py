"""Invert a residual block, with a proven bound on the error of the inverse.

Run it with `python examples/01_invert_a_block.py`. It takes a few seconds.
"""

import torch

from iresnet import Anderson, Banach, ConvergenceError, ResidualBlock, certify, contractive_mlp

torch.manual_seed(0)

# A residual block adds a network g to its input: z = x + g(x). If g is a contraction, that is, if it shortens every
# distance by a factor of at most L < 1, the block has exactly one inverse. `contractive_mlp` builds such a g: linear
# layers whose norms are held down, with activations that do not expand between them.

g = contractive_mlp(2, hidden=(64, 64), lipschitz=0.9)
block = ResidualBlock(g)

# A new network is nearly zero and easy to invert. Train this one briefly to expand the plane as much as the constraint
# allows: the fixed-point iteration is slowest on such a block. The constraint is applied automatically in every
# training step; there is nothing to call.

optimiser = torch.optim.Adam(block.parameters(), lr=5e-3)
for _ in range(150):
    _, logdet = block.forward_and_logdet(torch.randn(64, 2))
    optimiser.zero_grad()
    (-logdet.mean()).backward()
    optimiser.step()
block.eval()

# The constant need not be taken on trust. `certify` computes an upper bound for the norm of every layer from the stored
# weights; the bounds of the layers multiply. "estimated" approaches the norm from below, "bound" is proven.

print("What is proven about the block\n")
print(certify(block, input_shape=(2,)))

# Forward, and back. `inverse` returns x or raises; `solve` returns a report instead. The error bound in it is
# ||x + g(x) - z|| / (1 - L): one evaluation of g, in float64. It holds for every solver and every precision.

x = torch.randn(4, 2)
z = block(x)
solution = block.solve(z)

print("\n\nThere and back\n")
print(f"{'x':>11}{'z = x + g(x)':>26}{'x recovered from z':>25}{'evaluations of g':>20}{'proven error':>15}")
for i in range(len(x)):
    points = "".join("({:8.5f},{:8.5f})  ".format(*t[i].tolist()) for t in (x, z, solution.x))
    print(f"{points}{int(solution.iterations[i]):>13}{float(solution.error_bound[i]):>19.1e}")
print(f"\n{solution}")

# The algorithm is an object. Banach is the paper's Algorithm 1; Anderson, the default, combines the last few steps.

print("\n\nTwo solvers, one proof\n")
for solver in (Banach(), Anderson()):
    s = block.solve(z, tolerance=1e-5, solver=solver)
    most, worst = int(s.iterations.max()), float(s.error_bound.max())
    print(f"{type(solver).__name__:<10}{most:>3} evaluations of g, error bound {worst:.1e}")

# Now request the impossible. Numbers near 1 are 1e-7 apart in float32, so no float32 x can be proven accurate to 1e-10.
# The block raises an error instead of returning its best guess:

print("\n\nAn impossible request, in float32\n")
try:
    block.inverse(z, tolerance=1e-10)
except ConvergenceError as error:
    print(f"ConvergenceError: {error}")
    print(f"\nThe exception holds what was reached: {error.solution}")

# The message names the remedy: in float64 the same request succeeds.

block.double()
x, z = x.double(), block(x.double())
solution = block.solve(z, tolerance=1e-10)

print("\n\nThe same request in float64\n")
print(solution)
print(f"largest distance to the x we started from: {float((solution.x - x).norm(dim=1).max()):.1e}")

# The inverse is differentiable, in z and in the parameters, by the implicit function theorem: no iteration is unrolled,
# and the gradient does not depend on how many the solver took. Its Jacobian is that of the block, inverted.

forward = torch.autograd.functional.jacobian(lambda t: block(t)[0], x[:1])[:, 0]
backward = torch.autograd.functional.jacobian(lambda t: block.inverse(t)[0], z[:1].detach())[:, 0]
product = forward @ backward

print("\n\nThe Jacobian of the block times that of its inverse\n")
for row in product.tolist():
    print("".join(f"{round(value, 9) + 0.0:14.9f}" for value in row))

assert torch.allclose(product, torch.eye(2, dtype=product.dtype), atol=1e-9)
