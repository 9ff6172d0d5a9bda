"""A transformer: rows to codes, and codes to rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_array, check_is_fitted

from ..evaluate.chunks import CHUNK, in_chunks
from ..evaluate.solving import decode
from .density import DensityFit, MeanScoreMixin
from .rows import Array


class FlowTransformer(MeanScoreMixin, ClassNamePrefixFeaturesOutMixin, TransformerMixin, DensityFit):  # type: ignore[misc]
    """Maps rows to the codes of a density, which are close to independent normals, and codes back to rows.

    Parameters and attributes are those of `base.FlowEstimator`.

    It is a nonlinear whitening, like scikit-learn's PowerTransformer of all columns together. Nothing is lost:
    `inverse_transform` solves for the row of a code, and every block's solve is proven.
    """

    model_: Any

    def transform(self, X: ArrayLike) -> Array:
        """Return the code of every row."""
        rows = self._rows(X, known=True).x.double()
        with torch.no_grad():
            codes: Array = in_chunks(self.model_.transform, rows, CHUNK).numpy()
        return codes

    def inverse_transform(self, X: ArrayLike) -> Any:
        """Return the row of every code: an array or, as `sample`, a data frame."""
        check_is_fitted(self)
        codes = check_array(X, dtype=np.float64, input_name="X")
        if codes.shape[1] != self.n_features_in_:
            raise ValueError(
                f"X has {codes.shape[1]} features, but codes of {type(self).__name__} have {self.n_features_in_}."
            )
        return self._values(decode(self.model_.transform, torch.from_numpy(codes.copy()), decoder=self.model_.decoder))

    @property
    def _n_features_out(self) -> int:
        return int(self.n_features_in_)
