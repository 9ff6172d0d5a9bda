"""Run folders: what they hold, that they resume bit for bit, and the errors for those that cannot be used."""

import errno
import io
import json
import math
import os
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import iresnet
from iresnet import Classifier, Flow, Hybrid, certify, evaluate, presets, results
from iresnet.data import delimited
from iresnet.demo import digits
from iresnet.run import TRUNCATION, Run, callback, release, resume, start
from iresnet.run.callback import RunCallback
from iresnet.run.log import Log
from iresnet.train import checkpoint
from iresnet.train.guard import TrainingError
from tests.runs import copy_of, tiny, trained


def tensors(path):
    groups = checkpoint.load(path).tensors
    return {f"{group}/{name}": t for group, named in groups.items() for name, t in named.items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


class TestFolder:
    def test_it_holds_the_files_that_later_commands_need(self):
        names = {p.name for p in trained().iterdir()}
        assert {
            "config.toml",
            "schema.json",
            "environment.json",
            "log.csv",
            "last.safetensors",
            "best.safetensors",
            "model.safetensors",
            "certificate.json",
        } <= names
        assert not [n for n in names if n.startswith(".")]  # nothing half-written

    def test_it_returns_its_experiment(self):
        opened = Run.open(trained())
        assert opened.experiment == replace(tiny(), data=tiny().data.resolved())
        assert opened.schema.shape == (1, 8, 8)
        assert opened.schema.levels == 17

    def test_the_model_is_certified_and_in_eval(self):
        model = iresnet.load(trained())
        assert isinstance(model, Hybrid)
        assert not model.training
        assert certify(model).passed
        assert json.loads((trained() / "certificate.json").read_text())["passed"] is True

    def test_loading_twice_gives_the_same_function(self):
        x = Run.open(trained()).splits().test.x[:5] + 0.5
        first, second = (iresnet.load(trained())(x) for _ in range(2))
        assert torch.equal(first.log_prob, second.log_prob)
        assert torch.equal(first.logits, second.logits)

    def test_environment_names_versions_and_seeds(self):
        content = Run.open(trained()).read_json("environment.json")
        assert content["versions"]["iresnet"] == iresnet.__version__
        assert content["seeds"] == [0]
        assert content["parameters"] == sum(p.numel() for p in iresnet.load(trained()).parameters())

    def test_a_run_that_is_resumed_elsewhere_says_how_its_earlier_parts_were_made(self, tmp_path, monkeypatch):
        folder, asked = tmp_path / "run", iter(range(100))
        monkeypatch.setattr(results, "_commit", lambda: "1" * 40 + "-dirty")
        assert not start(tiny(), folder, stop=lambda: next(asked) >= 2).finished
        assert "earlier" not in Run.open(folder).read_json("environment.json")
        monkeypatch.setattr(results, "_commit", lambda: "2" * 40)
        assert resume(folder).finished
        content = Run.open(folder).read_json("environment.json")
        assert (content["commit"], content["step"]) == ("2" * 40, 6)
        (part,) = content["earlier"]
        assert (part["commit"], part["step"], part["device"]) == ("1" * 40 + "-dirty", 3, "cpu")
        assert results.commits_of(content) == ["2" * 40, "1" * 40 + "-dirty"]

    def test_a_run_that_is_resumed_where_it_stopped_has_one_part(self, tmp_path):
        asked = iter(range(100))
        assert not start(tiny(), tmp_path / "run", stop=lambda: next(asked) >= 2).finished
        assert resume(tmp_path / "run").finished
        assert "earlier" not in Run.open(tmp_path / "run").read_json("environment.json")

    def test_a_killed_process_leaves_its_part(self, tmp_path, monkeypatch):
        def killed():
            raise KeyboardInterrupt

        monkeypatch.setattr(results, "_commit", lambda: "1" * 40)
        with pytest.raises(KeyboardInterrupt):
            start(tiny(), tmp_path / "run", stop=killed)
        assert Run.open(tmp_path / "run").read_json("environment.json")["commit"] == "1" * 40

    def test_log_has_a_row_for_every_validation_and_the_end(self):
        log = Run.open(trained()).log()
        assert [row["step"] for row in log] == [3, 6]
        assert all(math.isfinite(row["validation bits/dim"]) for row in log)
        assert log[0]["learning_rate"] == pytest.approx(tiny().training.learning_rate_at(2))

    def test_reference_is_the_likelihood_of_validation_rows(self):
        opened = Run.open(trained())
        rows = opened.splits().validation
        again = evaluate.log_likelihood(opened.model(), rows).value
        assert torch.allclose(opened.reference(), again)

    @pytest.mark.parametrize(("name", "kind"), [("digits-classifier", Classifier), ("digits-density", Flow)])
    def test_other_objectives(self, name, kind, tmp_path):
        outcome = start(tiny(name), tmp_path / "run")
        assert isinstance(outcome.run.model(), kind)
        assert outcome.certificate.passed

    def test_a_classifier_has_no_reference(self, tmp_path):
        outcome = start(tiny("digits-classifier"), tmp_path / "run")
        with pytest.raises(ValueError, match="this model only classifies"):
            outcome.run.reference()

    def test_semi_supervised_learns_from_few_labels(self, tmp_path):
        outcome = start(tiny("digits-semi-supervised"), tmp_path / "run")
        splits = outcome.run.splits()
        assert 0.85 < float((splits.train.y == -1).double().mean()) < 0.95
        assert not bool((splits.test.y == -1).any())
        assert math.isfinite(outcome.run.log()[-1]["validation error %"])

    def test_every_step_has_labels_where_they_are_few(self, tmp_path):
        experiment = tiny("digits-semi-supervised", labelled_batch=99, batch=8, steps=1)
        outcome = start(replace(experiment, data=replace(experiment.data, labelled=10)), tmp_path / "run")
        assert int((outcome.run.splits().train.y >= 0).sum()) == 10
        assert outcome.run.log()[-1]["cross-entropy"] > 0  # it is 0 for a batch without labels

    def test_epochs_become_steps(self, tmp_path):
        outcome = start(tiny(epochs=1, batch=600), tmp_path / "run")
        assert outcome.step == 2  # 1,389 images in batches of 600
        assert Run.open(tmp_path / "run").experiment.training.steps == 2


class TestEarlyStopping:
    """The criterion of validation t is `values[t]`; the weights are real."""

    def run(self, monkeypatch, folder, values, stop=lambda: False, **training):
        numbers = iter(values)
        monkeypatch.setattr(callback, "validate", lambda *_: ({"validation nats": 0.0}, next(numbers)))
        settings = {"steps": 40, "validate_every": 2, "save_every": 100, "patience": 3} | training
        return start(tiny("points-density", **settings), folder, stop=stop)

    def test_it_ends_after_that_many_validations_without_improvement(self, tmp_path, monkeypatch):
        result = self.run(monkeypatch, tmp_path / "run", [5, 4, 4.5, 3, 3.5, 3.2, 3.1, 0])
        assert (result.step, result.finished) == (14, True)
        assert result.run.best_metrics()["step"] == 8
        assert (tmp_path / "run" / "model.safetensors").is_file()

    def test_a_run_that_ended_early_is_finished(self, tmp_path, monkeypatch):
        self.run(monkeypatch, tmp_path / "run", [3, 4, 4, 4])
        before = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir() if p.is_file()}
        again = resume(tmp_path / "run")
        assert (again.step, again.finished) == (8, True)
        assert before == {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir() if p.is_file()}

    def test_a_model_that_was_not_written_is_released_without_another_step(self, tmp_path, monkeypatch):
        self.run(monkeypatch, tmp_path / "run", [3, 4, 4, 4])
        (tmp_path / "run" / "model.safetensors").unlink()
        again = resume(tmp_path / "run")
        assert (again.step, again.finished) == (8, True)
        assert (tmp_path / "run" / "model.safetensors").is_file()

    def test_validations_before_an_interruption_count(self, tmp_path, monkeypatch):
        calls = iter(range(100))
        stopped = self.run(monkeypatch, tmp_path / "run", [3, 4, 4, 4, 4], stop=lambda: next(calls) == 4)
        assert (stopped.step, stopped.finished) == (5, False)  # after one validation without improvement
        assert resume(tmp_path / "run").step == 8

    def test_without_patience_it_takes_all_steps(self, tmp_path, monkeypatch):
        assert self.run(monkeypatch, tmp_path / "run", [3] + 50 * [4], patience=0).step == 40

    def test_a_time_limit_ends_it(self, tmp_path, monkeypatch):
        result = self.run(monkeypatch, tmp_path / "run", 50 * [4], patience=0, max_seconds=1e-3)
        assert (result.step, result.finished) == (1, True)

    def test_min_steps_bound_the_steps_of_epochs_from_below(self):
        training = presets.PRESETS["points-density"].training
        assert replace(training, epochs=2, min_steps=50).resolve_epochs(10).steps == 50
        assert replace(training, epochs=9, min_steps=50).resolve_epochs(10).steps == 90

    def test_the_last_weights_need_no_patience(self):
        with pytest.raises(ValueError, match="patience needs select = 'best', the weights it waits for; got 3"):
            tiny("points-density", select="last", patience=3)


class TestResume:
    @pytest.mark.parametrize("name", ["digits-hybrid", "points-density"])
    def test_it_continues_bit_for_bit(self, name, tmp_path):
        experiment = tiny(name, steps=7, validate_every=3, save_every=2)
        start(experiment, tmp_path / "whole")
        calls = iter(range(100))
        stopped = start(experiment, tmp_path / "parts", stop=lambda: next(calls) == 3)
        assert (stopped.step, stopped.finished) == (4, False)
        finished = resume(tmp_path / "parts")
        assert (finished.step, finished.finished) == (7, True)
        for file in ("last.safetensors", "best.safetensors", "model.safetensors"):
            assert same(tensors(tmp_path / "whole" / file), tensors(tmp_path / "parts" / file))
        whole, parts = (Run.open(tmp_path / f).log()[-1] for f in ("whole", "parts"))
        assert {k: v for k, v in whole.items() if k != "seconds"} == {k: v for k, v in parts.items() if k != "seconds"}

    @pytest.mark.slow
    def test_steps_logged_after_the_checkpoint_are_repeated(self, tmp_path):
        experiment = tiny(steps=6, validate_every=1, save_every=4)
        calls = iter(range(100))

        def crash():
            if next(calls) == 5:
                raise KeyboardInterrupt
            return False

        with pytest.raises(KeyboardInterrupt):
            start(experiment, tmp_path / "run", stop=crash)
        assert [row["step"] for row in Run.open(tmp_path / "run").log()] == [1, 2, 3, 4, 5]
        assert resume(tmp_path / "run").finished
        assert [row["step"] for row in Run.open(tmp_path / "run").log()] == [1, 2, 3, 4, 5, 6]

    def test_resuming_a_finished_run_changes_nothing(self, tmp_path):
        folder = copy_of(trained(), tmp_path / "run")
        (folder / "evaluation.json").write_text("{}")
        before = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
        outcome = resume(folder)
        assert outcome.finished
        assert outcome.certificate.passed
        assert before == {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}

    def test_resuming_a_run_without_a_checkpoint_starts_at_the_beginning(self, tmp_path):
        folder = copy_of(trained(), tmp_path / "run")
        for name in ("last", "best", "model"):
            (folder / f"{name}.safetensors").unlink()
        assert resume(folder).finished
        assert same(tensors(folder / "model.safetensors"), tensors(trained() / "model.safetensors"))


class TestUnits:
    """Scaling and its log-determinant belong to the model: a score is in the units of the file."""

    @pytest.mark.slow
    def test_a_column_in_other_units_changes_the_density_by_that_factor(self, tmp_path):
        rng = np.random.default_rng(0)
        rows = rng.normal(size=(300, 3)) * [1.0, 2.0, 3.0] + [0.0, 5.0, -7.0]
        values = []
        for factor in (1.0, 1024.0):  # a power of two: the scaled rows are the same to the last bit
            path = tmp_path / f"{factor}.csv"
            np.savetxt(path, rows.astype(np.float32) * factor, delimiter=",", header="a,b,c", comments="")
            experiment = tiny("table-density")
            experiment = replace(experiment, data=replace(experiment.data, source=str(path)))
            outcome = start(experiment, tmp_path / f"run-{factor}")
            test = outcome.run.splits().test
            values.append(evaluate.log_likelihood(outcome.run.model(), test).value)
        assert torch.allclose(values[0] - values[1], torch.tensor(3 * math.log(1024.0)).double(), atol=1e-4)


class TestBadInput:
    def test_the_name_of_an_experiment_is_none(self, tmp_path):
        with pytest.raises(ValueError, match=r"must be an Experiment; got 'points-density'. Use presets.find\(name\)"):
            start("points-density", tmp_path / "run")

    def test_a_missing_folder_is_named(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"nothing does not exist. Train first: iresnet train"):
            Run.open(tmp_path / "nothing")

    def test_a_folder_without_a_run(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="is not a run folder: it has no config.toml"):
            Run.open(tmp_path)

    def test_of_another_version(self, tmp_path):
        folder = copy_of(trained(), tmp_path / "run")
        text = (folder / "config.toml").read_text()
        text = text.replace("format 1", "format 7", 1).replace(iresnet.__version__, "9.9", 1)
        (folder / "config.toml").write_text(text)
        with pytest.raises(ValueError, match="written by iresnet 9.9 in format 7; this version reads format 1. Use"):
            Run.open(folder)

    def test_a_config_of_somebody_else(self, tmp_path):
        (tmp_path / "config.toml").write_text("[settings]\n")
        with pytest.raises(ValueError, match="written by another program in format None"):
            Run.open(tmp_path)

    def test_a_damaged_schema(self, tmp_path):
        folder = copy_of(trained(), tmp_path / "run")
        (folder / "schema.json").write_text("{")
        with pytest.raises(ValueError, match=r"schema.json cannot be read: .* Train again"):
            Run.open(folder)

    def test_a_truncated_model_is_refused(self, tmp_path):
        folder = copy_of(trained(), tmp_path / "run")
        whole = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
        with pytest.raises(ValueError, match="is damaged or not a checkpoint"):
            iresnet.load(folder)

    def test_weights_of_another_network(self, tmp_path):
        folder = copy_of(trained(), tmp_path / "run")
        text = (folder / "config.toml").read_text()
        (folder / "config.toml").write_text(text.replace("width = 4", "width = 5"))
        with pytest.raises(ValueError, match=r"does not fit .*config.toml"):
            iresnet.load(folder)

    def test_a_run_without_a_model_says_how_to_finish_it(self, tmp_path):
        stopped = start(tiny(), tmp_path / "run", stop=lambda: True)
        assert not stopped.finished
        with pytest.raises(
            FileNotFoundError, match="has no trained model yet. Finish training: iresnet train --resume"
        ):
            iresnet.load(tmp_path / "run")

    def test_unknown_weights_are_refused(self):
        with pytest.raises(ValueError, match="weights must be 'model' or 'best'; got 'worst'"):
            Run.open(trained()).model("worst")

    def test_a_folder_that_holds_a_run_is_not_overwritten(self, tmp_path):
        folder = copy_of(trained(), tmp_path / "run")
        before = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
        with pytest.raises(
            ValueError, match="already holds a run. Choose another folder, or resume the run: iresnet train"
        ):
            start(tiny(), folder)
        assert before == {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}

    def test_a_file_in_place_of_the_folder_is_refused(self, tmp_path):
        (tmp_path / "run").write_text("mine")
        with pytest.raises(ValueError, match="is a file; a run needs a folder"):
            start(tiny(), tmp_path / "run")
        assert (tmp_path / "run").read_text() == "mine"

    def test_settings_that_cannot_be_built_leave_no_folder(self, tmp_path):
        experiment = tiny()
        experiment = replace(experiment, network=replace(experiment.network, blocks=(1, 1, 1, 1)))
        with pytest.raises(ValueError, match="give blocks fewer entries"):
            start(experiment, tmp_path / "run")
        assert not (tmp_path / "run").exists()

    def test_a_full_disk_leaves_the_last_checkpoint_to_resume_from(self, tmp_path, monkeypatch):
        experiment = tiny(steps=6, validate_every=6, save_every=2)
        sync, calls = os.fsync, iter(range(1000))

        def full(number):
            if next(calls) >= 14:  # config, schema, data, log, environment, steps 2 and 4, each a file and its folder
                raise OSError(errno.ENOSPC, "No space left on device")
            sync(number)

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=r"cannot write .*: No space left on device. Free disk space"):
            start(experiment, tmp_path / "run")
        monkeypatch.undo()
        assert checkpoint.load(tmp_path / "run" / "last.safetensors").state["step"] == 4
        assert not [p for p in (tmp_path / "run").iterdir() if p.name.startswith(".")]
        assert resume(tmp_path / "run").finished
        start(experiment, tmp_path / "whole")
        assert same(tensors(tmp_path / "run" / "last.safetensors"), tensors(tmp_path / "whole" / "last.safetensors"))


def test_release_tightens_the_best_weights(tmp_path):
    folder = copy_of(trained(), tmp_path / "run")
    opened = Run.open(folder)
    (folder / "model.safetensors").unlink()
    certificate, _ = release(opened, opened.splits().validation)
    assert certificate.passed
    assert same(tensors(folder / "model.safetensors"), tensors(trained() / "model.safetensors"))


class TestFolderOfOthers:
    def test_files_of_something_else_are_not_overwritten(self, tmp_path):
        (tmp_path / "config.toml").write_text("# mine\n")
        (tmp_path / "log.csv").write_text("a,b\n")
        with pytest.raises(ValueError, match=r"holds files of something else \(config.toml, log.csv\). Choose another"):
            start(tiny(), tmp_path)
        assert (tmp_path / "config.toml").read_text() == "# mine\n"

    def test_a_run_without_its_checkpoint_is_still_a_run(self, tmp_path):
        folder = copy_of(trained(), tmp_path / "run")
        (folder / "last.safetensors").unlink()
        with pytest.raises(ValueError, match="already holds a run"):
            start(tiny(), folder)
        assert (folder / "model.safetensors").exists()

    def test_a_run_that_failed_before_its_first_checkpoint_can_be_restarted(self, tmp_path):
        folder = copy_of(trained(), tmp_path / "run")
        for name in ("last", "best", "model"):
            (folder / f"{name}.safetensors").unlink()
        assert start(tiny(), folder).finished

    def test_a_demonstration_replaces_only_a_demonstration(self, tmp_path):
        folder = copy_of(trained("digits-density"), tmp_path / "run")
        with pytest.raises(ValueError, match=r"holds another run. Choose another --out"):
            digits.run(folder, tiny())
        assert (folder / "model.safetensors").exists()


class TestData:
    def table(self, path, columns="a,b", factor=1.0, rows=200):
        values = np.random.default_rng(0).normal(size=(rows, 2)) * factor
        np.savetxt(path, values, delimiter=",", header=columns, comments="")
        return replace(tiny("table-density"), data=replace(tiny("table-density").data, source=str(path)))

    @pytest.mark.parametrize("change", [{"columns": "b,a"}, {"factor": 2.0}, {"rows": 201}])
    def test_data_that_changed_after_training_are_refused(self, change, tmp_path):
        outcome = start(self.table(tmp_path / "t.csv"), tmp_path / "run")
        assert len(outcome.run.splits().test) == 40
        self.table(tmp_path / "t.csv", **change)
        with pytest.raises(ValueError, match=r"have changed since it was trained, so its splits would differ"):
            Run.open(tmp_path / "run").splits()

    def test_data_are_found_from_another_working_directory(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        experiment = self.table(tmp_path / "t.csv")
        start(replace(experiment, data=replace(experiment.data, source="t.csv")), tmp_path / "run")
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert len(Run.open(tmp_path / "run").splits().test) == 40


class TestDamage:
    @pytest.mark.parametrize("text", ["{", "[1]", ""])
    def test_damage_to_a_json_file_names_it(self, text, tmp_path):
        folder = copy_of(trained(), tmp_path / "run")
        (folder / "environment.json").write_text(text)
        with pytest.raises(ValueError, match=r"environment.json is damaged: .* Remove it"):
            Run.open(folder).read_json("environment.json")

    @pytest.mark.parametrize("line", ["1,2,x", "1" + ",2" * 30])
    def test_damage_to_the_log_names_it(self, line, tmp_path):
        folder = copy_of(trained(), tmp_path / "run")
        with (folder / "log.csv").open("a") as file:
            file.write(line + "\n")
        with pytest.raises(ValueError, match=r"log.csv is damaged: .* Remove it"):
            Run.open(folder).log()

    def test_a_truncated_line_of_the_log_is_dropped_on_resume(self, tmp_path):
        stopped = start(tiny(), tmp_path / "run", stop=lambda: True)
        with (tmp_path / "run" / "log.csv").open("a") as file:
            file.write("1")  # of "10,..."
        assert stopped.step == 1
        assert resume(tmp_path / "run").finished
        assert [row["step"] for row in Run.open(tmp_path / "run").log()] == [1, 3, 6]

    def test_a_log_with_the_old_column_rate_is_read_and_resumed_with_learning_rate(self, tmp_path):
        start(tiny(), tmp_path / "run", stop=lambda: True)
        path = tmp_path / "run" / "log.csv"
        old = path.read_text().replace("step,seconds,learning_rate,", "step,seconds,rate,")
        path.write_text(old)
        (row,) = Run.open(tmp_path / "run").log()
        assert "rate" not in row
        assert row["learning_rate"] == pytest.approx(tiny().training.learning_rate_at(0))
        assert path.read_text() == old  # reading changes nothing
        assert resume(tmp_path / "run").finished
        header, *lines = path.read_text().splitlines()
        assert header == old.splitlines()[0].replace("rate", "learning_rate")
        assert lines[0] == old.splitlines()[1]
        rates = [row["learning_rate"] for row in Run.open(tmp_path / "run").log()]
        assert rates == pytest.approx([tiny().training.learning_rate_at(i) for i in (0, 2, 5)])


def test_loading_a_model_does_not_change_the_random_state():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    iresnet.load(trained())
    assert torch.equal(torch.rand(3), expected)


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    experiment = tiny(steps=6, save_every=2, validate_every=6)
    kept, original = [], RunCallback.__call__

    def spoiling(self, state):  # as a GPU might, between two looks of the guard
        if state.step == 4:
            kept.append((tmp_path / "run" / "last.safetensors").read_bytes())
            with torch.no_grad():
                state.parameters[0].fill_(math.nan)
        return original(self, state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunCallback, "__call__", spoiling)
        with pytest.raises(TrainingError, match=r"weights of step 4 are not finite; the last checkpoint is kept"):
            start(experiment, tmp_path / "run")
    assert (tmp_path / "run" / "last.safetensors").read_bytes() == kept[0]


def test_a_log_that_cannot_be_written_raises_a_clear_error(tmp_path):
    log = Log(tmp_path, 0, [])
    log.write({"step": 1, "loss": 2.0})

    class Full(io.StringIO):
        def flush(self):
            raise OSError(errno.ENOSPC, "No space left on device")

    log.file.close()
    log.file = Full()
    with pytest.raises(
        OSError, match=r"log.csv: No space left on device. Free disk space, then continue with --resume"
    ):
        log.write({"step": 2, "loss": 1.0})


def test_tensorboard_has_the_metrics_if_it_is_installed(tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    start(tiny(), tmp_path / "run")
    read = events.EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert {"bits/dim", "error_percent", "validation_bits/dim", "learning_rate", "loss"} <= set(read.Tags()["scalars"])
    assert [e.step for e in read.Scalars("validation_bits/dim")] == [3, 6]


def test_without_tensorboard_the_csv_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    start(tiny(), tmp_path / "run")
    assert not (tmp_path / "run" / "tensorboard").exists()
    assert len(Run.open(tmp_path / "run").log()) == 2


def test_a_roulette_is_validated_with_a_series(tmp_path):
    experiment = tiny("mnist-flow-small", steps=2)
    path = tmp_path / "images.npz"
    np.savez(path, np.random.default_rng(0).integers(0, 256, (60, 1, 12, 12)).astype(np.uint8))
    network = replace(experiment.network, blocks=(1,), estimator="roulette")
    data = replace(experiment.data, source=str(path), validation=0.2)
    outcome = start(replace(experiment, network=network, data=data), tmp_path / "run")
    assert math.isfinite(outcome.run.best_metrics()["validation bits/dim"])
    assert TRUNCATION not in outcome.run.log()[-1]  # it hides nothing


class TestFaultsOfFiles:
    def test_data_json_is_written_on_resume_if_the_process_was_killed_before(self, tmp_path):
        folder = copy_of(trained("digits-hybrid"), tmp_path / "run")
        for name in ("data.json", "last.safetensors", "model.safetensors"):
            (folder / name).unlink()
        resume(folder, stop=lambda: True)
        assert (folder / "data.json").is_file()

    @pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
    @pytest.mark.parametrize("name", ["schema.json", "best.safetensors"])
    def test_a_pipe_in_place_of_a_file_is_refused(self, tmp_path, name):
        folder = copy_of(trained("digits-hybrid"), tmp_path / "run")
        (folder / name).unlink()
        os.mkfifo(folder / name)
        with pytest.raises(ValueError, match=f"{name} must be a regular file"):
            Run.open(folder)

    def test_a_folder_name_that_is_not_utf_8_is_refused_before_training(self, tmp_path):
        with pytest.raises(ValueError, match="the path of a run must be UTF-8"):
            start(tiny("digits-hybrid"), tmp_path / "a\udcff")
        assert not any(tmp_path.iterdir())

    @pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="needs a file that cannot be read")
    def test_a_read_error_names_the_file(self, tmp_path):
        (tmp_path / "a.csv").symlink_to("/proc/self/mem")
        with pytest.raises(OSError, match="a.csv cannot be read: Input/output error"):
            delimited.read_delimited(tmp_path / "a.csv", lambda names: names)
        (tmp_path / "a.toml").symlink_to("/proc/self/mem")
        with pytest.raises(OSError, match="a.toml cannot be read: Input/output error"):
            presets.read(tmp_path / "a.toml")
