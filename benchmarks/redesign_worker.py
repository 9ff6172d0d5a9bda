"""Run one version of the library and answer commands over a pipe; `benchmarks/redesign.py` starts one per version.

A command is a line of JSON on standard input; its answer is a line of JSON on the original standard output. A training
waits for commands between its steps, so that the steps of two versions can alternate.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

#: Names that changed between versions; the first that can be imported is used.
TRAIN = ("iresnet.train", "iresnet.training")
MODELS = ("iresnet.models", "iresnet.architectures")
INVERSE = ("iresnet.inverse", "iresnet.inversion")
DEFER_NORMS = ("defer_norms", "unsettled")

#: The number of batches that a training cycles through; steps of a training that ends on command, for its schedule.
BATCHES, ENDLESS = 8, 10_000

#: The proven l2 error of each block's solve.
TOLERANCE = 1e-5

Command = dict[str, Any]


def named(attributes: str | tuple[str, ...], modules: tuple[str, ...]) -> Any:
    """Import an attribute, by the first of its names that one of the modules has."""
    names = (attributes,) if isinstance(attributes, str) else attributes
    for module, name in product(modules, names):
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(
        f"{' or '.join(names)} must be in one of {', '.join(modules)}. Add its new place to {Path(__file__).name}."
    )


class Pipe:
    """Receives commands and sends answers; one command can be put back for the next reader."""

    def __init__(self) -> None:
        self.answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # printed text is not an answer
        self.waiting: Command | None = None

    def receive(self) -> Command:
        """The next command; the end of the input is a command to stop."""
        command, self.waiting = self.waiting, None
        if command is None:
            line = sys.stdin.readline()
            command = json.loads(line) if line else {"do": "stop"}
        return command

    def send(self, **answer: Any) -> None:
        """Send an answer."""
        print(json.dumps(answer), file=self.answers, flush=True)


class Worker:
    """Runs commands until it receives "stop"."""

    def __init__(self, pipe: Pipe, device: str, tiny: bool) -> None:
        self.pipe, self.device, self.tiny = pipe, device, tiny
        self.model: nn.Module | None = None
        self.inverter: Any = None
        self.code = torch.empty(0)

    def run(self) -> None:
        """Run commands; an exception ends the worker with its traceback."""
        while (command := self.pipe.receive())["do"] != "stop":
            options = {key: value for key, value in command.items() if key != "do"}
            getattr(self, command["do"])(**options)

    # ------------------------------------------------------------------------------------------------- training

    def training(self, preset: str) -> None:
        """Train a preset on random samples; `steps` commands are answered from within the training loop."""
        objective, settings, samples = self.prepared(preset)
        losses: list[Tensor] = []

        def report(step: int, steps: int, found: Mapping[str, Tensor]) -> None:
            losses.append(next(iter(found.values())))

        generator = torch.Generator(self.device).manual_seed(0)
        batches = self.batches(samples, losses)
        self.model = named("train", TRAIN)(objective, batches, settings, generator=generator, report=report)
        self.pipe.send(trained=preset)

    def batches(self, samples: list[tuple[Tensor, Tensor]], losses: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield as many batches as each command requests, and answer with the losses and times of their steps."""
        self.pipe.send(ready=True)
        taken = 0
        while (command := self.pipe.receive())["do"] == "steps":
            losses.clear()
            start = self.now()
            for _ in range(command["count"]):
                yield samples[taken % len(samples)]
                taken += 1
            ms = 1e3 * (self.now() - start) / command["count"]
            self.pipe.send(ms=ms, losses=[float(loss) for loss in losses])
        if command["do"] != "finish":
            self.pipe.waiting = command

    def prepared(self, preset: str) -> tuple[nn.Module, Any, list[tuple[Tensor, Tensor]]]:
        """The objective of a preset, its settings, and batches of random samples."""
        from iresnet import presets
        from iresnet.data.source import schema_of
        from iresnet.lipschitz import refresh_

        experiment = self.scaled(presets.find(preset))
        schema, settings = schema_of(experiment.data.source), experiment.training
        drawn = torch.Generator().manual_seed(1)
        shape, classes = (BATCHES, settings.batch, *schema.shape), max(2, len(schema.classes))
        x = torch.randn(*shape, generator=drawn)
        if schema.levels is not None:
            x = torch.randint(0, schema.levels, shape, generator=drawn, dtype=torch.uint8)
        y = torch.randint(0, classes, shape[:2], generator=drawn)
        torch.manual_seed(0)
        with named(DEFER_NORMS, ("iresnet.lipschitz",))():
            model = named("build", MODELS)(experiment.network, schema, experiment.objective.kind, x[0]).to(self.device)
        refresh_(model, settle=True)
        make = getattr(experiment.objective, "build_objective", None) or experiment.objective.objective
        objective = make(model, schema.levels, experiment.data.augment).train()
        return objective, settings, [*zip(x.to(self.device), y.to(self.device), strict=True)]

    def scaled(self, experiment: Any) -> Any:
        """The preset with Adam for flows, and for a dry run with few and narrow blocks."""
        training = replace(experiment.training, steps=ENDLESS, epochs=0)
        if experiment.objective.kind == "density":
            training = replace(training, optimiser="adam")
        network = experiment.network
        if self.tiny:
            training = replace(training, batch=4)
            network = replace(network, blocks=(1,) * len(network.blocks), width=min(network.width, 8))
        return replace(experiment, network=network, training=training)

    # ------------------------------------------------------------------------------------------------- inverses

    def keep(self, path: str) -> None:
        """Save the weights of the last trained model."""
        assert self.model is not None
        torch.save(self.model.state_dict(), path)
        self.pipe.send(written=path)

    def take(self, path: str) -> None:
        """Load weights into the last trained model."""
        assert self.model is not None
        self.model.load_state_dict(torch.load(path))
        self.pipe.send(read=path)

    def sample(self, count: int) -> None:
        """Sample from the last trained flow."""
        flow: Any = self.model
        generator = torch.Generator(self.device).manual_seed(3)
        start = self.now()
        with torch.no_grad():
            x = flow.sample((count,), generator=generator)
        self.pipe.send(ms=1e3 * (self.now() - start), values=x.double().flatten().tolist())

    def weights(self, path: str, images: int) -> None:
        """Save a classifier with random weights, every layer at its coefficient and proven, and codes of images."""
        transform = self.transform()
        torch.manual_seed(2)
        shape = (images, 3, 32, 32)
        x = torch.randint(0, 256, shape).to(self.device, torch.float32) + 0.5
        from iresnet import tighten_

        with torch.no_grad():
            for name, p in transform.named_parameters():
                if name.endswith("original"):
                    p.copy_(5 * torch.randn_like(p))
                elif name.endswith("bias"):
                    p.copy_(0.1 * torch.randn_like(p))
            self.shown(transform, x)
            tighten_(transform, shape[1:])
            self.shown(transform, x)
            z = transform.reference(x)
        torch.save({"state": transform.state_dict(), "code": z.cpu()}, path)
        self.pipe.send(written=path)

    def shown(self, transform: Any, x: Tensor) -> None:
        """Initialise every ActNorm on its input, and let the norms converge."""
        from iresnet import ActNorm
        from iresnet.lipschitz import refresh_

        transform.eval()
        refresh_(transform, settle=True)
        for part in transform:
            if isinstance(part, ActNorm):
                part.initialise_(x)
            x = part(x)

    def transform(self) -> Any:
        """The transform of the paper's classifier."""
        model: Any = self.prepared("iresnet164")[0].model
        return model.transform

    def inverse(self, weights: str, path: str) -> None:
        """Prepare the inverse of a saved classifier, and save its solution and bounds."""
        transform, content = self.transform().eval(), torch.load(weights)  # eval() first, since it recomputes norms
        transform.load_state_dict(content["state"])
        self.code = content["code"].to(self.device)
        start = self.now()
        self.inverter = named("Inverter", INVERSE)(transform, self.code, tolerance=TOLERANCE)
        seconds, solution = self.now() - start, self.inverter.solve(self.code)
        names = ("x", "largest_block_bound", "composed_bound", "code_residual", "converged")
        torch.save({name: getattr(solution, name).double().cpu() for name in names}, path)
        self.pipe.send(seconds=seconds, reason=self.inverter.reason)

    def solve(self, repeats: int) -> None:
        """Time the last prepared inverse."""
        start = self.now()
        for _ in range(repeats):
            self.inverter.solve(self.code)
        self.pipe.send(ms=1e3 * (self.now() - start) / repeats)

    # ------------------------------------------------------------------------------------------------- other commands

    def demo(self) -> None:
        """Run what `make demo` runs, without its output."""
        from iresnet.demo import digits

        with tempfile.TemporaryDirectory() as folder:
            start = self.now()
            result = digits.run(Path(folder) / "run", digits.experiment(0, 20 if self.tiny else None))
            seconds = self.now() - start
        assert result is not None
        self.pipe.send(ms=1e3 * seconds, error=result.error.value, bits=result.density.value)

    def reference(self) -> None:
        """Compute the values that tests/reference records."""
        from tools import reference

        names, trained = reference.STEPS, reference.TRAINED
        steps = {name: reference.step(name) for name in (names[:1] if self.tiny else names)}
        losses = {name: reference.losses(name) for name in (trained[:1] if self.tiny else trained)}
        self.pipe.send(steps=steps, losses=losses)

    def now(self) -> float:
        """The time in seconds, after the device has finished."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def main(arguments: list[str]) -> None:
    """Answer commands with the version that Python imports; the arguments are DEVICE THREADS TINY."""
    device, threads, tiny = arguments
    if int(threads):
        torch.set_num_threads(int(threads))
    Worker(Pipe(), device, tiny == "tiny").run()


if __name__ == "__main__":
    main(sys.argv[1:])
