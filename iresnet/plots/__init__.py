"""Plots, written as PNG files.

toy         flows in the plane: data, density, samples, and the grid of codes pulled back
planes      densities in the plane: data, and what models learn of them
images      images side by side: samples, interpolations, reconstructions
paths       the dynamics of networks on the line, with the crossings of their paths
lines       curves of networks: norms of every layer, reconstruction error against iterations
series      curves of the power series: bias and deviation against its terms
ridges      likelihoods of several kinds of images, and how well each is detected
tradeoff    error against bits per dimension of hybrid models
speed       times of other methods as multiples of ours, and their growth
scatter     samples of tabular data beside the data
raster      images as bytes and as PNG files
canvas      the style and layout of all plots

No other package imports matplotlib, and nothing here uses or changes its global state.
"""

from .images import ImageRow, plot_image_grid, plot_image_rows, plot_interpolations, plot_reconstructions
from .lines import DecayLine, SpectrumLine, plot_reconstruction_error, plot_spectra
from .paths import Crossing, Dynamics, plot_paths
from .planes import Plane, plot_planes
from .ridges import Ridge, plot_ridges
from .scatter import plot_columns, plot_points
from .series import SeriesLine, plot_bias, plot_convergence
from .speed import GrowthLine, RatioRow, plot_growth, plot_ratios
from .toy import ToyPanel, pixel_centres, plot_toy_flows, square_window
from .tradeoff import HybridPoint, plot_tradeoff

__all__ = [
    "Crossing",
    "DecayLine",
    "Dynamics",
    "GrowthLine",
    "HybridPoint",
    "ImageRow",
    "Plane",
    "RatioRow",
    "Ridge",
    "SeriesLine",
    "SpectrumLine",
    "ToyPanel",
    "pixel_centres",
    "plot_bias",
    "plot_columns",
    "plot_convergence",
    "plot_growth",
    "plot_image_grid",
    "plot_image_rows",
    "plot_interpolations",
    "plot_paths",
    "plot_planes",
    "plot_points",
    "plot_ratios",
    "plot_reconstruction_error",
    "plot_reconstructions",
    "plot_ridges",
    "plot_spectra",
    "plot_toy_flows",
    "plot_tradeoff",
    "square_window",
]
