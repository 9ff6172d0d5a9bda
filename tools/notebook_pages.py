"""A hook for mkdocs that shows the notebooks of docs/notebooks/ as pages, with their stored outputs."""

import json
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files


def on_files(pages: Files, /, *, config: MkDocsConfig) -> Files:
    """Add a page for every notebook; the notebook itself is a file of the site too."""
    for file in [file for file in pages if file.src_uri.endswith(".ipynb")]:
        text = to_markdown(json.loads(file.content_string), Path(file.src_uri).name)
        pages.append(File.generated(config, file.src_uri.removesuffix("ipynb") + "md", content=text))
    return pages


def to_markdown(notebook: dict[str, Any], name: str) -> str:
    """Return a notebook as a page: text, code, and the outputs as they are stored."""
    title, *rest = [_cell(cell) for cell in notebook["cells"]]
    download = f"This page is a notebook: [{name}]({name}), with the outputs of a run."
    return "\n\n".join([title, download, *rest]) + "\n"


def _cell(cell: dict[str, Any]) -> str:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source
    return "\n\n".join([f"```python\n{source}\n```", *(_output(output) for output in cell["outputs"])])


def _output(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        return (
            f'<img alt="Plot made by the cell above" src="data:image/png;base64,{"".join(data["image/png"]).strip()}">'
        )
    text = "".join(output.get("text", data.get("text/plain", ""))).rstrip("\n")
    return f"```text\n{text}\n```"
