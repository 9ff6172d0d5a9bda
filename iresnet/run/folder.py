"""Run folders: everything about one training run, and all that later commands need.

config.toml         the experiment, every setting written out
schema.json         what a row is: shape, grey levels, columns, classes
data.json           rows of each part and a fingerprint of them
environment.json    command, commit, versions, hardware, seconds
log.csv             metrics over time; tensorboard/ holds the same where TensorBoard is installed
last.safetensors    the state of training, to go on from
best.safetensors    the averaged weights that did best on validation data, or the last ones if `select` says so
model.safetensors   the model: those weights, every layer within its bound, and the likelihoods of validation rows
certificate.json    what is proven of it
evaluation.json     its metrics on test data
reproduction.json   what a table or figure of the paper shows of it

The last three name the SHA-256 of model.safetensors, and are refused beside other weights. Whoever trains or tightens
holds a lock on the folder.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import atomic, config, data, lock, migration
from ..data import Schema, Splits
from ..lipschitz import defer_norms
from ..models import build
from ..presets import Experiment
from ..presets.reading import parse_experiment
from ..results import nonfinite_to_none
from ..spelling import quoted
from ..train import checkpoint
from ..train.checkpoint import Checkpoint, check_tensors, check_weights
from ..version import __version__
from . import reading
from .missing import explain_missing, is_run
from .weights import complete_state, is_shipped, output_folder, resolve_folder, shipped

FILES = (
    "config.toml", "schema.json", "data.json", "environment.json", "log.csv", "last.safetensors", "best.safetensors",
    "model.safetensors", "certificate.json", "evaluation.json", "reproduction.json", "report.html",
    *migration.FORMER_FILES.values(),
)  # fmt: skip

#: What speaks of the model names it by this key, and how each such file is made again.
MODEL_SHA256 = "model_sha256"
ABOUT_THE_MODEL = {
    "certificate.json": "Make it again: iresnet certify {}",
    "evaluation.json": "Make it again: iresnet evaluate {}",
    "reproduction.json": "Remove it; it can be made again.",
}


@dataclass(frozen=True)
class Run:
    """A run folder that exists: `model()` is its trained model, `splits()` its data."""

    folder: Path
    experiment: Experiment
    schema: Schema

    @classmethod
    def open(cls, folder: str | Path) -> Run:
        """The run in a folder, or the model of this name that comes with the library; or why there is none."""
        if not str(folder):
            raise ValueError(
                f"name a run folder, or a model that comes with the library ({', '.join(shipped())}); got ''."
            )
        folder = resolve_folder(Path(folder))
        if not is_run(folder):
            raise FileNotFoundError(explain_missing(folder))
        for name in FILES:  # a pipe would be waited for without end, a device read without end
            if (folder / name).exists() and not (folder / name).is_file():
                raise ValueError(f"{folder / name} must be a file; it is something else. Remove it, or train again.")
        header, _, body = reading.read_text(folder / "config.toml", "Train again.").partition("\n")
        settings = folder / "config.toml"
        written = migration.read_format(migration.parse_header_line(header), settings)
        try:
            content = json.loads((folder / "schema.json").read_text(encoding="utf-8"))
            whole = migration.migrate_json(content, folder / "schema.json") if isinstance(content, dict) else content
            schema = Schema.from_dict(whole)
        except (OSError, ValueError, RecursionError) as error:
            why = str(error).rstrip(".")
            raise ValueError(f"{folder / 'schema.json'} cannot be read: {why}. Train again.") from None
        try:
            return cls(folder, parse_experiment(body, settings, written), schema)
        except RecursionError:
            raise ValueError(f"{settings} is nested too deeply. Train again.") from None

    @classmethod
    def create(cls, folder: str | Path, experiment: Experiment, schema: Schema, *, overwrite: bool = False) -> Run:
        """A new run folder. One that holds a run is refused, or emptied of it with `overwrite`."""
        run = cls(Path(folder), experiment, schema)
        _make_room(run.folder, overwrite)
        run._write_config()
        run.write_run_json("schema.json", schema.to_dict())
        return run

    @staticmethod
    def lock_new_folder(folder: str | Path) -> AbstractContextManager[None]:
        """A lock on the folder of a run that is to be made; a file is refused."""
        if Path(folder).exists() and not Path(folder).is_dir():
            raise ValueError(f"{folder} is a file; a run needs a folder. Choose another --out.")
        try:
            str(Path(folder).absolute()).encode("utf-8")
        except UnicodeEncodeError:  # which safetensors cannot open
            raise ValueError(
                f"the path of a run must be UTF-8; got {quoted(str(folder))}. Choose another --out."
            ) from None
        return lock.lock_folder(folder)

    def _write_config(self, *comments: str) -> None:
        text = "".join(f"{line}\n" for line in (migration.header_line(__version__), *comments))
        atomic.write(self.folder / "config.toml", text + config.dump(self.experiment))

    def with_learning_rate(self, learning_rate: float, step: int) -> Run:
        """This run with another learning rate from a step on, which its config.toml says from then on."""
        training = replace(self.experiment.training, learning_rate=learning_rate)
        before, changed = self.experiment.training.learning_rate, replace(self.experiment, training=training)
        run = replace(self, experiment=changed)
        if learning_rate != before:
            note = f"training.learning_rate {learning_rate:g} from step {step}, {before:g} before"
            run._write_config(*(f"# {line}" for line in (*self.changes(), note)))
        return run

    def changes(self) -> list[str]:
        """What was changed when the run was resumed, as the comments of config.toml have it."""
        lines = reading.read_text(self.folder / "config.toml", "Train again.").splitlines()
        return [line[2:] for line in lines if line.startswith("# training.learning_rate ")]

    @property
    def output(self) -> Path:
        """Where commands put what they make: the folder, or runs/NAME-shipped for what comes with the library."""
        return output_folder(self.folder)

    def require_writable(self) -> Run:
        """This run, if it may be changed: what comes with the library stays as it is."""
        if is_shipped(self.folder):
            raise ValueError(
                f"{self.folder.name} comes with the library and stays as it is. Train a copy of your own: "
                f"iresnet presets prints its settings."
            )
        return self

    def with_data_folder(self, folder: str | Path | None) -> Run:
        """This run, its downloaded sets looked for in another folder; None: where they were when it was trained."""
        if folder is None:
            return self
        settings = replace(self.experiment.data, folder=str(folder))
        return replace(self, experiment=replace(self.experiment, data=settings))

    def splits(self) -> Splits:
        """The data it was trained, watched and is tested on; refused where they are not those any more."""
        try:
            splits = data.load(self.experiment.data)
        except (ValueError, OSError) as error:
            raise ValueError(f"{self.folder / 'config.toml'}: {error}") from None
        expected = self.read_json("data.json")
        if splits.schema != self.schema or (expected and expected != fingerprints(splits)):
            raise ValueError(
                f"the data of {self.folder} ({self.experiment.data.source}) have changed since it was trained, so the "
                "parts are not the same rows any more. Put them back, give other rows with --data, or train anew."
            )
        return splits

    def untrained_model(self, rows: Tensor | None = None) -> nn.Module:
        """The untrained model, drawn by torch's global generator; `rows` fit its scaling."""
        try:
            return build(self.experiment.network, self.schema, self.experiment.objective.kind, rows)
        except ValueError as error:
            raise ValueError(f"{self.folder}: config.toml and schema.json do not fit: {error}") from None

    def model(self, weights: str = "model", device: str | torch.device = "cpu") -> nn.Module:
        """The trained model in eval: `weights` is "model" (released) or "best" (as trained, not tightened)."""
        if weights not in ("model", "best"):
            raise ValueError(f"weights must be 'model' or 'best'; got {weights!r}.")
        if weights == "best" and is_shipped(self.folder):
            raise ValueError(
                f"only the released weights come with the library; got 'best' for {self.folder.name}. Use 'model'."
            )
        path = self._trained(f"{weights}.safetensors")
        with torch.random.fork_rng(devices=[]), defer_norms():  # a user's random numbers are not ours to change
            model = self.untrained_model().eval()
        saved = self.load_checkpoint(path)
        whole = replace(saved, tensors={"weights": complete_state(model, saved.tensors.get("weights", {}))})
        what = str(self.folder / "config.toml")
        model.load_state_dict(dict(check_weights(whole, model, what=what, remedy="Train again.")))
        return model.to(device)

    def load_checkpoint(self, path: Path) -> Checkpoint:
        """A checkpoint of this run; one that was made with another network, or for rows of another kind, is refused."""
        saved = checkpoint.load(path)
        made, here = saved.state.get("made_with", {}), self.made_with()
        for key, value in made.items() if isinstance(made, dict) else ():
            if here.get(key, value) != value:
                where = self.folder / ("schema.json" if key.startswith("schema.") else "config.toml")
                why = f"it was made with {key} = {value!r:.40}; got {here[key]!r:.40}"
                raise saved.mismatch_error(str(where), why, "Put that back, or train again.")
        return saved

    def made_with(self) -> dict[str, Any]:
        """What decides, beside the weights, which function a model is: it travels with them."""
        network = {f"network.{k}": v for k, v in config.to_mapping(self.experiment.network).items()}
        rows = {"schema.shape": list(self.schema.shape), "schema.levels": self.schema.levels}
        return {**network, "objective.kind": self.experiment.objective.kind, **rows}

    def reference(self) -> Tensor:
        """The log-likelihoods of validation rows, by which a row's anomaly is judged."""
        saved = self.load_checkpoint(self.folder / "model.safetensors")
        if "reference" not in saved.tensors:
            raise ValueError("an anomaly score needs a density; this model only classifies.")
        values = saved.tensors["reference"].get("log_likelihood", torch.empty(0))
        expected = {"log_likelihood": values.new_zeros(max(1, values.numel()), dtype=torch.float64)}
        return check_tensors(saved, "reference", expected, what="a density", remedy="Train again.")["log_likelihood"]

    def tightened_layers(self) -> list[str]:
        """The layers that were scaled down when the model was released."""
        saved = self.load_checkpoint(self.folder / "model.safetensors")
        names = saved.state.get("tightened", [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise saved.damaged_error(f"tightened must be names of layers; got {names!r:.40}")
        return names

    def best_metrics(self) -> dict[str, float]:
        """The step whose averaged weights did best on validation rows, and their figures."""
        saved = self.load_checkpoint(self.folder / "best.safetensors")
        return {"step": saved.read_count("step")} | {
            k: saved.read_number(k) for k in saved.state if k not in ("step", "made_with")
        }

    def log(self) -> list[dict[str, float | None]]:
        """The rows of log.csv."""
        path = self.folder / "log.csv"
        return reading.read_log(path) if path.is_file() else []

    def sha256(self) -> str:
        """The digest of the released model, which is empty for one from before there were any."""
        return checkpoint.sha256(self._trained("model.safetensors"))

    def _trained(self, name: str) -> Path:
        if not (self.folder / name).is_file():
            raise FileNotFoundError(
                f"{self.folder} has no trained model yet. Finish it: iresnet train --resume --out {self.folder}"
            )
        return self.folder / name

    def read_json(self, name: str) -> dict[str, Any]:
        """One of the folder's JSON files, or what a command made anew; empty where it is missing.

        What speaks of other weights than those of the model is refused.
        """
        path, content = self._json(name)
        if content and not self.read_current_json(name):
            remedy = ABOUT_THE_MODEL[name].format(self.folder)
            raise ValueError(f"{path} speaks of other weights than {self.folder / 'model.safetensors'}. {remedy}")
        return content

    def read_current_json(self, name: str) -> dict[str, Any]:
        """The same, for a file that is about to be written anew: what speaks of other weights counts as missing.

        Figures from before there were digests name no model, and are taken for this one's; a proof is not.
        """
        content, about = self._json(name)[1], name in ABOUT_THE_MODEL and (self.folder / "model.safetensors").is_file()
        named = content.get(MODEL_SHA256, "")
        binds = about and (bool(named) or name == "certificate.json")
        return {} if binds and named != self.sha256() else content

    def write_json(self, name: str, content: Mapping[str, Any], sha256: str) -> Path:
        """Write what is said of the model with this digest; None for what is no number."""
        content = migration.with_format({**content, MODEL_SHA256: sha256})
        return atomic.write(
            self.output / name, json.dumps(nonfinite_to_none(content), indent=1, allow_nan=False) + "\n"
        )

    def write_run_json(self, name: str, content: Mapping[str, Any]) -> Path:
        """Write what is said of the run itself: its rows, its data, how it was made."""
        return atomic.write(self.folder / name, json.dumps(migration.with_format(content), indent=1) + "\n")

    def add_missing_digests(self) -> None:
        """Let what was written before there were digests name the present model, which is about to be replaced."""
        for name in ABOUT_THE_MODEL:
            with suppress(ValueError, OSError):  # what is missing or damaged cannot be taken for something else
                content = reading.read_json_object(self._path(name))
                if not content.get(MODEL_SHA256):
                    self.write_json(name, content, self.sha256() or "unknown")

    def _json(self, name: str) -> tuple[Path, dict[str, Any]]:
        path = self._path(name)
        return path, reading.read_json_object(path) if path.is_file() else {}

    def _path(self, name: str) -> Path:
        """Where a file is: one that a command wrote anew, else the run's own, else one under its former name."""
        former = migration.FORMER_FILES.get(name, name)
        paths = (self.output / name, self.folder / name, self.folder / former)
        return next((path for path in paths if path.is_file()), self.folder / name)


def fingerprints(splits: Splits) -> dict[str, Any]:
    """What data.json holds: the number of rows of every part, and a hash of them."""
    parts = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    return {name: {"rows": len(part), "sha256": part.fingerprint()} for name, part in parts.items()}


def load(folder: str | Path, *, device: str | torch.device = "cpu") -> nn.Module:
    """The trained model of a run folder, or one that comes with the library, in eval: a Flow, Classifier or Hybrid."""
    return Run.open(folder).model(device=device)


def _make_room(folder: Path, overwrite: bool) -> None:
    """Take an earlier run out of a folder, where that is wanted or nothing is lost; refuse otherwise."""
    there = [name for name in (*FILES, "tensorboard") if (folder / name).exists()]
    weights = [name for name in there if name.endswith(".safetensors")]
    if weights and not overwrite:
        raise ValueError(f"{folder} holds a run already. Go on with it by --resume, or choose another --out.")
    if there and not _is_ours(folder):
        raise ValueError(f"{folder} holds files that are not a run's ({', '.join(there)}). Choose another --out.")
    for name in reversed(there):  # config.toml, by which a run is known, is the last to go
        if name == "tensorboard":
            shutil.rmtree(folder / name)
        else:
            (folder / name).unlink()


def _is_ours(folder: Path) -> bool:
    path = folder / "config.toml"
    return path.is_file() and path.read_text(encoding="utf-8", errors="replace").startswith("# iresnet ")
