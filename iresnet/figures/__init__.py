"""Pictures: PNG files of images, points and columns, and of what a flow on the plane has learned.

toy         a flow on the plane: data, density, samples, and the grid of codes pulled back
grids       images in rows: samples, reconstructions, interpolations
rows        the same images as several networks rebuild them
lines       curves: norms of every layer, error against iterations
series      curves of the power series: bias and deviation against its terms
scatter     points and columns: samples beside the data
raster      pixels into PNG
canvas      what they share: a clean matplotlib, the palette, writing whole or not at all

No other package imports matplotlib, and nothing here uses or changes its global state.
"""

from .grids import image_grid, interpolation_picture, reconstruction_picture
from .lines import DecayLine, SpectrumLine, decay_picture, spectra_picture
from .rows import ImageRow, rows_picture
from .scatter import columns_picture, points_picture
from .series import SeriesLine, bias_picture, convergence_picture
from .toy import ToyPanel, toy_picture

__all__ = [
    "DecayLine",
    "ImageRow",
    "SeriesLine",
    "SpectrumLine",
    "ToyPanel",
    "bias_picture",
    "columns_picture",
    "convergence_picture",
    "decay_picture",
    "image_grid",
    "interpolation_picture",
    "points_picture",
    "reconstruction_picture",
    "rows_picture",
    "spectra_picture",
    "toy_picture",
]
