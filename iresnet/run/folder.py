"""Run folders: everything about one training run that later commands need.

config.toml         the experiment, every setting written out
schema.json         the data schema: shape, grey levels, columns, classes
data.json           number of samples and fingerprint of each split
environment.json    command, commit, versions, hardware, seconds
log.csv             metrics over time; tensorboard/ holds the same if TensorBoard is installed
last.safetensors    the training state, to resume from
best.safetensors    the averaged weights with the lowest validation loss, or the last ones if `select` says so
model.safetensors   the model: those weights, every layer within its bound, and likelihoods of validation samples
certificate.json    the bounds that are proven for it
evaluation.json     its metrics on test data
reproduction.json   what a table or figure of the paper shows of it

The last three contain the SHA-256 of model.safetensors, and are refused beside other weights. Training and tightening
hold a lock on the folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import atomic, config, data, lock, migration
from ..data import Dataset, Schema, Splits
from ..lipschitz import defer_norms
from ..model import Model
from ..models import build
from ..presets import Experiment
from ..results import nonfinite_to_none
from ..spelling import quoted
from ..train import checkpoint
from ..train.checkpoint import Checkpoint, check_tensors, check_weights
from ..version import __version__
from . import reading
from .log import Log
from .made_with import check_made_with
from .missing import explain_missing, is_run
from .room import FILES, make_room
from .weights import complete_state, is_shipped, output_folder, resolve_folder, shipped

#: The key of the model's SHA-256 in the files that describe it, and how to recreate each of them.
MODEL_SHA256 = "model_sha256"
ABOUT_THE_MODEL = {
    "certificate.json": "Recreate it: iresnet certify {}",
    "evaluation.json": "Recreate it: iresnet evaluate {}",
    "reproduction.json": "Remove it; it can be recreated.",
}


@dataclass(frozen=True)
class Run:
    """An existing run folder: `model()` returns its trained model, `splits()` its data."""

    folder: Path
    experiment: Experiment
    schema: Schema

    #: Whether a training that was stopped can be resumed.
    resumable: ClassVar[bool] = True

    @classmethod
    def open(cls, folder: str | Path) -> Run:
        """Open a run folder, or the shipped model of this name; raise if there is none."""
        if not str(folder):
            raise ValueError(
                f"give a run folder, or a model that comes with the library ({', '.join(shipped())}); got ''."
            )
        folder = resolve_folder(Path(folder))
        if not is_run(folder):
            raise FileNotFoundError(explain_missing(folder))
        for name in FILES:  # reading a pipe or a device might never end
            if (folder / name).exists() and not (folder / name).is_file():
                raise ValueError(f"{folder / name} must be a regular file. Remove it, or train again.")
        experiment = reading.read_experiment(folder / "config.toml")
        return cls(folder, experiment, reading.read_schema(folder / "schema.json"))

    @classmethod
    def create(cls, folder: str | Path, experiment: Experiment, schema: Schema, *, overwrite: bool = False) -> Run:
        """Create a run folder. One that holds a run is refused, unless `overwrite` removes that run."""
        run = cls(Path(folder), experiment, schema)
        make_room(run.folder, overwrite)
        run._write_config()
        run.write_run_json("schema.json", schema.to_dict())
        return run

    @staticmethod
    def lock_new_folder(folder: str | Path) -> AbstractContextManager[None]:
        """Lock the folder of a new run; a path that is a file is refused."""
        if Path(folder).exists() and not Path(folder).is_dir():
            raise ValueError(f"{folder} is a file; a run needs a folder. Choose another --out.")
        try:
            str(Path(folder).absolute()).encode("utf-8")
        except UnicodeEncodeError:  # safetensors cannot open such a path
            raise ValueError(
                f"the path of a run must be UTF-8; got {quoted(str(folder))}. Choose another --out."
            ) from None
        return lock.lock_folder(folder)

    def settings_text(self, *comments: str) -> str:
        """Return the text of a settings file with every setting of this run, as in its config.toml."""
        lines = (migration.header_line(__version__), *comments)
        return "".join(f"{line}\n" for line in lines) + config.dump(self.experiment)

    def _write_config(self, *comments: str) -> None:
        atomic.write(self.folder / "config.toml", self.settings_text(*comments))

    def with_learning_rate(self, learning_rate: float, step: int) -> Run:
        """Return this run with another learning rate from a step on, and note the change in its config.toml."""
        training = replace(self.experiment.training, learning_rate=learning_rate)
        before, changed = self.experiment.training.learning_rate, replace(self.experiment, training=training)
        run = replace(self, experiment=changed)
        if learning_rate != before:
            note = f"training.learning_rate {learning_rate:g} from step {step}, {before:g} before"
            run._write_config(*(f"# {line}" for line in (*self.changes(), note)))
        return run

    def changes(self) -> list[str]:
        """Return the changes made when the run was resumed, from the comments in config.toml."""
        lines = reading.read_text(self.folder / "config.toml", "Train again.").splitlines()
        return [line[2:] for line in lines if line.startswith("# training.learning_rate ")]

    @property
    def output(self) -> Path:
        """The folder that commands write to: the run folder, or runs/NAME-shipped for a shipped model."""
        return output_folder(self.folder)

    def require_writable(self) -> Run:
        """Return this run; raise if it is a shipped model, which must not be changed."""
        if is_shipped(self.folder):
            raise ValueError(
                f"{self.folder.name} comes with the library and cannot be changed. Train a copy of your own: "
                f"iresnet presets prints its settings."
            )
        return self

    def with_data_folder(self, folder: str | Path | None) -> Run:
        """Return this run with another dataset directory; None keeps the one it was trained with."""
        if folder is None:
            return self
        settings = replace(self.experiment.data, folder=str(folder))
        return replace(self, experiment=replace(self.experiment, data=settings))

    def splits(self) -> Splits:
        """Load the training, validation and test data; raise if they have changed since training."""
        try:
            splits = data.load(self.experiment.data, self.schema)
        except (ValueError, OSError) as error:
            raise ValueError(f"{self.folder / 'config.toml'}: {error}") from None
        expected = self.read_json("data.json")
        if splits.schema != self.schema or (expected and expected != fingerprints(splits)):
            raise ValueError(
                f"the data of {self.folder} ({self.experiment.data.source}) have changed since it was trained, so its "
                "splits would differ. Restore them, give other data with --data, or train again."
            )
        return splits

    def untrained_model(self, rows: Tensor | None = None, validation: Tensor | None = None) -> Model:
        """Build the untrained model, initialised by torch's global generator; preprocessing is fitted to `rows`."""
        try:
            return build(self.experiment.network, self.schema, self.experiment.objective.kind, rows, validation)
        except ValueError as error:
            raise ValueError(f"{self.folder}: config.toml and schema.json do not fit: {error}") from None

    def model(self, weights: str = "model", device: str | torch.device = "cpu") -> Model:
        """Load the trained model in eval mode: `weights` is "model" (released) or "best" (as trained, untightened)."""
        if weights not in ("model", "best"):
            raise ValueError(f"weights must be 'model' or 'best'; got {weights!r}.")
        if weights == "best" and is_shipped(self.folder):
            raise ValueError(
                f"only the released weights come with the library; got 'best' for {self.folder.name}. Use 'model'."
            )
        path = self._trained(f"{weights}.safetensors")
        with torch.random.fork_rng(devices=[]), defer_norms():  # leave the user's random state unchanged
            model = self.untrained_model().eval()
        saved = self.load_checkpoint(path)
        complete = replace(saved, tensors={"weights": complete_state(model, saved.tensors.get("weights", {}))})
        what = str(self.folder / "config.toml")
        model.load_state_dict(dict(check_weights(complete, model, what=what, remedy="Train again.")))
        return model.to(device)

    def load_checkpoint(self, path: Path) -> Checkpoint:
        """Load a checkpoint of this run; raise if it was made with other network settings or another schema."""
        saved = checkpoint.load(path)
        check_made_with(saved, self.experiment, self.schema, self.folder)
        return saved

    def open_log(self, step: int, validation: list[str]) -> Log:
        """Open log.csv to write rows after this step; `validation` lists the columns of validation metrics."""
        return Log(self.folder, step, validation)

    def save_checkpoint(self, content: Checkpoint, name: str) -> None:
        """Write a checkpoint."""
        checkpoint.save(content, self.folder / name, version=__version__)

    def has_checkpoint(self, name: str) -> bool:
        """Whether a checkpoint of this name was written."""
        return (self.folder / name).exists()

    def reference(self) -> Tensor:
        """Return the log-likelihoods of validation samples, the reference for anomaly scores."""
        saved = self.load_checkpoint(self.folder / "model.safetensors")
        if "reference" not in saved.tensors:
            raise ValueError(
                "an anomaly score needs a density; this model only classifies. "
                "Train with objective.kind=hybrid or density."
            )
        values = saved.tensors["reference"].get("log_likelihood", torch.empty(0))
        expected = {"log_likelihood": values.new_zeros(max(1, values.numel()), dtype=torch.float64)}
        return check_tensors(saved, "reference", expected, what="a density", remedy="Train again.")["log_likelihood"]

    def tightened_layers(self) -> list[str]:
        """Return the names of the layers that were scaled down when the model was released."""
        saved = self.load_checkpoint(self.folder / "model.safetensors")
        names = saved.state.get("tightened", [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise saved.damaged_error(f"tightened must be a list of layer names; got {names!r:.40}")
        return names

    def best_metrics(self) -> dict[str, float]:
        """Return the step of the best averaged weights and their validation metrics."""
        saved = self.load_checkpoint(self.folder / "best.safetensors")
        return {"step": saved.read_count("step")} | {
            k: saved.read_number(k) for k in saved.state if k not in ("step", "made_with")
        }

    def log(self) -> list[dict[str, float | None]]:
        """Return the rows of log.csv."""
        path = self.folder / "log.csv"
        return reading.read_log(path) if path.is_file() else []

    def sha256(self) -> str:
        """Return the SHA-256 of the released model, computed for a model of an old version, whose file has none."""
        return checkpoint.sha256(self._trained("model.safetensors"))

    def _trained(self, name: str) -> Path:
        if not (self.folder / name).is_file():
            raise FileNotFoundError(
                f"{self.folder} has no trained model yet. Finish training: iresnet train --resume --out "
                f"{quote(str(self.folder))}"
            )
        return self.folder / name

    def read_json(self, name: str) -> dict[str, Any]:
        """Return the content of one of the run's JSON files, preferring a newer copy in `output`; empty if missing.

        Raises if the file describes other weights than those of the model.
        """
        path, content = self._json(name)
        if content and not self.read_current_json(name):
            remedy, model = ABOUT_THE_MODEL[name].format(quote(str(self.folder))), self.folder / "model.safetensors"
            if content.get(MODEL_SHA256):
                raise ValueError(f"{path} describes other weights than {model}. {remedy}")
            raise ValueError(
                f"{path} does not say which weights it describes, so nothing is proven of {model}. {remedy}"
            )
        return content

    def read_current_json(self, name: str) -> dict[str, Any]:
        """As `read_json`, but a file that describes other weights counts as missing: it is about to be rewritten.

        Metrics of old versions, without a digest, are assumed to describe this model; a certificate never is.
        """
        content = self._json(name)[1]
        about = name in ABOUT_THE_MODEL and (self.folder / "model.safetensors").is_file()
        digest = content.get(MODEL_SHA256)
        must_match = about and (bool(digest) or name == "certificate.json")
        return {} if must_match and not (digest and digest == self.sha256()) else content

    def write_json(self, name: str, content: Mapping[str, Any], sha256: str) -> Path:
        """Write a JSON file that describes the model with this digest; numbers that are not finite become null."""
        content = migration.with_format({**content, MODEL_SHA256: sha256})
        return atomic.write(
            self.output / name, json.dumps(nonfinite_to_none(content), indent=1, allow_nan=False) + "\n"
        )

    def write_run_json(self, name: str, content: Mapping[str, Any]) -> Path:
        """Write a JSON file that describes the run itself: its schema, its data, its environment."""
        return atomic.write(self.folder / name, json.dumps(migration.with_format(content), indent=1) + "\n")

    def add_missing_digests(self) -> None:
        """Add the current model's digest to files of old versions without one, before the model is replaced.

        Nothing shows that a certificate without one describes this model.
        """
        for name in ABOUT_THE_MODEL:
            with suppress(ValueError, OSError):  # a missing or damaged file cannot be mistaken for a current one
                content = reading.read_json_object(self._path(name))
                if not content.get(MODEL_SHA256):
                    self.write_json(name, content, "unknown" if name == "certificate.json" else self.sha256())

    def _json(self, name: str) -> tuple[Path, dict[str, Any]]:
        path = self._path(name)
        return path, reading.read_json_object(path) if path.is_file() else {}

    def _path(self, name: str) -> Path:
        """Return where a file is: in `output`, else in the run folder, else there under its former name."""
        former = migration.FORMER_FILES.get(name, name)
        paths = (self.output / name, self.folder / name, self.folder / former)
        return next((path for path in paths if path.is_file()), self.folder / name)


def fingerprints(splits: Splits) -> dict[str, Any]:
    """Return the content of data.json: number of samples and hash of each split."""
    return {name: fingerprint(part) for name, part in splits.parts.items()}


def fingerprint(part: Dataset) -> dict[str, Any]:
    """Return the number of samples of a split, and their hash."""
    return {"rows": part.total, "sha256": part.fingerprint()}


def load(folder: str | Path, *, device: str | torch.device = "cpu") -> Model:
    """Load the trained model of a run folder, or a shipped model, in eval mode: a Flow, Classifier or Hybrid."""
    return Run.open(folder).model(device=device)
