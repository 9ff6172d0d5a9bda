"""Whether rows are typical of a density, beside how likely they are: what tells strange data, and what does not.

A density in many dimensions gives simple images (one colour, blurred) a HIGHER likelihood than the data it learned, so
that the likelihood alone takes them for the most ordinary rows of all. Data do not lie where the density is highest but
where -ln p is close to the entropy H, so the distance from it is a score as well (Nalisnick et al., 2019):

    |-ln p(x) - H|,    or for several rows at once  |mean of -ln p(x_i) - H|,    H = mean of -ln p over held-out rows.

It notices rows that are too likely. Rows that happen to be as likely as the data it cannot tell from them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..data import Dataset, subsample
from ..data.corruptions import CORRUPTIONS, SYNTHETIC, corrupt
from ..flow import LogProb
from ..train.objective import nats_per_unit
from .likelihood import detection, log_likelihood

#: Rows in a batch that is judged as one.
BATCH = 10


@dataclass(frozen=True)
class Detection:
    """How well strange rows are told from the data: areas under the ROC curve, where 0.5 is chance.

    `likelihood` is how often a strange row is less likely than one of the data, `typicality` how often it is further
    from the entropy, and `batches` the same for batches of ten rows. `value` is the mean of -log p of the strange rows
    and `data` that of the data, in bits per dimension for integers, else in nats; `error` is what noise and probes make
    of one strange row, root mean square, in the same unit.
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
            f"{self.name}: found by likelihood {self.likelihood:.3f}, by typicality {self.typicality:.3f}, in batches "
            f"of {BATCH} {self.batches:.3f}; {self.value:.2f} against {self.data:.2f}, {than} likely than the data"
        )


def typicality(values: Tensor, reference: Tensor, batch: int = 1) -> Tensor:
    """|-ln p - H| in nats for every row, or for every `batch` rows; H is the mean of -ln p over reference rows.

    Rows that do not fill a batch are left out.

    >>> typicality(torch.tensor([-3.0, -1.0, 4.0]), torch.tensor([-2.0, 0.0])).tolist()
    [2.0, 0.0, 5.0]
    """
    if batch < 1 or len(values) < batch:
        raise ValueError(f"batch must lie between 1 and the number of rows, {len(values)}; got {batch}.")
    whole = values.double()[: len(values) // batch * batch].reshape(-1, batch)
    return (whole.mean(1) - reference.double().mean().to(whole.device)).abs()


def atypicality(values: Tensor, reference: Tensor) -> Tensor:
    """The share of reference rows that are closer to the entropy: 0 for the most typical, 1 for none as far.

    >>> atypicality(torch.tensor([1.0, 9.0]), torch.tensor([0.0, 1.0, 2.0])).tolist()
    [0.0, 1.0]
    """
    ordered = typicality(reference, reference).sort().values
    distance = typicality(values, reference).to(ordered.device)
    return torch.searchsorted(ordered, distance.contiguous()).double() / len(ordered)


def below_chance(area: float, rows: int) -> bool:
    """Whether an area is below 1/2 by more than the choice of rows explains: two standard errors, n rows on each side.

    Where both sides are alike, the area has the variance (2n + 1) / (12 n^2) (Mann and Whitney, 1947).

    >>> below_chance(0.45, 500), below_chance(0.45, 50)
    (True, False)
    """
    return area < 0.5 - 2 * math.sqrt((2 * rows + 1) / (12 * rows * rows))


def strange(data: Dataset) -> dict[str, Dataset]:
    """Images that are none of the data's: corrupted ones, patterns, their mean, and noise."""
    levels = data.schema.levels
    if levels is None or not data.schema.is_image:
        raise ValueError(f"corruptions are made of images of integers; got {data.schema}. Give rows of your own.")
    return {n: Dataset(corrupt(n, data.x, levels), None, data.schema) for n in (*CORRUPTIONS, *SYNTHETIC)}


def outside(
    model: nn.Module,
    data: Dataset,
    others: Mapping[str, Dataset],
    reference: Tensor,
    *,
    draws: int = 8,
    rows: int = 500,
) -> list[Detection]:
    """How well likelihood and typicality tell each of the others from the data, on at most `rows` of each.

    `reference` holds ln p of held-out rows, other ones than `data`, with as many draws, since all rows share their
    noise: a run keeps them as `Run.reference()`.
    """
    for name, dataset in {"the data": data, **others}.items():
        if min(len(dataset), rows) < BATCH:
            raise ValueError(f"batches of {BATCH} rows need that many; got {min(len(dataset), rows)} of {name}.")
    normal, scale = log_likelihood(model, subsample(data, rows), draws=draws), nats_per_unit(data.x, data.schema.levels)
    return [
        told_apart(name, normal, log_likelihood(model, subsample(dataset, rows), draws=draws), reference, scale)
        for name, dataset in others.items()
    ]


def told_apart(name: str, normal: LogProb, strange: LogProb, reference: Tensor, scale: float) -> Detection:
    """How well strange rows are told from the data, by the likelihoods of both; `scale` is a unit in nats.

    All three kinds of likelihoods must have had the same noise and probes, as `log_likelihood` gives them.
    """

    def area(batch: int) -> float:
        inside, beyond = (-typicality(rows.value, reference, batch) for rows in (normal, strange))
        return detection(inside, beyond)

    return Detection(
        name=name,
        rows=len(strange.value),
        value=-float(strange.value.mean()) / scale,
        data=-float(normal.value.mean()) / scale,
        likelihood=detection(normal.value, strange.value),
        typicality=area(1),
        batches=area(BATCH),
        error=float(strange.standard_error.square().mean().sqrt()) / scale,
    )
