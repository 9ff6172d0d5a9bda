"""Let hypothesis generate cases: it searches for a violation and shrinks it.

Cases are functions of a `random.Random`; hypothesis provides one whose numbers it chooses and shrinks.
"""

from __future__ import annotations

import random

from . import Kind


def find_smallest(kind: Kind, cases: int) -> Exception | None:
    """The simplest violation that hypothesis finds in `cases` examples and their shrinking; None if there is none."""
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
