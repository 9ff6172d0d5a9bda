"""How far an input may be moved before its class can change: proven from below, attacked from above.

With logits w_j . z + b_j of the code z = F(x) and K >= Lip(F), no x' can bring class j closer than the distance allows:

    (f_y - f_j)(x') >= (f_y - f_j)(x) - K ||w_y - w_j|| ||x' - x||,

so the class holds within  r(x) = min over j of (f_y - f_j)(x) / (K ||w_y - w_j||)  (Tsuzuku, Sato and Sugiyama, 2018).
K is the certificate's Lip(F), the product of a factor for every block, 1 + Lip(g), or 1 where g is a `Potential`, and
of what the scaling stretches; w is the linear map from the whole code, pooling included. Lengths are Euclidean and in
the units of x: grey levels for images, so that 36 of 255 is what other work calls 36/255. The attack (projected
gradient descent) finds changes that do change the class; what is certified it cannot touch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..branch import unconstrained_copy
from ..certificate import residual_blocks
from ..chain import Chain
from ..classifier import Classifier
from ..data import Dataset
from ..multiscale import Multiscale
from ..precision import full_precision
from ..proof import sample_norms
from ..train.objective import MISSING, bin_centres, class_vectors
from ..transform import Transform, stretch_of
from ..trust import NoBoundKnown, why_untrusted
from .classes import as_classifier, error_of, labelled, labels, logits
from .likelihood import CHUNK, check_eval

#: From where on the product of the blocks' factors makes a radius vacuous.
LARGE = 1e3

#: Layers that keep a head linear.
LINEAR = (nn.Linear, nn.Flatten, nn.Identity, nn.Dropout)

#: What is taken off for rounding in float64, relative to the numbers in a head and to radii: more than n units of the
#: last place for sums of n = 10^4 products.
ROUNDING = 1e-11


@dataclass(frozen=True)
class Robust:
    """Certified accuracy at a radius in percent, with its 95 % interval, between 0 and the accuracy under attack.

    `pixel_radius` is the radius for pixels scaled to [0, 1], where the data are images; `lipschitz` bounds Lip(F);
    `median` is that of the certified radii of all rows, None where there are none. `remark` says why nothing is
    certified, where that is so.
    """

    value: float
    low: float
    high: float
    clean: float
    attacked: float
    radius: float
    pixel_radius: float | None
    median: float | None
    lipschitz: float
    rows: int
    remark: str = ""

    def __str__(self) -> str:
        pixels = "" if self.pixel_radius is None else f" ({self.pixel_radius:.4g} for pixels in [0, 1])"
        text = (
            f"{self.value:.2f} % certified within {self.radius:g}{pixels} (95 % interval {self.low:.2f} to "
            f"{self.high:.2f} %), {self.attacked:.2f} % under attack, {self.clean:.2f} % clean; "
            + ("no radius" if self.median is None else f"median radius {self.median:.3g}")
        )
        text += f", Lip(F) <= {self.lipschitz:.3g}" if math.isfinite(self.lipschitz) else ""
        return f"{text}; {self.remark}" if self.remark else text


def robustness(
    model: nn.Module, data: Dataset, radius: float, *, steps: int = 20, restarts: int = 3, seed: int = 0
) -> Robust:
    """The share of rows whose class is right and proven to hold within `radius`, beside what an attack leaves."""
    view = _view(model)
    data = labelled(data)
    held = withstands(model, data, radius, steps=steps, restarts=restarts, seed=seed)
    radii, constant, remark = _proven(model, data)
    wrong = error_of(len(data) if radii is None else int((radii < radius).sum()), len(data))
    clean = _right(view, data)
    if radii is not None and wrong.wrong == len(data) and bool(clean.any()):
        remark = _too_far(model, data, constant, radii, bool(held.any()))
    levels = data.schema.levels
    return Robust(
        value=100 - wrong.value,
        low=100 - wrong.high,
        high=100 - wrong.low,
        clean=100 * float(clean.double().mean()),
        attacked=100 * float(held.double().mean()),
        radius=radius,
        pixel_radius=None if levels is None else radius / (levels - 1),
        median=None if radii is None else float(radii.median()),
        lipschitz=constant,
        rows=len(data),
        remark=remark,
    )


def _proven(model: nn.Module, data: Dataset) -> tuple[Tensor | None, float, str]:
    """The radii, Lip(F), and why there are none; a bound may be known where a margin is not."""
    try:
        constant = lipschitz(model, data)
    except NoBoundKnown as error:
        return None, math.inf, f"no bound is known: {error}"
    try:
        return certified_radius(model, data), constant, ""
    except NoBoundKnown:
        return None, constant, _no_margin(model, data, constant)


def _no_margin(model: nn.Module, data: Dataset, constant: float) -> str:
    head, remedy = _view(model).head, "network.head=[], and without network.bayes"
    names = [type(head).__name__]
    if isinstance(head, nn.Sequential) or hasattr(head, "layers"):
        parts = [m for name, m in head.named_modules() if "parametrizations" not in name and not isinstance(m, LINEAR)]
        names = [type(m).__name__.removesuffix("1d") for m in parts if next(m.children(), None) is None]
    if "BatchNorm" in names:
        remedy = "network.readout=lipschitz"
    anyway = f"; Lip(F) <= {constant:.2g} would make a radius vacuous anyway" if _factors(model, data) > LARGE else ""
    which = " and ".join(dict.fromkeys(names))
    return f"the head ({which}) is not linear, so no margin is read off it{anyway}. Train with {remedy}."


def _factors(model: nn.Module, data: Dataset) -> float:
    return math.prod(block.stretch(at).forward for _, block, at in residual_blocks(model, data.schema.shape))


def _too_far(model: nn.Module, data: Dataset, constant: float, radii: Tensor, stands: bool) -> str:
    """Why no row is certified: the bound, where rows stand that it could have certified, or the radius."""
    if not stands or _factors(model, data) <= LARGE:
        return f"the largest certified radius is {float(radii.max()):.3g}"
    blocks = len(list(residual_blocks(model, data.schema.shape)))
    return (
        f"the product of {blocks} factors, one a block, says nothing here: Lip(F) <= {constant:.2g} allows far more "
        'than F does. Use branch = "potential", whose factors are 1, or fewer blocks or a smaller lipschitz, and train '
        "with objective.radius."
    )


def lipschitz(model: nn.Module, data: Dataset) -> float:
    """The proven Lip(F) of a model's transform for these rows; `NoBoundKnown` where there is none."""
    view = _view(model)
    stretch = stretch_of(view.transform, data.schema.shape)
    if reason := why_untrusted(model):
        raise NoBoundKnown(reason)
    if not math.isfinite(stretch.forward):
        raise NoBoundKnown("A block has no Lipschitz bound; `certify` says which and why.")
    if not stretch.proven:
        raise NoBoundKnown(
            "A constant was asserted, or a transform is not known; a certified radius needs all of them proven. "
            "`certify` says which."
        )
    return stretch.forward


@torch.no_grad()
def certified_radius(model: nn.Module, data: Dataset) -> Tensor:
    """How far every row is proven to keep its right class, in float64 and the units of x; 0 where it is wrong.

    With a `Logit` the ball is that of inputs inside [0, levels], where the data are: its slope has no bound outside.
    Raises `NoBoundKnown` for a head that is not linear and a transform without a proven bound.
    """
    view, y = _view(model), labels(data)
    class_vectors(view.head)  # refuses the live head: a copy may have lost what makes it another function
    constant, head = lipschitz(model, data), unconstrained_copy(view.head).double()
    apart, size = _apart(class_vectors(head)), _size(head)
    radii = []
    for x, c in zip(torch.split(data.x, CHUNK), torch.split(y, CHUNK), strict=True):
        point = bin_centres(x, data.schema.levels).double()
        z, error = evaluated(view.transform, point)
        hidden = ROUNDING * size * (1 + sample_norms(z))
        radii.append(_radius(head(z), c, constant, apart, error, hidden))
    return torch.where(y == MISSING, 0.0, torch.cat(radii).clamp_min(0))


def evaluated(transform: Transform, x: Tensor) -> tuple[Tensor, Tensor]:
    """F(x) in float64, and how far rounding can have moved each: the error of every part, carried through the rest."""
    error = x.new_zeros(len(x))

    def step(part: Transform, x: Tensor) -> Tensor:
        nonlocal error
        if isinstance(part, Chain):
            for t in part:
                x = step(t, x)
            return x
        if isinstance(part, Multiscale):
            return part.run_forward(x, step)
        z, shape = part.reference(x), tuple(x.shape[1:])
        own = part.rounding(shape).residual_bound(torch.zeros_like(error), sample_norms(x) + error, sample_norms(z))
        # What has gone straight to the code by now keeps its error: no factor below one.
        error = (max(1.0, part.stretch(shape).forward) * error + own) * (1 + ROUNDING)
        return z

    return step(transform, x), error


def _size(head: nn.Module) -> float:
    """What the numbers in a linear head are at most, for a code with a norm of one: weights and biases multiplied."""
    layers = [layer for layer in head.modules() if isinstance(layer, nn.Linear)]
    return math.prod(1 + sum(float(p.norm()) for p in layer.parameters()) for layer in layers)


def _radius(logits: Tensor, y: Tensor, constant: float, apart: Tensor, error: Tensor, hidden: Tensor) -> Tensor:
    """min over j of the margin f_y - f_j by how fast it can fall, rounded down; classes that never part stay in order.

    `error` is that of the codes, `hidden` what rounding can do to logits.
    """
    y = y.clamp_min(0)
    margins = logits.gather(1, y[:, None]) - logits - 2 * hidden[:, None] - apart[y] * error[:, None]
    radii = torch.where(margins > 0, margins / (constant * apart[y]), 0.0)
    return radii.scatter(1, y[:, None], math.inf).amin(dim=1) * (1 - ROUNDING)


def _apart(v: Tensor) -> Tensor:
    """||v_i - v_j|| without cancellation, rounded up."""
    return torch.stack([(v - row).norm(dim=1) for row in v]) * (1 + ROUNDING)


def withstands(
    model: nn.Module, data: Dataset, radius: float, *, steps: int = 20, restarts: int = 3, seed: int = 0
) -> Tensor:
    """Which rows are right and stay right under projected gradient descent of so many steps from several starts.

    Every step goes 2.5 radius / steps down the gradient of f_y - max f_j, back into the ball and into the range of the
    data. The first start is x itself, the others are drawn from the ball.
    """
    check_radius(radius)
    for name, value in (("steps", steps), ("restarts", restarts)):
        if value < 1:
            raise ValueError(f"an attack needs {name} of at least 1; got {value}.")
    view, y = _view(model), labels(data)
    generator = torch.Generator(data.x.device).manual_seed(seed)
    held = _right(view, data)
    for start in range(restarts):
        for rows in torch.split(held.nonzero().flatten(), CHUNK) if bool(held.any()) else ():
            x = bin_centres(data.x[rows], data.schema.levels)
            noise = torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype) if start else None
            held[rows] = ~_fooled(view, x, y[rows], radius * (1 - 1e-6), steps, noise, data.schema.levels)
    return held


def _fooled(
    view: Classifier, x: Tensor, y: Tensor, radius: float, steps: int, noise: Tensor | None, levels: int | None
) -> Tensor:
    at = x if noise is None else _within(x, x + noise * (radius / noise.flatten(1).norm(dim=1).amax()), radius, levels)
    fooled = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    for step in range(steps + 1):
        at = at.detach().requires_grad_()
        with full_precision(x), torch.enable_grad():
            found = view(at)
            own = found.gather(1, y[:, None]).squeeze(1)
            margin = own - found.scatter(1, y[:, None], -math.inf).amax(dim=1)
        fooled |= margin.detach() < 0
        if step < steps:
            (gradient,) = torch.autograd.grad(margin.sum(), at)
            length = gradient.flatten(1).norm(dim=1).clamp_min(torch.finfo(x.dtype).tiny)
            move = gradient * (2.5 * radius / steps / length).view(-1, *[1] * (x.dim() - 1))
            at = _within(x, at.detach() - move, radius, levels)
    return fooled


def _within(x: Tensor, at: Tensor, radius: float, levels: int | None) -> Tensor:
    """The point of the ball around x, and of the range of the data, that is close to another."""
    change = at - x
    length = change.flatten(1).norm(dim=1).clamp_min(torch.finfo(x.dtype).tiny)
    at = x + change * (radius / length).clamp_max(1.0).view(-1, *[1] * (x.dim() - 1))
    return at if levels is None else at.clamp(0.5, levels - 0.5)


@torch.no_grad()
def _right(view: Classifier, data: Dataset) -> Tensor:
    try:
        found = logits(view, data)
    except (RuntimeError, ValueError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        why = str(error).splitlines()[0]
        raise ValueError(f"the model does not take rows of shape {data.schema.shape}: {why}") from None
    return found.argmax(dim=1) == labels(data)


def _view(model: nn.Module) -> Classifier:
    check_eval(model, "robustness")
    return as_classifier(model, "robustness is that of a class")


def check_radius(radius: float) -> None:
    """Refuse what is no radius."""
    if not 0 < radius < math.inf:
        raise ValueError(f"radius must be positive and finite, in the units of the data; got {radius}.")
