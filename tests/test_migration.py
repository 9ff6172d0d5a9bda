"""Files of earlier formats are migrated by one table of renamed keys; files of later formats are refused."""

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from iresnet import audit, migration
from iresnet.migration import FORMAT, OLDEST, migrate
from iresnet.presets import read
from iresnet.run import Run, resume
from iresnet.train import checkpoint
from tools import reference
from tools.reference import FOLDER, RUNS, STOPPED

#: What each file called things two formats ago, and one: a setting moved to another table, tensors, a state, figures.
STEPS = (
    {
        "config.toml": {"train.number_of_steps": "training.number_of_steps", "network.couplings": "network.depth"},
        "tensors": {r"^weight/": "weights/", r"\.zero_": "."},
        "evaluation.json": {"wrong": "error.wrong"},
    },
    {
        "config.toml": {"training.number_of_steps": "training.steps"},
        "state": {"at.step": "step"},
        "schema.json": {"size": "shape"},
        "data.json": {"learning": "train"},
        "certificate.json": {"blocks.constant": "blocks.lipschitz"},
    },
)


@pytest.fixture
def three_formats(monkeypatch):
    """A version that knows what was renamed twice."""
    monkeypatch.setattr(migration, "STEPS", STEPS)
    monkeypatch.setattr(migration, "FORMAT", OLDEST + len(STEPS))


def aged(folder):
    """Give a run folder of today the names of the oldest format, by hand."""
    settings = (folder / "config.toml").read_text()
    moved = next(line for line in settings.splitlines() if line.startswith("steps = "))
    settings = settings.replace(f"{moved}\n", "", 1) + f"\n[train]\nnumber_of_{moved}\n"
    (folder / "config.toml").write_text(settings.replace("\ndepth = ", "\ncouplings = "))
    for name, old, new in (
        ("schema.json", '"shape"', '"size"'),
        ("data.json", '"train"', '"learning"'),
        ("certificate.json", '"lipschitz"', '"constant"'),
    ):
        if (folder / name).is_file():
            (folder / name).write_text((folder / name).read_text().replace(old, new))
    for path in folder.glob("*.safetensors"):
        age_tensors(path)
    return folder


def age_tensors(path):
    """The same with a checkpoint, whose digest is that of its names as they are written."""
    with safe_open(str(path), framework="pt") as file:
        header = json.loads(file.metadata()["iresnet"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    tensors = {name.replace("weights/", "weight/").replace(".bias", ".zero_bias"): t for name, t in tensors.items()}
    state = header["state"]
    if "step" in state:
        state["at"] = {"step": state.pop("step")}
    made = state["made_with"]
    made["network.couplings"] = made.pop("network.depth")
    header["sha256"] = checkpoint.digest(tensors, state)
    save_file(tensors, path, metadata={"iresnet": json.dumps(header)})


def rebound(folder):
    """Let the certificate name the digest that the model has got."""
    content = json.loads((folder / "certificate.json").read_text())
    content["model_sha256"] = checkpoint.sha256(folder / "model.safetensors")
    (folder / "certificate.json").write_text(json.dumps(content))
    return folder


class TestTheTable:
    def test_every_step_raises_the_format(self):
        assert OLDEST + len(migration.STEPS) == FORMAT

    def test_a_file_of_the_current_format_is_unchanged(self):
        content = {"a": {"b": [1, {"c": 2}]}, "made_with": {"network.depth": 2}}
        assert migrate(content, "state", FORMAT) == content

    @pytest.mark.usefixtures("three_formats")
    @pytest.mark.parametrize(
        ("kind", "old", "new"),
        [
            ("config.toml", {"train": {"number_of_steps": 3, "x": 1}}, {"train": {"x": 1}, "training": {"steps": 3}}),
            ("config.toml", {"network": {"couplings": 2}}, {"network": {"depth": 2}}),
            ("config.toml", {"network": {"width": 2}}, {"network": {"width": 2}}),
            ("config.toml", {"network": 3, "train": [1]}, {"network": 3, "train": [1]}),
            ("state", {"at": {"step": 4}}, {"step": 4}),
            ("state", {"at": {"step": None, "x": 1}}, {"at": {"x": 1}, "step": None}),
            ("state", {"made_with": {"network.couplings": 2}}, {"made_with": {"network.depth": 2}}),
            ("tensors", {"weight/g.zero_bias": 1, "average/b": 2}, {"weights/g.bias": 1, "average/b": 2}),
            ("certificate.json", {"blocks": [{"constant": 1}, {}]}, {"blocks": [{"lipschitz": 1}, {}]}),
            ("evaluation.json", {"wrong": 7, "error": {"rows": 9}}, {"error": {"rows": 9, "wrong": 7}}),
            ("evaluation.json", {"wrong": 7}, {"error": {"wrong": 7}}),
        ],
    )
    def test_names_of_the_oldest_format(self, kind, old, new):
        before = json.dumps(old)
        assert migrate(old, kind, OLDEST) == new
        assert json.dumps(old) == before  # what was read stays what it was

    @pytest.mark.usefixtures("three_formats")
    def test_only_later_steps_are_applied(self):
        content = {"network": {"couplings": 2}, "training": {"number_of_steps": 3}}
        assert migrate(content, "config.toml", 2) == {"network": {"couplings": 2}, "training": {"steps": 3}}
        assert migrate(content, "config.toml", 3) == content


@pytest.mark.usefixtures("three_formats")
class TestOldFiles:
    @pytest.mark.parametrize("kind", RUNS)
    def test_a_run_folder_scores_as_it_did(self, kind, tmp_path):
        folder = rebound(aged(reference.placed(kind, tmp_path)))
        recorded = json.loads((FOLDER / "scores.json").read_text())[kind]
        for name, values in reference.scores(folder).items():
            assert torch.allclose(torch.tensor(values), torch.tensor(recorded[name]), rtol=1e-5)
        certificate = Run.open(folder).read_json("certificate.json")
        assert all(block["lipschitz"] < 1 for block in certificate["blocks"])
        subject = audit.Subject(Run.open(folder))
        assert all(check(subject)[0] for check in (audit.files.check_digest, audit.files.check_weights))

    def test_a_stopped_training_resumes_to_the_same_weights_and_writes_todays_names(self, tmp_path):
        folder = aged(reference.placed(STOPPED, tmp_path))
        found, recorded = reference.resumed(folder), json.loads((FOLDER / "scores.json").read_text())[STOPPED]
        for name, values in recorded.items():
            assert found[name] == pytest.approx(values, rel=1e-5, abs=1e-6 * max(map(abs, values)))
        with safe_open(str(folder / "model.safetensors"), framework="pt") as file:
            assert json.loads(file.metadata()["iresnet"])["format"] == 3
            assert not any("zero_" in name for name in file.keys())  # noqa: SIM118
        assert json.loads((folder / "certificate.json").read_text())["format"] == 3
        assert "format" not in Run.open(folder).read_json("certificate.json")

    def test_a_changed_config_is_written_in_the_current_format(self, tmp_path):
        folder = aged(reference.placed(STOPPED, tmp_path))
        resume(folder, learning_rate=Run.open(folder).experiment.training.learning_rate / 2)
        text = (folder / "config.toml").read_text()
        assert "format 3\n" in text.splitlines(keepends=True)[0]
        assert "couplings" not in text
        assert Run.open(folder).experiment.training.steps == 6
        assert Run.open(folder).splits()  # schema.json and data.json are in the format that they have

    def test_settings_of_an_old_run_start_a_new_one(self, tmp_path):
        folder = aged(reference.placed("flow", tmp_path))
        assert read(folder / "config.toml") == Run.open(folder).experiment

    def test_settings_without_a_header_have_todays_names(self, tmp_path):
        (tmp_path / "mine.toml").write_text("[network]\ncouplings = 2\n")
        with pytest.raises(ValueError, match="unknown setting 'network.couplings'"):
            read(tmp_path / "mine.toml")


class TestLaterFiles:
    @pytest.mark.parametrize("name", ["certificate.json", "data.json"])
    def test_a_json_file(self, name, tmp_path):
        folder = tmp_path / "run"
        shutil.copytree(FOLDER / "runs" / "flow", folder)
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**content, "format": FORMAT + 1}))
        sentence = f"{name} was written by a later version in format {FORMAT + 1}; this version reads format {FORMAT}."
        with pytest.raises(ValueError, match=sentence + " Use the version that wrote it, or train again."):
            Run.open(folder).read_json(name)

    def test_a_schema(self, tmp_path):
        folder = tmp_path / "run"
        shutil.copytree(FOLDER / "runs" / "flow", folder)
        (folder / "schema.json").write_text(json.dumps({"shape": [2], "format": FORMAT + 1}))
        with pytest.raises(ValueError, match="schema.json cannot be read: .*by a later version in format"):
            Run.open(folder)

    def test_settings(self, tmp_path):
        (tmp_path / "a.toml").write_text(f"# iresnet 9.9, format {FORMAT + 1}\nseed = 1\n")
        with pytest.raises(ValueError, match=f"written by iresnet 9.9 in format {FORMAT + 1}; this version reads"):
            read(tmp_path / "a.toml")

    @pytest.mark.usefixtures("three_formats")
    def test_the_message_names_the_formats_that_can_be_read(self, tmp_path):
        with pytest.raises(ValueError, match="in format 4; this version reads formats 1 to 3. Use the version"):
            migration.read_format({"format": 4, "iresnet": "9.9"}, tmp_path)

    @pytest.mark.parametrize("number", [0, -1, True, 1.0, "1", None, [1]])
    def test_an_invalid_format_number_is_refused(self, number, tmp_path):
        with pytest.raises(ValueError, match="was written by another program in format"):
            migration.migrate_json({"format": number}, tmp_path / "data.json")

    @pytest.mark.parametrize("number", ["", "x", "²", "-1", "9" * 5000])
    def test_a_first_line_without_a_format_is_not_a_header(self, number):
        assert migration.parse_header_line(f"# iresnet 1.2, format {number}") == {}


@pytest.mark.parametrize(
    ("kind", "names", "content", "sentence"),
    [
        ("tensors", {"^w$": "v"}, {"w": 1, "v": 2}, "two of 2 would have the same"),
        (
            "config.toml",
            {"a.b": "a.c", "a.c": "a.d"},
            {"a": {"b": 1, "c": 2}},
            "must not rename a key twice; got a.c on both",
        ),
    ],
)
def test_a_step_that_would_lose_something_is_refused(monkeypatch, kind, names, content, sentence):
    monkeypatch.setattr(migration, "STEPS", ({kind: names},))
    with pytest.raises(ValueError, match=sentence):
        migration.migrate(content, kind, 1)


class TestFormerValues:
    """A setting whose default changed keeps its former value in files that the library wrote before it existed."""

    def test_a_run_folder_without_the_setting_keeps_the_rule_it_was_trained_with(self):
        folder = FOLDER / "runs" / STOPPED
        assert "\nnorm = " not in (folder / "config.toml").read_text()
        assert Run.open(folder).experiment.network.norm == "power-iteration"
        assert read(folder / "config.toml").network.norm == "power-iteration"

    def test_a_file_that_a_user_wrote_has_the_default(self, tmp_path):
        (tmp_path / "mine.toml").write_text('extends = "points-density"\n')
        assert read(tmp_path / "mine.toml").network.norm == "auto"

    def test_a_setting_in_the_file_is_kept(self):
        found = migration.with_former_values({"network": {"norm": "gram-iteration"}, "seed": 1})
        assert found == {"network": {"norm": "gram-iteration"}, "seed": 1}
        assert migration.with_former_values({}) == {"network": {"norm": "power-iteration"}}
