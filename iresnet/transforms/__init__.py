"""Transforms by a formula each way, and those that split what they are given.

In reading order: `closed_form` (the base class), `first_batch` (what a first batch initialises), `elementary` (ActNorm,
Squeeze, Flatten, InjectivePad), `mixing` (linear maps of the channels), `preprocess` (data in their own units), `split`
(what stays and what is moved), `conditioner` (the networks inside a coupling), `coupling` (affine and additive),
`dequantisation` (the noise that integers get), `imported` (MADE, MAF and FFJORD, which are zuko's).
"""

from .closed_form import ClosedForm
from .coupling import AdditiveCoupling, AffineCoupling, Coupling, preserves_volume
from .elementary import ActNorm, Flatten, InjectivePad, Squeeze
from .imported import Imported, ffjord, made, maf
from .mixing import InvertibleConv1x1, PrincipalAxes, Reverse
from .preprocess import Logit, Standardise, dequantise
from .split import Alternate, Checkerboard, Halves, Split

__all__ = [
    "ActNorm",
    "AdditiveCoupling",
    "AffineCoupling",
    "Alternate",
    "Checkerboard",
    "ClosedForm",
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
