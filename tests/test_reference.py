"""What is computed is what an earlier version computed: tests/reference holds its values and its run folders."""

import json
import math
from itertools import chain

import pytest
import torch

import iresnet
from iresnet.run import Run
from tools import reference
from tools.reference import FOLDER, RUNS, SHIPPED, STEPS, STOPPED, THREADS, TRAINED

pytestmark = pytest.mark.no_cover


def recorded(name):
    return json.loads((FOLDER / f"{name}.json").read_text())


def assert_close(found, expected, rel):
    """Numbers, and lists and mappings of them, as far apart as `rel` of the largest number of each list."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_close(found[key], value, rel)
    elif isinstance(expected, list) and isinstance(expected[0], list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other, rel)
    elif isinstance(expected, list):
        scale = max(map(abs, expected), default=0)
        assert found == pytest.approx(expected, rel=0, abs=rel * scale)
    else:
        assert found == pytest.approx(expected, rel=rel)


@pytest.fixture(autouse=True)
def _one_thread():
    with reference.threads(1):
        yield


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "cifar10-flow-modern")) for name in STEPS]
)
def test_loss_and_gradients_of_a_step_in_float64(name):
    found, expected = reference.step(name), recorded("steps")[name]
    one, other = found.pop("gradients"), expected.pop("gradients")
    assert_close(found, expected, 1e-12)
    assert one.keys() == other.keys()
    one, other = ([*chain.from_iterable(gradients.values())] for gradients in (one, other))
    assert_close(one, other, 1e-12)  # of the largest of all: some cancel


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_fifty_steps_in_float32_stay_within_the_spread_over_threads(name):
    """Beside the spread of one and two threads, a few units in the last place, since two thread counts can agree."""
    lines = [recorded("training")[name][str(count)] for count in THREADS]
    found = reference.losses(name)
    for loss, *others in zip(found, *lines, strict=True):
        spread = max(others) - min(others)
        assert min(others) - spread - 1e-6 <= loss <= max(others) + spread + 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
def test_codes_scores_and_inverses_of_a_model_that_comes_with_the_library(name):
    expected = recorded("models")[name]
    found = reference.model_values(iresnet.load(name), Run.open(name).schema.shape)
    bounds = found.pop("bounds"), expected.pop("bounds")
    verdicts = [(values.pop("converged"), values.pop("proven")) for values in (found, expected)]
    assert verdicts[0] == verdicts[1]
    assert_close(found, expected, 1e-5)
    for name, values in bounds[1].items():  # a bound follows the last digits of a residual
        for one, other in zip(bounds[0][name], values, strict=True):
            assert abs(math.log10(one / other)) < 1


@pytest.mark.parametrize("kind", RUNS)
def test_scores_of_a_run_folder_that_was_written_earlier(kind, tmp_path):
    assert_close(reference.scores(reference.placed(kind, tmp_path)), recorded("scores")[kind], 1e-5)


@pytest.mark.parametrize("kind", RUNS)
def test_its_certificate_still_holds(kind):
    folder = FOLDER / "runs" / kind
    expected = json.loads((folder / "certificate.json").read_text())
    found = json.loads(iresnet.certify(Run.open(folder).model(), Run.open(folder).schema.shape).to_json())
    assert found["passed"] == expected["passed"] is True
    constants = [[(block["name"], block["proven"]) for block in c["blocks"]] for c in (found, expected)]
    assert constants[0] == constants[1]
    bounds = [[block["lipschitz"] for block in c["blocks"]] for c in (found, expected)]
    assert_close(*bounds, 1e-6)


def test_a_training_that_was_stopped_earlier_goes_on_to_the_same_weights(tmp_path):
    assert_close(reference.resumed(reference.placed(STOPPED, tmp_path)), recorded("scores")[STOPPED], 1e-5)


def test_a_projection_tells_tensors_apart():
    x = torch.arange(6.0)
    assert reference.projected(x) != reference.projected(x.flip(0))
    assert reference.projected(x)[0] == pytest.approx(math.sqrt(55))
