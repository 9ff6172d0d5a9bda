"""The call paths that docs/explanation/design.md describes, compared with the calls that are actually made."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import iresnet
from iresnet import ActNorm, Chain, DiagonalNormal, Flow, PowerSeries, ResidualBlock, contractive_convnet, mlp_flow
from iresnet.gpu import planned
from iresnet.train import Training, train
from iresnet.train.objective import MaximumLikelihood
from tests.runs import copy_of, trained
from tests.zoo import rouse_

ROOT = Path(iresnet.__file__).parent
TEXT = (
    (ROOT.parent / "docs" / "explanation" / "design.md").read_text().partition("## Five walks")[2].partition("\n## ")[0]
)

#: The steps of each walk, as (file, function), by its title.
WALKS = {
    title: [
        (file, function)
        for file, functions in re.findall(r"^\d+\. `([\w/]+\.py)`: (.*)$", body, re.MULTILINE)
        for function in re.findall(r"`([\w.]+)`", functions)
    ]
    for title, body in re.findall(r"^\*\*(.+?)\*\*\n(.*?)(?=^\*\*|\Z)", TEXT, re.MULTILINE | re.DOTALL)
}
CPU, GPU, LIKELIHOOD, SAMPLE, REPORT = WALKS


def calls(function: Callable[[], object]) -> list[tuple[str, str]]:
    """All functions of the library that a call runs, in order."""
    found = []

    def look(frame, event, _):
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(f"{ROOT}/"):
            found.append((path[len(f"{ROOT}/") :], name_of(frame)))

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        function()
    finally:
        sys.setprofile(before)
    return found


def name_of(frame):
    """The qualified name of a function; `co_qualname` needs Python 3.11."""
    name, first = frame.f_code.co_name, frame.f_locals.get("self", frame.f_locals.get("cls"))
    for cls in type(first).__mro__ if first is not None and not isinstance(first, type) else ():
        own = vars(cls).get(name)
        code = getattr(getattr(own, "fget", getattr(own, "__wrapped__", own)), "__code__", None)
        if code is frame.f_code:
            return f"{cls.__name__}.{name}"
    return name


def assert_walked(walk, made):
    """Assert that the calls contain every step of a walk, in order."""
    at = 0
    for step in walk:
        assert step in made[at:], f"{step} is not called after {walk[: walk.index(step)]}"
        at = made.index(step, at) + 1


def images():
    torch.manual_seed(0)
    block = ResidualBlock(contractive_convnet(3, 8, kernels=(3, 3)))
    return rouse_(Flow(Chain(ActNorm(3), block), DiagonalNormal((3, 5, 5)), estimator=PowerSeries(3)))


def test_five_walks_visit_at_most_ten_files_each_and_none_twice():
    assert len(WALKS) == 5
    for title, walk in WALKS.items():
        files = [file for file, _ in walk]
        runs = [file for i, file in enumerate(files) if i == 0 or files[i - 1] != file]
        assert len(runs) == len(set(runs)) <= 10, title


def test_a_training_step_on_a_cpu():
    flow, x = images(), torch.randn(4, 3, 5, 5)
    assert_walked(WALKS[CPU], calls(lambda: train(MaximumLikelihood(flow), [x], Training(steps=1))))


def test_the_computations_of_a_training_step_on_a_gpu():
    walk = [step for step in WALKS[GPU] if step[0].startswith("gpu/") and step[0] != "gpu/step.py"]
    flow, x = images(), torch.randn(4, 3, 5, 5)

    def step():
        with planned(flow, torch.float32, compiled=False) as view:
            view(x)

    assert_walked(walk, calls(step))


@pytest.mark.gpu
def test_a_training_step_on_a_gpu():
    flow, x = images().cuda(), torch.randn(4, 3, 5, 5, device="cuda")
    made = calls(lambda: train(MaximumLikelihood(flow), [x] * 8, Training(steps=8)))
    assert_walked([step for step in WALKS[GPU] if not step[0].startswith("gpu/") or step[0] == "gpu/step.py"], made)


def test_a_likelihood():
    flow, x = images().eval(), torch.randn(4, 3, 5, 5)
    with torch.no_grad():
        assert_walked(WALKS[LIKELIHOOD], calls(lambda: flow.log_prob(x)))


def test_a_sample():
    flow = rouse_(mlp_flow(2, blocks=2, hidden=(8,))).eval()
    assert_walked(WALKS[SAMPLE], calls(lambda: flow.sample((3,))))


def test_a_report(call, tmp_path):
    folder = copy_of(trained(), tmp_path / "run")
    assert_walked(WALKS[REPORT], calls(lambda: call("report", folder)))
