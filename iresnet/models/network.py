"""A network as settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias, get_args

from ..allowed import Rule, check_settings, in_interval, max_entries, maximum, minimum

Family: TypeAlias = Literal[
    "iresnet", "resnet", "resnet-plain", "glow", "glow-additive", "realnvp", "nice", "irevnet", "made", "maf", "ffjord",
]  # fmt: skip
ActivationName: TypeAlias = Literal["elu", "lipswish", "maxmin", "sine", "relu"]
Preprocessing: TypeAlias = Literal["logit", "standardise", "centre"]
ReadoutName: TypeAlias = Literal["linear", "batchnorm", "lipschitz"]

FAMILIES: tuple[str, ...] = get_args(Family)
ACTIVATIONS: tuple[str, ...] = get_args(ActivationName)
#: Those that never fall, which a potential needs.
MONOTONE = ("elu", "relu")
PREPROCESSING: tuple[str, ...] = get_args(Preprocessing)
READOUTS: tuple[str, ...] = get_args(ReadoutName)

#: Of families without residual blocks: what their inverse is, and why there is nothing to certify.
_FORMULA = (
    "its inverse is a formula, and no block of it a contraction; `iresnet invert` computes the error, row by row."
)
_ZUKO = "its inverse is zuko's, and no block of it a contraction; `iresnet invert` measures the error, row by row."
INVERSES = {
    **dict.fromkeys(("resnet", "resnet-plain"), "an ordinary ResNet has no inverse to prove."),
    **dict.fromkeys(("glow", "glow-additive", "realnvp"), _FORMULA),
    **dict.fromkeys(("nice", "irevnet"), f"it preserves volume, {_FORMULA}"),
    **dict.fromkeys(("made", "maf", "ffjord"), _ZUKO),
}


@dataclass(frozen=True)
class Network:
    """Settings of a network; docs/reference/settings.md lists them in a table."""

    # ------------------------------------------------------------------------------------ scales of residual blocks

    #: Residual blocks, or what they are compared with. A resnet is an ordinary one of bottlenecks, which has no
    #: inverse; in resnet-plain activations come after the layers and the sum, not before. The others are flows.
    family: Family = "iresnet"
    #: Residual blocks, one entry a scale. An image is squeezed before each scale; a table has one.
    blocks: Annotated[
        tuple[Annotated[int, maximum(1_000)], ...],
        Rule(lambda blocks: min(blocks, default=0) >= 1, "must list at least one block for every scale"),
        max_entries(16),
    ] = (4, 4)
    #: Whether an image is squeezed before the first scale too.
    squeeze_first: bool = True

    # --------------------------------------------------------------------------------------- g, the branch of a block

    #: A chain of layers; a potential: one layer and its transpose, so that no block stretches; or dense: each layer but
    #: the last adds `width` channels to those it is given.
    branch: Literal["chain", "potential", "dense"] = "chain"
    #: Channels or units of its layers; 0: as many as the scale has. Of a resnet at first; 0: 16.
    width: Annotated[
        int, Rule(lambda width: width >= 0, "must be at least 1, or 0 for that of the scale"), maximum(2**14)
    ] = 64
    #: Images: the sizes of its convolutions.
    kernels: Annotated[tuple[Annotated[int, maximum(99)], ...], max_entries(100)] = (3, 1, 3)
    #: Tables and the tail: its hidden layers.
    depth: Annotated[int, minimum(1), maximum(100)] = 2
    #: Whether Lip(g) is kept below `lipschitz`; otherwise nothing is proven.
    constrained: bool = True
    #: The bound for Lip(g).
    lipschitz: Annotated[float, in_interval("(0, 1)", remedy="A block with 1 has no inverse.")] = 0.9
    #: Between its layers.
    activation: ActivationName = "elu"
    #: Of the sine.
    frequency: Annotated[float, maximum(1_000)] = 2.0
    #: Whether an activation comes before the first layer.
    preactivation: bool = False
    #: Its last layer starts so many times as large as it would.
    last_scale: Annotated[float, in_interval("(0, 1]", remedy="At 0 no gradient passes it.")] = 1.0
    #: An ActNorm before every block, BatchNorm before every activation of an unconstrained g, or none.
    normalisation: Literal["actnorm", "batchnorm", "none"] = "actnorm"

    # ------------------------------------------------------------------------------------------ before the blocks

    #: What is done to pixels; a table is always standardised.
    preprocessing: Preprocessing = "logit"
    #: Of the logit: how far pixels are kept from 0 and 1.
    alpha: float = 0.05
    #: Channels of zeros that are added first, for classification alone.
    padding: Annotated[int, minimum(0), maximum(2**14)] = 0

    # ------------------------------------------------------------------------------------ beside and after the blocks

    #: Whether an invertible 1x1 convolution precedes the blocks of every scale.
    mixing: bool = False
    #: Whether that convolution starts at the principal axes of the first batch.
    principal: bool = False
    #: Whether half of the channels go straight to the code after each scale.
    factor_out: bool = False
    #: So many blocks at the end, fully connected and never dense, act on the code as a whole.
    tail: Annotated[int, minimum(0), maximum(1_000)] = 0
    #: Units inside their g.
    tail_width: Annotated[int, minimum(1), maximum(2**14)] = 128

    # ------------------------------------------------------------------------------------------ the base of a density

    #: Normals in the base; more than one are a learned mixture.
    components: Annotated[int, minimum(1), maximum(10_000)] = 1
    #: Whether the mean and the deviations of a single normal are learned.
    learned_base: bool = True
    #: Hybrids: the base has one component a class, whose posterior classifies; there is no other head.
    bayes: bool = False

    # ----------------------------------------------------------------------------------------- the head of a classifier

    #: What bounds or normalises the head.
    readout: ReadoutName = "linear"
    #: Its hidden widths; none for a linear one.
    head: Annotated[
        tuple[Annotated[int, maximum(2**16)], ...],
        Rule(lambda head: all(width >= 1 for width in head), "must list widths of at least 1"),
        max_entries(100),
    ] = ()
    #: In the head.
    dropout: Annotated[float, in_interval("[0, 1)")] = 0.0
    #: Whether the code is averaged over positions before it.
    pool: bool = False

    # ---------------------------------------------------------------------------------------- the loss of a density

    #: What makes the log-determinant in training; auto: exact up to 8 dimensions, else a series.
    estimator: Literal["auto", "series", "roulette", "exact"] = "auto"
    #: Terms of the series, or those that the roulette always takes.
    terms: Annotated[int, minimum(1), maximum(1_000)] = 6
    #: The width of a network that learns the noise of integers with the density; 0: uniform noise.
    dequantiser: Annotated[int, minimum(0), maximum(2**14)] = 0

    def __post_init__(self) -> None:
        check_settings(self)
        self._check_together()

    def _check_together(self) -> None:
        """Refuse settings that are right one by one and contradict each other."""
        if self.normalisation == "batchnorm" and self.constrained and self.family == "iresnet":
            raise ValueError(
                "normalisation 'batchnorm' has no Lipschitz bound, so it needs constrained = false; got true. "
                "Use 'actnorm' for a network that is proven invertible."
            )
        if self.readout == "lipschitz" and self.dropout:
            raise ValueError(
                f"readout 'lipschitz' needs dropout = 0, since dropout has no Lipschitz bound; got {self.dropout}."
            )
        if self.principal and not self.mixing:
            raise ValueError(
                "principal says where the convolutions of mixing start; it needs mixing = true; got false."
            )
        if self.tail and self.pool:
            raise ValueError(f"a tail leaves no positions to pool; got tail = {self.tail}. Use pool = false.")
        if self.branch == "potential":
            self._check_potential()
        if self.branch == "dense":
            self._check_plain("dense", (("preactivation", False), ("constrained", True)))

    def _check_potential(self) -> None:
        if self.activation not in MONOTONE:
            raise ValueError(
                f"branch 'potential' needs an activation that never falls: {' or '.join(MONOTONE)}; "
                f"got {self.activation!r}."
            )
        self._check_plain("potential", (("preactivation", False), ("constrained", True), ("last_scale", 1.0)))

    def _check_plain(self, branch: str, settings: tuple[tuple[str, float], ...]) -> None:
        for name, known in settings:
            if (got := getattr(self, name)) != known:
                raise ValueError(f"branch {branch!r} needs {name} = {str(known).lower()}; got {str(got).lower()}.")
