"""The report: one HTML file that shows what one trained network does, and what is proven about it.

    Material -> page(material): str -> write(material, path)

The page can be read offline and needs no script and no other file: style, charts (SVG) and images (PNG) are inside. A
section without material is left out. Every text that comes from a user is escaped.

material    what a page is made from
gather      collecting it from a run folder
document    the page: head, sections, foot
masthead    name, summary and key figures
curves      training
scores      test figures, confusion
robustness  classes that are proven to hold within a radius
samples     samples beside data, interpolations
inverse     reconstructions
anomalies   scores of corrupted inputs
proofs      singular values, certificate
settings    configuration, circumstances, pictures
chart       plots in SVG whose text keeps its size at any width
tiles       images of a page, and how many it can carry
markup      HTML that is balanced and escaped by construction
words       numbers and counts as a reader wants them
"""

from .document import page, write
from .material import Anomaly, Material, Reconstruction, SpectrumOfLayer

__all__ = ["Anomaly", "Material", "Reconstruction", "SpectrumOfLayer", "page", "write"]
