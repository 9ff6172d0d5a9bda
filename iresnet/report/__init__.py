"""The report: one HTML file with the metrics, plots and certificate of a trained network.

    Material -> page(material): str -> write(material, path)

The page works offline, without scripts or other files: style, charts (SVG) and images (PNG) are embedded. A section
without content is left out. All text that comes from a user is escaped.

material    the content of a page, as plain data
gather      collects it from a run folder
document    the page: head, sections, foot
masthead    name, summary and key metrics
contents    what the data of a table are: source, rows, columns with their kinds
curves      training curves
scores      test metrics, confusion matrix
robustness  certified accuracy within a radius
samples     samples beside data, interpolations
columns     samples of a table, column by column; categories by their names
inverse     reconstructions
anomalies   scores of corrupted inputs
unusual     the rows of a table with the highest scores, and the columns that make them unusual
proofs      singular values, certificate
settings    configuration, environment, plots
chart       SVG charts whose text keeps its size at any width
tiles       embedded images, limited in bytes
markup      HTML that is balanced and escaped by construction
words       numbers and counts as text
"""

from .document import page, write
from .material import Anomaly, Material, Reconstruction, SpectrumOfLayer, UnusualRows

__all__ = ["Anomaly", "Material", "Reconstruction", "SpectrumOfLayer", "UnusualRows", "page", "write"]
