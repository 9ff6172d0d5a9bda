"""Other families of flows from settings, and every command on a run of each."""

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from iresnet import ActNorm, Chain, Classifier, Flow, Hybrid, Multiscale, cli, config, evaluate
from iresnet.data import Dataset, Schema
from iresnet.data.builtin import schema_of
from iresnet.models import FAMILIES, INVERSES, Network, build
from iresnet.models.families import IMAGE_SETTINGS, SHARED, VECTOR_SETTINGS, is_other_flow
from iresnet.presets import PRESETS, find
from iresnet.presets.reading import GROUPS
from iresnet.train import Training, parameter_groups
from iresnet.train.objective import Margin, MaximumLikelihood
from iresnet.transforms import AdditiveCoupling, AffineCoupling, Coupling, preserves_volume
from tests.runs import copy_of, trained
from tests.zoo import normal

TABLE = Schema((3,), columns=tuple("abc"))
FORMULA = ("glow", "glow-additive", "realnvp", "nice")
ZUKO = ("made", "maf", "ffjord")
OTHERS = [PRESETS[name] for name in GROUPS["others"] if name in PRESETS]


def network(family, schema, **changes):
    scales = schema.is_image and family in ("glow", "glow-additive", "realnvp", "irevnet")
    blocks = (1, 1) if scales else (1,)
    used = IMAGE_SETTINGS[family] if schema.is_image else VECTOR_SETTINGS
    settings = {
        "blocks": blocks, "activation": "relu", "preprocessing": "standardise",
        "padding": 15 if family == "irevnet" else 0,
        **{k: v for k, v in {"width": 8, "depth": 1, "factor_out": scales}.items() if k in used},
    }  # fmt: skip
    return Network(family=family, **{**settings, **changes})


def built(family, source="digits", purpose="density", **changes):
    if family in ZUKO:
        pytest.importorskip("zuko", reason="MADE, MAF and FFJORD are zuko's: pip install 'iresnet[flows]'")
    schema = {"table": TABLE, "one": Schema((1,), columns=("a",))}.get(source) or schema_of(source)
    torch.manual_seed(0)
    return build(network(family, schema, **changes), schema, purpose)


class TestSettings:
    def test_every_family_says_which_settings_it_uses(self):
        assert set(IMAGE_SETTINGS) == {f for f in FAMILIES if is_other_flow(Network(family=f))}
        assert {name for names in IMAGE_SETTINGS.values() for name in names} == set(SHARED)

    def test_every_other_family_describes_its_inverse(self):
        assert set(INVERSES) == set(FAMILIES) - {"iresnet"}
        assert {f for f in FAMILIES if is_other_flow(Network(family=f))} == set(INVERSES) - {"resnet", "resnet-plain"}

    @pytest.mark.parametrize("source", ["digits", "table", "moons"])
    @pytest.mark.parametrize("family", [*FORMULA, *ZUKO])
    def test_a_density_takes_a_step_and_inverts(self, family, source):
        flow = built(family, source)
        assert type(flow) is Flow
        assert flow.estimator is None
        shape = flow.event_shape
        x = normal(16, *shape).float()
        (-flow.train()(x).mean()).backward()
        assert all(p.grad is not None for p in flow.parameters())
        solution = flow.eval().transform.solve(flow.transform(x).detach())
        assert float(solution.measured_error(x).max()) < 1e-2
        assert bool(solution.converged.all()) == (family in FORMULA)

    @pytest.mark.parametrize("family", [*FORMULA, "irevnet", "maf"])
    def test_a_classifier(self, family):
        model = built(family, purpose="classification", readout="batchnorm", pool=True)
        assert type(model) is Classifier
        x = 16 * torch.rand(6, 1, 8, 8)
        assert model(x).shape == (6, 10)
        assert evaluate.has_inverse(model)

    def test_a_hybrid(self):
        model = built("glow", purpose="hybrid")
        assert type(model) is Hybrid
        log_prob, logits = model.eval()(16 * torch.rand(6, 1, 8, 8))
        assert (log_prob.shape, logits.shape) == ((6,), (6, 10))

    def test_glow_s_layout(self):
        """Squeeze, steps, half leaves: 12 @ 16, 24 @ 8, 48 @ 4 for photographs."""
        flow = built("glow", "cifar10", blocks=(1, 1, 1))
        assert type(flow.transform) is Multiscale
        assert flow.transform.code_shapes == ((6, 16, 16), (12, 8, 8), (48, 4, 4))

    @pytest.mark.parametrize("family", ["glow", "glow-additive"])
    def test_the_half_that_goes_to_the_code_was_transformed_last(self, family):
        """As in Glow: the last coupling of a scale moves the half that leaves, by what goes on."""
        flow = built(family, "cifar10", blocks=(1, 1))
        last = flow.transform[0][-1]
        x = normal(2, 12, 16, 16).float()
        leaving, staying = x.chunk(2, dim=1)
        with torch.no_grad():
            for p in last.conditioner.parameters():
                p.add_(0.1)
            z = last.eval()(x)
        moved, kept = z.chunk(2, dim=1)
        assert torch.equal(kept, staying)
        assert not torch.equal(moved, leaving)

    def test_real_nvp_s_layout(self):
        """Three couplings of a checkerboard, squeeze, three of channels, half leaves; then four of a board."""
        flow = built("realnvp", "cifar10", blocks=(3, 3))
        splits = [[str(t.split) for t in stage if isinstance(t, Coupling)] for stage in flow.transform]
        board = [f"Checkerboard(swapped={i % 2 == 1})" for i in range(4)]
        halves = [f"Halves(swapped={i % 2 == 1})" for i in range(3)]
        assert splits == [board[:3] + halves, board]
        assert flow.transform.code_shapes == ((6, 16, 16), (6, 16, 16))

    def test_real_nvp_s_conditioners_double_their_width_at_every_squeeze(self):
        flow = built("realnvp", "cifar10", blocks=(1, 1, 1), width=4)
        widths = [
            [t.conditioner.first.out_channels for t in stage if isinstance(t, Coupling)] for stage in flow.transform
        ]
        assert widths == [[4, 8], [8, 16], [16, 16]]
        flow = built("realnvp", "cifar10", blocks=(1, 1), width=0)
        assert [t.conditioner.first.out_channels for t in flow.transform[1] if isinstance(t, Coupling)] == [6, 6]

    @pytest.mark.parametrize("blocks", [(1, 1, 1), (2, 3, 2)])
    def test_the_halves_of_an_i_revnet_alternate_across_scales(self, blocks):
        model = built("irevnet", "cifar10", "classification", blocks=blocks, padding=29)
        swapped = [t.split.swapped for t in model.transform if isinstance(t, Coupling)]
        assert swapped == [i % 2 == 0 for i in range(sum(blocks))]

    def test_i_revnet_s_activation_is_that_of_the_settings(self):
        model = built("irevnet", purpose="classification", activation="elu")
        branches = nn.ModuleList(t.conditioner for t in model.transform if isinstance(t, Coupling))
        kinds = {type(m) for m in branches.modules()} & {nn.ReLU, nn.ELU}
        assert kinds == {nn.ELU}

    def test_i_revnet_s_layout(self):
        """32 channels at full size, 128 at half, 512 at a quarter, and volumes kept but for the scaling."""
        model = built("irevnet", "cifar10", "classification", blocks=(1, 1, 1), padding=29)
        assert model.transform.output_shape((3, 32, 32)) == (512, 8, 8)
        assert preserves_volume(Chain(*list(model.transform)[1:]))

    def test_nice_preserves_volume_but_for_the_scaling(self):
        assert preserves_volume(Chain(*list(built("nice").transform)[1:]))
        assert not preserves_volume(built("glow-additive").transform)

    def test_weight_decay_applies_to_conditioners_only(self):
        flow = built("glow", "table")
        groups = parameter_groups(MaximumLikelihood(flow), Training(weight_decay=0.5))
        weights = [p for t in flow.transform if isinstance(t, AffineCoupling) for p in t.parameters() if p.dim() > 1]
        assert {id(p) for p in groups[0]["params"]} == {id(p) for p in weights}
        assert groups[0]["weight_decay"] == 0.5
        assert groups[1]["weight_decay"] == 0.0

    def test_batchnorm_keeps_codes_of_couplings_from_growing(self):
        """What a conditioner says does not grow with what it sees, and a scale stretches by e^2 at most."""
        bounded = built("glow", purpose="classification", blocks=(4, 2), normalisation="batchnorm").train()
        plain = built("glow", purpose="classification", blocks=(4, 2)).train()
        for model, changes in ((bounded, 1.0), (plain, 10.0)):
            model(normal(32, 1, 8, 8).float())  # the first batch initialises its ActNorms
            coupling = next(m for m in model.modules() if isinstance(m, AffineCoupling))
            nn.init.normal_(coupling.conditioner[-1].weight)
            nn.init.zeros_(coupling.conditioner[-1].bias)
            for m in coupling.conditioner.modules():
                if isinstance(m, ActNorm):
                    nn.init.zeros_(m.shift)
            x = normal(32, 2, 4, 4, seed=1).float()
            once, more = coupling.conditioner(x), coupling.conditioner(10 * x)
            torch.testing.assert_close(more, changes * once, rtol=1e-2, atol=1e-3)
        largest = [m.max_log_scale for m in bounded.modules() if isinstance(m, AffineCoupling)]
        assert largest == [0.5] * 4 + [1.0] * 2

    @pytest.mark.parametrize(
        ("family", "source", "purpose", "changes", "sentence"),
        [
            ("glow", "digits", "density", {"normalisation": "none"}, "glow has its own normalisation; got 'none'"),
            ("glow", "table", "density", {"normalisation": "batchnorm"}, "on tables does not use normalisation"),
            ("nice", "digits", "density", {"normalisation": "batchnorm"}, "on images does not use normalisation"),
            ("glow", "digits", "density", {"lipschitz": 0.5}, "has no residual blocks, so it does not use lipschitz"),
            ("nice", "digits", "density", {"tail": 2}, "does not use tail; got 2. Leave it out."),
            ("maf", "digits", "density", {"estimator": "exact"}, "does not use estimator; got 'exact'"),
            ("glow", "digits", "density", {"terms": 3}, "does not use terms; got 3"),
            ("glow", "digits", "density", {"depth": 3}, "the family glow on images does not use depth; got 3. Leave"),
            ("glow", "table", "density", {"kernels": (3, 3)}, r"on tables does not use kernels; got \[3, 3\]. Leave"),
            ("realnvp", "digits", "density", {"squeeze_first": False}, "on images does not use squeeze_first"),
            ("nice", "digits", "density", {"factor_out": True}, "the family nice on images does not use factor_out"),
            ("irevnet", "digits", "classification", {"width": 8}, "irevnet on images does not use width; got 8"),
            (
                "maf",
                "one",
                "density",
                {},
                'at least two dimensions; got 1. Use family = "iresnet", "made"',
            ),
            ("glow", "digits", "density", {"activation": "sine"}, "activation must be relu or elu for the family glow"),
            ("glow", "digits", "density", {"padding": 1}, "padding must be 0 for a density"),
            ("irevnet", "digits", "density", {}, "the family irevnet classifies images; got density"),
            (
                "glow",
                "table",
                "density",
                {"blocks": (1, 1)},
                "blocks must have one entry for a table",
            ),
            (
                "nice",
                "digits",
                "density",
                {"blocks": (1, 1)},
                "blocks must have one entry for this family",
            ),
            ("made", "digits", "density", {"blocks": (2,)}, "blocks must be 1 for MADE; got 2"),
            ("glow", "mnist", "density", {"blocks": (1, 1, 1)}, "must be multiples of 8; got 28 x 28"),
            ("glow", "digits", "density", {"squeeze_first": False}, "needs at least two channels, one to keep"),
        ],
    )
    def test_unsupported_settings_are_refused(self, family, source, purpose, changes, sentence):
        with pytest.raises(ValueError, match=sentence):
            built(family, source, purpose, **changes)

    @pytest.mark.parametrize("source", ["digits", "table"])
    @pytest.mark.parametrize("family", ["glow", "realnvp"])
    def test_the_bound_on_scales_is_that_of_every_affine_coupling(self, family, source):
        model = built(family, source, max_log_scale=0.3)
        assert {m.max_log_scale for m in model.modules() if isinstance(m, AffineCoupling)} == {0.3}

    @pytest.mark.parametrize("family", ["iresnet", "nice", "glow-additive", "maf"])
    def test_only_affine_couplings_have_a_bound_on_scales(self, family):
        with pytest.raises(ValueError, match="max_log_scale is a bound on affine couplings"):
            Network(family=family, max_log_scale=0.3)

    def test_a_single_column_is_refused(self):
        with pytest.raises(ValueError, match="the family glow needs data of at least two dimensions; got 1"):
            build(Network(family="glow", blocks=(1,)), Schema((1,)), "density")


class TestPresets:
    def test_the_default_glow_has_44_million_parameters(self):
        """9 C/2 512 + 512^2 + 9 512 C weights in the coupling of a step, for C = 12, 24, 48 and 32 steps each."""
        weights = sum(32 * (9 * c // 2 * 512 + 512**2 + 9 * 512 * c) for c in (12, 24, 48))
        assert weights == pytest.approx(44e6, rel=0.01)
        layers = PRESETS["cifar10-glow"].network
        assert (layers.blocks, layers.width, layers.kernels) == ((32, 32, 32), 512, (3, 1, 3))

    def test_the_other_models_of_table_3_have_one_layout(self):
        affine, additive, ours = (
            PRESETS[f"cifar10-{name}"].network
            for name in ("glow-classifier", "additive-classifier", "iresnet-glow-style")
        )
        assert additive == replace(affine, family="glow-additive")
        for name in ("blocks", "width", "kernels", "squeeze_first", "factor_out", "readout", "pool", "preprocessing"):
            assert getattr(affine, name) == getattr(ours, name)

    def test_the_glow_of_figure_2(self):
        flow = build(PRESETS["toy-glow"].network, schema_of("checkerboard"), "density")
        assert sum(isinstance(t, AffineCoupling) for t in flow.transform) == 100

    @pytest.mark.parametrize(("prefix", "ours"), [("digits", "digits-density"), ("mnist", "mnist-flow")])
    def test_other_families_have_the_same_preprocessing(self, prefix, ours):
        network = PRESETS[ours].network
        others = [e.network for e in OTHERS if e.name.startswith(prefix)]
        assert len(others) == 7
        assert {(n.preprocessing, n.alpha) for n in others} == {(network.preprocessing, network.alpha)}

    def test_ink_where_the_first_batch_has_none_is_not_impossible(self):
        """A row's ActNorm has no more than the noise to go by there; the logit spreads that over several units."""
        pytest.importorskip("zuko", reason="MADE is zuko's: pip install 'iresnet[flows]'")
        blank = torch.rand(64, 1, 28, 28, generator=torch.Generator().manual_seed(0))
        ink, cost = blank.clone(), {}
        ink[:, :, 10, 10] += 250
        for kind in ("logit", "centre"):
            network = replace(PRESETS["mnist-made"].network, width=8, preprocessing=kind)
            flow = build(network, schema_of("mnist"), "density").train()
            flow(blank)
            with torch.no_grad():
                cost[kind] = float((flow.eval()(blank) - flow(ink)).mean()) / (784 * math.log(2))
        assert cost["logit"] < 1 < 100 < cost["centre"]

    def test_they_have_no_coefficient(self):
        with pytest.raises(ValueError, match="cifar10-glow is not constrained, so it has no coefficient"):
            find("cifar10-glow-c0.9")

    @pytest.mark.parametrize("experiment", OTHERS, ids=lambda e: e.name)
    def test_they_survive_toml(self, experiment):
        assert config.parse(type(experiment), config.dump(experiment)) == experiment


def said(capsys, *words):
    with pytest.raises(SystemExit) as stop:
        cli.main([str(w) for w in words])
    got = capsys.readouterr()
    return stop.value.code, " ".join((got.out + got.err).split())


class TestCommands:
    @pytest.fixture(params=["digits-glow", "digits-nice", "digits-maf"])
    def folder(self, request, tmp_path):
        if request.param == "digits-maf":
            pytest.importorskip("zuko", reason="MAF is zuko's: pip install 'iresnet[flows]'")
        return copy_of(trained(request.param), tmp_path / request.param)

    def test_all_of_them(self, folder, tmp_path, capsys):
        """Each works, or says in a sentence why not."""
        formula = folder.name != "digits-maf"
        out, keeps = tmp_path / "out", folder.name == "digits-nice"
        for words, code, sentence in (
            (("evaluate", folder, "--rows", 40), 0, "in closed form" if formula else "no bound is known for this"),
            (("sample", folder, "-n", 4, "--out", out), 0, "4 samples in"),
            (("score", folder, "digits", "--draws", 2, "--out", tmp_path / "scores.csv"), 0, "scores.csv"),
            (("invert", folder, "-n", 4, "--out", out), int(not formula), "measured error"),
            (("interpolate", folder, "--pairs", 2, "--steps", 3, "--out", out), 0, "2 pairs in"),
            (("certify", folder), 2, f"nothing to certify: {'it preserves volume, ' if keeps else ''}its inverse is"),
            (("report", folder, "--out", tmp_path / "page.html"), 0, "page.html"),
        ):
            assert (got := said(capsys, *words))[0] == code, (words, got)
            assert sentence in got[1], (words, got)
        page = " ".join((tmp_path / "page.html").read_text().split())
        assert "inverted in float64 without an iteration." in page
        assert ("no bound: no bound is known for this inverse; 0 of 40 samples proven" in page) != formula
        assert "contraction" not in page
        assert not (folder / "certificate.json").exists()
        metrics = json.loads((folder / "evaluation.json").read_text())
        assert metrics["density"]["bias_bound"] == (0 if formula else None)
        assert ("no bound known" in page) != formula
        assert metrics["inverse"]["proven"] == (40 if formula else 0)

    def test_training_says_why_there_is_no_certificate(self, tmp_path, capsys):
        code, text = said(
            capsys, "train", "toy-glow", "--device", "cpu", "--out", tmp_path / "run",
            "--set", "steps=3", "--set", "blocks=[2]", "--set", "width=8",
        )  # fmt: skip
        assert code == 0
        assert "Not certified: its inverse is a formula, and no block is a contraction" in text

    def test_a_likelihood_beyond_64_dimensions_has_no_bias(self):
        schema = Schema((70,))
        flow = build(network("glow", schema), schema, "density").eval()
        found = evaluate.density(flow, Dataset(normal(30, 70).float(), None, schema))
        assert found.bias_bound == 0
        assert found.estimator_error == 0


def test_an_additive_coupling_is_in_the_additive_family():
    flow = built("glow-additive", "table")
    assert sum(isinstance(t, AdditiveCoupling) for t in flow.transform) == 1


def test_a_margin_needs_a_lipschitz_constant():
    model = built("glow", purpose="classification")
    with pytest.raises(ValueError, match=r"radius = 1 needs a bound .* No Lipschitz constant is known for AffineC"):
        Margin(model, 17, radius=1.0)
