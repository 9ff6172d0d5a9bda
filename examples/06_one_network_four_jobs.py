"""One network, four jobs: it classifies, gives likelihoods, draws samples and is inverted, and all of it is certified.

Run it with `python examples/06_one_network_four_jobs.py`. It takes about 15 seconds.
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
    """Print images (N, 1, 8, 8) of grey levels side by side, two characters per pixel."""
    shades = (images[:, 0] / levels * len(SHADES)).long().clamp(0, len(SHADES) - 1)
    for row in range(shades.shape[1]):
        print("   ".join("".join(2 * SHADES[k] for k in image[row].tolist()) for image in shades).rstrip())


# The preset trains for minutes; here the network is smaller and trains for a fraction of the steps. Its loss has two
# terms, both computed from the same code z: the bits/dim of the images, and `weight` times the cross-entropy.

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

# The run folder is all that is needed from here on: `iresnet.load` builds the model from its settings and weights.

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
# noise is a lower bound for the log-probability of the image. A uniform guess costs log2(17) = 4.09 bits per pixel.

density = evaluate.density(model, test)
print(f"\nGives likelihoods. {density}; error of the estimator {density.estimator_error:.3f}")
assert density.value < 3

# Corrupted images should be less likely. Some are not: a density tends to assign high likelihood to simple images, and
# half an image is simple. "pairs" is how often a corrupted image is less likely than an original one.

subsample = test.take(torch.arange(100))
normal = evaluate.log_likelihood(model, subsample, draws=2).value
print(f"\n{'corruption':<16}{'pairs':>9}")
for name in CORRUPTIONS:
    images = data.Dataset(corrupt(name, subsample.x, levels=17), None, run.schema)
    corrupted = evaluate.log_likelihood(model, images, draws=2).value
    print(f"{name:<16}{100 * evaluate.auroc(normal, corrupted):>7.1f} %")

# ---------------------------------------------------------------------------------------------------------------------
# Three: it draws samples: codes drawn from the base and inverted through every block.

print("\nDraws samples.\n")
show(model.sample((5,), generator=torch.Generator().manual_seed(3)))

# ---------------------------------------------------------------------------------------------------------------------
# Four: it is inverted, from the code of an image back to the image. Three numbers mean different things and are never
# merged: the proven error of each block's solve, the distance from the code, and the distance from the image.

few = test.take(torch.arange(5))
solution, x = evaluate.reconstruct(model, few)  # x: the images, every pixel at the middle of its bin
print("\nIs inverted. Test images, and their reconstructions from codes.\n")
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
# And the certificate. Training estimates norms from below, so some layers exceed their coefficient. `start` scaled
# those down before it certified the model; the effect on the predictions is measured.

assert outcome.certificate is not None
assert outcome.certificate.passed
before = evaluate.logits(run.model("best"), test).argmax(1)
after = evaluate.logits(model, test).argmax(1)
print(f"\n{outcome.certificate.summary()}")
changed = int((before != after).sum())
print(f"{len(outcome.tightened)} layers tightened, which changed {changed} of {len(test)} predictions")
folder.cleanup()
