"""A network as settings."""

from __future__ import annotations

from dataclasses import dataclass

from ..spelling import quoted

BRANCHES = ("chain", "potential", "dense")
ACTIVATIONS = ("elu", "lipswish", "maxmin", "sine", "relu")
#: Those that never fall, which a potential needs.
MONOTONE = ("elu", "relu")
ESTIMATORS = ("auto", "series", "roulette", "exact")
PREPROCESSING = ("logit", "standardise", "centre")
NORMALISATIONS = ("actnorm", "batchnorm", "none")
READOUTS = ("linear", "batchnorm", "lipschitz")
FAMILIES = (
    "iresnet", "resnet", "resnet-plain", "glow", "glow-additive", "realnvp", "nice", "irevnet", "made", "maf", "ffjord",
)  # fmt: skip

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

CHOICES = {
    "family": FAMILIES, "branch": BRANCHES, "activation": ACTIVATIONS, "normalisation": NORMALISATIONS,
    "preprocessing": PREPROCESSING, "readout": READOUTS, "estimator": ESTIMATORS,
}  # fmt: skip

#: The largest value of each setting that becomes layers or memory, and the most entries of one that is a list: far
#: above what is trained, and low enough that a slip of the hand is told at once.
LARGEST = {
    "blocks": 1_000, "width": 2**14, "kernels": 99, "depth": 100, "frequency": 1e3, "padding": 2**14, "tail": 1_000,
    "tail_width": 2**14, "components": 10_000, "head": 2**16, "terms": 1_000, "dequantiser": 2**14,
}  # fmt: skip
ENTRIES = {"blocks": 16, "kernels": 100, "head": 100}


@dataclass(frozen=True)
class Network:
    """A network as settings.

    `blocks` counts residual blocks, one entry a scale: an image is squeezed before each scale, the first only with
    `squeeze_first`; a table has one. g has `kernels` convolutions (images) or `depth` hidden layers (tables) of
    `width` channels or units (0: as many as the scale has), with `preactivation` an activation before the first,
    and Lip(g) stays below `lipschitz` unless the network is not `constrained`; its last layer starts `last_scale`
    times as large as it would. With the `branch` potential g has one layer and its transpose, and no block
    stretches; with dense each layer of g but the last adds `width` channels to those it is given. `normalisation`
    is an ActNorm before every block, BatchNorm before every activation of an unconstrained g, or none. With
    `mixing` an invertible 1x1 convolution precedes the blocks of every scale, which with `principal` starts at the
    axes of the first batch. `factor_out` sends half of the channels straight to the code after each scale. A `tail`
    of so many blocks, fully connected and `tail_width` wide, never dense, acts on the code as a whole. The base is
    a mixture of so many `components`. With `bayes` a hybrid's base has one component a class, whose posterior
    classifies; otherwise `head` lists the hidden widths of its head, none for a linear one, `pool` averages the
    code over positions before it, and `readout` says what bounds or normalises it. `estimator` and `terms` make the
    log-determinant in training. With a `dequantiser` of that width the noise of integers is learned with the density.
    The `family` resnet is an ordinary ResNet of bottlenecks, `width` wide at first (0:
    16), which has no inverse; in resnet-plain activations come after the layers and the sum, not before.
    """

    family: str = "iresnet"
    blocks: tuple[int, ...] = (4, 4)
    squeeze_first: bool = True
    branch: str = "chain"
    width: int = 64
    kernels: tuple[int, ...] = (3, 1, 3)
    depth: int = 2
    constrained: bool = True
    lipschitz: float = 0.9
    activation: str = "elu"
    frequency: float = 2.0
    preactivation: bool = False
    last_scale: float = 1.0
    normalisation: str = "actnorm"
    preprocessing: str = "logit"
    alpha: float = 0.05
    padding: int = 0
    mixing: bool = False
    principal: bool = False
    factor_out: bool = False
    tail: int = 0
    tail_width: int = 128
    components: int = 1
    learned_base: bool = True
    bayes: bool = False
    readout: str = "linear"
    head: tuple[int, ...] = ()
    dropout: float = 0.0
    pool: bool = False
    estimator: str = "auto"
    terms: int = 6
    dequantiser: int = 0

    def __post_init__(self) -> None:
        if not self.blocks or any(b < 1 for b in self.blocks):
            raise ValueError(f"blocks must list at least one block for every scale; got {quoted(list(self.blocks))}.")
        for name in ("depth", "terms", "components", "tail_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}.")
        if self.width < 0:
            raise ValueError(f"width must be at least 1, or 0 for that of the scale; got {self.width}.")
        if not 0 < self.lipschitz < 1:
            raise ValueError(f"lipschitz must lie in (0, 1); got {self.lipschitz}. A block with 1 has no inverse.")
        if not 0 < self.last_scale <= 1:
            raise ValueError(f"last_scale must lie in (0, 1]; got {self.last_scale}. At 0 no gradient passes it.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must lie in [0, 1); got {self.dropout}.")
        for name in ("padding", "tail", "dequantiser"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative; got {getattr(self, name)}.")
        if any(h < 1 for h in self.head):
            raise ValueError(f"head must list widths of at least 1; got {quoted(list(self.head))}.")
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}; got {quoted(getattr(self, name))}.")
        self._check_size()
        self._check_together()

    def _check_size(self) -> None:
        """Refuse what no machine could hold, before it is made."""
        for name, most in ENTRIES.items():
            if len(getattr(self, name)) > most:
                raise ValueError(f"{name} must have at most {most:,} entries; got {len(getattr(self, name)):,}.")
        for name, largest in LARGEST.items():
            value = getattr(self, name)
            got = max(value, default=0) if isinstance(value, tuple) else value
            if not got <= largest:
                raise ValueError(f"{name} must be at most {largest:,g}; got {quoted(got)}. Lower it.")

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
