"""Synthetic material for reports, with realistic sizes and shapes; nothing here was trained."""

import math

import numpy as np
import torch
from sklearn.datasets import load_digits, make_moons

from iresnet.data import Schema
from iresnet.data.columns import ColumnKind
from iresnet.report import Anomaly, Material, Reconstruction, SpectrumOfLayer, UnusualRows

CONFIG = """\
format = 1
name = "{name}"

[model]
architecture = "{architecture}"
blocks = {blocks}
hidden = [128, 128]
coefficient = 0.95

[training]
objective = "{objective}"
steps = 4000
batch = 128
rate = 0.002
seed = 0
"""

ENVIRONMENT = {
    "command": "iresnet train digits --set training.steps=4000 --out runs/digits",
    "commit": "009677e51c2f0a8d4b6f1f0a7c2e9d3b5a4c8e70",
    "seeds": [0],
    "epochs": None,
    "seconds": 142.3,
    "hardware": {"cpu": "Intel(R) Xeon(R) Processor @ 2.60GHz", "cores": 2, "threads": 1, "gpu": None},
    "versions": {"python": "3.11.9", "torch": "2.13.0", "iresnet": "0.1.0"},
    "precision": "float32",
    "date": "2025-11-15T10:55:02+00:00",
}


def Rows(shape, levels=None, columns=(), classes=()):  # noqa: N802 (it stands for a class)
    """A schema without the name of the label column."""
    return Schema(shape, levels, columns, "", classes)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def log(steps=4000, every=10, unit="bits/dim", floor=2.05, error=True):
    noise = np.random.default_rng(0).normal(size=(steps // every, 3))
    rows = []
    for k, (a, b, c) in enumerate(noise):
        s = k * every
        density = floor + 3.4 * math.exp(-s / 90) + 0.5 * math.exp(-s / 1100) + 0.03 * a
        row = {
            "step": s,
            "seconds": s * 0.035,
            "learning_rate": 2e-3 * min(1, s / 200) * (1 - s / steps),
            unit: density,
        }
        if error:
            row["error %"] = max(0.0, 88 * math.exp(-s / 130) + 1.2 * math.exp(-s / 1500) + 0.7 * b)
        row["loss"] = density + (0.01 * row["error %"] if error else 0)
        if s % 200 == 0:
            row[f"validation {unit}"] = density + 0.02 + 0.005 * c - 0.03 * a
            row["validation error %"] = max(0.5, row["error %"] + 1.1) if error else None
        rows.append(row)
    return rows


def certificate(blocks=8, shape=(4, 4, 4), kind="LipschitzConv2d", passed=True):
    spread = np.random.default_rng(1).uniform(0.72, 0.86, blocks)
    made = []
    for k, bound in enumerate(spread):
        layer = bound ** (1 / 3)
        layers = [{"name": str(2 * j), "kind": kind, "bound": layer, "coefficient": 0.95, "estimate": layer - 1e-4}
                  for j in range(3)]  # fmt: skip
        layers.insert(1, {"name": "1", "kind": "ELU", "bound": 1.0, "coefficient": None, "estimate": None})
        made.append({"name": f"transform.{2 * k + 1}", "lipschitz": float(bound), "proven": True, "layers": layers,
                     "input_shape": list(shape), "remark": "", "verdict": "proven"})  # fmt: skip
    if not passed:
        made[1] |= {"lipschitz": 0.9, "proven": False, "verdict": "asserted", "layers": []}
        remark = "The forward of Mine cannot be read."
        made[2] |= {"lipschitz": None, "proven": False, "verdict": "no bound known", "remark": remark, "layers": []}
    forward, inverse = float(np.prod(1 + spread)), float(np.prod(1 / (1 - spread)))
    stretch = {"forward": forward, "inverse": inverse, "logdet": [-812.4, 291.7], "proven": True}
    return {"passed": passed, "summary": "…", "input_shape": list(shape), "blocks": made,
            "stretch": stretch if passed else None}  # fmt: skip


def spectra(layers=9, size=64):
    made = []
    for k in range(layers):
        decay = np.exp(-np.linspace(0, 1.5 + k / 4, size))
        top = 0.95 if k % 3 else 0.83
        values = [float(v) for v in top * decay]
        made.append(SpectrumOfLayer(f"transform.{2 * (k // 3) + 1}.g.{2 * (k % 3)}", 0.95, top + 2e-4, values))
    return made


def reconstruction(x, n=12):
    rebuilt = x[:n].double() + 2e-14 * normal(n, *x.shape[1:], seed=3)
    errors = (rebuilt - x[:n].double()).flatten(1).norm(dim=1)
    bounds = 6e-13 + 1e-13 * normal(n, seed=4).abs()
    return Reconstruction(x[:n].double(), rebuilt, errors, torch.arange(30, 30 + n), bounds)


INVERSE = {"rows": 360, "precision": "float64", "proven": 360, "largest_block_bound": 9.4e-13, "code_residual": 3.1e-13,
           "measured_error": 4.2e-13, "composed_bound": 7.3e-6, "informative": True, "iterations": 41.3}  # fmt: skip


ROBUST = {"value": 83.06, "low": 78.84, "high": 86.57, "clean": 97.5, "attacked": 90.28, "radius": 2.0,
          "pixel_radius": 0.125, "median": 3.41, "lipschitz": 11.6, "rows": 360, "remark": ""}  # fmt: skip

VACUOUS = ROBUST | {"value": 0.0, "low": 0.0, "high": 1.06, "median": 0.0, "lipschitz": None,
                    "remark": "no bound is known: A block has no Lipschitz bound; `certify` says why."}  # fmt: skip

PROBE = {"codes": {"value": 1.944, "wrong": 7, "rows": 360, "low": 0.946, "high": 3.959},
         "inputs": {"value": 3.889, "wrong": 14, "rows": 360, "low": 2.33, "high": 6.42}, "rows": 1221}  # fmt: skip

#: The inverse of a network without the constraint, as evaluation.json has it: null is what JSON has for infinity.
FREE = INVERSE | {"proven": 0, "largest_block_bound": None, "composed_bound": None, "informative": False}
DIVERGED = FREE | {"code_residual": None, "measured_error": None}


def free_certificate():
    """The certificate of a network without the constraint: no block is a contraction."""
    made = certificate()
    blocks = [b | {"lipschitz": 1.84, "verdict": "not proven (bound >= 1)"} for b in made["blocks"]]
    return made | {"passed": False, "blocks": blocks, "stretch": made["stretch"] | {"inverse": None}}


def digits(**changes):
    bunch = load_digits()
    x = torch.tensor(bunch.images).unsqueeze(1) + 0.5  # at the middle of their bins, as for a flow
    mixed = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))]
    samples = 0.8 * mixed[:80] + 0.2 * mixed[80:160] + 1.1 * normal(80, 1, 8, 8)
    t = torch.linspace(0, 1, 9).reshape(1, 9, 1, 1, 1)
    confusion = np.diag([36, 34, 35, 37, 36, 36, 36, 36, 32, 36]).tolist()
    confusion[1][8], confusion[8][1], confusion[8][5], confusion[3][9] = 2, 2, 1, 1
    evaluation = {
        "split": "test", "rows": 360, "error": {"value": 1.667, "wrong": 6, "rows": 360, "low": 0.766, "high": 3.587},
        "density": {"value": 2.0513, "unit": "bits/dim", "standard_error": 0.0118, "estimator_error": 0.00093,
                    "bias_bound": 0.0, "draws": 8},
        "inverse": INVERSE, "tightening": {"layers": 3, "predictions_changed": 0, "rows": 360}, "confusion": confusion,
    }  # fmt: skip
    content = {
        "name": "digits-hybrid",
        "objective": "hybrid",
        "schema": Rows((1, 8, 8), 17, (), tuple("0123456789")),
        "config": CONFIG.format(name="digits-hybrid", architecture="multiscale", blocks=8, objective="hybrid"),
        "environment": ENVIRONMENT,
        "parameters": 412_330,
        "log": log(),
        "evaluation": evaluation,
        "certificate": certificate(),
        "samples": samples,
        "data": mixed[:80].floor().to(torch.uint8),
        "reconstruction": reconstruction(mixed),
        "interpolation": (1 - t) * x[:5].unsqueeze(1) + t * x[15:20].unsqueeze(1),
        "spectra": spectra(),
        "anomalies": [
            Anomaly("noise", x[:8] + 5 * normal(8, 1, 8, 8), torch.linspace(0.93, 1, 8), "Gaussian noise, 5 levels."),
            Anomaly("inverted", 17 - x[:8], torch.ones(8), "16 minus the pixel."),
            Anomaly("upside down", x[:8].flip(2), torch.linspace(0.31, 0.99, 8), "The rows in reverse order."),
            Anomaly("unchanged", x[:8], torch.linspace(0.04, 0.92, 8), "For comparison."),
        ],
    }
    return Material(**content | changes)


def points(**changes):
    x = torch.tensor(make_moons(1500, noise=0.06, random_state=0)[0])
    t = torch.linspace(0, 1, 20).reshape(1, 20, 1)
    bent = (1 - t) * x[:6].unsqueeze(1) + t * x[6:12].unsqueeze(1) + 0.5 * torch.sin(math.pi * t)
    inverse = INVERSE | {"rows": 1000, "proven": 1000, "composed_bound": 4.1e12, "informative": False}
    density = {"value": 2.3949, "unit": "nats", "standard_error": 0.021, "bias_bound": 0.0}
    content = {
        "name": "Two moons",
        "objective": "density",
        "schema": Rows((2,)),
        "config": CONFIG.format(name="moons", architecture="mlp", blocks=16, objective="density"),
        "environment": ENVIRONMENT,
        "parameters": 69_664,
        "log": log(unit="nats", floor=2.39, error=False),
        "evaluation": {"split": "validation", "rows": 1000, "density": density, "inverse": inverse},
        "certificate": certificate(24, (2,), "LipschitzLinear"),
        "samples": x[:1200] + 0.03 * normal(1200, 2),
        "data": x,
        "reconstruction": reconstruction(x),
        "interpolation": bent,
        "spectra": spectra(30, 16),
        "anomalies": [Anomaly("shifted", x[:60] + 0.5, torch.linspace(0.4, 1, 60), "Half a unit to the right and up.")],
    }
    return Material(**content | changes)


COLUMNS = ("alcohol", "malic acid", "ash of the wine, in grams per litre", "magnesium", "phenols", "hue", "proline")


def table(**changes):
    mix = torch.eye(7, dtype=torch.float64) + 0.4 * normal(7, 7, seed=5)
    scale = torch.tensor([1.0, 3.0, 0.2, 14.0, 0.6, 0.02, 310.0]).double()
    x = (normal(600, 7) @ mix) * scale + torch.tensor([13.0, 2.3, 2.4, 100.0, 2.3, 0.96, 750.0])
    t = torch.linspace(0, 1, 11).reshape(1, 11, 1)
    error = {"value": 2.22, "wrong": 4, "low": 0.87, "high": 5.57}
    density = {"value": 4.813, "unit": "nats", "standard_error": 0.094, "bias_bound": 0.0}
    content = {
        "name": "wine",
        "objective": "semi-supervised",
        "schema": Rows((7,), None, COLUMNS, ("Barolo", "Grignolino", "Barbera")),
        "config": CONFIG.format(name="wine", architecture="mlp", blocks=8, objective="semi-supervised"),
        "environment": ENVIRONMENT,
        "parameters": 31_204,
        "log": log(unit="nats", floor=4.8),
        "evaluation": {
            "split": "test", "rows": 180, "error": error, "density": density, "inverse": INVERSE,
            "confusion": [[58, 1, 0], [1, 69, 1], [0, 1, 49]],
        },
        "certificate": certificate(8, (7,), "LipschitzLinear"),
        "samples": (normal(500, 7, seed=9) @ mix) * scale + torch.tensor([13.0, 2.3, 2.4, 100.0, 2.3, 0.96, 750.0]),
        "data": x,
        "reconstruction": reconstruction(x),
        "interpolation": (1 - t) * x[:4].unsqueeze(1) + t**2 * x[4:8].unsqueeze(1),
        "spectra": spectra(6, 7),
        "anomalies": [Anomaly("one column shuffled", x[:40], torch.linspace(0.2, 1, 40), "Each row, another proline.")],
    }  # fmt: skip
    return Material(**content | changes)


def mixed(**changes):
    """A density of rows with every kind of column, and rows that are unusual."""
    kinds = (
        ColumnKind("real"), ColumnKind("positive"), ColumnKind("bounded", 0.0, 1.0),
        ColumnKind("integer", 0.0, None, 1.0), ColumnKind.category(("retail", "business", "public")),
    )  # fmt: skip
    names = ("temperature", "income", "utilisation", "visits", "segment")
    schema = Schema((5,), columns=names, kinds=kinds, id="customer")

    def draw(n, seed):
        rng = np.random.default_rng(seed)
        columns = [rng.normal(20, 3, n), rng.lognormal(10, 1, n), rng.uniform(size=n), rng.poisson(3, n)]
        return torch.tensor(np.stack([*columns, rng.choice(3, n, p=[0.6, 0.3, 0.1])], axis=1))

    x, likelihoods = draw(500, 0), -20 + 2 * normal(500, seed=7)
    x[0, 1], order = 5e6, likelihoods.argsort()[:3]
    scores = torch.linspace(1, 500, 500).double()[likelihoods.argsort(descending=True).argsort()] / 501
    gains = torch.tensor([[0.1, 7.25, 0.0, -0.2, 1.5], [0.0, 0.0, 2.5, 0.0, -1.0], [3.0, 2.0, 1.0, 0.5, 0.25]])
    unusual = UnusualRows(
        scores, likelihoods, ("c17", "c4", "c9"), x[:3], scores[order], likelihoods[order], gains.double()
    )
    baseline = {"standard_error": 0.1, "fitted": 2040}
    evaluation = {
        "split": "test", "rows": 500, "inverse": INVERSE,
        "density": {"value": 20.014, "unit": "nats", "standard_error": 0.094, "bias_bound": 0.0},
        "baselines": [
            baseline | {"name": "Gaussian", "components": 1, "value": 21.4, "gain": 1.386, "gain_error": 0.081},
            baseline | {"name": "mixture of 5 Gaussians", "components": 5, "value": 20.5, "gain": 0.486,
                        "gain_error": 0.052},
        ],
    }  # fmt: skip
    t = torch.linspace(0, 1, 5).reshape(1, 5, 1)
    content = {
        "name": "customers", "objective": "density", "schema": schema, "environment": ENVIRONMENT,
        "config": CONFIG.format(name="customers", architecture="mlp", blocks=8, objective="density"),
        "parameters": 31_204, "log": log(unit="nats", floor=20.0, error=False), "evaluation": evaluation,
        "certificate": certificate(8, (5,), "LipschitzLinear"), "samples": draw(400, 1), "data": x,
        "reconstruction": reconstruction(x), "interpolation": (1 - t) * x[:4, None] + t * x[4:8, None],
        "spectra": spectra(6, 7), "unusual": unusual, "released": 200, "source": "customers.csv",
        "sizes": {"train": 2040, "validation": 360, "test": 600},
    }  # fmt: skip
    return Material(**content | changes)


def large(**changes):
    """Colour noise, which PNG cannot compress, and many blocks, classes, layers and log entries."""
    noise = (255 * torch.rand(100, 3, 32, 32, generator=torch.Generator().manual_seed(0))).to(torch.uint8)
    n = 100
    confusion = [[3 if i == j else (i * j) % 7 == 1 for j in range(n)] for i in range(n)]
    content = {
        "name": "cifar100",
        "schema": Rows((3, 32, 32), 256, (), tuple(f"class {i}" for i in range(n))),
        "log": log(40_000, 10),
        "evaluation": digits().evaluation | {"confusion": [[int(c) for c in row] for row in confusion]},
        "certificate": certificate(54, (48, 16, 16)),
        "samples": noise,
        "data": noise,
        "reconstruction": reconstruction(noise),
        "interpolation": noise[:96].reshape(8, 12, 3, 32, 32),
        "spectra": spectra(162, 3000),
        "anomalies": [Anomaly(f"kind {k}", noise, torch.rand(100), "Noise.") for k in range(12)],
    }
    return digits(**content | changes)
