"""The settings of a network, with the values that each may have. `build` turns them into a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias, get_args

from ..allowed import Rule, check_settings, in_interval, max_entries, maximum, minimum, positive
from ..logdet import Probe
from ..transforms.coupling import MAX_LOG_SCALE

Family: TypeAlias = Literal[
    "iresnet", "resnet", "resnet-plain", "glow", "glow-additive", "realnvp", "nice", "irevnet", "made", "maf", "ffjord",
]  # fmt: skip
ActivationName: TypeAlias = Literal["elu", "lipswish", "maxmin", "sine", "relu", "softplus", "tanh"]
Preprocessing: TypeAlias = Literal["logit", "standardise", "centre"]
ReadoutName: TypeAlias = Literal["linear", "batchnorm", "lipschitz"]

FAMILIES: tuple[str, ...] = get_args(Family)
ACTIVATIONS: tuple[str, ...] = get_args(ActivationName)
#: Monotone activations, which a potential needs.
MONOTONE = ("elu", "relu", "softplus", "tanh")
PREPROCESSING: tuple[str, ...] = get_args(Preprocessing)
READOUTS: tuple[str, ...] = get_args(ReadoutName)

#: Families with affine couplings.
AFFINE = ("glow", "realnvp")

#: Families whose scales halve an image.
HALVING = ("iresnet", "glow", "glow-additive", "realnvp", "irevnet")

#: For families without residual blocks: what their inverse is, and why there is nothing to certify.
_FORMULA = "its inverse is a formula, and no block is a contraction; `iresnet invert` computes the error per sample."
_ZUKO = "its inverse is zuko's, and no block is a contraction; `iresnet invert` measures the error per sample."
INVERSES = {
    **dict.fromkeys(("resnet", "resnet-plain"), "an ordinary ResNet has no inverse to prove."),
    **dict.fromkeys(("glow", "glow-additive", "realnvp"), _FORMULA),
    **dict.fromkeys(("nice", "irevnet"), f"it preserves volume, {_FORMULA}"),
    **dict.fromkeys(("made", "maf", "ffjord"), _ZUKO),
}


@dataclass(frozen=True)
class Network:
    """The settings of a network; docs/reference/settings.md lists them in a table."""

    # ------------------------------------------------------------------------------------------------ architecture

    #: "iresnet": invertible residual blocks. "resnet" and "resnet-plain": ordinary ResNets of bottlenecks without an
    #: inverse, with activations before (pre-activation) or after each layer. The others are flows to compare with.
    family: Family = "iresnet"
    #: The number of residual blocks per scale. Each scale of an image begins with a squeeze; a table has one scale.
    blocks: Annotated[
        tuple[Annotated[int, maximum(1_000)], ...],
        Rule(lambda blocks: min(blocks, default=0) >= 1, "must list at least one block for every scale"),
        max_entries(16),
    ] = (4, 4)
    #: Whether the first scale of an image begins with a squeeze too.
    squeeze_first: bool = True

    # ---------------------------------------------------------------------------------------- the branch g of a block

    #: "chain": layers one after another. "potential": one layer, an activation and the transposed layer, so that no
    #: block stretches. "dense": each layer but the last appends `width` channels to its input.
    branch: Literal["chain", "potential", "dense"] = "chain"
    #: Hidden channels or units; 0: as many as the input of the scale has. For a resnet: the width of the first stage;
    #: 0: 16.
    width: Annotated[
        int, Rule(lambda width: width >= 0, "must be at least 1, or 0 for that of the scale"), maximum(2**14)
    ] = 64
    #: The kernel sizes of the convolutions (images).
    kernels: Annotated[tuple[Annotated[int, maximum(99)], ...], max_entries(100)] = (3, 1, 3)
    #: The number of hidden layers (tables and the tail).
    depth: Annotated[int, minimum(1), maximum(100)] = 2
    #: Whether the layers are constrained so that Lip(g) <= `lipschitz`. Without it nothing is proven.
    constrained: bool = True
    #: The bound on Lip(g).
    lipschitz: Annotated[float, in_interval("(0, 1)", remedy="A block with 1 has no inverse.")] = 0.9
    #: How training computes the norm of a layer of g, to scale it down: "power-iteration", an estimate from below, as
    #: in the paper; "gram-iteration", an upper bound, with which no layer ever exceeds its coefficient; or "auto": the
    #: upper bound for linear layers of up to 128 inputs or outputs, where it costs as little, otherwise the estimate.
    norm: Literal["auto", "power-iteration", "gram-iteration"] = "auto"
    #: The iterations per step, unless norm is "auto"; 0: 1 of power iteration, 6 of Gram iteration.
    norm_iterations: Annotated[int, minimum(0), maximum(100)] = 0
    #: The activation between the layers.
    activation: ActivationName = "elu"
    #: The frequency of the activation "sine".
    frequency: Annotated[float, maximum(1_000)] = 2.0
    #: Whether an activation comes before the first layer too.
    preactivation: bool = False
    #: The initial norm of every layer, relative to its coefficient; 0: that of torch's initial weights, which is small
    #: for wide layers, and the constraint scales weights down, never up.
    initial_norm: Annotated[float, in_interval("[0, 1]")] = 0.0
    #: A factor for the initial weights of the last layer.
    last_scale: Annotated[float, in_interval("(0, 1]", remedy="At 0 no gradient passes it.")] = 1.0
    #: "actnorm": an ActNorm before every block. "batchnorm": BatchNorm before every activation (unconstrained g only).
    #: "none": no normalisation.
    normalisation: Literal["actnorm", "batchnorm", "none"] = "actnorm"

    # ------------------------------------------------------------------------------------------------ preprocessing

    #: The preprocessing of images: "logit", "standardise" (mean 0, variance 1 per channel) or "centre" (to
    #: [-1/2, 1/2]). Tables are always standardised.
    preprocessing: Preprocessing = "logit"
    #: For tables: the most pieces of a monotone spline per column, which makes the column nearly normal; 0: columns are
    #: only standardised. Splines are fitted before training, and left out where validation samples do not need them.
    spline_bins: Annotated[int, minimum(0), maximum(1_000)] = 0
    #: The margin of the logit: pixels are mapped to [alpha, 1 - alpha] first.
    alpha: float = 0.05
    #: The number of channels of zeros that are appended to the input (classification only).
    padding: Annotated[int, minimum(0), maximum(2**14)] = 0

    # -------------------------------------------------------------------------------------------- between the blocks

    #: Whether every scale has an invertible 1x1 convolution before its blocks.
    mixing: bool = False
    #: Whether that convolution is initialised to the principal axes of the first batch.
    principal: bool = False
    #: Whether half of the channels go straight to the code after each scale but the last.
    factor_out: bool = False
    #: The number of fully connected blocks at the end, which act on the whole code; they are never dense.
    tail: Annotated[int, minimum(0), maximum(1_000)] = 0
    #: The hidden units of these blocks.
    tail_width: Annotated[int, minimum(1), maximum(2**14)] = 128

    #: The bound on |s| of affine couplings, which scale by exp(s) (Glow, Real NVP). A deep flow needs a small one.
    max_log_scale: Annotated[float, positive] = MAX_LOG_SCALE

    # ------------------------------------------------------------------------------------------ the base of a density

    #: "diagonal": every number of the code has a scale of its own. "full": covariances, fitted by EM before training.
    covariance: Literal["diagonal", "full"] = "diagonal"
    #: The number of normals in the base; more than one form a mixture. With covariance = "full" there is one more, a
    #: wide one for outliers, and 0 means as many as suit the validation samples best.
    components: Annotated[int, minimum(0), maximum(10_000)] = 1
    #: Whether mean and scale of a single normal, or a mixture with full covariances, are learned.
    learned_base: bool = True
    #: For hybrids: the base has one component per class, and its posterior replaces the head.
    bayes: bool = False

    # ----------------------------------------------------------------------------------------- the head of a classifier

    #: "linear": unconstrained layers. "batchnorm": BatchNorm and ELU first. "lipschitz": layers with norm below 1.
    readout: ReadoutName = "linear"
    #: The hidden widths of the head; empty for a linear head.
    head: Annotated[
        tuple[Annotated[int, maximum(2**16)], ...],
        Rule(lambda head: all(width >= 1 for width in head), "must list widths of at least 1"),
        max_entries(100),
    ] = ()
    #: The dropout probability in the head.
    dropout: Annotated[float, in_interval("[0, 1)")] = 0.0
    #: Whether the code is averaged over positions before the head.
    pool: bool = False

    # ---------------------------------------------------------------------------------------- the loss of a density

    #: The estimator of the log-determinant in training; "auto": exact up to 8 dimensions, otherwise a series.
    estimator: Literal["auto", "series", "roulette", "exact"] = "auto"
    #: The number of terms of the series, or of those that the roulette always computes.
    terms: Annotated[int, minimum(1), maximum(1_000)] = 6
    #: The random vectors that estimate its traces: "rademacher" (signs), with less variance; or "gaussian", as in the
    #: paper.
    probe: Probe = "rademacher"
    #: The width of a network that learns the dequantisation noise with the density; 0: uniform noise.
    dequantiser: Annotated[int, minimum(0), maximum(2**14)] = 0

    def __post_init__(self) -> None:
        check_settings(self)
        self._check_together()

    def check_size(self, height: int, width: int) -> None:
        """Refuse images that cannot be halved as often as the scales need, with sizes near theirs that can."""
        if self.family not in HALVING:
            return
        whole = self.family in ("realnvp", "irevnet") or not self.squeeze_first  # the first scale does not halve
        factor = 2 ** (len(self.blocks) - whole)
        if height % factor or width % factor:
            side = min(height, width)
            sizes = [str(n) for n in (side // factor * factor, -(-side // factor) * factor) if n]
            raise ValueError(
                f"every entry of blocks{' but the first' if whole else ''} halves the image, so height and width must "
                f"be multiples of {factor}; got {height} x {width}. Resize the images of a folder to a size that is, "
                f"with --set data.size={' or '.join(dict.fromkeys(sizes))}, or give blocks fewer entries."
            )

    def _check_together(self) -> None:
        """Refuse combinations of settings that contradict each other."""
        if self.normalisation == "batchnorm" and self.constrained and self.family == "iresnet":
            raise ValueError(
                "normalisation 'batchnorm' has no Lipschitz bound, so it needs constrained = false; got true. "
                "Use 'actnorm' for a network that is proven invertible."
            )
        if self.norm == "auto" and self.norm_iterations:
            raise ValueError(
                f"norm_iterations needs a norm that it counts, 'power-iteration' or 'gram-iteration'; got "
                f"{self.norm_iterations} with 'auto'. Set norm, or set norm_iterations = 0."
            )
        if self.norm == "gram-iteration" and self.norm_iterations == 1:
            raise ValueError("norm 'gram-iteration' needs norm_iterations of at least 2, or 0 for its default; got 1.")
        if self.initial_norm and not (self.constrained and self.family == "iresnet"):
            raise ValueError(
                f'initial_norm is relative to a coefficient, so it needs constrained = true and family = "iresnet"; '
                f"got {self.initial_norm} without. Set initial_norm = 0."
            )
        if self.max_log_scale != MAX_LOG_SCALE and self.family not in AFFINE:
            raise ValueError(
                f"max_log_scale is a bound on affine couplings, which the family {self.family} does not have; got "
                f"{self.max_log_scale}. Leave it out, or use the family {' or '.join(AFFINE)}."
            )
        if self.readout == "lipschitz" and self.dropout:
            raise ValueError(
                f"readout 'lipschitz' needs dropout = 0, since dropout has no Lipschitz bound; got {self.dropout}."
            )
        if self.principal and not self.mixing:
            raise ValueError("principal needs mixing = true, whose convolutions it initialises; got mixing = false.")
        if self.components == 0 and self.covariance == "diagonal":
            raise ValueError('components must be at least 1 unless covariance = "full"; got 0.')
        if self.tail and self.pool:
            raise ValueError(f"pool needs tail = 0: a tail leaves no positions to pool; got {self.tail}.")
        if self.branch == "potential":
            self._check_potential()
        if self.branch == "dense":
            self._check_fixed("dense", (("preactivation", False), ("constrained", True)))

    def _check_potential(self) -> None:
        if self.activation not in MONOTONE:
            raise ValueError(
                f"branch 'potential' needs a monotone activation, {', '.join(MONOTONE[:-1])} or {MONOTONE[-1]}; "
                f"got {self.activation!r}."
            )
        self._check_fixed("potential", (("preactivation", False), ("constrained", True), ("last_scale", 1.0)))

    def _check_fixed(self, branch: str, settings: tuple[tuple[str, float], ...]) -> None:
        """Refuse a value that this branch does not allow."""
        for name, needed in settings:
            if (got := getattr(self, name)) != needed:
                raise ValueError(f"branch {branch!r} needs {name} = {str(needed).lower()}; got {str(got).lower()}.")
