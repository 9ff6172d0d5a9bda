"""Time the check that a network has not changed since something was proven about it: `trust.Fingerprint.matches`.

    python3 benchmarks/freshness.py --device cuda --out results/freshness.json
    python3 benchmarks/freshness.py --device cpu --preset digits-hybrid                        a dry run

For the transform of a preset, in milliseconds: the whole check; the part that compares all numbers bit for bit, which
synchronises with the device once; and, for comparison, the seconds that the bounds of all blocks take the first time.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from inverse import milliseconds

from iresnet.certificate import residual_blocks
from iresnet.data.builtin import schema_of
from iresnet.fingerprint import Fingerprint, bitwise_equal, describe_function
from iresnet.lipschitz import defer_norms, refresh_
from iresnet.models import build
from iresnet.presets import find
from iresnet.results import Results, provenance, require_commit, write
from iresnet.tree import parameter_count


def main() -> None:
    """Measure, print, and write the results file if --out is given."""
    parser = argparse.ArgumentParser(description="Time the check that the weights have not changed since the proof.")
    parser.add_argument("--out", type=Path, help="results file to write, NAME.json")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--preset", default="iresnet164")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    if options.out:
        require_commit(options.out.parent)
    begin, device = time.perf_counter(), torch.device(options.device)
    experiment = find(options.preset)
    schema = schema_of(experiment.data.source)
    torch.manual_seed(0)
    with defer_norms():
        model = build(experiment.network, schema, experiment.objective.kind).to(device).eval()
    transform = model.transform
    refresh_(transform, settle=True)
    start = time.perf_counter()
    for _, block, shape in residual_blocks(transform, schema.shape):
        block.bound(shape)
    proving = time.perf_counter() - start
    seal = Fingerprint(transform)
    _, tensors = describe_function(transform)
    row = {
        "model": options.preset,
        "weights": parameter_count(transform),
        "ms": milliseconds(lambda: seal.matches(transform), device, options.repeats),
        "ms of numbers": milliseconds(lambda: bitwise_equal(seal.numbers, tensors), device, options.repeats),
        "ms of settings": milliseconds(lambda: describe_function(transform), torch.device("cpu"), options.repeats),
        "s of the bounds": proving,
        "run": 0,
    }
    print(row, flush=True)
    if options.out:
        run = provenance(seeds=[0], seconds=time.perf_counter() - begin, precision="float32")
        print(write(Results(options.out.stem, [row], [run]), options.out.parent))


if __name__ == "__main__":
    main()
