"""Read the parts of a checkpoint that training resumes from, each checked: weights, average, optimiser, generators.

Fused optimisers index memory by the shape of the weights alone, so state of another shape would be written out of
bounds. Nothing is loaded before all of a checkpoint is known to fit.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from .checkpoint import Checkpoint, check_tensors, check_weights

#: The tensors that each optimiser keeps per parameter, and those among them that may be negative.
OPTIMISER_STATE = {
    "adam": ("step", "exp_avg", "exp_avg_sq"),
    "adamax": ("step", "exp_avg", "exp_inf"),
    "sgd": ("momentum_buffer",),
}
SIGNED = (".exp_avg", ".momentum_buffer")

#: Size of the state of a CUDA generator, in bytes.
CUDA_STATE = 16

#: Used in messages: what the checkpoint does not fit, and the remedy.
FIT = {"what": "this model", "remedy": "Resume with the settings it was made with."}


def read_weights(checkpoint: Checkpoint, model: nn.Module) -> dict[str, Tensor]:
    """Return the live weights."""
    return dict(check_weights(checkpoint, model, **FIT))


def read_average(checkpoint: Checkpoint, model: nn.Module) -> Mapping[str, Tensor] | None:
    """Return the averaged weights; None for a checkpoint of step 0, which has none."""
    if "average" not in checkpoint.tensors and not checkpoint.read_count("step"):
        return None
    return check_tensors(checkpoint, "average", dict(model.named_parameters()), **FIT)


def read_optimiser_state(
    checkpoint: Checkpoint, optimiser: torch.optim.Optimizer, kind: str
) -> dict[int, dict[str, Tensor]]:
    """Return the optimiser's state by parameter index: all tensors of its kind, in the shape of the parameter."""
    made_with = checkpoint.state.get("optimiser", kind)
    if made_with != kind:
        raise ValueError(f"{checkpoint} was made with the optimiser {made_with!s:.40}; got {kind}. {FIT['remedy']}")
    owners = {str(i): p for i, p in enumerate(p for group in optimiser.param_groups for p in group["params"])}
    found = checkpoint.tensors.get("optimiser", {})
    if not found and kind != "sgd" and checkpoint.read_count("step"):
        raise checkpoint.damaged_error("the optimiser's state is missing")
    check_tensors(checkpoint, "optimiser", _expected(found, owners, kind), **FIT)
    entries: dict[int, dict[str, Tensor]] = {}
    for key, value in found.items():
        if not key.endswith(SIGNED) and bool((value < 0).any()):
            raise checkpoint.damaged_error(f"optimiser/{key} must not be negative")
        index, _, name = key.partition(".")
        # A file does not store the memory layout, and the state must have the layout of its parameter.
        like = value if name == "step" else owners[index]
        entries.setdefault(int(index), {})[name] = torch.empty_like(like, device=value.device).copy_(value)
    return entries


def _expected(found: Mapping[str, Tensor], owners: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    """Return templates for the state of each parameter that has any; one without a gradient has none."""
    held = [index for index in dict.fromkeys(key.partition(".")[0] for key in found) if index in owners]
    step = torch.zeros((), dtype=torch.float64)
    return {f"{i}.{name}": step if name == "step" else owners[i] for i in held for name in OPTIMISER_STATE[kind]}


def read_generator_states(checkpoint: Checkpoint, mine: torch.Generator | None) -> list[tuple[torch.Generator, Tensor]]:
    """Return (generator, state to set) pairs: torch's global one, used by dropout on a CPU, and that of training.

    The generator state of another device has another size; it is skipped, and the noise starts from the seed.
    """
    found, cpu = checkpoint.tensors.get("generator", {}), torch.get_rng_state()
    expected = {"global": cpu} if "global" in found else {}
    if (state := found.get("state")) is not None:
        expected["state"] = cpu.new_empty(CUDA_STATE if state.numel() == CUDA_STATE else len(cpu))
    check_tensors(checkpoint, "generator", expected, **FIT)
    pairs = [(torch.default_generator, found["global"].cpu())] if "global" in found else []
    if mine is not None and state is not None and len(state) == len(mine.get_state()):
        pairs.append((mine, state.cpu()))
    for generator, content in pairs:
        try:
            torch.Generator(generator.device).set_state(content)
        except RuntimeError as error:
            raise checkpoint.damaged_error(f"a generator state is invalid, {str(error).splitlines()[0]}") from None
    return pairs
