"""Transforms with a closed form, coupling layers, and flows imported from zuko.

In reading order: `closed_form` (base classes), `first_batch` (data-dependent initialisation), `elementary` (ActNorm,
Squeeze, Flatten, InjectivePad), `mixing` (linear maps of the channels), `preprocess` (logit, standardisation),
`columns` (tables whose columns have bounds), `spline` (columns made nearly normal), `split` (which part a coupling
keeps and which it transforms), `per_sample` (networks known to be functions of one sample), `conditioner` (the networks
inside a coupling), `coupling` (affine and additive), `given` (some columns of a row, given the others),
`dequantisation` (noise for discrete data), `imported` (MADE, MAF and FFJORD from zuko).
"""

from .closed_form import ClosedForm
from .columns import ColumnTransform
from .coupling import AdditiveCoupling, AffineCoupling, Coupling, preserves_volume
from .elementary import ActNorm, Flatten, InjectivePad, Squeeze
from .imported import Imported, ffjord, made, maf
from .mixing import InvertibleConv1x1, PrincipalAxes, Reverse
from .preprocess import Logit, Standardise, dequantise
from .spline import ColumnSpline
from .split import Alternate, Checkerboard, Halves, Split

__all__ = [
    "ActNorm",
    "AdditiveCoupling",
    "AffineCoupling",
    "Alternate",
    "Checkerboard",
    "ClosedForm",
    "ColumnSpline",
    "ColumnTransform",
    "Coupling",
    "Flatten",
    "Halves",
    "Imported",
    "InjectivePad",
    "InvertibleConv1x1",
    "Logit",
    "PrincipalAxes",
    "Reverse",
    "Split",
    "Squeeze",
    "Standardise",
    "dequantise",
    "ffjord",
    "made",
    "maf",
    "preserves_volume",
]
