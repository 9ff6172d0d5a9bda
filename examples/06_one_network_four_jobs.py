"""One network, four jobs: it classifies, gives likelihoods, draws samples and is inverted, and all of it is certified.

Run it with `python examples/06_one_network_four_jobs.py`. It takes a quarter of a minute.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

import iresnet
from iresnet import data, evaluate
from iresnet.data.corruptions import CORRUPTIONS, corrupt
from iresnet.presets import PRESETS
from iresnet.run import start

SHADES = " .:-=+*#@"


def show(images: Tensor, levels: int = 17) -> None:
    """Print images (N, 1, 8, 8) of grey levels side by side, two characters a pixel."""
    shades = (images[:, 0] / levels * len(SHADES)).long().clamp(0, len(SHADES) - 1)
    for row in range(shades.shape[1]):
        print("   ".join("".join(2 * SHADES[k] for k in image[row].tolist()) for image in shades).rstrip())


# The preset trains for minutes; here it gets a smaller network and a fraction of the steps. Its loss is a sum of two
# from the same code z: the bits per dimension of the images, and `weight` times the cross-entropy of their classes.

preset = PRESETS["digits-hybrid"]
experiment = replace(
    preset,
    network=replace(preset.network, blocks=(2, 2), width=16),
    objective=replace(preset.objective, weight=3.0, shifted=0.0),
    training=replace(preset.training, steps=200, batch=64, average=0.98),
)
folder = tempfile.TemporaryDirectory()  # an example leaves nothing behind
outcome = start(experiment, Path(folder.name) / "run")
run, test = outcome.run, outcome.run.splits().test

# The folder is all that is needed from here on: `iresnet.load` makes the model from its settings and its weights.

model = iresnet.load(run.folder)
assert isinstance(model, iresnet.Hybrid)
print(
    f"Trained in {outcome.seconds:.0f} s on {len(run.splits().train)} scanned digits, 8 x 8 pixels of 17 grey levels."
)

# ---------------------------------------------------------------------------------------------------------------------
# One: it classifies. The interval is for the error on all digits of this kind, of which the test images are a sample.

error = evaluate.error(model, test)
print(f"\nClassifies. Test error {error}")
assert error.value < 8

# ---------------------------------------------------------------------------------------------------------------------
# Two: it gives likelihoods. A pixel is an integer, so noise in [0, 1) is added to it, and the mean of log p over the
# noise is a lower bound for the log-probability of the image. A uniform guess would cost log2(17) = 4.09 bits a pixel.

density = evaluate.density(model, test)
print(f"\nGives likelihoods. {density}; error of the estimator {density.estimator_error:.3f}")
assert density.value < 3

# Images that are wrong should be less likely. Some are not: a density tends to find simple images likely, and half an
# image is a simple one. "pairs" is how often a changed image is less likely than an unchanged one.

subsample = test.take(torch.arange(100))
normal = evaluate.log_likelihood(model, subsample, draws=2).value
print(f"\n{'changed images':<16}{'pairs':>9}")
for name in CORRUPTIONS:
    images = data.Dataset(corrupt(name, subsample.x, levels=17), None, run.schema)
    strange = evaluate.log_likelihood(model, images, draws=2).value
    print(f"{name:<16}{100 * evaluate.auroc(normal, strange):>7.1f} %")

# ---------------------------------------------------------------------------------------------------------------------
# Three: it draws samples. A code from the base, sent through the inverse of every block.

print("\nDraws samples.\n")
show(model.sample((5,), generator=torch.Generator().manual_seed(3)))

# ---------------------------------------------------------------------------------------------------------------------
# Four: it is inverted. The code of an image goes back to the image. Three numbers, which say different things and are
# never merged: what is proven of every block's solve, how well the code is met, and how far off the image is.

few = test.take(torch.arange(5))
solution, x = evaluate.reconstruct(model, few)  # x: the images, every pixel at the middle of its bin
print("\nIs inverted. Test images, and what came back from their codes.\n")
show(x)
print()
show(solution.x)
inverse = evaluate.inverse(model, test)
print(
    f"\n{inverse.proven} of {inverse.rows} test images proven block by block, {inverse.iterations:.0f} evaluations each"
)
print(f"largest bound of a block     {inverse.largest_block_bound:.1e}   proven")
print(f"code residual                {inverse.code_residual:.1e}   evaluated in float64")
print(f"distance to the image        {inverse.measured_error:.1e}   measured")
assert inverse.proven == len(test)
assert inverse.measured_error < 1e-5

# ---------------------------------------------------------------------------------------------------------------------
# And what is proven of all of it. In training, norms are estimated from below, so some layers exceed what they were
# asked to keep. `start` scaled those down before it certified the model; what that did to the predictions is measured.

assert outcome.certificate is not None
assert outcome.certificate.passed
before = evaluate.logits(run.model("best"), test).argmax(1)
after = evaluate.logits(model, test).argmax(1)
print(f"\n{outcome.certificate.summary()}")
changed = int((before != after).sum())
print(f"{len(outcome.tightened)} layers tightened, which changed {changed} of {len(test)} predictions")
folder.cleanup()
