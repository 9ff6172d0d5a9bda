"""Ctrl-C and SIGTERM: training is saved and can be resumed, other commands exit at once, a pair of signals is one."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch
import typer

from iresnet import DiagonalNormal, Flow, early
from iresnet.chain import Chain
from iresnet.cli.console import ctrl_c
from iresnet.reproduce import RESULTS
from iresnet.run import resume, start
from iresnet.train import Training, checkpoint, train
from iresnet.train.objective import MaximumLikelihood
from tests.runs import tiny

POSIX = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def handlers():
    """A command that was stopped leaves its handlers: its process ends with it, and this one does not."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


def training(during, steps=5):
    """Train for so many steps; `during` is called with the step within the loop, and the loop asks after it."""
    with ctrl_c() as stop:
        flow, done = Flow(Chain(), DiagonalNormal(2, learned=True)), []

        def callback(state):
            done.append(state.step)
            during(state.step)
            return stop()

        train(
            MaximumLikelihood(flow), (torch.randn(4, 2) for _ in range(steps)), Training(steps=steps), callback=callback
        )
    return done


@POSIX
@pytest.mark.parametrize(
    "sent", [(signal.SIGINT, signal.SIGTERM), pytest.param((signal.SIGTERM,), marks=pytest.mark.slow)], ids=str
)
def test_a_stopped_training_is_saved_and_can_be_resumed(sent, tmp_path):
    small = ("--set", "width=4", "--set", "blocks=[1]", "--set", "steps=100000", "--set", "validate_every=100000")
    process = subprocess.Popen(
        [sys.executable, "-m", "iresnet", "train", "points-density", *small, "--out", str(tmp_path / "run")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    log, deadline = tmp_path / "run" / "log.csv", time.monotonic() + 600
    while not (log.exists() and log.read_text().count("\n") > 1):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    for number in (signal.SIGSTOP, *sent, signal.SIGCONT):  # a pair arrives at one moment, however busy the machine is
        process.send_signal(number)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 130, err
    assert "Stopped and saved at step" in out
    assert f"iresnet train --resume --out {tmp_path / 'run'}" in out.replace("\n", "")
    assert "Traceback" not in err
    step = checkpoint.load(tmp_path / "run" / "last.safetensors").state["step"]
    assert step >= 10
    assert resume(tmp_path / "run", stop=lambda: True).step == step + 1


@pytest.mark.parametrize("number", SIGNALS)
def test_training_stops_after_the_current_step(number):
    assert training(lambda step: signal.raise_signal(number) if step == 2 else None) == [1, 2]


def test_two_signals_at_once_count_as_one_and_a_later_one_exits_at_once(monkeypatch):
    clock = iter((10.0, 10.9, 11.1))

    def thrice(step):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr("iresnet.cli.console.time.monotonic", lambda: next(clock))
        assert training(thrice) == [1]


@pytest.mark.parametrize("number", SIGNALS)
def test_beside_a_training_the_first_ends_at_once_and_its_twin_is_not_heard(number, capsys):
    def both():
        with ctrl_c(lambda: "Go on."):
            try:
                signal.raise_signal(number)
            finally:
                signal.raise_signal(number)

    with pytest.raises(typer.Exit) as ended:
        both()
    signal.raise_signal(signal.SIGINT)  # it is on its way out
    assert ended.value.exit_code == 130
    assert capsys.readouterr().out == "Stopped. Go on.\n"


def test_without_a_signal_nothing_changes(handlers):
    with ctrl_c() as stop:
        assert signal.getsignal(signal.SIGTERM) != handlers[signal.SIGTERM]
    assert not stop()
    assert {number: signal.getsignal(number) for number in SIGNALS} == handlers


def test_train_says_what_can_be_resumed(call, monkeypatch, tmp_path):
    def interrupted(*_, **__):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(sys.modules["iresnet.cli.train"], "start", interrupted)
    words = ("train", "points-density", "--out", tmp_path)
    assert call(*words) == (130, "Stopped. Nothing was saved yet; start again.\n")
    (tmp_path / "last.safetensors").touch()
    code, text = call(*words)
    assert (code, text) == (130, f"Stopped. Resume with:\n  iresnet train --resume --out {tmp_path}\n")


def test_reproduce_exits_at_once_while_it_evaluates(call, monkeypatch, tmp_path):
    evaluation = replace(RESULTS["table2"], run=lambda work: signal.raise_signal(signal.SIGTERM))
    monkeypatch.setitem(RESULTS, "table2", evaluation)
    assert call("reproduce", "table2", "--out", tmp_path) == (130, "Stopped. Run the same command again to resume.\n")


def test_a_signal_in_the_last_step_leaves_the_rest_to_resume(tmp_path):
    asked = count()
    stopped = start(tiny(steps=2), tmp_path / "run", stop=lambda: next(asked) > 0)
    assert (stopped.step, stopped.finished) == (2, False)
    assert not (tmp_path / "run" / "model.safetensors").exists()
    assert resume(tmp_path / "run").certificate.passed


MODULE = [sys.executable, "-m", "iresnet", "--version"]
SCRIPT = "import sys\nfrom iresnet.cli import main\nsys.exit(main())\n"  # what an installer writes


@POSIX
@pytest.mark.parametrize("as_script", [False, True], ids=["module", "script"])
def test_ctrl_c_during_the_import_exits_silently(as_script, tmp_path):
    """Ctrl-C arrives in the middle of torch's import, here a file that sends it and then waits."""
    (tmp_path / "torch").mkdir()
    sends = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(600)\n"
    (tmp_path / "torch" / "__init__.py").write_text(sends)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "iresnet").write_text(SCRIPT)
    words = [sys.executable, str(tmp_path / "bin" / "iresnet"), "--version"] if as_script else MODULE
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are made to ignore it
    paths = os.pathsep.join([str(tmp_path), str(Path(early.__file__).parent.parent)])
    done = subprocess.run(
        words, env={**os.environ, "PYTHONPATH": paths}, cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(
    ("argv", "original", "ours"),
    [
        (["/usr/bin/iresnet", "train"], ["python", "/usr/bin/iresnet", "train"], True),
        (["C:/Scripts/iresnet.exe"], ["iresnet.exe"], True),
        (["-m", "demo"], ["python", "-m", "iresnet", "demo"], True),
        (["-m"], ["python", "-m", "mine"], False),
        (["-c"], ["python", "-c", "import iresnet"], False),
        (["/home/me/train.py"], ["python", "/home/me/train.py"], False),
        ([], ["python"], False),
    ],
)
def test_only_the_command_handles_ctrl_c_while_it_is_imported(argv, original, ours, monkeypatch):
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", original)
    assert early.is_command() == ours


def test_after_the_import_ctrl_c_is_handled_by_python():
    signal.signal(signal.SIGINT, early.exit_silently)
    early.restore()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as nohup does
    early.restore()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
