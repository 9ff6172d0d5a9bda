"""scikit-learn's API on top of the models: estimators for tables.

FlowDensity              the density of a table, like KernelDensity and GaussianMixture
FlowOutlierDetector      rows of low density, like EllipticEnvelope
FlowClassifier           classes, with the density of every row
FlowTransformer          codes and back, like PowerTransformer
ConditionalFlowDensity   the density of y given X: a regression that predicts a whole distribution

They are trained like the presets `table-density` and `table-hybrid`, certified, and saved as run folders. Their
parameters and attributes are those of `base.FlowEstimator`.
"""

from .classifier import FlowClassifier
from .conditional import ConditionalFlowDensity
from .density import FlowDensity
from .outliers import FlowOutlierDetector
from .transformer import FlowTransformer

__all__ = ["FlowDensity", "FlowOutlierDetector", "FlowClassifier", "FlowTransformer", "ConditionalFlowDensity"]
