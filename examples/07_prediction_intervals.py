"""Prediction intervals with scikit-learn's API: a regression that predicts whole distributions, and knows strange rows.

Run it with `python examples/07_prediction_intervals.py`. It takes some seconds.
"""

import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import train_test_split

from iresnet.estimators import ConditionalFlowDensity, FlowOutlierDetector

Array = NDArray[np.float64]
rng = np.random.default_rng(0)

# The data: how long a delivery takes, in minutes, given its distance and the hour of the day. During the day the times
# vary little. At night some drivers are fast and the others slow, so there are two modes, further apart at a distance.


def draw(n: int) -> tuple[Array, Array]:
    """n rows of (distance, hour), and the times."""
    distance, hour = rng.gamma(4, 1.5, n), rng.uniform(0, 24, n)
    night, slow = (hour > 20) | (hour < 6), rng.random(n) < 0.5
    mean = 10 + 3 * distance + np.where(night & slow, 3 * distance, 0)
    return np.column_stack([distance, hour]), mean * np.exp(0.08 * rng.normal(size=n))


X, y = draw(2_000)
X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=0.5, random_state=0)

# An ordinary regression predicts a mean. An interval around it, from the spread of its residuals, is equally wide for
# every row.

linear = LinearRegression().fit(X_train, y_train)
low, high = np.quantile(y_train - linear.predict(X_train), [0.05, 0.95])
intervals = {"linear regression": linear.predict(X_test)[:, None] + np.array([low, high])}

# A conditional density has quantiles for every row. They are exact: a flow of one number is monotone, so a quantile is
# the inverse of a quantile of the base, and the inverse is proven.

model = ConditionalFlowDensity(blocks=4, width=32, learning_rate=5e-3, max_steps=300, random_state=0)
model.fit(X_train, y_train)
intervals["conditional flow"] = model.quantiles(X_test, [0.05, 0.95])
assert model.certificate_ is not None
print(model.certificate_.summary())

# About 90 % of all new rows lie in either kind of interval. Those of the regression are too wide by day and too narrow
# at night; those of the flow are close to 90 % both times, and narrower.

night = (X_test[:, 1] > 20) | (X_test[:, 1] < 6)
print(f"\n{'90 % intervals':<20}{'all':>8}{'by day':>10}{'at night':>10}{'median width':>15}")
for name, ends in intervals.items():
    inside = (ends[:, 0] <= y_test) & (y_test <= ends[:, 1])
    width = float(np.median(ends[:, 1] - ends[:, 0]))
    shares = (inside.mean(), inside[~night].mean(), inside[night].mean())
    print(f"{name:<20}{shares[0]:>8.1%}{shares[1]:>10.1%}{shares[2]:>10.1%}{width:>11.0f} min")
    if name == "conditional flow":
        assert all(abs(share - 0.9) < 0.06 for share in shares)

# `sample` draws from the same distributions, and shows the two modes.

trip = np.array([[8.0, 23.0]])
times = model.sample(trip, 1_000, random_state=0)[0]
counts, edges = np.histogram(times, bins=14, range=(20, 76))
print("\n1,000 samples for 8 km at 23 h")
for count, left in zip(counts, edges[:-1], strict=True):
    print(f"{left:>5.0f} min {'#' * round(count / 5)}")

# `cdf` says where a delivery lies in the distribution of such deliveries. It is uniform if the model is calibrated.

deciles = np.histogram(model.cdf(X_test, y_test), bins=10, range=(0, 1))[0] / len(y_test)
print("\nShare of new rows per decile of their own distribution:", " ".join(f"{share:.2f}" for share in deciles))
assert float(abs(deciles - 0.1).max()) < 0.05

# A prediction is only as good as the rows it was trained on. A density of X itself finds rows unlike those.

detector = FlowOutlierDetector(contamination=0.01, blocks=4, width=32, max_steps=200, random_state=0).fit(X_train)
print("\n8 km and 100 km, ordinary (1) or not (-1):", detector.predict([[8.0, 12.0], [100.0, 12.0]]))
assert detector.predict([[8.0, 12.0], [100.0, 12.0]]).tolist() == [1, -1]

# Both are ordinary scikit-learn estimators: pipelines, cross-validation and joblib take them. To keep one, save it as a
# run folder, which the command `iresnet` takes too.

with tempfile.TemporaryDirectory() as folder:
    saved = model.save(Path(folder) / "deliveries")
    again = ConditionalFlowDensity.from_run(saved)
    assert np.allclose(again.log_prob(X_test, y_test), model.log_prob(X_test, y_test))
    print("\nSaved:", ", ".join(sorted(path.name for path in saved.iterdir() if path.suffix != ".lock")))
