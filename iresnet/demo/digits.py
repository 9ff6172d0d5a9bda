"""The main demo: one hybrid network on 8x8 digits, all its tasks, and everything proven about it.

The digits come with scikit-learn: 1,221 for training, 216 for validation, 360 for the test. The report shows error,
bits per dimension, samples, reconstructions, anomaly scores and the certificate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import evaluate
from ..certificate import Certificate
from ..evaluate import Density, Error, Inverse
from ..presets import PRESETS, Experiment
from ..report import write
from ..report.gather import gather
from ..run import Run, start
from ..train import Report


@dataclass(frozen=True)
class DigitsResult:
    """The metrics of the demo; `changed` counts test images whose predicted class tightening changed."""

    error: Error
    density: Density
    inverse: Inverse
    certificate: Certificate
    tightened: int
    changed: int
    anomalies: tuple[dict[str, Any], ...]
    seconds: float
    page: Path


def experiment(seed: int = 0, steps: int | None = None) -> Experiment:
    """Return the experiment of the demo: the preset digits-hybrid."""
    preset = replace(PRESETS["digits-hybrid"], seed=seed)
    return preset if steps is None else replace(preset, training=replace(preset.training, steps=steps))


def run(
    folder: Path,
    settings: Experiment | None = None,
    *,
    report: Report | None = None,
    stop: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] = lambda text: None,
) -> DigitsResult | None:
    """Train, evaluate and write the report; return None if training was stopped."""
    settings = experiment() if settings is None else settings
    _check_folder(folder, settings)
    trained = start(settings, folder, report=report, stop=stop, overwrite=True)
    if not trained.finished or trained.certificate is None:
        return None
    say("Evaluating on test images …")
    test, model = trained.run.splits().test, trained.run.model()
    content = evaluate.evaluate(model, test)
    before = evaluate.logits(trained.run.model("best"), test).argmax(1)
    changed = int((before != evaluate.logits(model, test).argmax(1)).sum())
    content["tightening"] = {"layers": len(trained.tightened), "predictions_changed": changed, "rows": len(test)}
    content["anomalies"] = evaluate.corruption_detection(model, test)
    trained.run.write_json("evaluation.json", content, trained.run.sha256())
    say("Writing the report …")
    page = write(gather(trained.run), folder / "report.html")
    return DigitsResult(
        Error(**content["error"]),
        Density(**content["density"]),
        Inverse(**content["inverse"]),
        trained.certificate,
        len(trained.tightened),
        changed,
        tuple(content["anomalies"]),
        trained.seconds,
        page,
    )


def _check_folder(folder: Path, settings: Experiment) -> None:
    """Refuse a folder that holds a run other than an earlier demo."""
    if (folder / "config.toml").is_file() and Run.open(folder).experiment.name != settings.name:
        raise ValueError(f"{folder} holds another run. Choose another --out.")
