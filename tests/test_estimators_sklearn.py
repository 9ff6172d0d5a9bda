"""scikit-learn's own checks of an estimator. All of them are slow tests; a part runs every time."""

from typing import Any

import pytest
from sklearn.utils.estimator_checks import estimator_checks_generator

from iresnet.estimators import (
    ConditionalFlowDensity,
    FlowClassifier,
    FlowDensity,
    FlowOutlierDetector,
    FlowTransformer,
)

#: A network that starts at one normal: EM would take longer than all else.
PLAIN = {"covariance": "diagonal", "components": 1, "spline_bins": 0, "normalisation": "actnorm", "last_scale": 1.0}
SMALL: dict[str, Any] = {
    "blocks": 1, "width": 8, "max_steps": 15, "learning_rate": 1e-2, "random_state": 0, "settings": PLAIN,
}  # fmt: skip
ESTIMATORS = [
    FlowDensity(**SMALL),
    FlowOutlierDetector(**SMALL),
    FlowTransformer(**SMALL),
    FlowClassifier(**{**SMALL, "max_steps": 40, "learning_rate": 2e-2}),
    ConditionalFlowDensity(**SMALL),
    FlowDensity(**{**SMALL, "settings": None}),  # as the preset is
]

#: As for scikit-learn's own estimators that shuffle the rows; `test_a_weight_of_two_is_a_row_twice` takes its place.
RANDOM = {
    "check_sample_weight_equivalence_on_dense_data": "the rows are shuffled, so weights are equal in distribution"
}

#: Checks that run every time, of what is most easily broken.
QUICK = {
    "check_dont_overwrite_parameters",
    "check_estimators_nan_inf",
    "check_estimators_unfitted",
    "check_fit2d_1feature",
    "check_fit2d_1sample",
    "check_methods_subset_invariance",
    "check_n_features_in",
    "check_no_attributes_set_in_init",
    "check_outliers_train",
    "check_parameters_default_constructible",
    "check_readonly_memmap_input",
    "check_sample_weights_list",
    "check_supervised_y_2d",
}


def name_of(check):
    return getattr(check, "func", check).__name__


def checks():
    for estimator in ESTIMATORS:
        pairs = estimator_checks_generator(estimator, expected_failed_checks=RANDOM, mark=None)
        for number, (tested, check) in enumerate(pairs):
            name = name_of(check)
            marks = [] if name in QUICK and estimator.settings else [pytest.mark.slow]
            yield pytest.param(tested, check, name, marks=marks, id=f"{type(tested).__name__}-{name}-{number}")


@pytest.mark.no_cover
@pytest.mark.parametrize(("estimator", "check", "name"), list(checks()))
@pytest.mark.filterwarnings("default")
def test_scikit_learns_check(estimator, check, name):
    if name not in RANDOM:
        check(estimator)
        return
    if hasattr(estimator, "predict") or hasattr(estimator, "transform"):
        with pytest.raises(AssertionError, match="is not equivalent to fitting with removed or repeated data points"):
            check(estimator)
