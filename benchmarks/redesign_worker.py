"""One version of the library, asked over a pipe: `benchmarks/redesign.py` starts one of these for each version.

A command is a line of JSON on the standard input, its answer a line of JSON on what was the standard output. A training
waits for commands between its steps, so that two versions can be asked in turn, each in the middle of its own.
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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

#: What has had several names; the first that can be imported is taken.
TRAIN = ("iresnet.train", "iresnet.training")
MODELS = ("iresnet.models", "iresnet.architectures")
INVERSE = ("iresnet.inverse", "iresnet.inversion")

#: Batches that a training goes round in; steps of a training that nothing ends, as far as its learning rate goes.
BATCHES, ENDLESS = 8, 10_000

#: Proven l2 error of every block's solve.
TOLERANCE = 1e-5

Command = dict[str, Any]


def named(attribute: str, modules: tuple[str, ...]) -> Any:
    """An attribute of the first of these modules that has it."""
    for module in modules:
        try:
            return getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError):
            continue
    raise ImportError(
        f"{attribute} must be in one of {', '.join(modules)}. Name its new place in {Path(__file__).name}."
    )


class Pipe:
    """Commands in, answers out; one command can be put back for whoever comes next."""

    def __init__(self) -> None:
        self.answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # whatever is printed is no answer
        self.waiting: Command | None = None

    def receive(self) -> Command:
        """The next command; the end of the input is a command to stop."""
        command, self.waiting = self.waiting, None
        if command is None:
            line = sys.stdin.readline()
            command = json.loads(line) if line else {"do": "stop"}
        return command

    def send(self, **answer: Any) -> None:
        """An answer."""
        print(json.dumps(answer), file=self.answers, flush=True)


class Worker:
    """Does what it is told until it is told to stop."""

    def __init__(self, pipe: Pipe, device: str, tiny: bool) -> None:
        self.pipe, self.device, self.tiny = pipe, device, tiny
        self.model: nn.Module | None = None
        self.inverter: Any = None
        self.code = torch.empty(0)

    def run(self) -> None:
        """Answer commands; what fails ends the worker with its traceback."""
        while (command := self.pipe.receive())["do"] != "stop":
            options = {key: value for key, value in command.items() if key != "do"}
            getattr(self, command["do"])(**options)

    # ------------------------------------------------------------------------------------------------- training

    def training(self, preset: str) -> None:
        """Train a preset on random rows from its seed on; `steps` commands are answered from within."""
        objective, settings, rows = self.prepared(preset)
        figures: list[Tensor] = []

        def report(step: int, steps: int, found: Mapping[str, Tensor]) -> None:
            figures.append(next(iter(found.values())))

        generator = torch.Generator(self.device).manual_seed(0)
        batches = self.batches(rows, figures)
        self.model = named("train", TRAIN)(objective, batches, settings, generator=generator, report=report)
        self.pipe.send(trained=preset)

    def batches(self, rows: list[tuple[Tensor, Tensor]], figures: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """As many batches as each command asks for, and the losses and milliseconds of their steps as its answer."""
        self.pipe.send(ready=True)
        taken = 0
        while (command := self.pipe.receive())["do"] == "steps":
            figures.clear()
            start = self.now()
            for _ in range(command["count"]):
                yield rows[taken % len(rows)]
                taken += 1
            ms = 1e3 * (self.now() - start) / command["count"]
            self.pipe.send(ms=ms, losses=[float(f) for f in figures])
        if command["do"] != "finish":
            self.pipe.waiting = command

    def prepared(self, preset: str) -> tuple[nn.Module, Any, list[tuple[Tensor, Tensor]]]:
        """The objective of a preset, its settings and batches of random rows."""
        from iresnet import presets
        from iresnet.data.source import schema_of
        from iresnet.lipschitz import refresh_, unsettled

        experiment = self.scaled(presets.find(preset))
        schema, settings = schema_of(experiment.data.source), experiment.training
        drawn = torch.Generator().manual_seed(1)
        shape, classes = (BATCHES, settings.batch, *schema.shape), max(2, len(schema.classes))
        x = torch.randn(*shape, generator=drawn)
        if schema.levels is not None:
            x = torch.randint(0, schema.levels, shape, generator=drawn, dtype=torch.uint8)
        y = torch.randint(0, classes, shape[:2], generator=drawn)
        torch.manual_seed(0)
        with unsettled():
            model = named("build", MODELS)(experiment.network, schema, experiment.objective.kind, x[0]).to(self.device)
        refresh_(model, settle=True)
        make = getattr(experiment.objective, "build_objective", None) or experiment.objective.objective
        objective = make(model, schema.levels, experiment.data.augment).train()
        return objective, settings, [*zip(x.to(self.device), y.to(self.device), strict=True)]

    def scaled(self, experiment: Any) -> Any:
        """A preset with the optimiser that flows are timed with, and for a rehearsal with few and narrow blocks."""
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
        """Write the weights of the model that was trained last."""
        assert self.model is not None
        torch.save(self.model.state_dict(), path)
        self.pipe.send(written=path)

    def take(self, path: str) -> None:
        """Give it those weights."""
        assert self.model is not None
        self.model.load_state_dict(torch.load(path))
        self.pipe.send(read=path)

    def sample(self, count: int) -> None:
        """Draw from the flow that was trained last."""
        flow: Any = self.model
        generator = torch.Generator(self.device).manual_seed(3)
        start = self.now()
        with torch.no_grad():
            x = flow.sample((count,), generator=generator)
        self.pipe.send(ms=1e3 * (self.now() - start), values=x.double().flatten().tolist())

    def weights(self, path: str, images: int) -> None:
        """Write a classifier of random weights, every layer at its coefficient and proven, and codes of images."""
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
        """Let every ActNorm be set by its input, and norms converge."""
        from iresnet import ActNorm
        from iresnet.lipschitz import refresh_

        transform.eval()
        refresh_(transform, settle=True)
        for part in transform:
            if isinstance(part, ActNorm):
                part.initialise_(x)
            x = part(x)

    def transform(self) -> Any:
        """That of the paper's classifier."""
        model: Any = self.prepared("iresnet164")[0].model
        return model.transform

    def inverse(self, weights: str, path: str) -> None:
        """Prepare the inverse of a classifier in a file, and write what it gives and what is proven of that."""
        transform, content = self.transform().eval(), torch.load(weights)  # in eval before: that settles norms anew
        transform.load_state_dict(content["state"])
        self.code = content["code"].to(self.device)
        start = self.now()
        self.inverter = named("Inverter", INVERSE)(transform, self.code, tolerance=TOLERANCE)
        seconds, solution = self.now() - start, self.inverter.solve(self.code)
        names = ("x", "largest_block_bound", "composed_bound", "code_residual", "converged")
        torch.save({name: getattr(solution, name).double().cpu() for name in names}, path)
        self.pipe.send(seconds=seconds, reason=self.inverter.reason)

    def solve(self, repeats: int) -> None:
        """Time the inverse that was prepared last."""
        start = self.now()
        for _ in range(repeats):
            self.inverter.solve(self.code)
        self.pipe.send(ms=1e3 * (self.now() - start) / repeats)

    # ------------------------------------------------------------------------------------------------- the rest

    def demo(self) -> None:
        """What `make demo` does, without the screen."""
        from iresnet.demo import digits

        with tempfile.TemporaryDirectory() as folder:
            start = self.now()
            outcome = digits.run(Path(folder) / "run", digits.experiment(0, 20 if self.tiny else None))
            seconds = self.now() - start
        assert outcome is not None
        self.pipe.send(ms=1e3 * seconds, error=outcome.error.value, bits=outcome.density.value)

    def reference(self) -> None:
        """What this version computes of what tests/reference records."""
        from tools import reference

        names, trained = reference.STEPS, reference.TRAINED
        steps = {name: reference.step(name) for name in (names[:1] if self.tiny else names)}
        losses = {name: reference.losses(name) for name in (trained[:1] if self.tiny else trained)}
        self.pipe.send(steps=steps, losses=losses)

    def now(self) -> float:
        """Seconds, after all that was launched is done."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def main(arguments: list[str]) -> None:
    """Answer commands about the version that Python finds: DEVICE THREADS TINY."""
    device, threads, tiny = arguments
    if int(threads):
        torch.set_num_threads(int(threads))
    Worker(Pipe(), device, tiny == "tiny").run()


if __name__ == "__main__":
    main(sys.argv[1:])
