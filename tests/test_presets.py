"""Presets: every one can be built and trained on data of its kind, and a file is found, read or explained."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from iresnet import Classifier, Flow, Hybrid, cli, config
from iresnet.data import Batches, Dataset, Schema
from iresnet.data.builtin import names, schema_of
from iresnet.models import Network, build
from iresnet.presets import PRESETS, Experiment, find, read, with_overrides
from iresnet.presets.reading import GROUPS, TABLES
from iresnet.train import Training, train
from iresnet.train.objective import ObjectiveSettings

KINDS = {"density": Flow, "classification": Classifier, "hybrid": Hybrid, "semi-supervised": Hybrid}
REFERENCE = json.loads((Path(__file__).parent / "reference" / "presets.json").read_text())
TABLE = Schema((5,), columns=tuple("abcde"), label="kind", classes=("u", "v"))
PICTURES = Schema((3, 32, 32), 256, classes=("u", "v"))


def schema(experiment):
    return {"table.csv": TABLE, "images": PICTURES}.get(experiment.data.source) or schema_of(experiment.data.source)


def rows(schema, count=6):
    generator = torch.Generator().manual_seed(0)
    if schema.is_image:
        x = torch.randint(schema.levels, (count, *schema.shape), generator=generator).to(torch.uint8)
    else:
        x = torch.randn(count, *schema.shape, generator=generator)
    y = torch.arange(count) % len(schema.classes) if schema.classes else None
    return Dataset(x, y, schema)


def trained_one_step(experiment, data):
    torch.manual_seed(0)
    model = build(experiment.network, data.schema, experiment.objective.kind, data.x)
    assert type(model) is KINDS[experiment.objective.kind]
    objective = experiment.objective.build_objective(model, data.schema.levels, experiment.data.augment)
    batches = Batches(data, experiment.training.batch, augment=experiment.data.augment)
    seen = []
    train(
        objective, batches.starting_at(0), replace(experiment.training, steps=1),
        generator=torch.Generator().manual_seed(0), report=lambda *a: seen.append(a[2]),
    )  # fmt: skip
    return seen[0]


def flat(table, prefix=""):
    """Nested tables as one, whose keys have dots."""
    parts = (flat(v, f"{prefix}{k}.") if isinstance(v, dict) else {prefix + k: v} for k, v in table.items())
    return {key: value for part in parts for key, value in part.items()}


class TestReference:
    """tests/reference/presets.json has every setting, so that none changes by accident: the defaults under "", and of
    every preset, and of some with a coefficient, what differs from them."""

    def test_the_presets_are_listed_in_the_same_order(self):
        assert [name for name in REFERENCE if not re.search(r"-c[\d.]", name)] == ["", *PRESETS]

    @pytest.mark.parametrize("name", REFERENCE)
    def test_every_setting_is_the_same(self, name):
        found = find(name) if name else Experiment()
        assert flat(config.to_mapping(found)) == REFERENCE[""] | REFERENCE[name]


class TestTables:
    def test_a_name_is_given_once(self):
        assert len(TABLES) == sum(len(group) for group in GROUPS.values())

    def test_every_part_is_extended_by_another(self):
        names = [table.get("extends", []) for table in TABLES.values()]
        extended = {name for each in names for name in ([each] if isinstance(each, str) else each)}
        assert {name for name, table in TABLES.items() if "about" not in table} <= extended <= set(TABLES)


@pytest.mark.parametrize("name", PRESETS)
class TestEvery:
    def test_it_has_its_name_and_a_description(self, name):
        experiment = PRESETS[name]
        assert experiment.name == name == find(name).name
        assert len(experiment.about) > 20
        assert experiment.data.source in [*names(), "table.csv", "images"]

    @pytest.mark.slow
    def test_its_network_is_built_in_full(self, name):
        experiment = PRESETS[name]
        network = replace(experiment.network, components=experiment.network.components or 1)  # chosen on data
        model = build(network, schema(experiment), experiment.objective.kind)
        assert type(model) is KINDS[experiment.objective.kind]


#: One preset of each kind; the others are slow tests.
QUICK = {
    "points-density", "table-density", "digits-density", "digits-hybrid", "digits-certified", "mnist-flow-noise",
    "cifar10-flow", "cifar10-flow-modern", "iresnet164", "resnet164", "vanilla164", "digits-glow", "toy-iresnet",
    "cifar10-irevnet", "mnist-realnvp", "images-density",
}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in PRESETS])
@pytest.mark.no_cover
def test_its_network_takes_a_training_step_on_data_of_its_kind(name):
    """With one block a scale and narrow ones, where the full size takes long: the shapes are the same."""
    experiment = PRESETS[name]
    network = experiment.network
    small = replace(
        network,
        blocks=(1,) * len(network.blocks),
        width=0 if network.family == "irevnet" else min(network.width or 8, 8),
        padding=min(network.padding, 1),
        tail=min(network.tail, 1),
        tail_width=8,
    )
    metrics = trained_one_step(replace(experiment, network=small), rows(schema(experiment)))
    assert metrics
    assert all(bool(torch.isfinite(value)) for value in metrics.values())


def test_the_papers_classifiers_have_the_size_it_states():
    """18 blocks a scale with 19 C^2 weights each, for C = 16, 64, 256, are 23.9 M; a ResNet-164 has 1.7 M.

    The constraint adds no parameter, and a network of this size is made at once without it.
    """
    size = {}
    for name in ("vanilla164", "batchnorm164", "resnet164"):
        model = build(PRESETS[name].network, schema(PRESETS[name]), "classification")
        size[name] = sum(p.numel() for p in model.parameters())
        kernels = sum(p.numel() for p in model.parameters() if p.dim() == 4)
        assert name == "resnet164" or kernels == 18 * 19 * (16**2 + 64**2 + 256**2)
    assert size["vanilla164"] == pytest.approx(23.9e6, rel=2e-3)
    assert size["resnet164"] == pytest.approx(1.7e6, rel=2e-3)
    assert PRESETS["iresnet164"].network == replace(PRESETS["vanilla164"].network, constrained=True)


@pytest.mark.parametrize(
    ("name", "blocks"),
    [("iresnet164", 54), ("iresnet118", 39), ("iresnet64", 21), ("mnist-iresnet64", 21), ("mnist-classifier", 21)],
)
def test_blocks(name, blocks):
    assert sum(PRESETS[name].network.blocks) == blocks
    assert PRESETS[name].network.lipschitz == pytest.approx(0.9**3)


def test_the_classifier_that_ships_is_small():
    """Weights, and as much again for what power iteration keeps, in float32."""
    network = replace(PRESETS["mnist-classifier"].network, constrained=False)
    model = build(network, schema_of("mnist"), "classification")
    assert 2 * 4 * sum(p.numel() for p in model.parameters()) < 10 * 2**20


class TestCoefficient:
    def test_the_name_may_end_in_the_coefficient_of_every_layer(self):
        found, preset = find("iresnet164-c0.7"), PRESETS["iresnet164"]
        assert found.name == "iresnet164-c0.7"
        assert found.network.lipschitz == 0.343
        assert found.about.endswith("; here every layer below 0.7")
        assert found == replace(preset, name=found.name, about=found.about, network=found.network)
        assert found.network == replace(preset.network, lipschitz=0.343)

    @pytest.mark.parametrize(
        ("name", "lipschitz"),
        [
            ("digits-hybrid-c.5", 0.25),
            ("table-density-c0.5", 0.125),
            ("iresnet164-c5e-1", 0.125),
            ("iresnet164-c0.01", 1e-6),
        ],
    )
    def test_as_many_factors_as_layers(self, name, lipschitz):
        assert find(name).network.lipschitz == lipschitz

    def test_it_survives_a_round_trip(self):
        assert config.parse(Experiment, config.dump(find("iresnet64-c0.5"))) == find("iresnet64-c0.5")

    @pytest.mark.parametrize(
        ("name", "sentence"),
        [
            ("vanilla164-c0.9", "vanilla164 is not constrained, so it has no coefficient; got 0.9. Use vanilla164."),
            ("resnet164-c0.9", "resnet164 is not constrained, so it has no coefficient; got 0.9. Use resnet164."),
            (
                "iresnet164-c1.2",
                "the coefficient of a layer must lie in (0, 1); got 1.2. Example: iresnet164-c0.9",
            ),
            ("iresnet164-c0", "the coefficient of a layer must lie in (0, 1); got 0. Example: iresnet164-c0.9"),
            *(
                (
                    f"iresnet164-c{c}",
                    f"the coefficient of a layer must be at least 0.01, or g vanishes; got {c}. "
                    "Example: iresnet164-c0.9",
                )
                for c in ("1e-3", "0.00001", "1e-200")
            ),
            (
                "iresnet164-cold",
                "unknown preset 'iresnet164-cold'. Did you mean 'iresnet164'? A settings file must end in .toml.",
            ),
            (
                "iresnet16-c0.9",
                "unknown preset 'iresnet16-c0.9'. Did you mean 'iresnet164'? A settings file must end in .toml.",
            ),
        ],
    )
    def test_an_invalid_coefficient_raises_a_clear_error(self, name, sentence):
        with pytest.raises(ValueError, match="preset|coefficient") as caught:
            find(name)
        assert str(caught.value) == sentence


def test_labels_are_missing_only_for_semi_supervised_learning():
    for name, experiment in PRESETS.items():
        assert (experiment.data.labelled != 1) == (experiment.objective.kind == "semi-supervised"), name


def test_labelled_batches_are_for_hybrids():
    assert with_overrides(find("digits-hybrid"), ["labelled_batch=8"]).training.labelled_batch == 8
    assert with_overrides(find("digits-hybrid"), "labelled_batch=8").training.labelled_batch == 8
    sentence = "labelled_batch is for hybrids; got 8 for objective.kind = 'density'. Set labelled_batch = 0."
    with pytest.raises(ValueError, match=sentence):
        with_overrides(find("digits-density"), ["labelled_batch=8"])


class TestFind:
    @pytest.mark.parametrize(
        ("name", "near"),
        [
            ("digits-hybird", "digits-hybrid"),
            ("cifar-flow", "cifar10-flow"),
            ("moon", None),
            ("glow-digits", "digits-glow"),
            ("classifier-digits", "digits-classifier"),
        ],
    )
    def test_an_unknown_name_gets_the_nearest_one(self, name, near):
        known = ", ".join(list(PRESETS)[:6])
        remedy = f"Did you mean '{near}'?" if near else f"Use one of {known}; `iresnet presets` lists all."
        with pytest.raises(ValueError, match="unknown preset") as caught:
            find(name)
        assert str(caught.value) == f"unknown preset {name!r}. {remedy} A settings file must end in .toml."

    @pytest.mark.parametrize(("name", "first"), [("glow", "toy-glow"), ("glow-of-digits", "digits-glow")])
    def test_names_with_the_same_words_come_first(self, name, first):
        with pytest.raises(ValueError, match="Use one of (.*); `iresnet presets` lists all") as caught:
            find(name)
        names = str(caught.value).split("Use one of ")[1].split(";")[0].split(", ")
        assert names[0] == first
        assert len(names) == 6
        assert all("glow" in n for n in names)

    def test_a_missing_file_says_how_to_write_one(self, tmp_path):
        path = tmp_path / "mine.toml"
        with pytest.raises(FileNotFoundError) as caught:
            find(str(path))
        remedy = "Write one with: iresnet presets digits-hybrid > mine.toml"
        assert str(caught.value) == f"{path} does not exist. {remedy}"

    @pytest.mark.parametrize("content", [b"\xff\xfe\x00name", b"\x93NUMPY\x01\x00\xf6"])
    def test_a_binary_file(self, tmp_path, content):
        path = tmp_path / "mine.toml"
        path.write_bytes(content)
        with pytest.raises(
            ValueError, match=f"{re.escape(str(path))} is not a text file. Give a TOML file of settings."
        ):
            find(str(path))

    def test_a_file_is_found_by_its_path(self, tmp_path):
        path = tmp_path / "mine.toml"
        path.write_text(config.dump(PRESETS["points-density"]), encoding="utf-8")
        assert find(str(path)) == PRESETS["points-density"]


class TestExtends:
    def written(self, tmp_path, text):
        (tmp_path / "mine.toml").write_text(text)
        return tmp_path / "mine.toml"

    def test_omitted_settings_come_from_the_preset_it_extends(self, tmp_path):
        path = self.written(tmp_path, 'extends = "iresnet64"\n[network]\nblocks = [2, 2, 2]\n[data]\nseed = 3\n')
        preset = PRESETS["iresnet64"]
        assert read(path) == replace(
            preset,
            name="experiment",
            about="",
            network=replace(preset.network, blocks=(2, 2, 2)),
            data=replace(preset.data, seed=3),
        )

    def test_of_several_the_last_wins(self, tmp_path):
        path = self.written(tmp_path, 'extends = ["mnist-flow", "digits-images"]\nname = "mine"\n')
        made = read(path)
        assert made.network == PRESETS["mnist-flow"].network
        assert (made.name, made.data.source, made.data.shift) == ("mine", "digits", 1)
        assert config.parse(Experiment, config.dump(made)) == made

    def test_a_preset_is_copied_by_its_table(self, tmp_path):
        """What stands below the name of a preset in a file of this library is a file of settings."""
        text = (Path(config.__file__).parent / "presets" / "flows.toml").read_text()
        body = re.search(r"^\[mnist-flow-noise\]\n(.*)", text, re.DOTALL | re.MULTILINE)[1]
        made = read(self.written(tmp_path, body))
        assert replace(made, name="mnist-flow-noise") == PRESETS["mnist-flow-noise"]

    @pytest.mark.parametrize(
        ("text", "sentence"),
        [
            ('extends = "iresnet46"', "unknown preset 'iresnet46'. Did you mean 'iresnet64'?"),
            ("extends = 3", "extends must be the name of a preset, or a list of names; got 3."),
            ("extends = [[]]", "extends must be the name of a preset, or a list of names; got [[]]."),
            (
                'extends = "iresnet64"\nnetwork = 3',
                "network must be a table of settings; got 3. Write [network], then its keys.",
            ),
            ('extends = "iresnet64"\nnetwork.block = 3', "unknown setting 'network.block'. Did you mean 'blocks'?"),
            (
                'extends = "iresnet64"\nnetwork.normalisation = "batchnorm"',
                "normalisation 'batchnorm' has no Lipschitz bound, so it needs constrained = false; got true. "
                "Use 'actnorm' for a network that is proven invertible.",
            ),
        ],
    )
    def test_a_mistake_is_named_with_the_file(self, tmp_path, text, sentence):
        path = self.written(tmp_path, text)
        with pytest.raises(ValueError, match="mine.toml: ") as caught:
            read(path)
        assert str(caught.value) == f"{path}: {sentence}"


class TestRead:
    def test_omitted_settings_keep_their_defaults(self, tmp_path):
        path = tmp_path / "mine.toml"
        path.write_text(
            'name = "größer"\n[network]\nblocks = [2]\n[objective]\nkind = "density"\n[training]\nsteps = 7\n',
            encoding="utf-8",
        )
        assert read(path) == Experiment(
            name="größer",
            network=Network(blocks=(2,)),
            objective=ObjectiveSettings("density"),
            training=Training(steps=7),
        )

    def test_an_empty_file_is_the_default(self, tmp_path):
        (tmp_path / "mine.toml").write_text("")
        assert read(tmp_path / "mine.toml") == Experiment()

    @pytest.mark.parametrize(
        ("text", "sentence"),
        [
            ("[trainig]\nsteps = 3\n", "unknown setting 'trainig'. Did you mean 'training'?"),
            ("[training]\nstep = 3\n", "unknown setting 'training.step'. Did you mean 'steps'?"),
            ("[training]\nsteps = 0\n", "steps must be at least 1; got 0."),
            (
                "[network]\nblocks = 3\n",
                "network.blocks must be a list of entries, each an integer; got 3. Example: network.blocks=[3]",
            ),
            ("[data]\nvalidation = 'x'\n", "data.validation must be a number; got 'x'."),
        ],
    )
    def test_a_mistake_is_named_with_the_file(self, tmp_path, text, sentence):
        path = tmp_path / "mine.toml"
        path.write_text(text)
        with pytest.raises(ValueError, match="mine.toml: ") as caught:
            read(path)
        assert str(caught.value) == f"{path}: {sentence}"

    def test_a_byte_order_mark_is_ignored(self, tmp_path):
        (tmp_path / "mine.toml").write_bytes(b"\xef\xbb\xbfseed = 3\r\n")
        assert read(tmp_path / "mine.toml") == Experiment(seed=3)

    @pytest.mark.parametrize(
        ("text", "sentence"),
        [
            (b"about = '\xe9'", "is not a text file. Give a TOML file of settings."),
            (b"\0", "is not valid TOML: "),
            (b".".join(30_000 * [b"a"]) + b"=1", "a key must have at most 32 parts"),
            (b"seed = " + 9999 * b"[", "nested too deep"),
            (b"seed = 9223372036854775808", "seed must fit 64 bits; got 9223372036854775808."),
            (b"[network]\nblocks = [1000000000]", "blocks must be at most 1,000; got 1000000000. Lower it."),
            (b"[network]\ndepth = 1000000000", "depth must be at most 100; got 1000000000. Lower it."),
            (b"[network]\ntail = 1000000000", "tail must be at most 1,000; got 1000000000. Lower it."),
            (b"[training]\nepochs = 9000000000000000000", "epochs must be at most 1,000,000,000; got 90000"),
            (b"[data]\nsize = 1000000000", "size is that of an image, or 0 to keep it; got 1000000000."),
            (b'[data]\nsource = "a\\u0000b"', "source must be a path of at most 4096 characters, in UTF-8"),
        ],
        ids=str.split("latin-1 nul key list seed blocks depth tail epochs size source"),
    )
    def test_malicious_files_are_refused(self, tmp_path, text, sentence):
        path = tmp_path / "mine.toml"
        path.write_bytes(text)
        with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
            read(path)
        assert str(caught.value).startswith(str(path))
        assert len(str(caught.value)) < len(str(path)) + 300

    def test_an_endless_file_is_refused(self):
        with pytest.raises(ValueError, match="/dev/zero cannot be read as settings: it must have at most 1,048,576"):
            read("/dev/zero")

    def test_a_seed_has_64_bits(self):
        with pytest.raises(ValueError, match="seed must fit 64 bits; got 18446744073709551616."):
            Experiment(seed=2**64)
        assert Experiment(seed=-(2**63)).seed == -(2**63)

    def test_bad_toml_names_file_and_line(self, tmp_path):
        path = tmp_path / "mine.toml"
        path.write_text("name = 'a'\nseed = \n")
        with pytest.raises(ValueError, match=r"mine.toml is not valid TOML: .*line 2.*Fix that line."):
            read(path)


def test_the_list_says_that_a_coefficient_may_follow(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["presets"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in PRESETS)
    assert "NAME-cX is the preset NAME with the Lipschitz constant of every layer below X." in printed
