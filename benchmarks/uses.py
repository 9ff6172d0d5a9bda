"""Collect certified accuracy from an evaluated run into results/.

    iresnet train mnist-certified --out runs/mnist-certified
    iresnet evaluate runs/mnist-certified --rows 10000 --radius 36 --radius 127 --radius 255
    python benchmarks/uses.py --certified runs/mnist-certified

The commands measure; this script copies their metrics and the run's environment into results/robustness.json.
"""

from __future__ import annotations

import argparse

from iresnet.results import Results, write
from iresnet.run import Run


def robustness(run: Run) -> Results:
    """Certified accuracy and accuracy under attack, for each radius."""
    found, pixels = run.read_json("evaluation.json"), (run.schema.levels or 256) - 1
    rows = [
        {
            "model": run.experiment.name, "radius in grey levels": entry["radius"],
            "radius": entry["radius"] / pixels, "certified %": entry["value"], "under attack %": entry["attacked"],
            "accuracy %": entry["clean"], "median certified radius": entry["median"] / pixels,
            "Lip(F)": entry["lipschitz"] * pixels, "rows": entry["rows"], "run": 0,
        }
        for entry in found["robustness"]
    ]  # fmt: skip
    return Results("robustness", rows, [run.read_json("environment.json")])


def main() -> None:
    """Write results/robustness.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--certified", required=True)
    parser.add_argument("--out", default="results")
    options = parser.parse_args()
    print(write(robustness(Run.open(options.certified)), options.out))


if __name__ == "__main__":
    main()
