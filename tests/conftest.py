"""Fixtures and settings of all tests: one thread, one seed, deterministic hypothesis, so results are reproducible."""

import gc
from pathlib import Path

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("iresnet", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("iresnet")

# Importing torch and collecting thousands of tests creates millions of objects that live to the end: the garbage
# collector need not look at them again and again. It is enabled once they are all there.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m gpu`, import only files with GPU tests: a GPU machine may lack what the other files import."""
    if config.option.markexpr != "gpu" or collection_path.suffix != ".py":
        return None
    return "mark.gpu" not in collection_path.read_text(encoding="utf-8") or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` if there is no GPU."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU that torch.cuda can use"))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def call(capsys):
    """Run the command and return its exit code and its output; the test fails unless it exits cleanly."""
    from iresnet import cli

    def run(*words):
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            cli.main([str(w) for w in words])
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        return stop.value.code, printed.out + printed.err

    return run


@pytest.fixture
def figures(monkeypatch):
    """The matplotlib figures that are drawn, kept instead of written."""
    kept = []
    monkeypatch.setattr("iresnet.plots.canvas.save", lambda figure, path, dpi: kept.append(figure))
    return kept
