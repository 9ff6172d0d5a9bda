"""The laws that every transform obeys, over the whole zoo."""

import copy

import pytest
import safetensors.torch
import torch

from iresnet import Bijector, ResidualBlock, Transform
from iresnet.lipschitz import refresh_
from tests.zoo import DOUBLE, ZOO, Case, dense_jacobian, normal

BATCH = 5

# The same lines for every case; what they cover is covered where each transform is tested.
pytestmark = pytest.mark.no_cover

every = pytest.mark.parametrize("case", ZOO, ids=lambda case: case.name)


@pytest.fixture
def built(case: Case) -> tuple[Transform, torch.Tensor, torch.Tensor | None]:
    return case.build(), case.x(BATCH), case.c(BATCH)


def distance(a, b):
    return (a - b).flatten(1).norm(dim=1)


@every
def test_inverse_undoes_forward(built):
    transform, x, c = built
    torch.testing.assert_close(transform.inverse(transform(x, c), c), x, atol=1e-8, rtol=0)


@every
def test_forward_undoes_inverse(built):
    transform, x, c = built
    z = transform(x, c) + 0.1
    torch.testing.assert_close(transform(transform.inverse(z, c), c), z, atol=1e-8, rtol=0)


@every
def test_it_is_a_transform_of_torch_distributions(case, built):
    transform, x, c = built
    t = Bijector(transform, case.shape).given(c)
    z = t(x)
    assert (t.forward_shape(x.shape), t.inverse_shape(z.shape)) == (z.shape, x.shape)
    torch.testing.assert_close(t.inv(z), x, atol=1e-8, rtol=0)
    torch.testing.assert_close(t.log_abs_det_jacobian(x, z), transform.forward_and_logdet(x, c)[1])
    torch.testing.assert_close(t(x[:, None])[0, 0], z[0])  # every sample with every context


@every
def test_the_map_is_not_the_identity(case, built):
    transform, x, c = built
    if case.name not in ("chain-of-nothing", "flatten"):
        assert (transform(x, c).flatten(1) - x.flatten(1)).abs().max() > 1e-2


@every
def test_logdet_is_that_of_the_dense_jacobian(built):
    transform, x, c = built
    z, logdet = transform.forward_and_logdet(x, c)
    torch.testing.assert_close(z, transform(x, c))
    sign, expected = torch.linalg.slogdet(dense_jacobian(lambda t: transform(t, c), x))
    if isinstance(transform, ResidualBlock):
        assert (sign > 0).all()  # Lemma 6
    torch.testing.assert_close(logdet, expected, atol=1e-9, rtol=1e-9)


@every
def test_a_batch_of_one_keeps_its_dimension(case, built):
    transform, x, c = built
    one, context = x[:1], None if c is None else c[:1]
    z, logdet = transform.forward_and_logdet(one, context)
    assert z.shape == (1, *transform.output_shape(case.shape))
    assert logdet.shape == (1,)
    assert transform.inverse(z, context).shape == one.shape
    assert transform.solve(z, context).error_bound.shape == (1,)


@every
def test_output_shape_is_that_of_the_output(case, built):
    transform, x, c = built
    shape = transform.output_shape(case.shape)
    assert shape == tuple(transform(x, c).shape[1:])
    assert transform.data_shape(shape) == case.shape


@every
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE], ids=["float32", "float64"])
def test_the_type_of_the_input_is_kept(case, dtype):
    transform, x, c = case.build(dtype=dtype), case.x(BATCH, dtype=dtype), case.c(BATCH, dtype=dtype)
    z, logdet = transform.forward_and_logdet(x, c)
    assert {z.dtype, logdet.dtype, transform.inverse(z, c).dtype} == {dtype}


@every
def test_a_state_saved_as_safetensors_restores_the_function(case, built):
    transform, x, c = built
    other = case.build(seed=7)
    state = {name: value.clone() for name, value in transform.state_dict().items()}  # it refuses shared memory
    state = safetensors.torch.load(safetensors.torch.save(state))
    other.load_state_dict(state)
    for got, expected in zip(other.forward_and_logdet(x, c), transform.forward_and_logdet(x, c), strict=True):
        assert torch.equal(got, expected)
    assert other.stretch(case.shape) == transform.stretch(case.shape)


@every
def test_a_copy_is_the_same_function_and_independent(built):
    transform, x, c = built
    z = transform(x, c).detach().clone()
    transform.solve(z, c)  # with whatever a solve leaves behind
    twin = copy.deepcopy(transform)
    assert torch.equal(twin(x, c), z)
    with torch.no_grad():
        for p in twin.parameters():
            p.add_(0.05)  # small enough to leave an asserted constant true
    refresh_(twin, settle=True)
    assert torch.equal(transform(x, c), z)
    torch.testing.assert_close(twin.inverse(twin(x, c), c), x, atol=1e-8, rtol=0)
    if list(twin.parameters()):
        assert not torch.equal(twin(x, c), z)


@every
def test_stretch_bounds_the_singular_values_and_the_determinant(case, built):
    """Lemmas 2 and 7, at points."""
    transform, x, c = built
    s = transform.stretch(case.shape)
    sigma = torch.linalg.svdvals(dense_jacobian(lambda t: transform(t, c), x))
    assert sigma.max() <= s.forward * (1 + 1e-9)
    assert 1 / sigma.min() <= s.inverse * (1 + 1e-9)
    logdet = sigma.log().sum(1)
    assert s.logdet[0] - 1e-9 <= logdet.min()
    assert logdet.max() <= s.logdet[1] + 1e-9


@every
def test_stretch_bounds_distances(case, built):
    """Lemma 2, between points far and near."""
    transform, x, c = built
    s, z = transform.stretch(case.shape), transform(x, c)
    for scale in (1.0, 1e-3):
        y = case.data(BATCH, *case.shape, seed=5) * scale + x * (1 - scale)
        apart, mapped = distance(x, y), distance(z, transform(y, c))
        assert (mapped <= s.forward * apart * (1 + 1e-9)).all()
        assert (apart <= s.inverse * mapped * (1 + 1e-9)).all()


@every
def test_the_reference_is_the_same_map_in_float64(case):
    """The map with the stored float32 weights, evaluated in float64, whatever the type of the input."""
    transform = case.build(dtype=torch.float32)
    x, c = case.x(BATCH, dtype=torch.float32), case.c(BATCH, dtype=torch.float32)
    got = transform.reference(x, c)
    assert got.dtype == DOUBLE
    torch.testing.assert_close(got.float(), transform(x, c), atol=1e-5, rtol=1e-5)
    wide = copy.deepcopy(transform).double()
    torch.testing.assert_close(got, wide(x.double(), None if c is None else c.double()), atol=1e-6, rtol=1e-6)


@every
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE], ids=["float32", "float64"])
def test_the_error_bound_of_a_solve_holds(case, dtype):
    transform, c = case.build(dtype=dtype), case.c(BATCH, dtype=dtype)
    z = transform(case.x(BATCH, dtype=dtype), c)
    found = transform.solve(z, c)
    assert found.converged.all() == case.proven
    # The true solution for the same stored weights, by Newton's method on the float64 reference.
    x, context = found.x.double().clone(), None if c is None else c.double()
    for _ in range(4):
        residual = (transform.reference(x, context) - z.double()).flatten(1)
        j = dense_jacobian(lambda t: transform.reference(t, context), x)
        x -= torch.linalg.solve(j, residual).reshape(x.shape)
    slack = 1e-14 * transform.stretch(case.shape).inverse
    assert (distance(found.x.double(), x) <= found.error_bound + slack).all()


@every
def test_a_sample_does_not_depend_on_the_rest_of_the_batch(built):
    transform, x, c = built
    z, logdet = transform.forward_and_logdet(x, c)
    found = transform.solve(z, c)
    for i in range(BATCH):
        one, context = x[i : i + 1], None if c is None else c[i : i + 1]
        alone, its_logdet = transform.forward_and_logdet(one, context)
        torch.testing.assert_close(alone[0], z[i], atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(its_logdet[0], logdet[i], atol=1e-12, rtol=1e-12)
        by_itself = transform.solve(z[i : i + 1], context)
        torch.testing.assert_close(by_itself.x[0], found.x[i], atol=1e-9, rtol=0)
        assert by_itself.iterations[0] == found.iterations[i]


@every
def test_the_inverse_has_the_inverse_jacobian(case, built):
    """The implicit gradient, against the dense Jacobian of the forward map."""
    transform, x, c = built
    z = transform(x, c).detach().requires_grad_()
    found = transform.inverse(z, c)
    v = normal(*found.shape, seed=3)
    (got,) = torch.autograd.grad(found, z, v)
    j = dense_jacobian(lambda t: transform(t, c), x)
    torch.testing.assert_close(got.flatten(1), torch.linalg.solve(j.mT, v.flatten(1)), atol=1e-7, rtol=1e-6)


@every
def test_gradients_reach_every_parameter(built):
    transform, x, c = built
    z, logdet = transform.forward_and_logdet(x.requires_grad_(), c)
    ((z * normal(*z.shape, seed=4)).sum() + logdet.sum()).backward()
    for name, p in transform.named_parameters():
        assert p.grad is not None, name
        assert torch.isfinite(p.grad).all(), name
        assert p.grad.abs().max() > 0, name


@every
def test_the_map_stands_still_in_eval(built):
    """No evaluation, inversion or estimate moves a weight or a buffer."""
    transform, x, c = built
    z, logdet = transform.forward_and_logdet(x, c)
    before = {name: value.clone() for name, value in transform.state_dict().items()}
    transform.inverse(z, c)
    transform.solve(z, c)
    again = transform.forward_and_logdet(x, c)
    assert torch.equal(again[0], z)
    assert torch.equal(again[1], logdet)
    assert all(torch.equal(value, before[name]) for name, value in transform.state_dict().items())
