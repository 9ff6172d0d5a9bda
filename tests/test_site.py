"""The site can be read from disk: its search finds pages there, and nothing is loaded from a network."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    return folder


@pytest.mark.slow
@pytest.mark.no_cover
def test_no_page_loads_anything_from_a_network(site):
    for page in site.rglob("*.html"):
        assert not re.findall(r'<(?:script|link|img)[^>]* (?:src|href)="https?://', page.read_text(encoding="utf-8")), (
            page
        )


@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
@pytest.mark.parametrize(("query", "found"), [("contraction", True), ("zyzzyva", False)])
def test_the_search_answers_from_disk(site, tmp_path, query, found):
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
    address = f"file://{site}/guide/train.html?q={query}"
    made = subprocess.run(
        [*command, "--virtual-time-budget=20000", "--dump-dom", address], capture_output=True, text=True, timeout=120
    )
    said = re.search(r'md-search-result__meta">\s*([^<]*?)\s*<', made.stdout)
    assert said is not None
    assert bool(re.fullmatch(r"\d+ matching documents", said[1])) == found
    assert (said[1] == "No matching documents") != found
