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
    """Print a long sentence, wrapped."""
    print(textwrap.fill(str(text), 118))


# ---------------------------------------------------------------------------------------------------------------------
# Part one: an ordinary residual network, trained briefly in the ordinary way. It classifies scanned digits, 8 x 8
# pixels, with three residual layers, and uses nothing of iresnet.


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
        batch = torch.randint(len(labels[training]), (128,))
        optimiser.zero_grad()
        functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimiser.step()
    model.eval()


@torch.no_grad()
def misread(model: ResNet) -> str:
    """The error on digits that were not used for training."""
    wrong = model(images[unseen]).argmax(1) != labels[unseen]
    return f"{100 * float(wrong.float().mean()):.1f} % of 300 unseen digits misread"


model = ResNet()
fit(model, steps=80)
print(f"The network as it is: {misread(model)}. Is it invertible?\n")
try:
    ResidualBlock(model.branches[0])
except ValueError as refusal:
    say(f"ValueError: {refusal}")

# The five lines. `constrain_` works in place: afterwards the norms of the layers of a branch multiply to at most 0.9. A
# weight above its share is scaled down, any other is unchanged. A ResidualBlock adds x to the output of its branch. The
# layers still belong to `model`, whose own forward computes the same function as the chain.

for g in model.branches:
    constrain_(g, lipschitz=0.9)
chain = Chain(*(ResidualBlock(g) for g in model.branches))
certificate = certify(chain, input_shape=(1, 8, 8))
decoded = chain.inverse(chain(images[unseen]).detach()).detach()

print(f"\n\nConstrained: {misread(model)}.")
print(f"Codes turned back into images, off by at most {float((decoded - images[unseen]).abs().max()):.0e} a pixel.\n")
say(certificate.summary())

# Scaling weights down costs accuracy. Continue the training with the same loop: the optimiser need not know about the
# constraint.

fit(model, steps=80)
print(f"\n\nAfter more training: {misread(model)}.\n")
print(certify(chain, input_shape=(1, 8, 8)))

# "asked" is what training aims at. It goes by power iteration, which approaches a norm from below, one step for each
# training step. "bound" is an upper bound for images of this size, and decides alone. Where it exceeds what was asked,
# `tighten_` scales the layer down by the difference; the released model then keeps its word to the letter.

changed = tighten_(chain, input_shape=(1, 8, 8))
certificate = certify(chain, input_shape=(1, 8, 8))
print(f"\n\nTightened, {len(changed)} of {len(certificate.layers)} layers by a little: {misread(model)}.\n")
say(certificate.summary())

# For several blocks, three different numbers say how accurate the inverse is. A fourth, the only end-to-end proof,
# multiplies the worst cases of all blocks and quickly becomes uninformative.

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
# Part two: a branch with a custom forward. It uses x twice and calls functions, so a product of norms would not be a
# bound, and the library does not compute one.


class Own(nn.Module):
    """A branch whose constant does not follow from its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = LipschitzLinear(64, 64, coefficient=0.8)

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * torch.tanh(self.layer(x)) + 0.4 * torch.sin(x)


print("\n\nA branch with a custom forward\n")
try:
    ResidualBlock(Own())
except ValueError as refusal:
    say(f"ValueError: {refusal}")

# By hand: 0.5 * 0.8 + 0.4 = 0.8. A constant that you know can be asserted. Everything then works as before, but rests
# on your assertion: the certificate shows the constant as asserted, and does not pass.

block = ResidualBlock(Own(), lipschitz=0.8).eval()
x = torch.randn(5, 64)
solution = block.solve(block(x).detach())
print(f"\n{certify(block, input_shape=(64,))}")
print(f"\nIf 0.8 is right, the inverse is right to {float(solution.error_bound.max()):.0e}.")
