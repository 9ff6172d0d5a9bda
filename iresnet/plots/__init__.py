"""Pictures: PNG files of images, points and columns, and of what a flow on the plane has learned.

toy         a flow on the plane: data, density, samples, and the grid of codes pulled back
grids       images in rows: samples, reconstructions, interpolations
planes      densities in the plane: data, and what models learn of them
paths       the dynamics of networks on the line, with the places where paths cross
rows        the same images as several networks rebuild them
lines       curves: norms of every layer, error against iterations
series      curves of the power series: bias and deviation against its terms
ridges      likelihoods of several kinds of images, row by row, beside how well they are found
tradeoff    error against bits per dimension, for every weight of a hybrid
scatter     points and columns: samples beside the data
raster      pixels into PNG
canvas      what they share: a clean matplotlib, the palette, writing whole or not at all

No other package imports matplotlib, and nothing here uses or changes its global state.
"""

from .grids import image_grid, interpolation_picture, reconstruction_picture
from .lines import DecayLine, SpectrumLine, decay_picture, spectra_picture
from .paths import Crossing, Dynamics, paths_picture
from .planes import Plane, planes_picture
from .ridges import Ridge, ridges_picture
from .rows import ImageRow, rows_picture
from .scatter import columns_picture, points_picture
from .series import SeriesLine, bias_picture, convergence_picture
from .toy import ToyPanel, plane_points, square, toy_picture
from .tradeoff import Compromise, tradeoff_picture

__all__ = [
    "Compromise",
    "Crossing",
    "DecayLine",
    "Dynamics",
    "ImageRow",
    "Plane",
    "Ridge",
    "SeriesLine",
    "SpectrumLine",
    "ToyPanel",
    "bias_picture",
    "columns_picture",
    "convergence_picture",
    "decay_picture",
    "image_grid",
    "interpolation_picture",
    "paths_picture",
    "plane_points",
    "planes_picture",
    "points_picture",
    "reconstruction_picture",
    "ridges_picture",
    "rows_picture",
    "spectra_picture",
    "square",
    "toy_picture",
    "tradeoff_picture",
]
