"""Scores for a table: learn the density of its rows, and find those that do not belong.

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

# The table: readings of a machine that idles or runs. Its speed, in turns a minute, is one of two bumps; the current it
# draws, in amperes, grows with the cube of the speed; its temperature, in degrees, with the speed itself. The law is
# known, so that what is learned can be compared with it.

COLUMNS = ("speed", "current", "temperature")
REGIMES = ((0.3, 900.0, 60.0), (0.7, 1500.0, 80.0))  # share, mean and deviation of the speed


def draw(n: int) -> Tensor:
    """n readings, one a row."""
    noise = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    idle = torch.rand(n, generator=generator, dtype=torch.float64) < REGIMES[0][0]
    means, deviations = (torch.tensor([r[k] for r in REGIMES]).double()[1 - idle.long()] for k in (1, 2))
    speed = means + deviations * noise[:, 0]
    current, temperature = law(speed)
    return torch.stack([speed, current + 0.3 * noise[:, 1], temperature + 1.5 * noise[:, 2]], dim=1)


def law(speed: Tensor) -> tuple[Tensor, Tensor]:
    """The current and the temperature that belong to a speed."""
    return 2 + 3 * (speed / 1000) ** 3, 20 + 0.03 * speed


def true_log_density(x: Tensor) -> Tensor:
    """ln p of readings, per turn a minute, ampere and degree."""
    current, temperature = law(x[:, 0])
    bumps = torch.stack([math.log(share) + normal(x[:, 0], m, s) for share, m, s in REGIMES])
    return bumps.logsumexp(0) + normal(x[:, 1], current, 0.3) + normal(x[:, 2], temperature, 1.5)


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

# An experiment is data, network, objective and training: four frozen dataclasses. A preset is one with a name;
# `replace` changes what should differ. The exact determinant, which these three columns get, is the default up to eight
# dimensions.

preset = PRESETS["table-density"]
experiment = replace(
    preset,
    data=replace(preset.data, source=str(table)),
    network=replace(preset.network, blocks=(4,), width=32),
    training=replace(preset.training, steps=400, average=0.98),
)

# `start` splits the rows, trains, keeps the weights that did best on validation rows, scales down what exceeds its
# bound, certifies, and writes all of it into a folder. `iresnet train table-density --data readings.csv` does the same.

outcome = start(experiment, Path(folder.name) / "run")
run, model = outcome.run, outcome.run.model()
print(f"Trained in {outcome.seconds:.0f} s. The run folder holds")
print(f"  {', '.join(sorted(path.name for path in run.folder.iterdir()))}")

# Scaling is part of the model and its log-determinant is counted, so a likelihood is one in the units of the file. The
# true law is in the same units: the difference is what the model has not learned.

test = run.splits().test
learned = evaluate.density(model, test)
true = -true_log_density(test.x.double())
print(f"\nNegative log-likelihood of {len(test)} rows it has not met: {learned}")
print(f"The same under the true law:                          {float(true.mean()):.3f} nats")

assert learned.value - true.mean() < 0.25

# Later, new readings come in, with their columns in another order; `read` finds them by name. Three of the rows are
# wrong, though each of their numbers is an ordinary one: the machine idles with the current of a running one, runs with
# that of an idle one, and runs without getting warm.

new = draw(200)
new[20] = torch.tensor([900.0, 12.0, 47.0])
new[90] = torch.tensor([1500.0, 4.5, 65.0])
new[150] = torch.tensor([1500.0, 12.0, 47.0])
write(later, new, ("temperature", "speed", "current"))

rows = data.read(later, run.schema)
likelihood = evaluate.log_likelihood(model, rows)
scores = evaluate.anomaly(likelihood.value, run.reference())

# The score of a row is the share of validation rows that are more likely than it. Of ordinary rows, about one in a
# hundred has a score above 0.99. Here are the least likely rows, how many deviations each column alone is off its mean,
# and log p under the model and under the true law. Far from all data the model cannot know how small the truth is; it
# knows that nothing like it was among the rows.

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
assert float(distance[order[:3]].abs().max()) < 3  # no column alone would have told

# What is proven of it, and what is not. The certificate says that every block is a contraction, so the map from rows to
# codes is a bijection and p integrates to one. In up to 64 dimensions a likelihood is exact up to rounding. Rows and
# codes belong together to a tolerance that is proven block by block. How well p fits the data is measured, not proven.

assert outcome.certificate is not None
print(f"\n{outcome.certificate.summary()}")
bias, noise = float(likelihood.bias_bound.max()), float(likelihood.standard_error.max())
print(f"Likelihoods: bias at most {bias:g} nats, standard error {noise:g}")
print(f"Inverse: {evaluate.inverse(model, rows)}")
folder.cleanup()
