"""A hook for mkdocs that adds MathJax to the site, so that formulas are drawn without a network.

The script comes from the package `sphinx-mathjax-offline`, of which nothing else is used.
"""

from importlib.metadata import files

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PACKAGE = "sphinx-mathjax-offline"
SCRIPT = "tex-svg.js"  # the one bundle that needs no font files


def on_files(pages: Files, /, *, config: MkDocsConfig) -> Files:
    """Add the script to the site's files."""
    source = next(file for file in files(PACKAGE) or [] if file.name == SCRIPT)
    pages.append(File.generated(config, f"javascripts/{SCRIPT}", abs_src_path=str(source.locate())))
    return pages
