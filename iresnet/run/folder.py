"""Run folders: everything about one training run, and all that later commands need.

config.toml         the experiment, every setting written out
schema.json         what a row is: shape, grey levels, columns, classes
data.json           rows of each part and a fingerprint of them
environment.json    command, commit, versions, hardware, seconds
log.csv             figures over time; tensorboard/ holds the same where TensorBoard is installed
last.safetensors    the state of training, to go on from
best.safetensors    the averaged weights that did best on validation data, or the last ones if `select` says so
model.safetensors   the model: those weights, every layer within its bound, and the likelihoods of validation rows
certificate.json    what is proven of it
judgement.json      what a table or figure of the paper shows of it
"""

from __future__ import annotations

import csv
import io
import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import atomic, checkpoint, config, data
from ..architectures import build
from ..data import Schema, Splits
from ..lipschitz import unsettled
from ..presets import Experiment
from ..version import __version__
from .weights import completed, is_shipped, meant, output_of, resolve, shipped

FILES = (
    "config.toml", "schema.json", "data.json", "environment.json", "log.csv", "last.safetensors", "best.safetensors",
    "model.safetensors", "certificate.json", "evaluation.json", "judgement.json", "report.html",
)  # fmt: skip


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
        folder = resolve(Path(folder))
        if not (folder / "config.toml").is_file():
            what = "is not a run folder: it has no config.toml" if folder.is_dir() else f"does not exist{meant(folder)}"
            end = "" if what.endswith("?") else "."
            raise FileNotFoundError(f"{folder} {what}{end} Train first: iresnet train digits-hybrid --out {folder}")
        text = (folder / "config.toml").read_text(encoding="utf-8")
        header, _, body = text.partition("\n")
        _check_header(header, folder)
        try:
            schema = Schema.from_dict(json.loads((folder / "schema.json").read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise ValueError(f"{folder / 'schema.json'} cannot be read: {error}. Train again.") from None
        return cls(folder, config.parse(Experiment, body, str(folder / "config.toml")), schema)

    @classmethod
    def create(cls, folder: str | Path, experiment: Experiment, schema: Schema, *, overwrite: bool = False) -> Run:
        """A new run folder. One that holds a run is refused, or emptied of it with `overwrite`."""
        folder = Path(folder)
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{folder} is a file; a run needs a folder. Choose another --out.")
        _make_room(folder, overwrite)
        run = cls(folder, experiment, schema)
        atomic.write(folder / "config.toml", f"{_header()}\n{config.dump(experiment)}")
        atomic.write(folder / "schema.json", json.dumps(schema.to_dict(), indent=1) + "\n")
        return run

    @property
    def output(self) -> Path:
        """Where commands put what they make: the folder, or runs/NAME-shipped for what comes with the library."""
        return output_of(self.folder)

    def own(self) -> Run:
        """This run, if it may be changed: what comes with the library stays as it is."""
        if is_shipped(self.folder):
            raise ValueError(
                f"{self.folder.name} comes with the library and stays as it is. Train a copy of your own: "
                f"iresnet presets prints its settings."
            )
        return self

    def with_data_in(self, folder: str | Path | None) -> Run:
        """This run, its downloaded sets looked for in another folder; None: where they were when it was trained."""
        if folder is None:
            return self
        settings = replace(self.experiment.data, folder=str(folder))
        return replace(self, experiment=replace(self.experiment, data=settings))

    def splits(self) -> Splits:
        """The data it was trained, watched and is tested on; refused where they are not those any more."""
        splits = data.load(self.experiment.data)
        expected = self.read_json("data.json")
        if splits.schema != self.schema or (expected and expected != fingerprints(splits)):
            raise ValueError(
                f"the data of {self.folder} ({self.experiment.data.source}) have changed since it was trained, so the "
                "parts are not the same rows any more. Put them back, give other rows with --data, or train anew."
            )
        return splits

    def blank(self, rows: Tensor | None = None) -> nn.Module:
        """The untrained model, drawn by torch's global generator; `rows` fit its scaling."""
        return build(self.experiment.network, self.schema, self.experiment.objective.kind, rows)

    def model(self, weights: str = "model", device: str | torch.device = "cpu") -> nn.Module:
        """The trained model in eval: `weights` is "model" (released) or "best" (as trained, not tightened)."""
        if weights not in ("model", "best"):
            raise ValueError(f"weights must be 'model' or 'best'; got {weights!r}.")
        if weights == "best" and is_shipped(self.folder):
            raise ValueError(
                f"only the released weights come with the library; got 'best' for {self.folder.name}. Use 'model'."
            )
        path = self.folder / f"{weights}.safetensors"
        if not path.is_file():
            raise FileNotFoundError(
                f"{self.folder} has no trained model yet. Finish it: iresnet train --resume --out {self.folder}"
            )
        with torch.random.fork_rng(devices=[]), unsettled():  # a user's random numbers are not ours to change
            model = self.blank().eval()
        try:
            model.load_state_dict(completed(model, checkpoint.load(path).tensors["weights"]))
        except (KeyError, RuntimeError) as error:
            raise ValueError(f"{path} does not fit {self.folder / 'config.toml'}: {error}. Train again.") from None
        return model.to(device)

    def reference(self) -> Tensor:
        """The log-likelihoods of validation rows, by which a row's anomaly is judged."""
        tensors = checkpoint.load(self.folder / "model.safetensors").tensors
        if "reference" not in tensors:
            raise ValueError("an anomaly score needs a density; this model only classifies.")
        return tensors["reference"]["log_likelihood"]

    def tightened(self) -> list[str]:
        """The layers that were scaled down when the model was released."""
        return list(checkpoint.load(self.folder / "model.safetensors").state.get("tightened", []))

    def best(self) -> dict[str, float]:
        """The step whose averaged weights did best on validation rows, and their figures."""
        return dict(checkpoint.load(self.folder / "best.safetensors").state)

    def log(self) -> list[dict[str, float | None]]:
        """The rows of log.csv."""
        path = self.folder / "log.csv"
        if not path.is_file():
            return []
        try:
            rows = list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8")), strict=True))
            return [{key: float(value) if value else None for key, value in row.items()} for row in rows]
        except (ValueError, TypeError, csv.Error) as error:
            raise ValueError(f"{path} is damaged: {error}. Remove it; the model does not need it.") from None

    def read_json(self, name: str) -> dict[str, Any]:
        """One of the folder's JSON files, or what a command made anew; empty where it is missing."""
        path = self.output / name if (self.output / name).is_file() else self.folder / name
        if not path.is_file():
            return {}
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(content, dict):
                raise ValueError("it is no object")
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}. Remove it; it can be made again.") from None
        return content


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
    for name in there:
        if name == "tensorboard":
            shutil.rmtree(folder / name)
        else:
            (folder / name).unlink()


def _is_ours(folder: Path) -> bool:
    path = folder / "config.toml"
    return path.is_file() and path.read_text(encoding="utf-8", errors="replace").startswith("# iresnet ")


def _header() -> str:
    return f"# iresnet {__version__}, format {checkpoint.FORMAT}"


def _check_header(line: str, folder: Path) -> None:
    words = line.replace(",", "").split()
    header: dict[str, Any] = {}
    if len(words) == 5 and words[:2] == ["#", "iresnet"] and words[4].isdigit():
        header = {"iresnet": words[2], "format": int(words[4])}
    checkpoint.check_format(header, folder / "config.toml")
