"""Allowed values of settings: rules on fields, checked together."""

import math
from dataclasses import dataclass, fields
from typing import Annotated, Literal

import pytest

from iresnet.allowed import check_settings, in_interval, max_entries, maximum, minimum, positive
from iresnet.presets import Experiment


@dataclass(frozen=True)
class Settings:
    kind: Literal["density", "hybrid"] = "hybrid"
    sizes: Annotated[tuple[Annotated[int, maximum(9_999)], ...], max_entries(2)] = (1,)
    count: Annotated[int, minimum(1), maximum(5)] = 1
    share: Annotated[float, in_interval("(0, 1]", "is a share,", "Use 1.")] = 1.0
    rate: Annotated[float, positive] = 1.0
    decay: Annotated[float, minimum(0)] = 0.0
    free: float = 0.0

    def __post_init__(self):
        check_settings(self)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"kind": "hybird"}, "kind must be one of density, hybrid; got 'hybird'. Did you mean 'hybrid'?"),
        ({"kind": 3}, "kind must be one of density, hybrid; got 3."),
        ({"sizes": (1, 2, 3)}, "sizes must have at most 2 entries; got 3."),
        ({"sizes": (1, 10_000)}, "sizes must be at most 9,999; got 10000. Lower it."),
        ({"count": 0}, "count must be at least 1; got 0."),
        ({"count": 6}, "count must be at most 5; got 6. Lower it."),
        ({"share": 0.0}, "share is a share, in (0, 1]; got 0.0. Use 1."),
        ({"share": 1.5}, "share is a share, in (0, 1]; got 1.5. Use 1."),
        ({"rate": 0.0}, "rate must be positive; got 0.0."),
        ({"decay": -1.0}, "decay must not be negative; got -1.0."),
        *(({name: math.nan}, "got nan.") for name in ("share", "rate", "decay")),
    ],
)
def test_a_value_that_is_not_allowed_raises_a_clear_error(wrong, sentence):
    with pytest.raises(ValueError, match="; got ") as caught:
        Settings(**wrong)
    assert sentence in str(caught.value)


def test_what_is_allowed_passes():
    made = Settings("density", (9_999, 1), 5, 1e-9, math.inf, 0.0, math.nan)
    assert (made.kind, made.sizes, made.count) == ("density", (9_999, 1), 5)


@pytest.mark.parametrize("table", [f.name for f in fields(Experiment) if f.name not in ("name", "about", "seed")])
def test_defaults_are_allowed(table):
    check_settings(getattr(Experiment(), table))
