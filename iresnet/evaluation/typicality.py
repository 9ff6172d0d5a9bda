"""Whether rows are typical of a density, beside how likely they are: what tells strange data, and what does not.

A density in many dimensions gives simple images (one colour, blurred) a HIGHER likelihood than the data it learned, so
that the likelihood alone takes them for the most ordinary rows of all. Data do not lie where the density is highest but
where -ln p is close to the entropy H, so the distance from it is a score as well (Nalisnick et al., 2019):

    |-ln p(x) - H|,    or for several rows at once  |mean of -ln p(x_i) - H|,    H = mean of -ln p over held-out rows.

It notices rows that are too likely. Rows that happen to be as likely as the data it cannot tell from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..data import Dataset, some
from ..data.corruptions import CORRUPTIONS, corrupt
from ..data.dataset import stream
from ..objective import unit
from .likelihood import detection, log_likelihood

#: Rows in a batch that is judged as one.
BATCH = 10


@dataclass(frozen=True)
class Detection:
    """How well strange rows are told from the data: areas under the ROC curve, where 0.5 is chance.

    `likelihood` is how often a strange row is less likely than one of the data, `typicality` how often it is further
    from the entropy, and `batches` the same for batches of ten rows. `value` is the mean of -log p of the strange rows
    and `data` that of the data, in bits per dimension for integers, else in nats.
    """

    name: str
    rows: int
    value: float
    data: float
    likelihood: float
    typicality: float
    batches: float

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


def strange(data: Dataset) -> dict[str, Dataset]:
    """Images that are none of the data's: corrupted ones, all of one level, and noise."""
    levels, x = data.schema.levels, data.x
    if levels is None or not data.schema.is_image:
        raise ValueError(f"corruptions are made of images of integers; got {data.schema}. Give rows of your own.")
    generator = stream(0, "strange")
    one = torch.randint(levels, (len(x), *[1] * (x.dim() - 1)), generator=generator)
    made = {name: corrupt(name, x, levels) for name in CORRUPTIONS}
    made["blank"] = torch.zeros_like(x)
    made["one level"] = one.to(x).expand_as(x).contiguous()
    made["noise"] = torch.randint(levels, x.shape, generator=generator).to(x)
    return {name: Dataset(rows, None, data.schema) for name, rows in made.items()}


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
    normal, found = log_likelihood(model, some(data, rows), draws=draws).value, []
    scale = unit(data.x, data.schema.levels)
    for name, dataset in others.items():
        values = log_likelihood(model, some(dataset, rows), draws=draws).value
        found.append(_detection(name, normal, values, reference, scale))
    return found


def _detection(name: str, normal: Tensor, values: Tensor, reference: Tensor, scale: float) -> Detection:
    def area(batch: int) -> float:
        inside, beyond = (-typicality(v, reference, batch) for v in (normal, values))
        return detection(inside, beyond)

    return Detection(
        name=name,
        rows=len(values),
        value=-float(values.mean()) / scale,
        data=-float(normal.mean()) / scale,
        likelihood=detection(normal, values),
        typicality=area(1),
        batches=area(BATCH),
    )
