"""A kind that fails on purpose in every possible way, to test that a run survives and counts it."""

from __future__ import annotations

import os
import random
import time

from . import Violation, kind


@kind("selftest", cases=0, limit=1.0)
def selftest(r: random.Random) -> str:
    """Fail on purpose: a violation, an exception, a hang or the end of the process. Runs only by name."""
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
