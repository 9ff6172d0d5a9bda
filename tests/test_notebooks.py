"""The notebooks run, and the outputs that they store are what they print."""

import json

import pytest

from tools import notebooks
from tools.console import without_numbers

PATHS = sorted(notebooks.FOLDER.glob("*.ipynb"))

#: Notebooks that train a model, or draw images from one.
LONG = ("anomaly-detection", "density-of-your-data", "images")


def printed(outputs):
    """The words of the outputs of a cell; plots count as such."""
    texts = [o.get("text") or o["data"].get("text/plain") or "plot" for o in outputs]
    return without_numbers(" ".join(notebooks.text_of(text) for text in texts))


def test_there_are_four():
    assert len(PATHS) == 4


@pytest.mark.no_cover
@pytest.mark.parametrize(
    "path", [pytest.param(p, marks=[pytest.mark.slow] * (p.stem in LONG), id=p.stem) for p in PATHS]
)
def test_a_notebook_prints_what_it_stores(path):
    notebook = notebooks.read(path)
    made, stored = notebooks.run(notebook), [cell["outputs"] for cell in notebooks.code_cells(notebook)]
    assert [printed(outputs) for outputs in made] == [printed(outputs) for outputs in stored]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_every_cell_was_run_in_order(path):
    cells = notebooks.code_cells(notebooks.read(path))
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert any("image/png" in o.get("data", {}) for cell in cells for o in cell["outputs"])


class TestRunning:
    def run(self, *sources):
        return notebooks.run({"cells": [{"cell_type": "code", "source": source} for source in sources]})

    def test_text_values_and_plots_are_outputs(self):
        first, second, third = self.run(
            "print('a')\nx = 2", "x + 1", "import matplotlib.pyplot as plt\nplt.plot([1, 2]);"
        )
        assert first == [{"output_type": "stream", "name": "stdout", "text": ["a\n"]}]
        assert second[0]["data"] == {"text/plain": ["3"]}
        assert [list(o["data"]) for o in third] == [["image/png"]]  # a semicolon hides the value

    def test_cells_leave_no_files(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        self.run("open('made', 'w').close()")
        assert not any(tmp_path.iterdir())

    def test_an_error_ends_the_run(self):
        with pytest.raises(ZeroDivisionError):
            self.run("1 / 0")

    def test_outputs_are_written_into_the_file(self, tmp_path):
        path = tmp_path / "one.ipynb"
        cells = [
            {"cell_type": "markdown", "source": "# One"},
            {"cell_type": "code", "source": ["print(1)"], "outputs": []},
        ]
        path.write_text(json.dumps({"cells": cells}))
        notebooks.store(path)
        (cell,) = notebooks.code_cells(notebooks.read(path))
        assert cell["outputs"][0]["text"] == ["1\n"]
        assert cell["execution_count"] == 1


def test_a_notebook_becomes_a_page():
    pages = pytest.importorskip("tools.notebook_pages", reason="needs mkdocs", exc_type=ImportError)
    text = pages.to_markdown(notebooks.read(notebooks.FOLDER / "what-is-proven.ipynb"), "what-is-proven.ipynb")
    assert text.startswith("# What is proven\n")
    assert "[what-is-proven.ipynb](what-is-proven.ipynb)" in text
    assert "```python\n" in text
    assert "```text\n" in text
    assert '<img alt="Plot made by the cell above" src="data:image/png;base64,' in text
