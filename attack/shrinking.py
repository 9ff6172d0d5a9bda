"""Hypothesis as the source of cases: it looks for a violation and gives the smallest one that it finds.

Cases are functions of a `random.Random`; hypothesis has one whose numbers it chooses itself and makes smaller.
"""

from __future__ import annotations

import random

from . import Kind


def smallest(kind: Kind, cases: int) -> Exception | None:
    """The violation of the simplest case among so many and what they shrink to; None where there is none."""
    import torch
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import strategies as st

    found: list[Exception] = []

    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(st.randoms(use_true_random=False))
    def search(r: random.Random) -> None:
        torch.manual_seed(r.getrandbits(32))
        try:
            kind.attack(r)
        except Exception as error:
            found.append(error)
            raise

    try:
        search()
    except Exception:
        return found[-1]
    return None
