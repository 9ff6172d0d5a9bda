"""Anomaly scores from the likelihood and from typicality, and how well they detect out-of-distribution samples.

A density in many dimensions gives simple images (one colour, blurred) a HIGHER likelihood than its training data, so
the likelihood alone ranks them as the most normal samples of all. Data do not lie where the density is highest but
where -ln p is close to the entropy H, so the distance from it is a second score (Nalisnick et al., 2019):

    |-ln p(x) - H|,    or for a batch  |mean of -ln p(x_i) - H|,    H = mean of -ln p over held-out samples.

It detects samples that are too likely. It cannot detect samples that happen to be as likely as the data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..data import Dataset, subsample
from ..data.corruptions import CORRUPTIONS, SYNTHETIC, corrupt
from ..data.units import nats_per_unit
from ..flow import LogProb
from ..model import Model
from ..progress import each
from .likelihood import log_likelihood

#: Samples in a batch that gets one score.
BATCH = 10


@dataclass(frozen=True)
class Detection:
    """How well out-of-distribution samples are detected: areas under the ROC curve, where 0.5 is chance.

    `likelihood` is how often such a sample is less likely than one of the data, `typicality` how often it is further
    from the entropy, and `batches` the same for batches of ten samples. `value` is the mean of -log p of these samples
    and `data` that of the data, in bits per dimension for integers, else in nats; `error` is the root mean square error
    of one sample by noise and probes, in the same unit.
    """

    name: str
    rows: int
    value: float
    data: float
    likelihood: float
    typicality: float
    batches: float
    error: float

    def __str__(self) -> str:
        than = "more" if self.value < self.data else "less"
        return (
            f"{self.name}: AUROC by likelihood {self.likelihood:.3f}, by typicality {self.typicality:.3f}, in batches "
            f"of {BATCH} {self.batches:.3f}; {self.value:.2f} against {self.data:.2f}, {than} likely than the data"
        )


def typicality(values: Tensor, reference: Tensor, batch: int = 1) -> Tensor:
    """Compute |-ln p - H| in nats for every sample, or batch of samples; H is the mean of -ln p over reference samples.

    Samples that do not fill a batch are dropped.

    >>> typicality(torch.tensor([-3.0, -1.0, 4.0]), torch.tensor([-2.0, 0.0])).tolist()
    [2.0, 0.0, 5.0]
    """
    if batch < 1 or len(values) < batch:
        raise ValueError(f"batch must lie between 1 and the number of samples, {len(values)}; got {batch}.")
    whole = values.double()[: len(values) // batch * batch].reshape(-1, batch)
    return (whole.mean(1) - reference.double().mean().to(whole.device)).abs()


def atypicality(values: Tensor, reference: Tensor) -> Tensor:
    """Return the fraction of reference samples that are closer to the entropy, in (0, 1): `anomaly` of the distances.

    >>> [round(a, 3) for a in atypicality(torch.tensor([1.0, 2.0, 9.0]), torch.tensor([0.0, 1.0, 2.0])).tolist()]
    [0.25, 0.75, 0.935]
    """
    return anomaly(-typicality(values, reference), -typicality(reference, reference))


def below_chance(area: float, rows: int) -> bool:
    """Whether an area is below 1/2 by more than two standard errors, for n samples of each kind.

    For samples of one distribution the area has the variance (2n + 1) / (12 n^2) (Mann and Whitney, 1947).

    >>> below_chance(0.45, 500), below_chance(0.45, 50)
    (True, False)
    """
    return area < 0.5 - 2 * math.sqrt((2 * rows + 1) / (12 * rows * rows))


def anomaly(values: Tensor, reference: Tensor) -> Tensor:
    """Return the fraction of reference log-likelihoods above each value: near 0 for the most likely, 1 for the least.

    The k-th largest of n reference values has the fraction k / (n + 1), its expectation; between two of them it is
    interpolated. Beyond the smallest, where nothing was observed, the rest 1 / (n + 1) is divided by 1 + ln(1 + d / s),
    for the distance d to it and the mean absolute deviation s of the reference; likewise above the largest. So it falls
    strictly with ln p, however far out, and ranks samples as ln p does; only ln p = -inf has the fraction 1.

    It is made of elementary operations and indexing, which export to ONNX.

    >>> values, reference = torch.tensor([9.0, 1.0, 0.5, 0.0, -9.0, -math.inf]), torch.tensor([0.0, 1.0])
    >>> anomaly(values, reference).round(decimals=3).tolist()
    [0.087, 0.333, 0.5, 0.667, 0.915, 1.0]
    """
    ordered, a = (-reference.double()).sort().values, -values.double()
    n, k = len(ordered), _count_up_to(ordered, a)
    s = (ordered - ordered.mean()).abs().mean()
    s = torch.where(s > 0, s, 1.0)  # all are equal: distances in nats

    def tail(distance: Tensor) -> Tensor:
        return 1 / (1 + torch.log1p(distance.clamp(min=0) / s)) / (n + 1)

    low, high = ordered[(k - 1).clamp(min=0)], ordered[k.clamp(max=n - 1)]
    between = (k + (a - low) / torch.where(high > low, high - low, 1.0)) / (n + 1)
    return torch.where(k == 0, tail(ordered[0] - a), torch.where(k == n, 1 - tail(a - ordered[-1]), between))


def _count_up_to(ordered: Tensor, values: Tensor) -> Tensor:
    """Count the entries that are at most each value, by bisection: ONNX has no `torch.searchsorted`."""
    n, count = len(ordered), torch.zeros_like(values, dtype=torch.int64)
    for bit in reversed(range(n.bit_length())):
        more = count + 2**bit
        count = torch.where((more <= n) & (ordered[more.clamp(max=n) - 1] <= values), more, count)
    return count


def auroc(normal: Tensor, outliers: Tensor) -> float:
    """Compute the area under the ROC curve: how often an outlier scores below a normal sample; ties count half.

    >>> auroc(torch.tensor([2.0, 3.0]), torch.tensor([1.0, 2.0]))
    0.875
    """
    ordered, s = normal.double().sort().values, outliers.double().contiguous()
    below, up_to = (torch.searchsorted(ordered, s, right=right).double() for right in (False, True))
    return float(1 - (below + up_to).mean() / (2 * len(ordered)))


def corrupted_datasets(data: Dataset, names: Iterable[str] = (*CORRUPTIONS, *SYNTHETIC)) -> dict[str, Dataset]:
    """Make corrupted and synthetic images from the images of a dataset, by name."""
    levels = data.schema.levels
    if levels is None or not data.schema.is_image:
        raise ValueError(f"corruptions need images of integers; got {data.schema}. Give samples of your own.")
    return {name: Dataset(corrupt(name, data.x, levels), None, data.schema) for name in names}


def corruption_detection(model: Model, data: Dataset, *, draws: int = 2, rows: int = 200) -> list[dict[str, Any]]:
    """Evaluate how well the likelihood detects each corruption, on at most `rows` images."""
    data = subsample(data, rows)
    corrupted = corrupted_datasets(data, CORRUPTIONS)
    normal, *found = each(lambda d: log_likelihood(model, d, draws=draws).value, [data, *corrupted.values()])
    entries = []
    for name, values in zip(corrupted, found, strict=True):
        median = float(anomaly(values, normal).median())
        entries.append({"name": name, "detection": auroc(normal, values), "median_anomaly": median})
    return entries


def ood_detection(
    model: Model,
    data: Dataset,
    others: Mapping[str, Dataset],
    reference: Tensor,
    *,
    draws: int = 8,
    rows: int = 500,
) -> list[Detection]:
    """Evaluate how well likelihood and typicality detect each of the other datasets, on at most `rows` samples of each.

    `reference` holds ln p of held-out samples that are not in `data`, with as many draws, since all samples share their
    noise: a run stores them as `Run.reference()`.
    """
    for name, dataset in {"the data": data, **others}.items():
        if min(len(dataset), rows) < BATCH:
            raise ValueError(f"a batch needs {BATCH} samples; got {min(len(dataset), rows)} of {name}.")
    scale = nats_per_unit(data.x.shape[1:], data.schema.levels)
    normal, *found = each(lambda d: log_likelihood(model, subsample(d, rows), draws=draws), [data, *others.values()])
    return [
        detection_from_likelihoods(name, normal, outliers, reference, scale)
        for name, outliers in zip(others, found, strict=True)
    ]


def detection_from_likelihoods(
    name: str, normal: LogProb, outliers: LogProb, reference: Tensor, scale: float
) -> Detection:
    """Compute how well outliers are detected from the likelihoods of both; `scale` is the unit in nats.

    All three likelihoods must use the same noise and probes, as those of `log_likelihood` do.
    """

    def area(batch: int) -> float:
        return auroc(*(-typicality(part.value, reference, batch) for part in (normal, outliers)))

    return Detection(
        name=name,
        rows=len(outliers.value),
        value=-float(outliers.value.mean()) / scale,
        data=-float(normal.value.mean()) / scale,
        likelihood=auroc(normal.value, outliers.value),
        typicality=area(1),
        batches=area(BATCH),
        error=float(outliers.standard_error.square().mean().sqrt()) / scale,
    )
