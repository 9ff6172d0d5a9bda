"""A kind that fails on purpose, in every way that the others could: what a run must survive and count."""

from __future__ import annotations

import os
import random
import time

from . import Violation, kind


@kind("selftest", cases=0, limit=1.0)
def selftest(r: random.Random) -> str:
    """Fails on purpose: by a violation, an exception, a hang or the end of its process. Only run by name."""
    match r.randrange(12):
        case 0:
            raise Violation("on purpose")
        case 1:
            raise ZeroDivisionError("on purpose")
        case 2:
            time.sleep(60)
        case 3:
            os._exit(7)
    return "survived"
