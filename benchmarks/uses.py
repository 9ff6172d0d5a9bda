"""Collect certified accuracy and linear-probe errors from evaluated runs into results/.

    iresnet train mnist-certified --out runs/mnist-certified
    iresnet evaluate runs/mnist-certified --rows 10000 --radius 36 --radius 127 --radius 255
    iresnet evaluate mnist-classifier --rows 10000 --probe
    python benchmarks/uses.py --certified runs/mnist-certified --probed mnist-classifier

The commands measure; this script copies their metrics and the runs' environments into results/robustness.json and
results/probe.json.
"""

from __future__ import annotations

import argparse
from typing import Any

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


def probe(run: Run) -> Results:
    """The errors of linear classifiers on the codes and on the inputs."""
    found = run.read_json("evaluation.json")["probe"]
    row: dict[str, Any] = {"model": run.experiment.name, "training rows": found["rows"]}
    for what in ("codes", "inputs"):
        row |= {f"{what}, error %": found[what]["value"], f"{what}, 95 % interval": _interval(found[what])}
    return Results(
        "probe", [row | {"test rows": found["codes"]["rows"], "run": 0}], [run.read_json("environment.json")]
    )


def _interval(error: dict[str, Any]) -> str:
    return f"{error['low']:.2f} to {error['high']:.2f}"


def main() -> None:
    """Write results/robustness.json and results/probe.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--certified", required=True)
    parser.add_argument("--probed", required=True)
    parser.add_argument("--out", default="results")
    options = parser.parse_args()
    print(write(robustness(Run.open(options.certified)), options.out))
    print(write(probe(Run.open(options.probed)), options.out))


if __name__ == "__main__":
    main()
