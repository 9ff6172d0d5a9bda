"""What leaves the library computes what the library computes: plain weights, torch.export programs, ONNX."""

import copy
import json
import logging
import math
import re
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import iresnet.export as exporting
from iresnet import (
    ActNorm,
    Chain,
    Classifier,
    DiagonalNormal,
    Flow,
    FullMixture,
    InjectivePad,
    LipschitzLinear,
    Logit,
    ResidualBlock,
    Sine,
    Squeeze,
    Standardise,
    contractive_convnet,
    contractive_mlp,
    mlp_flow,
)
from iresnet.data import ColumnKind, Dataset, Schema
from iresnet.evaluate import anomaly, log_likelihood
from iresnet.export import export, forward_program, save_onnx, save_program, save_weights, without_constraints
from iresnet.export.forward import Determinant, Forward
from iresnet.hybrid import Hybrid
from iresnet.logdet import Jacobian
from iresnet.transforms.columns import ColumnTransform
from iresnet.transforms.first_batch import DataInitialised
from tests.zoo import ZOO, constrained_layers, contraction, linear_block, normal, rouse_

# torch 2.11 warns of its own doings: when the compiler is imported, and when a program is loaded.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning"),
]

SIZES = (1, 2, 3, 8)

every = pytest.mark.parametrize("case", ZOO, ids=lambda case: case.name)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def seen_(model):
    """Mark every layer that waits for its first batch as initialised, as after training."""
    for module in model.modules():
        if isinstance(module, DataInitialised):
            module.initialised.fill_(True)
    return model


def head(features, classes=3):
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(features, classes))


def flow():
    return mlp_flow(2, blocks=2, hidden=(8,))


def conditional():
    return mlp_flow(2, blocks=1, hidden=(8,), context=3)


def classifier():
    first, second = contractive_convnet(4, 6), contractive_convnet(16, 6, preactivation=True)
    chain = Chain(InjectivePad(1), ActNorm(4), ResidualBlock(first), Squeeze(), ActNorm(16), ResidualBlock(second))
    return Classifier(chain, head(16))


def image_chain():
    block = ResidualBlock(contractive_convnet(4, 6, activation=Sine))
    return Chain(Logit(levels=256), Squeeze(), ActNorm(4), block, Standardise([0.5] * 4, [2.0] * 4))


def image_flow():
    return Flow(image_chain(), DiagonalNormal((4, 3, 3)), event_shape=(1, 6, 6))


def hybrid():
    return Hybrid(image_chain(), DiagonalNormal((4, 3, 3)), head(4), event_shape=(1, 6, 6))


def rows(*shape, seed=1):
    return normal(*shape, seed=seed, dtype=torch.float32)


def pixels(count, seed=1):
    return torch.rand(count, 1, 6, 6, generator=torch.Generator().manual_seed(seed)) * 256


MODELS = {
    "flow": (flow, lambda n: (rows(n, 2),)),
    "conditional": (conditional, lambda n: (rows(n, 2), rows(n, 3, seed=2))),
    "classifier": (classifier, lambda n: (rows(n, 3, 4, 4),)),
    "image-flow": (image_flow, lambda n: (pixels(n),)),
    "hybrid": (hybrid, lambda n: (pixels(n),)),
}

models = pytest.mark.parametrize("kind", MODELS)
# The image flow is the hybrid without its head.
traced = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if kind == "image-flow" else kind for kind in MODELS]
)


def made(kind):
    """(a model whose constraints bite, n -> the inputs of n rows)."""
    make, data = MODELS[kind]
    torch.manual_seed(0)
    return seen_(rouse_(make())).eval(), data


def expected(model, *inputs):
    code = model.transform(*inputs)
    outputs = {"code": code, "logits": model.head(code)} if hasattr(model, "head") else {"code": code}
    return outputs | ({"log_prob": model.log_prob(*inputs).double()} if scores(model) else {})


def scores(model):
    """Whether an export of the model has its log-likelihood: a density of rows."""
    return hasattr(model, "base") and len(model.base.shape) == 1


def agree(run, model, data, atol=2e-6):
    for n in SIZES:
        inputs = data(n)
        with torch.no_grad():
            torch.testing.assert_close(dict(run(*inputs)), expected(model, *inputs), atol=atol, rtol=atol)


# ---------------------------------------------------------------------------------------------- plain copies


@every
@pytest.mark.no_cover
def test_the_plain_copy_is_the_same_transform(case):
    transform, x, c = case.build(), case.x(3), case.c(3)
    z = transform(x, c)
    before = copy.deepcopy(transform.state_dict())
    plain = without_constraints(transform)
    assert torch.equal(plain(x, c), z)
    torch.testing.assert_close(plain.forward_and_logdet(x, c), transform.forward_and_logdet(x, c))
    torch.testing.assert_close(plain.inverse(z, c), x, atol=1e-8, rtol=0)
    assert not any("parametrizations" in key for key in plain.state_dict())
    assert not any(p.requires_grad for p in plain.parameters())
    torch.testing.assert_close(transform.state_dict(), before, atol=0, rtol=0)
    assert torch.equal(transform(x, c), z)


def test_the_plain_weight_is_the_constrained_one():
    layer = LipschitzLinear(3, 3, bias=False, coefficient=0.5)
    layer.weight = torch.diag(torch.tensor([2.0, 1.0, 0.0]))
    plain = without_constraints(layer)
    assert type(plain) is LipschitzLinear
    assert list(plain.state_dict()) == ["weight"]
    torch.testing.assert_close(plain.weight, torch.diag(torch.tensor([0.5, 0.25, 0.0])))
    assert constrained_layers(layer) == [layer]
    assert constrained_layers(plain) == []


def test_a_model_in_training_is_copied_as_it_will_be_in_eval():
    model = flow()
    x = rows(64, 2)
    model(x).mean().backward()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))  # the norms have not caught up
    state = copy.deepcopy(model.state_dict())
    plain = without_constraints(model)
    assert model.training
    assert not plain.training
    torch.testing.assert_close(model.state_dict(), state, atol=0, rtol=0)
    assert all(p.grad is not None for p in model.parameters())
    assert torch.equal(plain(x), model.eval()(x))


def test_parametrizations_of_torch_are_baked_in_too():
    block = ResidualBlock(contractive_mlp(3, (4,)))
    model = Classifier(block, parametrizations.weight_norm(parametrizations.orthogonal(nn.Linear(3, 3)), "bias"))
    model.eval()
    x = rows(5, 3)
    y = model(x)
    plain = without_constraints(model)
    assert {"head.weight", "head.bias"} <= set(plain.state_dict())
    torch.testing.assert_close(plain(x), y)
    assert torch.equal(model(x), y)  # the original has kept its own
    assert parametrize.is_parametrized(model.head, "weight")
    torch.testing.assert_close(without_constraints(model)(x), y)


# ---------------------------------------------------------------------------------------------- weights


@models
def test_weights_load_into_the_same_architecture(kind, tmp_path):
    model, data = made(kind)
    path = save_weights(model, tmp_path / "new" / "weights.safetensors")
    torch.manual_seed(9)
    other = without_constraints(MODELS[kind][0]())
    other.load_state_dict(load_file(path))
    agree(lambda *inputs: expected(other, *inputs), model, data, atol=0)
    assert all(module.initialised for module in other.modules() if isinstance(module, ActNorm))


def test_the_header_says_what_the_weights_are(tmp_path):
    model, _ = made("flow")
    path = save_weights(model, tmp_path / "weights.safetensors", about={"classes": ["no", "yes"]})
    with safe_open(path, framework="pt") as file:
        says = json.loads(file.metadata()["iresnet"])
        assert set(file.keys()) == set(says["keys"])
    assert says["model"] == "Flow"
    assert says["shape"] == [2]
    assert says["about"] == {"classes": ["no", "yes"]}
    assert says["keys"]["transform.transforms.1.g.0.weight"] == {"layer": "Linear", "shape": [8, 2]}
    assert "transform.transforms.1.g.0.bias" in says["keys"]


def test_a_block_that_is_used_twice_is_saved_under_both_names(tmp_path):
    block = rouse_(ResidualBlock(contractive_mlp(2, (4,))))
    weights = load_file(save_weights(Chain(block, block), tmp_path / "weights.safetensors"))
    assert torch.equal(weights["transforms.0.g.0.weight"], weights["transforms.1.g.0.weight"])


# ---------------------------------------------------------------------------------------------- programs


def test_the_program_of_a_linear_block_is_linear_algebra():
    a = contraction(3, 0.8)
    x = normal(7, 3, seed=1)
    program = forward_program(linear_block(a), normal(4, 3)).module()
    torch.testing.assert_close(program(x)["code"], x @ (torch.eye(3, dtype=a.dtype) + a).T)


@traced
@pytest.mark.no_cover
def test_a_loaded_program_is_the_model_at_every_batch_size(kind, tmp_path):
    model, data = made(kind)
    x, *context = data(4)
    path = save_program(model, x, tmp_path / "program.pt2", *context)
    agree(torch.export.load(path).module(), model, data)
    assert [p.name for p in tmp_path.iterdir()] == ["program.pt2"]


@pytest.mark.slow
@every
def test_every_transform_has_a_program(case):
    transform = seen_(case.build())
    program = forward_program(transform, case.x(1), case.c(1)).module()
    for n in (1, 2, 5):
        inputs = [t for t in (case.x(n), case.c(n)) if t is not None]
        torch.testing.assert_close(program(*inputs)["code"], transform(*inputs))


def test_one_row_is_example_enough_and_its_values_stay_out_of_the_program():
    model, data = made("flow")
    program = forward_program(model, torch.full((1, 2), 7.0))
    agree(program.module(), model, data)
    (example,), _ = program.example_inputs
    assert not example.any()


def test_a_model_in_training_is_exported_as_it_will_be_in_eval():
    model, data = made("flow")
    program = forward_program(model.train(), *data(3)).module()
    assert model.training
    agree(program, model.eval(), data)


def test_a_user_network_that_asks_for_the_length_of_its_batch_keeps_it_free():
    class Own(nn.Module):
        def forward(self, x):
            return 0.5 * x + 0 * torch.ones(len(x), 1)

    program = forward_program(ResidualBlock(Own(), lipschitz=0.5), rows(3, 2)).module()
    torch.testing.assert_close(program(rows(6, 2))["code"], 1.5 * rows(6, 2))


@pytest.mark.gpu
def test_a_model_on_the_gpu_gives_a_program_for_the_cpu_that_can_be_moved():
    from torch.export.passes import move_to_device_pass

    model, data = made("classifier")
    program = forward_program(copy.deepcopy(model).cuda(), *(t.cuda() for t in data(2)))
    agree(program.module(), model, data, atol=1e-5)
    moved = move_to_device_pass(program, "cuda").module()
    agree(lambda x: {name: y.cpu() for name, y in moved(x.cuda()).items()}, model, data, atol=1e-2)  # TF32


# ---------------------------------------------------------------------------------------------- scores

KINDS = (ColumnKind(), ColumnKind("positive"), ColumnKind("bounded", 0.0, 1.0), ColumnKind("integer", 0.0, None, 1.0))
TABLE = Schema((4,), kinds=KINDS)
REFERENCE = torch.linspace(-20, 0, 41, dtype=torch.float64)


def table_rows(count):
    x = rows(count, 4)
    return torch.stack([x[:, 0], x[:, 1].exp(), x[:, 2].sigmoid(), x[:, 3].exp().round()], dim=1)


def table_flow():
    """A density of a real, a positive, a bounded and an integer column."""
    ends = [kind.interval for kind in KINDS]
    lower, upper, margin = ([end[i] for end in ends] for i in range(3))
    columns = ColumnTransform(lower, upper, margin, [kind.step for kind in KINDS]).fit(table_rows(64))
    block = ResidualBlock(contractive_mlp(4, (8,)))
    return rouse_(Flow(Chain(columns, block), FullMixture(4, 2))).eval()


def same_scores(run, model, atol):
    data = Dataset(table_rows(7), None, TABLE)
    value, got = log_likelihood(model, data).value, run(data.x)
    torch.testing.assert_close(got["log_prob"], value, atol=atol, rtol=atol)
    assert torch.equal(got["anomaly"], anomaly(got["log_prob"], REFERENCE))
    outside = torch.tensor([[0.0, 1.0, 0.5, 2.5], [0.0, -1.0, 0.5, 2.0], [0.0, 1.0, 1.5, 2.0], [0.0, 1.0, 0.5, 2.0]])
    got = run(outside)
    assert torch.isneginf(got["log_prob"]).tolist() == [True, True, True, False]
    assert got["anomaly"][:3].tolist() == [1, 1, 1]


def test_a_program_scores_rows_as_the_command_does(tmp_path):
    torch.manual_seed(0)
    model = table_flow()
    save_program(model, table_rows(3), tmp_path / "program.pt2", schema=TABLE, reference=REFERENCE)
    same_scores(torch.export.load(tmp_path / "program.pt2").module(), model, atol=1e-5)


def test_the_log_prob_of_a_linear_block_is_linear_algebra():
    a, x = contraction(3, 0.8), normal(5, 3, seed=1)
    eye = torch.eye(3, dtype=a.dtype)
    flow = Flow(linear_block(a), DiagonalNormal(3)).double().eval()
    exact = torch.distributions.MultivariateNormal(torch.zeros(3).double(), precision_matrix=(eye + a).T @ (eye + a))
    program = forward_program(flow, x).module()
    torch.testing.assert_close(program(x)["log_prob"], exact.log_prob(x))


def shrinking_flow(coefficient, dimension=64):
    """A flow with the smallest determinant that its coefficient allows, (1 - c)^d, at 0."""
    g = nn.Sequential(LipschitzLinear(dimension, dimension, coefficient=coefficient), nn.Tanh())
    with torch.no_grad():
        g[0].parametrizations.weight.original.copy_(-torch.eye(dimension))
        g[0].bias.zero_()
    return Flow(ResidualBlock(g), DiagonalNormal(dimension), event_shape=(dimension,)).eval()


SMALL_DETERMINANTS = [(0.5, 64), (0.8, 64), (0.85, 64), (0.99, 64), (0.99, 33), (0.99, 20), (0.99, 7)]


def same_small_determinants(run, flow, d):
    x = torch.cat([torch.zeros(1, d), rows(3, d), 9 * rows(1, d)])
    got, exact = run(x), copy.deepcopy(flow).double().log_prob(x.double())
    torch.testing.assert_close(got["log_prob"], exact, atol=1e-3, rtol=1e-5)
    assert (got["anomaly"] < 1).all()


@pytest.mark.parametrize(("c", "d"), SMALL_DETERMINANTS)
def test_determinants_that_float32_cannot_hold(c, d):
    flow = shrinking_flow(c, d)
    program = forward_program(flow, rows(2, d), reference=flow.log_prob(rows(9, d)).detach().double())
    same_small_determinants(program.module(), flow, d)


@pytest.mark.parametrize("order", ["ascending", "descending", "alternating"])
def test_factors_of_a_determinant_may_differ_widely(order):
    factors = torch.tensor([0.02] * 32 + [1.98] * 32, dtype=torch.float64)
    factors = {"ascending": factors, "descending": factors.flip(0), "alternating": factors.view(2, 32).T.flatten()}
    j = torch.diag(factors[order].float() - 1).expand(3, 64, 64)
    x = torch.zeros(3, 64)
    got = Determinant()(Jacobian(lambda v: torch.einsum("bij,...bi->...bj", j, v), broadcasts=True), x)
    torch.testing.assert_close(got.double(), factors[order].log().sum().expand(3), atol=1e-3, rtol=0)


def same_far_out(run, model):
    x = table_rows(6)
    x[0, 0], x[1, 0], x[2, 0], x[3, 1], x[4, 3] = 1e20, 3e38, -3e38, 3e38, 1e30
    got = run(x)
    torch.testing.assert_close(got["log_prob"], log_likelihood(model, Dataset(x, None, TABLE)).value, rtol=1e-4, atol=0)
    assert (got["anomaly"] < 1).all()


def test_rows_far_out_have_finite_scores_as_in_the_library():
    torch.manual_seed(0)
    model = table_flow()
    same_far_out(forward_program(model, table_rows(3), schema=TABLE, reference=REFERENCE).module(), model)


def test_a_code_that_overflows_is_impossible_and_nan_stays():
    flow = Flow(linear_block(0.8 * torch.eye(3)).float(), FullMixture(3, 2)).eval()
    program = forward_program(flow, rows(2, 3), reference=REFERENCE).module()
    x = torch.tensor([[3e38, -3e38, 3e38], [3e38, 3e38, 3e38], [math.inf, 0.0, -math.inf], [math.nan, 0.0, 0.0]])
    got = program(x)
    assert torch.isneginf(got["log_prob"]).tolist() == [True, True, True, False]
    assert got["anomaly"][:3].tolist() == [1, 1, 1]
    assert got["log_prob"][3].isnan()


@pytest.mark.parametrize(
    ("model", "example", "reason"),
    [
        (
            lambda: mlp_flow(65, blocks=1, hidden=(4,)),
            rows(2, 65),
            "and this model has 65",
        ),
        (image_flow, pixels(2), "only rows are scored, not images"),
    ],
    ids=["wide", "image"],
)
def test_what_cannot_be_scored_says_so(model, example, reason):
    forward = Forward(seen_(model()).eval(), reference=REFERENCE)
    assert list(forward(example)) == ["code"]
    text = forward.readme("", {"x": example}, "", with_onnx=False)
    assert "There is no log_prob: " in text
    assert reason in text


# ---------------------------------------------------------------------------------------------- ONNX


def run_onnx(source):
    session = pytest.importorskip("onnxruntime").InferenceSession(source, providers=["CPUExecutionProvider"])
    inputs, outputs = [i.name for i in session.get_inputs()], [o.name for o in session.get_outputs()]

    def run(*tensors):
        values = session.run(outputs, dict(zip(inputs, (t.numpy() for t in tensors), strict=True)))
        return dict(zip(outputs, map(torch.from_numpy, values), strict=True))

    return run


@pytest.fixture
def onnx():
    pytest.importorskip("onnxscript")
    return pytest.importorskip("onnx")


@models
def test_onnxruntime_computes_the_model_at_every_batch_size(kind, onnx, tmp_path):
    model, data = made(kind)
    x, *context = data(4)
    path = save_onnx(model, x, tmp_path / "model.onnx", *context)
    agree(run_onnx(path), model, data, atol=1e-5)
    graph = onnx.load(path).graph
    assert [i.name for i in graph.input] == ["x", "context"][: 1 + len(context)]
    assert all(i.type.tensor_type.shape.dim[0].dim_param == "batch" for i in (*graph.input, *graph.output))
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]


def test_onnxruntime_scores_rows_as_the_command_does(onnx, tmp_path):
    torch.manual_seed(0)
    model = table_flow()
    save_onnx(model, table_rows(3), tmp_path / "model.onnx", schema=TABLE, reference=REFERENCE)
    same_scores(run_onnx(tmp_path / "model.onnx"), model, atol=3e-5)


@pytest.mark.parametrize(("c", "d"), SMALL_DETERMINANTS[1:4])
def test_onnxruntime_has_determinants_that_float32_cannot_hold(c, d, onnx, tmp_path):
    flow = shrinking_flow(c, d)
    save_onnx(flow, rows(2, d), tmp_path / "model.onnx", reference=flow.log_prob(rows(9, d)).detach().double())
    same_small_determinants(run_onnx(tmp_path / "model.onnx"), flow, d)


def test_onnxruntime_scores_rows_far_out_as_the_library_does(onnx, tmp_path):
    torch.manual_seed(0)
    model = table_flow()
    save_onnx(model, table_rows(3), tmp_path / "model.onnx", schema=TABLE, reference=REFERENCE)
    same_far_out(run_onnx(tmp_path / "model.onnx"), model)


@pytest.mark.slow
def test_the_log_and_the_warnings_of_the_exporter_stay_inside(onnx, tmp_path, caplog):
    model, data = made("flow")
    level = logging.getLogger("torch.onnx").level
    save_onnx(model, *data(2), tmp_path / "model.onnx")  # a warning would be an error
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert logging.getLogger("torch.onnx").level == level


def test_onnx_without_a_runtime_is_written_unseen(onnx, tmp_path, monkeypatch):
    found = exporting.onnx.find_spec
    monkeypatch.setattr(exporting.onnx, "find_spec", lambda name: None if name == "onnxruntime" else found(name))
    model, data = made("flow")
    files = export(model, *data(2), tmp_path)
    assert "model.onnx was not run" in files["readme"].read_text()
    agree(run_onnx(files["onnx"]), model, data, atol=1e-5)


def test_what_onnx_cannot_say_gets_a_sentence(onnx, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("no such operator.")

    model = linear_block(contraction(2, 0.5))
    monkeypatch.setattr(torch.onnx, "export", refuse)
    with pytest.raises(RuntimeError, match="cannot be exported to ONNX: no such operator. Use a float32 model"):
        save_onnx(model, normal(2, 2), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_onnx_without_its_packages_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(exporting.onnx, "find_spec", lambda _: None)
    model, data = made("flow")
    with pytest.raises(RuntimeError, match="missing: onnx, onnxscript. Install them: pip install onnx onnxscript."):
        save_onnx(model, *data(2), tmp_path / "model.onnx")


# ---------------------------------------------------------------------------------------------- the folder


def readme_code(text, name):
    """The three lines that the README gives for a file."""
    paragraph = text.split(f"{name} needs", 1)[1]
    return "\n".join(re.findall(r"^    (.*)$", paragraph, flags=re.M)[:3])


def run_without_library(code, folder):
    """Run a script in a process in which iresnet cannot be imported; what it prints."""
    script = f"import sys\nsys.modules['iresnet'] = None\n{code}"
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_folder_holds_all_of_it_and_says_how_to_load_it(tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "missing_packages", lambda: ["onnx"])
    (tmp_path / "model.onnx").write_text("of an earlier model")
    model, data = made("hybrid")
    files = export(model, *data(2), tmp_path)
    names = {"weights": "weights.safetensors", "program": "program.pt2", "readme": "README.txt"}
    assert {key: path.name for key, path in files.items()} == names
    assert {p.name for p in tmp_path.iterdir()} == set(names.values())
    text = files["readme"].read_text()
    with safe_open(files["weights"], framework="pt") as file:
        assert json.loads(file.metadata()["iresnet"])["shape"] == [1, 6, 6]
    assert "x (batch, 1, 6, 6) -> code (batch, 4, 3, 3) and logits (batch, 3)" in text
    assert "The inverse, the likelihood and the certificate need the library." in text
    assert "pip install onnx onnxscript" in text
    scope = {"x": pixels(3)}
    monkeypatch.chdir(tmp_path)
    exec(readme_code(text, "program.pt2"), scope)
    torch.testing.assert_close(scope["outputs"]["logits"], model.logits(pixels(3)))


def test_an_old_onnx_file_goes_only_when_the_rest_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "missing_packages", lambda: ["onnx"])
    (tmp_path / "model.onnx").write_text("of an earlier model")
    (tmp_path / "README.txt").mkdir()  # cannot be written
    model, data = made("flow")
    with pytest.raises(OSError, match="cannot write .*README.txt: it is a folder"):
        export(model, *data(2), tmp_path)
    assert (tmp_path / "model.onnx").read_text() == "of an earlier model"


@pytest.mark.slow
def test_the_program_loads_as_the_readme_says_without_this_library(tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "missing_packages", lambda: ["onnx"])
    model, data = made("classifier")
    code = readme_code(export(model, *data(2), tmp_path)["readme"].read_text(), "program.pt2")
    printed = run_without_library(
        f"import torch\nx = torch.ones(3, 3, 4, 4)\n{code}\nprint(outputs['logits'].tolist())", tmp_path
    )
    logits = model(torch.ones(3, 3, 4, 4))
    torch.testing.assert_close(torch.tensor(json.loads(printed)), logits, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_onnx_loads_as_the_readme_says_without_this_library(onnx, tmp_path):
    pytest.importorskip("onnxruntime")
    model, data = made("classifier")
    text = export(model, *data(2), tmp_path)["readme"].read_text()
    assert re.search(
        r"On \d given samples?, program.pt2 differs from the model by at most \S+, model.onnx by \d\S+\.", text
    )
    code = readme_code(text, "model.onnx")
    printed = run_without_library(
        f"import numpy\nx = numpy.ones((3, 3, 4, 4), 'float32')\n{code}\nprint(outputs[1].tolist())", tmp_path
    )
    logits = model(torch.ones(3, 3, 4, 4))
    torch.testing.assert_close(torch.tensor(json.loads(printed)), logits, atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------------------------------------- errors


def test_a_model_that_has_not_seen_data_is_refused(tmp_path):
    model = flow()
    sentence = (
        "must be initialised before export; 3 layers still wait for their first "
        "batch, e.g. transform.transforms.0. Train"
    )
    with pytest.raises(ValueError, match=sentence):
        export(model, rows(2, 2), tmp_path)
    with pytest.raises(ValueError, match=sentence):
        save_weights(model, tmp_path / "weights.safetensors")
    with pytest.raises(ValueError, match="e.g. the model itself"):
        save_weights(ActNorm(2), tmp_path / "weights.safetensors")
    assert not list(tmp_path.iterdir())


def test_what_has_no_transform_is_refused():
    with pytest.raises(ValueError, match="must be a Transform or have one as .transform .* got Linear. Wrap it"):
        Forward(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("example", "sentence"),
    [
        (torch.zeros(2, 3), r"example must have shape \(batch, 2\); got \(2, 3\)"),
        (torch.zeros(2), "example must have a batch dimension"),
        (torch.zeros(0, 2), "example must hold at least one sample"),
        (torch.zeros(2, 2, dtype=torch.uint8), r"example must be a floating-point tensor; got torch.uint8"),
        (
            torch.zeros(2, 2, dtype=torch.float64),
            r"x must have the dtype of the weights, torch.float32; got torch.float64",
        ),
        (torch.full((2, 2), torch.nan), "x must be finite"),
    ],
    ids=["shape", "vector", "empty", "bytes", "double", "nan"],
)
def test_an_example_that_the_model_does_not_take_gets_a_sentence(example, sentence):
    with pytest.raises(ValueError, match=sentence):
        forward_program(made("flow")[0], example)


def test_an_image_of_another_size_gets_a_sentence():
    model, _ = made("classifier")
    model.head = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    with pytest.raises(ValueError, match="example must be a batch that the model accepts; got shape .*1024 and 64x3"):
        forward_program(model, rows(2, 3, 16, 16))
    model, _ = made("image-flow")
    model.event_shape = None
    with pytest.raises(
        ValueError, match=r"the code of example must have the shape of the base, \(4, 3, 3\); got \(4, 2, 2\)"
    ):
        forward_program(model, torch.ones(2, 1, 4, 4))


def test_a_conditional_model_needs_an_example_of_its_context():
    with pytest.raises(ValueError, match="this network is conditional; pass context="):
        forward_program(made("conditional")[0], rows(2, 2))


class Branching(nn.Module):
    def forward(self, x):
        return 0.5 * x if x.sum() > 0 else 0.25 * x


class Fickle(nn.Module):
    def forward(self, x):
        return 0.5 * x if torch.compiler.is_compiling() else 0.25 * x


def test_a_forward_pass_that_branches_on_values_is_refused_with_a_remedy():
    with pytest.raises(
        RuntimeError, match="cannot be traced into one program: .* Remove control flow that depends on values"
    ):
        forward_program(ResidualBlock(Branching(), lipschitz=0.5), torch.ones(2, 2))


def test_a_program_that_differs_from_its_model_is_not_handed_out(tmp_path):
    model = ResidualBlock(Fickle(), lipschitz=0.5).eval()
    with pytest.raises(RuntimeError, match="program must agree with the model; for a batch of 1 their code differ"):
        save_program(model, torch.ones(2, 2), tmp_path / "program.pt2")
    assert not list(tmp_path.iterdir())


def test_a_program_is_called_pt2(tmp_path):
    model, data = made("flow")
    with pytest.raises(ValueError, match=r"must end in .pt2, or torch does not load it; got .*program.bin. Rename it"):
        save_program(model, *data(2), tmp_path / "program.bin")


def test_a_path_that_cannot_be_written_gets_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot write .*weights.safetensors"):
        save_weights(made("flow")[0], tmp_path / "file" / "weights.safetensors")


class Raised(Flow):
    def forward(self, x, context=None, **options):
        return super().forward(x, context, **options) + 100


class Sharpened(Classifier):
    def forward(self, x, context=None):
        return 3 * super().forward(x, context)


def hooked(*parts):
    model = Flow(*parts)
    model.register_forward_hook(lambda m, x, y: y + 100)
    return model


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (lambda t: Raised(t, DiagonalNormal(2)), "this Raised returns another log_prob"),
        (lambda t: Sharpened(t, nn.Linear(2, 3)), "this Sharpened returns another logits"),
        (lambda t: hooked(t, DiagonalNormal(2)), "this Flow returns another log_prob. Remove its hooks"),
    ],
)
def test_a_model_that_returns_something_else_is_refused(kind, sentence, tmp_path):
    """Trap: the program is that of transform, base and head, and was compared with these only."""
    model = kind(Chain(ResidualBlock(contractive_mlp(2, (4,)))))
    with pytest.raises(RuntimeError, match=sentence):
        export(model.eval(), normal(2, 2).float(), tmp_path)
