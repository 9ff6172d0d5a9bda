"""Run the notebooks of docs/notebooks/ and store what they print and plot: python -m tools.notebooks [NAME ...]

A notebook is JSON. Its code cells run in order in one namespace, as Jupyter would run them: printed text, the value of
a last line that is an expression, and the plots become the outputs of the cell. Jupyter itself is not needed.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "notebooks"

#: Dots per inch of the stored plots.
RESOLUTION = 80


def read(path: Path) -> dict[str, Any]:
    """Return a notebook."""
    return dict(json.loads(path.read_text(encoding="utf-8")))


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the cells that run."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def text_of(lines: str | list[str]) -> str:
    """Return the text of a cell or an output, which may be stored as lines."""
    return lines if isinstance(lines, str) else "".join(lines)


def run(notebook: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Run all code cells in an empty folder; return the outputs of each."""
    import matplotlib

    matplotlib.use("Agg")
    names: dict[str, Any] = {"__name__": "__main__"}
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            return [_run_cell(text_of(cell["source"]), names) for cell in code_cells(notebook)]
        finally:
            os.chdir(before)


def _run_cell(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    body, printed, value = ast.parse(source).body, io.StringIO(), None
    shown = body.pop() if body and isinstance(body[-1], ast.Expr) and not source.rstrip().endswith(";") else None
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, []), "<cell>", "exec"), names)
        if isinstance(shown, ast.Expr):
            value = eval(compile(ast.Expression(shown.value), "<cell>", "eval"), names)
    outputs: list[dict[str, Any]] = [{"output_type": "stream", "name": "stdout", "text": _lines(printed.getvalue())}]
    outputs += _plots()
    if value is not None:
        data = {"text/plain": _lines(repr(value))}
        outputs.append({"output_type": "execute_result", "execution_count": None, "metadata": {}, "data": data})
    return outputs if printed.getvalue() else outputs[1:]


def _plots() -> list[dict[str, Any]]:
    """Return the open plots as PNG images, and close them."""
    from matplotlib import pyplot

    images = []
    for number in pyplot.get_fignums():
        file = io.BytesIO()
        pyplot.figure(number).savefig(
            file, format="png", dpi=RESOLUTION, bbox_inches="tight", metadata={"Software": None}
        )
        images.append(base64.b64encode(file.getvalue()).decode())
    pyplot.close("all")
    return [{"output_type": "display_data", "metadata": {}, "data": {"image/png": image}} for image in images]


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def store(path: Path) -> None:
    """Run a notebook and write it back with its outputs."""
    notebook = read(path)
    for count, (cell, outputs) in enumerate(zip(code_cells(notebook), run(notebook), strict=True), 1):
        numbered = [o | {"execution_count": count} if "execution_count" in o else o for o in outputs]
        cell.update(execution_count=count, outputs=numbered)
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for notebook_path in sorted(FOLDER.glob("*.ipynb")):
        if not sys.argv[1:] or notebook_path.stem in sys.argv[1:]:
            store(notebook_path)
            print(notebook_path)
