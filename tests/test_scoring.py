"""A `Scorer`: a picklable function of a batch, with the scores of the command."""

import io
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from iresnet.run import Run, Scorer, TrainedModel
from tests.runs import trained as images
from tests.test_cli_large import table, trained, write

NAMES = ["log_likelihood", "standard_error", "bias_bound", "anomaly", "atypicality"]


@pytest.fixture
def frame():
    a, b, n, word = table(30, seed=1)
    return pd.DataFrame({"other": 1, "word": word, "n": n, "b": b, "a": a})


@pytest.fixture(scope="module")
def scorer():
    return Scorer(trained())


def test_the_scores_are_those_of_the_command(call, scorer, frame, tmp_path):
    frame.to_csv(tmp_path / "t.csv", index=False)
    expected = pd.read_csv(io.StringIO(call("score", trained(), tmp_path / "t.csv")[1]))
    scores = scorer(frame)
    assert list(scores) == [*frame, *NAMES]
    for name in NAMES:
        assert np.allclose(scores[name], expected[name], rtol=1e-5)


def test_kinds_of_batches(scorer, frame):
    scores = scorer(frame)
    columns = scorer({name: frame[name].to_numpy() for name in frame})
    assert list(columns) == list(scores)
    assert all(np.array_equal(columns[name], scores[name].to_numpy()) for name in NAMES)
    assert isinstance(columns["anomaly"], np.ndarray)
    texts = scorer({name: frame[name].to_numpy(dtype="U" if name == "word" else None) for name in frame})
    assert np.array_equal(texts["log_likelihood"], columns["log_likelihood"])


def test_arrow_tables(scorer, frame):
    arrow = pytest.importorskip("pyarrow")
    batch = arrow.Table.from_pandas(frame)
    scores = scorer(scorer(batch))  # the second time it replaces the columns
    assert isinstance(scores, arrow.Table)
    assert scores.column_names == [*frame, *NAMES]
    assert np.array_equal(scores["log_likelihood"].to_numpy(), scorer(frame)["log_likelihood"])


def test_polars_frames(scorer, frame):
    polars = pytest.importorskip("polars")
    batch = polars.from_pandas(frame)
    scores = scorer(scorer(batch))
    assert isinstance(scores, polars.DataFrame)
    assert scores.columns == [*frame, *NAMES]
    assert np.array_equal(scores["log_likelihood"].to_numpy(), scorer(frame)["log_likelihood"])


def test_a_row_does_not_depend_on_its_batch(scorer, frame):
    parts = [scorer(frame.iloc[i : i + 7]) for i in range(0, 30, 7)]
    assert np.allclose(pd.concat(parts)["log_likelihood"], scorer(frame)["log_likelihood"], atol=1e-5)  # float32


def test_it_is_pickled_as_a_path(scorer, frame):
    scorer(frame)
    data = pickle.dumps(scorer)
    assert len(data) < 1000
    assert np.array_equal(pickle.loads(data)(frame)["anomaly"], scorer(frame)["anomaly"])
    of_run = pickle.loads(pickle.dumps(Scorer(Run.open(trained()), draws=2)))
    assert of_run.draws == 2


def test_scores_are_not_relative_to_another_model(frame, tmp_path):
    """Trap: after a change of the weights, anomaly scores were shares of the likelihoods of the model before."""
    run = shutil.copytree(trained(), tmp_path / "run")
    scorer = Scorer(run)
    scorer(frame)
    parameter = next(scorer.model.parameters())
    with torch.no_grad():
        parameter.mul_(3)
    with pytest.raises(ValueError, match="weights of the model have changed since it was loaded, so anomaly scores"):
        scorer(frame)
    late, model = Scorer(run), TrainedModel.open(run)
    assert late.model is not None
    with torch.no_grad():
        next(model.model.parameters()).mul_(0.9)
    with pytest.warns(UserWarning, match="weights have changed"):
        model.save(run, overwrite=True)
    with pytest.raises(ValueError, match="was trained again since its model was loaded. Create another Scorer."):
        late(frame)


def test_a_batch_without_rows_has_the_columns(scorer, frame):
    scores = scorer(frame.iloc[:0])
    assert list(scores) == [*frame, *NAMES]
    assert len(scores) == 0
    assert scores["anomaly"].dtype == np.float64


def test_missing_cells(scorer, frame):
    frame.loc[3, "a"] = np.nan
    frame.loc[5, "word"] = None
    with pytest.raises(ValueError, match=r"batch: numbers must be finite .* got nan in row 3, column 'a'"):
        scorer(frame)
    scores = Scorer(trained(), missing="nan")(frame)
    assert np.flatnonzero(scores["log_likelihood"].isna()).tolist() == [3, 5]
    whole = frame.drop(index=[3, 5])
    assert np.array_equal(scores.drop(index=[3, 5])["anomaly"], scorer(whole)["anomaly"])
    with pytest.raises(ValueError, match="missing must be 'refuse' or 'nan'; got 'drop'."):
        Scorer(trained(), missing="drop")


def test_draws_or_a_tolerance():
    with pytest.raises(ValueError, match="draws and tolerance exclude each other; got 8 and 0.5. Give one of them."):
        Scorer(trained(), draws=8, tolerance=0.5)


@pytest.mark.parametrize("options", [{}, {"draws": 2}, {"tolerance": 0.05}])
def test_an_impossible_value_leaves_the_other_rows_as_they_are(frame, options):
    scorer, expected = Scorer(trained(), **options), Scorer(trained(), **options)(frame)
    with pytest.warns(UserWarning, match="1 of 30 rows hold a value that its column cannot have.*; explain=1 names it"):
        scores = scorer(frame.assign(n=[0.5, *frame["n"][1:]]))
    assert scores["log_likelihood"][0] == -np.inf
    assert scores["standard_error"][0] == 0
    assert np.allclose(scores["log_likelihood"][1:], expected["log_likelihood"][1:], atol=1e-5)


def test_explanations(frame):
    frame.loc[0, ["a", "b"]] = [3.0, -3.0]
    scores = Scorer(trained(), explain=2)(frame)
    assert list(scores)[-4:] == ["column_1", "gain_1", "column_2", "gain_2"]
    assert scores["column_1"][0] in ("a", "b")
    assert scores["gain_1"].dtype == np.float64


@pytest.mark.filterwarnings("ignore:1 of 1 rows")
def test_explanations_where_no_row_is_possible(frame):
    scores = Scorer(trained(), explain=1)(frame.head(1).assign(n=0.5))
    assert scores["column_1"].tolist() == ["n"]
    assert scores["gain_1"].tolist() == [np.inf]


def test_an_impossible_value_has_no_class(call, frame, tmp_path):
    write(tmp_path / "t.csv")
    options = [
        "--data",
        tmp_path / "t.csv",
        "--label",
        "word",
        "--drop",
        "name",
        "--set",
        "steps=2",
        "--out",
        tmp_path / "run",
    ]
    assert call("train", "table-hybrid", *options)[0] == 0
    with pytest.warns(UserWarning, match="1 of 30 rows"):
        scores = Scorer(tmp_path / "run")(frame.assign(n=[0.5, *frame["n"][1:]]))
    assert scores["class"][0] == ""
    assert np.isnan(scores["probability"][0])
    assert set(scores["class"][1:]) <= {"up", "down"}
    assert (scores["probability"][1:] >= 0.5).all()


def test_json_holds_numbers(call, frame, tmp_path):
    frame.to_csv(tmp_path / "t.csv", index=False)
    found = json.loads(call("score", trained(), tmp_path / "t.csv", "--json")[1])
    assert all(isinstance(cell, int | float) for row in found["rows"] for cell in row)


def test_a_file_of_another_format_is_refused(call, frame, tmp_path):
    frame.to_csv(tmp_path / "t.csv", index=False)
    code, text = call("score", trained(), tmp_path / "t.csv", "--out", tmp_path / "s.parquet")
    assert code == 2
    assert "--out must be a CSV file, which scores are written as" in text
    assert not (tmp_path / "s.parquet").exists()


def test_images_are_refused():
    with pytest.raises(ValueError, match=r"a batch must be a table; the model takes images of shape \(1, 8, 8\)"):
        Scorer(images())({"x": np.zeros(3)})


def test_a_column_that_is_not_there(scorer, frame):
    with pytest.raises(ValueError, match="batch has no column 'a', which the model needs"):
        scorer(frame.drop(columns="a"))


@pytest.mark.slow
@pytest.mark.no_cover
def test_the_lines_for_spark(scorer, frame, tmp_path):
    """The lines of the page, in a process of their own, with one worker; they need PySpark, pyarrow and Java."""
    for name in ("pyspark", "pyarrow"):
        pytest.importorskip(name)
    page = (Path(__file__).parents[1] / "docs" / "guide" / "large-data.md").read_text(encoding="utf-8")
    (lines,) = (block for block in re.findall(r"```py\n(.*?)```", page, re.DOTALL) if "pyspark" in block)
    shutil.copytree(trained(), tmp_path / "runs" / "mine")
    (tmp_path / "hours").mkdir()
    for k, part in enumerate((frame[:20], frame[20:])):
        part.to_parquet(tmp_path / "hours" / f"{k}.parquet")
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)]),
        "PYSPARK_PYTHON": sys.executable, "PYSPARK_SUBMIT_ARGS": "--master local[1] pyspark-shell",
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", lines], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    scores, expected = (
        found.sort_values("a").reset_index(drop=True) for found in (pd.read_parquet(tmp_path / "scores"), scorer(frame))
    )
    assert list(scores) == list(expected)
    assert np.allclose(scores[NAMES], expected[NAMES], atol=1e-5)
