"""Which columns make a row unlikely: how much more likely it would be with an ordinary value in one column.

For values r_1, ..., r_K of column j from samples of the model, and x with x_j replaced by r_k,

    gain_j  =  ln ( 1/K sum_k p(x with x_j = r_k) )  -  ln p(x)    in nats.

It is large where x_j does not fit the other columns, even if x_j alone is an ordinary value, and it does not depend on
the unit of the column. Gains do not add up to a total: a row may need two changes. For a conditional density the
samples are those for the given columns of the row, which have no gain themselves.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..data import Dataset, Schema
from ..flow import Flow
from ..model import Model
from ..progress import each, part
from ..spelling import at_least
from ..transform import check_eval
from ..transforms.given import Given
from .chunks import chunk_size, in_chunks
from .roles import as_flow

#: Values of a column that are tried; rows that are changed together, and changed rows that are evaluated together.
VALUES, ROWS, CHUNK = 32, 1000, 4000


@torch.no_grad()
def column_gains(model: Model, data: Dataset, *, values: int = VALUES, seed: int = 0) -> Tensor:
    """Compute the gain of every column for every row of a table, (rows, columns), in nats.

    It is infinite for a value that the column cannot have; the other columns of such a row have the gain 0.
    """
    check_eval(model, "the gain of a column")
    if data.schema.is_image:
        raise ValueError(f"gains are for the columns of a table; got {data.schema}.")
    at_least(1, values=values)
    flow, allowed = as_flow(model), data.schema.allowed(data.x)
    gains = torch.where(allowed, 0.0, math.inf).double()

    def explain(rows: Tensor) -> None:
        generator = torch.Generator(data.x.device).manual_seed(seed)
        gains[rows] = _gains(flow, data.x[rows], data.schema, values, generator)

    if bool((possible := allowed.all(1)).any()):
        each(explain, torch.split(possible.nonzero()[:, 0], ROWS))
    return gains


def _gains(flow: Flow, x: Tensor, schema: Schema, values: int, generator: torch.Generator) -> Tensor:
    size, transform = chunk_size(flow, x, CHUNK), flow.transform
    context = x[:, list(transform.others)] if isinstance(transform, Given) else None
    columns = list(transform.targets if isinstance(transform, Given) else range(x.shape[1]))
    with part(0, len(columns) + 1):
        drawn = flow.sample((values,), context, generator=generator)  # (values, D), or one for each context
        own = in_chunks(flow.log_prob, x, size).double()
    ordinary = schema.restore(drawn.reshape(-1, x.shape[1])).reshape(values, -1, x.shape[1]).expand(-1, len(x), -1)
    gains = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for i, j in enumerate(columns, 1):
        changed = x.expand(values, *x.shape).clone()
        changed[:, :, j] = ordinary[:, :, j]
        with part(i, len(columns) + 1):
            found = in_chunks(flow.log_prob, changed.flatten(0, 1), size).double().view(values, len(x))
        gains[:, j] = found.logsumexp(0) - math.log(values) - own
    # Where float32 overflows, ln p is -inf with any value in this column: another one is at fault.
    return gains.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)
