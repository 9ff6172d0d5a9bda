"""One thread, one seed, and hypothesis without chance: a test gives the same verdict every time."""

import pytest
import torch
from hypothesis import settings

from iresnet import cli

torch.set_num_threads(1)
settings.register_profile("iresnet", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("iresnet")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def call(capsys):
    """Run the command; (exit code, what it printed). Anything but a clean exit is a failure of the test."""

    def run(*words):
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            cli.main([str(w) for w in words])
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        return stop.value.code, printed.out + printed.err

    return run
