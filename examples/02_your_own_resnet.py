"""Make a residual network that you already have invertible, in five lines.

Run it with `python examples/02_your_own_resnet.py`. It takes some seconds.
"""

import textwrap

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from iresnet import Chain, LipschitzLinear, ResidualBlock, certify, constrain_, tighten_

torch.manual_seed(0)


def say(text: object) -> None:
    """Print a long sentence in lines."""
    print(textwrap.fill(str(text), 118))


# ---------------------------------------------------------------------------------------------------------------------
# Part one: a network of the usual kind, trained for a moment in the usual way. It reads scanned digits, 8 x 8 pixels,
# through three residual layers. Nothing of iresnet is in it.


class ResNet(nn.Module):
    """x + g(x) three times, then a linear classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ELU(), nn.Conv2d(16, 1, 3, padding=1)) for _ in range(3)
        )
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        for g in self.branches:
            x = x + g(x)
        return self.head(x.flatten(1))


pixels, classes = load_digits(return_X_y=True)
images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1
labels = torch.tensor(classes)
training, unseen = slice(0, -300), slice(-300, None)


def fit(model: ResNet, steps: int) -> None:
    """An ordinary training loop."""
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    model.train()
    for _ in range(steps):
        rows = torch.randint(len(labels[training]), (128,))
        optimiser.zero_grad()
        functional.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimiser.step()
    model.eval()


@torch.no_grad()
def misread(model: ResNet) -> str:
    """The error on digits that were not trained on."""
    wrong = model(images[unseen]).argmax(1) != labels[unseen]
    return f"{100 * float(wrong.float().mean()):.1f} % of 300 unseen digits misread"


model = ResNet()
fit(model, steps=80)
print(f"The network as it is: {misread(model)}. Is it invertible?\n")
try:
    ResidualBlock(model.branches[0])
except ValueError as refusal:
    say(f"ValueError: {refusal}")

# The five lines. `constrain_` works in place, so that the norms of the layers of a branch multiply to 0.9 at most: a
# weight above its share is scaled down, any other stays as it is. A ResidualBlock is a branch with its x added. The
# layers still belong to `model`, whose own forward computes the same function as the chain.

for g in model.branches:
    constrain_(g, lipschitz=0.9)
chain = Chain(*(ResidualBlock(g) for g in model.branches))
certificate = certify(chain, input_shape=(1, 8, 8))
decoded = chain.inverse(chain(images[unseen]).detach()).detach()

print(f"\n\nConstrained: {misread(model)}.")
print(f"Codes turned back into images, off by at most {float((decoded - images[unseen]).abs().max()):.0e} a pixel.\n")
say(certificate.summary())

# Cutting weights down has a price. Train on: the optimiser knows nothing of a constraint, and the loop above is used as
# it stands.

fit(model, steps=80)
print(f"\n\nTrained on: {misread(model)}.\n")
print(certify(chain, input_shape=(1, 8, 8)))

# "asked" is what training aims at. It goes by power iteration, which approaches a norm from below, one step for each
# training step. "bound" is an upper bound for images of this size, and decides alone. Where it exceeds what was asked,
# `tighten_` scales the layer down by the difference; the released model then keeps its word to the letter.

changed = tighten_(chain, input_shape=(1, 8, 8))
certificate = certify(chain, input_shape=(1, 8, 8))
print(f"\n\nTightened, {len(changed)} of {len(certificate.layers)} layers by a little: {misread(model)}.\n")
say(certificate.summary())

# Through several blocks, three numbers say how well codes are turned back, and they are not the same thing. A fourth,
# the only proof from end to end, multiplies the worst case of every block and is soon useless.

with torch.no_grad():
    z = chain(images[unseen])
solution = chain.solve(z)
print("\n\n300 codes turned back into images (l2 distances over 64 pixels)\n")
print(f"largest error of one block's solve   {float(solution.largest_block_bound.max()):.1e}   proven")
print(f"code residual ||F(x) - z||           {float(solution.code_residual.max()):.1e}   evaluated in float64")
print(f"distance to the image it came from   {float(solution.measured_error(images[unseen]).max()):.1e}   measured")
print(f"composed through all blocks          {float(solution.composed_bound.max()):.1e}   proven, and pessimistic")

assert certificate.passed
assert solution.measured_error(images[unseen]).max() < 1e-3

# ---------------------------------------------------------------------------------------------------------------------
# Part two: a branch with a forward of its own. This one uses x twice and calls functions. A product of norms would be
# no bound for it, so none is formed.


class Own(nn.Module):
    """A branch that nobody can take apart by looking at its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = LipschitzLinear(64, 64, coefficient=0.8)

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * torch.tanh(self.layer(x)) + 0.4 * torch.sin(x)


print("\n\nA branch with a forward of its own\n")
try:
    ResidualBlock(Own())
except ValueError as refusal:
    say(f"ValueError: {refusal}")

# With pencil and paper: 0.5 * 0.8 + 0.4 = 0.8. Whoever knows a constant may assert it. Everything works as before, but
# all of it rests on that word: the certificate shows the constant as asserted, and does not pass.

block = ResidualBlock(Own(), lipschitz=0.8).eval()
x = torch.randn(5, 64)
solution = block.solve(block(x).detach())
print(f"\n{certify(block, input_shape=(64,))}")
print(f"\nIf 0.8 is right, the inverse is right to {float(solution.error_bound.max()):.0e}.")
