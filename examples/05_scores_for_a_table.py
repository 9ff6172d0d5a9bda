"""Anomaly scores for a table: learn the density of its rows, and find the unusual ones.

Run it with `python examples/05_scores_for_a_table.py`. It takes some seconds.
"""

import csv
import math
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from iresnet import data, evaluate
from iresnet.presets import PRESETS
from iresnet.run import start

generator = torch.Generator().manual_seed(0)

# The table: readings of a machine that idles or runs. Its speed, in turns per minute, has two modes; the current it
# draws, in amperes, grows with the cube of the speed; its temperature, in degrees, with the speed itself. The true
# density is known, so the learned one can be compared with it.

COLUMNS = ("speed", "current", "temperature")
REGIMES = ((0.3, 900.0, 60.0), (0.7, 1500.0, 80.0))  # share, mean and deviation of the speed


def draw(n: int) -> Tensor:
    """n readings, one per row."""
    noise = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    idle = torch.rand(n, generator=generator, dtype=torch.float64) < REGIMES[0][0]
    means, deviations = (torch.tensor([r[k] for r in REGIMES]).double()[1 - idle.long()] for k in (1, 2))
    speed = means + deviations * noise[:, 0]
    current, temperature = expected(speed)
    return torch.stack([speed, current + 0.3 * noise[:, 1], temperature + 1.5 * noise[:, 2]], dim=1)


def expected(speed: Tensor) -> tuple[Tensor, Tensor]:
    """The mean current and temperature at a speed."""
    return 2 + 3 * (speed / 1000) ** 3, 20 + 0.03 * speed


def true_log_density(x: Tensor) -> Tensor:
    """ln p of readings, in the units of the columns."""
    current, temperature = expected(x[:, 0])
    modes = torch.stack([math.log(share) + normal(x[:, 0], m, s) for share, m, s in REGIMES])
    return modes.logsumexp(0) + normal(x[:, 1], current, 0.3) + normal(x[:, 2], temperature, 1.5)


def normal(x: Tensor, mean: Tensor | float, deviation: float) -> Tensor:
    """ln of the normal density."""
    return -0.5 * ((x - mean) / deviation) ** 2 - math.log(deviation * math.sqrt(2 * math.pi))


def write(path: Path, x: Tensor, columns: tuple[str, ...] = COLUMNS) -> None:
    """A CSV file with a header."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(x[:, [COLUMNS.index(c) for c in columns]].tolist())


folder = tempfile.TemporaryDirectory()  # an example leaves nothing behind
table, later = Path(folder.name) / "readings.csv", Path(folder.name) / "later.csv"
write(table, draw(3_000))

# An experiment is data, network, objective and training: four frozen dataclasses. A preset is a named experiment;
# `replace` changes what should differ. The exact log-determinant is the default up to eight dimensions, so it is used
# for these three columns.

preset = PRESETS["table-density"]
experiment = replace(
    preset,
    data=replace(preset.data, source=str(table)),
    network=replace(preset.network, blocks=(4,), width=32),
    training=replace(preset.training, steps=400, average=0.98),
)

# `start` splits the rows, trains, keeps the weights with the best validation score, scales down layers that exceed
# their bound, certifies, and writes everything into a folder. `iresnet train table-density --data readings.csv` does
# the same.

outcome = start(experiment, Path(folder.name) / "run")
run, model = outcome.run, outcome.run.model()
print(f"Trained in {outcome.seconds:.0f} s. The run folder holds")
print(f"  {', '.join(sorted(path.name for path in run.folder.iterdir()))}")

# Scaling is part of the model and its log-determinant is counted, so likelihoods are in the units of the file. The true
# density is in the same units: the difference is what the model has not learned.

test = run.splits().test
learned = evaluate.density(model, test)
true = -true_log_density(test.x.double())
print(f"\nNegative log-likelihood of {len(test)} unseen rows: {learned}")
print(f"The same under the true density:            {float(true.mean()):.3f} nats")

assert learned.value - true.mean() < 0.25

# Later, new readings arrive with their columns in another order; `read` finds them by name. Three rows are anomalies,
# though each of their numbers is ordinary: the machine idles with the current of a running one, runs with that of an
# idle one, and runs without getting warm.

new = draw(200)
new[20] = torch.tensor([900.0, 12.0, 47.0])
new[90] = torch.tensor([1500.0, 4.5, 65.0])
new[150] = torch.tensor([1500.0, 12.0, 47.0])
write(later, new, ("temperature", "speed", "current"))

rows = data.read(later, run.schema)
likelihood = evaluate.log_likelihood(model, rows)
scores = evaluate.anomaly(likelihood.value, run.reference())

# The score of a row is the fraction of validation rows that are more likely. About one in a hundred ordinary rows has a
# score above 0.99. Here are the least likely rows, the distance of each column from its mean in standard deviations,
# and log p under the model and under the true density. Far from all data the model cannot know how small the true
# density is, only that no similar row was in the training set.

train = run.splits().train.x
distance = (rows.x - train.mean(0)) / train.std(0)
order = likelihood.value.argsort()
print(
    f"\n{'row':>4}{'speed':>10}{'current':>10}{'temperature':>13}{'deviations':>22}{'log p':>10}{'true':>9}{'score':>8}"
)
for i in order[:6].tolist():
    speed, current, temperature = rows.x[i].tolist()
    deviations = "".join(f"{value:>6.1f}" for value in distance[i].tolist())
    truth = float(true_log_density(rows.x[i : i + 1].double()))
    print(f"{i:>4}{speed:>10.0f}{current:>10.1f}{temperature:>13.1f}{deviations:>22}", end="")
    print(f"{float(likelihood.value[i]):>10.1f}{truth:>9.1f}{float(scores[i]):>8.3f}")

assert set(order[:3].tolist()) == {20, 90, 150}
assert float(distance[order[:3]].abs().max()) < 3  # no single column reveals them

# What is proven, and what is not. The certificate says that every block is a contraction, so the map from rows to codes
# is a bijection and p integrates to one. In up to 64 dimensions a likelihood is exact up to rounding. Codes invert to
# rows within a tolerance that is proven for each block. How well p fits the data is measured, not proven.

assert outcome.certificate is not None
print(f"\n{outcome.certificate.summary()}")
bias, noise = float(likelihood.bias_bound.max()), float(likelihood.standard_error.max())
print(f"Likelihoods: bias at most {bias:g} nats, standard error {noise:g}")
print(f"Inverse: {evaluate.inverse(model, rows)}")
folder.cleanup()
