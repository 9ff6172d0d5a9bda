"""What a new user types first works, or is answered with the exact command to type."""

import shlex
from dataclasses import asdict

import numpy as np
import pytest
from PIL import Image

import iresnet
from iresnet import data
from iresnet.presets import PRESETS, PURPOSES, is_preset, presets_for
from iresnet.run import Run
from tests.runs import copy_of, trained

TINY = ("--set", "network.width=4", "--set", "steps=1", "--set", "batch=16")
ONE, TWO = ("--set", "blocks=[1]"), ("--set", "blocks=[1, 1]")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with a table, a labelled table, arrays, and images with and without classes."""
    folder, rng = tmp_path_factory.mktemp("files"), np.random.default_rng(0)
    x = rng.normal(size=(60, 2))
    lines = [f"{a:.4f},{b:.4f},{'cat' if a > 0 else 'dog'}" for a, b in x]
    (folder / "my table.csv").write_text("a,b\n" + "\n".join(line.rpartition(",")[0] for line in lines) + "\n")
    (folder / "kinds.csv").write_text("a,b,kind\n" + "\n".join(lines) + "\n")
    (folder / "notes.txt").write_text("nothing\n")
    np.savez(folder / "labelled.npz", x=x, y=(x[:, 0] > 0).astype(int))
    np.savez(folder / "images.npz", x=rng.integers(0, 256, (40, 8, 8)).astype("uint8"), y=rng.integers(0, 2, 40))
    for name in ("photos", "classes/cat", "classes/dog", "odd"):
        (folder / name).mkdir(parents=True)
        for i in range(40):
            side = 6 if name == "odd" else 8
            Image.fromarray(rng.integers(0, 256, (side, side)).astype("uint8")).save(folder / name / f"{i}.png")
    return folder


@pytest.fixture
def here(files, tmp_path, monkeypatch):
    """The same files and two trained runs in the current folder, so that names are typed as a user would."""
    for path in files.iterdir():
        (tmp_path / path.name).symlink_to(path)
    copy_of(trained(), tmp_path / "runs" / "mine")
    copy_of(trained(), tmp_path / "runs" / "spirals")
    monkeypatch.chdir(tmp_path)
    return tmp_path


TRAINED = [
    (("moons", *ONE), "moons is a dataset", "points-density --data moons --out runs/moons"),
    (("--data", "circles", *ONE), "circles is a dataset", "points-density --data circles --out runs/circles"),
    (("digits", *TWO), "digits is a dataset", "digits-hybrid --out runs/digits"),
    (("--preset", "digits", *TWO), "digits is a dataset", "digits-hybrid --out runs/digits"),
    (("digits", "--data", "digits", "--out", "b", *TWO), "digits is a dataset", "digits-hybrid --out b"),
    (("my table.csv", *ONE), "is a file", "table-density --data 'my table.csv' --out 'runs/my table'"),
    (
        ("kinds.csv", "--label", "kind", *ONE),
        "is a file",
        "table-hybrid --data kinds.csv --label kind --out runs/kinds",
    ),
    (("photos", *TWO), "photos is a folder", "images-density --data photos --out runs/photos"),
]


@pytest.mark.parametrize(("words", "what", "command"), TRAINED)
def test_a_dataset_or_file_in_place_of_a_preset_is_trained_on(call, here, words, what, command):
    code, text = call("train", *words, *TINY)
    assert code == 0, text
    note = text.splitlines()[0]
    *options, out_option, out = shlex.split(command)
    preset, changes = options[0], [word for word in (*words, *TINY) if "=" in word]
    settings = [word for change in changes for word in ("--set", change)]
    same = shlex.join(["iresnet", "train", *options, *settings, out_option, out])
    assert f"{what}: training the preset {preset} on it; the same as: {same}" in note
    expected, got = PRESETS[preset], Run.open(out).experiment
    assert (got.name, got.objective) == (preset, expected.objective)


def test_the_command_in_the_note_trains_the_same_model(call, here):
    few = (*ONE, *TINY)
    _, text = call("train", "moons", *few, "--out", "a")
    command = shlex.split(text.splitlines()[0].partition("the same as: iresnet ")[2])
    assert command[-2:] == ["--out", "a"]
    assert call(*command[:-1], "b")[0] == 0
    assert asdict(Run.open("a").experiment) == asdict(Run.open("b").experiment)
    first, second = (iresnet.load(folder).state_dict() for folder in "ab")
    assert all((first[key] == second[key]).all() for key in first)


ANSWERS = [
    ("train", "name a preset, a dataset or a file. See them with: iresnet presets; iresnet data list"),
    (
        "train mnist",
        "mnist has labels, so a preset must be named. Use one of: iresnet train mnist-classifier (for classes); "
        "iresnet train mnist-flow-noise (for likelihoods and samples); iresnet train mnist-hybrid (for both).",
    ),
    ("train cifar10", "iresnet train iresnet164 (for classes); iresnet train cifar10-flow-principal (for likelihoods"),
    ("train cifar100", "iresnet train iresnet164 --data cifar100 (for classes); iresnet train cifar10-flow-principal"),
    ("train fashion-mnist", "iresnet train mnist-hybrid --data fashion-mnist (for both)."),
    ("train labelled.npz", "iresnet train table-classifier --data labelled.npz (for classes); iresnet train table-den"),
    ("train images.npz", "iresnet train images-density --data images.npz (for likelihoods and samples); iresnet train"),
    ("train classes", "iresnet train images-hybrid --data classes (for both)."),
    (
        "train odd",
        "must be multiples of 4; got 6 x 6. Resize the images of a folder to a size that is, with --set data.",
    ),
    (
        "train table-density --data classes",
        "the preset table-density is for a table; classes holds images. Use one of: iresnet train images-classifier "
        "--data classes (for classes); iresnet train images-density --data classes (for likelihoods and samples); "
        "iresnet train images-hybrid --data classes (for both).",
    ),
    ("train points-density --data photos", "photos holds images. Use: iresnet train images-density --data photos"),
    (
        "train digits-hybrid --data 'my table.csv'",
        "the preset digits-hybrid is for images; my table.csv holds none. Use: iresnet train table-density --data 'my ",
    ),
    ("train images-hybrid --data kinds.csv --label kind", "Use: iresnet train table-hybrid --data kinds.csv --label k"),
    (
        "train iresnet164-c0.7 --data moons",
        "is for images; moons holds none. Use: iresnet train points-density --data m",
    ),
    ("train table-density --data images.npz", "is for a table; images.npz holds images. Use one of: iresnet train im"),
    ("train notes.txt", "notes.txt must be a folder of images or a table (.csv, .tsv, .npy, .npz, .parquet)."),
    ("train none.csv", "'none.csv'"),
    ("train moosn", "there is no preset or dataset 'moosn'. Did you mean 'moons'?"),
    ("train cifar", "there is no preset or dataset 'cifar'. Did you mean 'cifar10'?"),
    ("train moons --data circles", "a run has one dataset; got 'moons' and --data 'circles'. Leave one out."),
    ("train --data digits-density", "digits-density is a preset. Use: iresnet train digits-density"),
    ("train digits-hybrid --data iresnet164-c0.7", "iresnet164-c0.7 is a preset. Use: iresnet train iresnet164-c0.7"),
    ("train moons --label kind", "got 'kind' for moons."),
    (
        "train runs/mine",
        "runs/mine is a run folder. Resume it: iresnet train --resume --out runs/mine, or train again with its "
        "settings: iresnet train runs/mine/config.toml --out runs/NEW",
    ),
    ("train spirals", "runs/spirals already holds a run."),
    ("moons", "a command comes first; got 'moons'. Use: iresnet train moons"),
    ("digits-hybrid", "a command comes first; got 'digits-hybrid'. Use: iresnet train digits-hybrid"),
    ("presets moons", "moons is a dataset, not a preset. The presets for it: iresnet presets points-density"),
    ("presets mnist", "iresnet presets mnist-classifier; iresnet presets mnist-flow-noise; iresnet presets mnist-hybr"),
    ("data download moons", "moons is built in and needs no download. Train on it: iresnet train moons"),
    ("evaluate moons", "moons is a dataset, not a run folder. Train a model on it first: iresnet train moons"),
    ("evaluate spirals", "spirals is not a run folder. Use the run folder runs/spirals."),
    (
        "sample mnist",
        "mnist is a dataset, not a run folder. Train a model on it first: iresnet train mnist, or use a model that "
        "comes with the library: mnist-classifier, mnist-flow-noise",
    ),
    ("report digits-hybrid", "is a preset, not a run folder. Train it first: iresnet train digits-hybrid"),
    ("certify iresnet164-c0.7", "is a preset, not a run folder. Train it first: iresnet train iresnet164-c0.7"),
    (
        "sample mnist-flow",
        "the model 'mnist-flow' that comes with the library is now called 'mnist-flow-noise'. Use that name.",
    ),
    ("audit runs", "runs is not a run folder but holds some. Use one of runs/mine, runs/spirals."),
    ("export runs/mine/model.safetensors", "is a file of a run. Use the run folder runs/mine."),
    ("evaluate runs/mien", "runs/mien does not exist. Did you mean 'runs/mine'? Train first: iresnet train"),
    ("evaluate mien", "mien does not exist. Did you mean 'runs/mine'? Train first: iresnet train"),
    ("evaluate run/mine", "run/mine does not exist. Did you mean 'runs/mine'? Train first: iresnet train"),
    ("evaluate runs/mnist-flow-nois", "Did you mean 'mnist-flow-noise', which comes with the library? Train first"),
    ("evaluate 'a b'", "a b does not exist. Train first: iresnet train digits-hybrid --out 'a b'"),
    (
        "evaluate kinds.csv",
        "kinds.csv is a file, not a run folder. Train a model with it first: iresnet train kinds.csv",
    ),
    ("evaluate notes.txt", "notes.txt is a file, not a run folder. Train first: iresnet train digits-hybrid"),
    ("evaluate photos", "photos holds images, not a run. Train a model on them first: iresnet train photos"),
    (
        "evaluate classes",
        "classes is not a run folder: it has no config.toml. Train first: iresnet train digits-hybrid",
    ),
    ("evaluate runs/mine kinds.csv", "the file is an option. Use: iresnet evaluate runs/mine --data kinds.csv"),
    ("invert runs/mine kinds.csv", "the file is an option. Use: iresnet invert runs/mine --data kinds.csv"),
    ("train moons --steps 40", "--steps is a setting. Use: --set steps=40"),
    ("train moons --learning-rate=.1", "--learning-rate=.1 is a setting. Use: --set learning_rate=.1"),
    ("train moons --lr .1", "--lr is a setting. Use: --set learning_rate=.1"),
    ("train moons --set lr=.1", "unknown setting 'lr'. Did you mean 'learning_rate'?"),
    ("score kinds.csv runs/mine", "the run folder comes first. Use: iresnet score runs/mine kinds.csv"),
]


@pytest.mark.parametrize(("line", "answer"), ANSWERS, ids=[line for line, _ in ANSWERS])
def test_a_first_guess_is_answered_with_what_to_type(call, here, line, answer):
    before = sorted(here.rglob("*"))
    code, text = call(*shlex.split(line))
    assert code == 2
    assert answer in text
    assert sorted(here.rglob("*")) == before  # nothing was made


@pytest.mark.parametrize("name", data.names())
def test_the_presets_for_a_dataset_exist_and_fit_it(name):
    names = presets_for(name)
    assert len(names) in (1, len(PURPOSES))
    assert all(is_preset(preset) for preset in names)
    if len(names) > 1:
        kinds = [PRESETS[preset].objective.kind for preset in names]
        assert kinds == ["classification", "density", "hybrid"]
        shape = data.builtin.schema_of(PRESETS[names[0]].data.source).shape
        assert data.builtin.schema_of(name).shape == shape
