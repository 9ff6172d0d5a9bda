"""What earlier implementations got wrong: where each trap is tested, and the tests that belong to no other file."""

import ast
from pathlib import Path

import numpy as np
import pytest
import torch

from iresnet import Banach, LipschitzConv2d, PowerSeries, RussianRoulette, certify, mlp_flow, tighten_
from iresnet.lipschitz import refresh_
from tests.zoo import DOUBLE, contraction, linear_block, normal, rouse_

TRAPS = {
    # the guarantee
    "power iteration under-estimates when cold": "test_spectral.py::test_one_step_underestimates",
    "power iteration is outrun by the optimiser": (
        "test_lipschitz.py::test_the_strict_rule_holds_at_every_step_where_power_iteration_is_outrun"
    ),
    "a small miss at .98 goes unnoticed": "test_certificate.py::test_a_power_iteration_that_missed_is_caught",
    "a stopping rule per element is no test in a large space": (
        "test_spectral.py::test_settling_stops_by_the_relative_change_of_sigma_in_a_large_space"
    ),
    "Fourier values on the n x n grid are no bound": (
        "test_spectral.py::test_the_grid_of_the_input_itself_is_not_enough"
    ),
    "the norm at the wrong size after a squeeze": (
        "test_lipschitz.py::test_after_a_squeeze_the_size_is_the_squeezed_one"
    ),
    "the norm frozen at the first size": "test_lipschitz.py::test_a_larger_input_later_counts",
    "an update function that the user must remember": "test_lipschitz.py::test_the_constraint_holds_while_training",
    "power iteration in eval or inside the inverse": (
        "test_lipschitz.py::test_never_in_eval_without_gradients_or_in_a_solve"
    ),
    "an epsilon in the denominator": "test_spectral.py::test_no_epsilon_spoils_a_small_norm",
    "Dropout, BatchNorm, ELU with alpha > 1, GELU": (
        "test_lipschitz.py::test_what_breaks_the_promise_is_refused_and_nothing_is_touched"
    ),
    "Swish without the factor 1 / 1.1": "test_lipschitz.py::test_swish_expands_and_lipswish_does_not",
    "a gradient through sigma that freezes a layer": (
        "test_lipschitz.py::test_gradient_through_sigma_has_no_part_along_the_weight_and_the_alternative_has"
    ),
    "a zero-initialised last layer": "test_lipschitz.py::test_a_zero_initialised_layer_gives_no_nan_and_recovers",
    "a product of norms where a layer is reused": "test_lipschitz.py::test_a_layer_used_twice_counts_twice",
    "a product of norms where a forward is its own": "test_lipschitz.py::test_a_forward_of_the_users_own_is_refused",
    "an average of weights with the live net's u and v": (
        "test_lipschitz.py::test_an_average_of_weights_gets_its_norm_by_settling"
    ),
    # the inverse
    "a fixed number of iterations, silent at the limit": "test_fixed_point.py::test_solve_reports_and_inverse_raises",
    "a squared step compared with an unsquared tolerance": "test_traps.py::test_the_tolerance_is_met_in_its_own_unit",
    "one stop for the whole batch": "test_fixed_point.py::test_easy_samples_stop_early",
    "one tolerance for the whole batch": "test_fixed_point.py::test_a_huge_code_does_not_make_the_others_inexact",
    "half precision stalls near 1e-3": "test_residual.py::test_autocast_around_a_solve_does_not_spoil_it",
    "an inverse without a gradient": "test_residual.py::test_gradcheck_in_z_parameters_and_context",
    "a block's bound passed off as one for the net": (
        "test_residual.py::test_a_chain_reports_three_numbers_and_never_merges_them"
    ),
    "the last step as a bound in float32": "test_fixed_point.py::test_the_bound_by_the_last_step_fails_in_float32",
    "the last step as a bound for Anderson": "test_fixed_point.py::test_the_bound_by_the_last_step_fails_for_anderson",
    # the log-determinant
    "no graph through the vector-Jacobian product": "test_logdet.py::test_the_determinant_pulls_at_the_parameters",
    "the log-determinant of the inverse taken at y": "test_flow.py::test_a_sample_and_its_density_belong_together",
    "roulette with q <= L^2": "test_logdet.py::test_a_continuation_with_unbounded_variance_is_refused",
    "stopping when the error looks small": "test_flow.py::test_its_errors_are_standard_errors",
    "a wrong roulette coefficient": "test_logdet.py::test_weights_are_those_of_the_formula",
    "numpy's global generator": "test_traps.py::test_no_global_generator_is_touched",
    "one draw for the whole batch": "test_logdet.py::test_every_sample_draws_its_own_number_of_terms",
    "tail probabilities as 1 - cdf": "test_logdet.py::test_tail_probabilities_keep_their_digits",
    "the first sample's gradient for the whole batch": "test_logdet.py::test_value_and_gradient_are_unbiased",
    "a surrogate logged as a likelihood": (
        "test_logdet.py::test_the_value_is_the_sum_for_its_probe_and_not_a_surrogate"
    ),
    "evaluation without an error bar": "test_flow.py::test_the_truth_lies_where_it_says",
    "too few terms in the worst case": "test_logdet.py::test_worst_case_terms_for_96_blocks",
    "a batch of one loses its dimension": "test_laws.py::test_a_batch_of_one_keeps_its_dimension",
    "an abs() that hides lost contraction": (
        "test_logdet.py::test_a_negative_determinant_is_refused_not_hidden_by_its_absolute_value"
    ),
    "zero padding with a density": "test_flow.py::test_padding_has_no_density",
    # training and files
    "ActNorm initialises itself again after loading": "test_elementary.py::test_loading_never_initialises_again",
    "a log_prob beside forward under DDP": (
        "test_flow.py::test_forward_is_log_prob_and_everything_that_wraps_forward_wraps_it"
    ),
    "deepcopy broken by hooks": "test_laws.py::test_a_copy_is_the_same_function_and_independent",
    "version counters that fused optimisers leave alone": "test_residual.py::test_a_change_of_weights_is_seen",
    "memory that grows with the terms": "test_logdet.py::test_forty_terms_take_no_more_memory_than_five",
}


@pytest.mark.parametrize("trap", TRAPS)
def test_every_trap_has_its_test(trap):
    file, name = TRAPS[trap].split("::")
    tree = ast.parse((Path(__file__).parent / file).read_text())
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("tolerance", [1e-3, 1e-5, 1e-7])
def test_the_tolerance_is_met_in_its_own_unit(tolerance):
    """A squared step compared with it would leave an error of sqrt(tolerance): 3e-3 instead of 1e-5."""
    a, z = contraction(30, 0.9), normal(50, 30)
    x = linear_block(a).inverse(z, tolerance=tolerance, solver=Banach())
    error = (x - torch.linalg.solve(torch.eye(30, dtype=DOUBLE) + a, z.T).T).norm(dim=1)
    assert error.max() <= tolerance


@pytest.mark.parametrize("estimator", [PowerSeries(5), RussianRoulette()], ids=["series", "roulette"])
def test_no_global_generator_is_touched(estimator):
    """Training, sampling and estimates with a generator leave torch's and numpy's own state alone."""
    flow, x, generator = rouse_(mlp_flow(2, blocks=1, hidden=(8,))), normal(4, 2).float(), torch.Generator()
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    flow(x, estimator=estimator, generator=generator).sum().backward()
    flow.rsample_and_log_prob((3,), estimator=estimator, generator=generator)
    flow.eval().sample((3,), generator=generator)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)


def test_an_average_of_convolutions_is_made_when_their_input_size_is_known():
    """Trap: a buffer is as large as the input, and torch's average copies buffers of equal size only."""
    layer = LipschitzConv2d(2, 2, 3, padding=1)
    layer(normal(1, 2, 4, 4).float())
    refresh_(layer, settle=True)
    average = torch.optim.swa_utils.AveragedModel(layer)
    for _ in range(2):
        layer(normal(1, 2, 4, 4).float()).sum().backward()
        average.update_parameters(layer)
    torch.testing.assert_close(average.eval()(normal(1, 2, 4, 4).float()), layer.eval()(normal(1, 2, 4, 4).float()))


def test_an_average_of_a_trained_flow_is_judged_with_norms_of_its_own():
    """EMA by torch's own class: a copy that follows, with the wrong norms until it is settled; then it is certified."""
    flow = rouse_(mlp_flow(8, blocks=2, hidden=(32,), coefficient=0.95, estimator=PowerSeries(5)))
    ema = torch.optim.swa_utils.get_ema_multi_avg_fn(0.95)
    average = torch.optim.swa_utils.AveragedModel(flow, multi_avg_fn=ema)
    adam, x = torch.optim.Adam(flow.parameters(), lr=0.3), normal(64, 8).float()
    for _ in range(20):
        adam.zero_grad()
        (-flow(x).mean()).backward()
        adam.step()
        average.update_parameters(flow)
    model = average.module
    assert max(part.bound for part in certify(model).layers) > 0.955
    refresh_(model, settle=True)
    assert max(part.bound for part in certify(model).layers) < 0.951
    tighten_(model.eval())
    assert certify(model).passed
    torch.testing.assert_close(model.transform.inverse(model.transform(x)), x, atol=1e-3, rtol=0)
