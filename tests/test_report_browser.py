"""The report in a real browser: nothing sticks out at any width, every image is drawn, and the console stays empty."""

import html
import json
import re
import shutil
import subprocess

import pytest

from iresnet.report import page
from tests import material

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = (360, 768, 1600)

#: Runs beside the pages, which allow no script of their own, and writes what it saw into its own page.
MEASURE = """
function measure(frame) {
  const page = frame.contentDocument, root = page.documentElement;
  page.querySelectorAll("details").forEach(d => d.open = true);
  const out = [...page.body.querySelectorAll("*")].filter(e =>
    !e.closest(".scroll") && !e.closest("svg") && e.getBoundingClientRect().right > frame.clientWidth + 1);
  const cut = [...page.querySelectorAll("h1, h2, h3, dd, figcaption, .plot span")].filter(e =>
    !e.closest(".scroll") && e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).display != "inline");
  const broken = [...page.images].filter(i => !i.complete || !i.naturalWidth);
  const small = [...page.querySelectorAll("p, td, th, dd, figcaption, .plot span")].filter(e =>
    e.textContent.trim() && parseFloat(getComputedStyle(e).fontSize) < 9);
  return {name: frame.title, width: root.scrollWidth, out: out.map(e => e.outerHTML.slice(0, 200)),
          cut: cut.map(e => e.outerHTML.slice(0, 200)), broken: broken.length, images: page.images.length,
          small: small.length, height: root.scrollHeight};
}
addEventListener("load", () => document.getElementById("seen").textContent =
  JSON.stringify([...document.querySelectorAll("iframe")].map(measure)));
"""

LONG = "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft" * 2


def unwieldy():
    """Long words without a place to break, in every place that a user fills."""
    names = tuple(f"{LONG}{i}" for i in range(7))
    environment = {"command": LONG, LONG: LONG, "commit": LONG}
    certificate = material.certificate(3, passed=False)
    certificate["blocks"][0]["name"] = certificate["blocks"][2]["remark"] = LONG
    spectra = [material.SpectrumOfLayer(LONG, 0.9, 0.9, [0.5, 0.1])]
    return material.table(
        name=LONG, config=LONG, environment=environment, certificate=certificate, spectra=spectra, source=LONG,
        schema=material.Rows((7,), None, names, names[:3]), log=[{"step": 1e6 + k, LONG: 1e-7 * k} for k in range(5)],
        anomalies=[material.Anomaly(LONG, material.table().data[:4], material.torch.rand(4), LONG)],
    )  # fmt: skip


def browse(tmp_path, pages):
    """What the browser saw of each page at each width, by (name, width), and what it wrote to its console."""
    frame = '<iframe title="{} {}" style="width:{}px;height:900px;border:0" srcdoc="{}"></iframe>'
    frames = [frame.format(name, w, w, html.escape(text)) for name, text in pages.items() for w in WIDTHS]
    path = tmp_path / "frames.html"
    head = f"<!doctype html><meta charset='utf-8'><script>{MEASURE}</script>"
    path.write_text(f"{head}<pre id='seen'></pre>{''.join(frames)}", encoding="utf-8")
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run",
        "--disable-dev-shm-usage", "--hide-scrollbars", f"--user-data-dir={tmp_path / 'profile'}",
        "--enable-logging=stderr", "--virtual-time-budget=8000", "--dump-dom", path.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    seen = json.loads(html.unescape(re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.S).group(1)))
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return {(entry["name"].split()[0], int(entry["name"].split()[1])): entry for entry in seen}, console


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_pages_fit_every_width_and_the_console_is_empty(tmp_path):
    made = {
        "digits": material.digits(),
        "points": material.points(),
        "table": material.table(),
        "mixed": material.mixed(),
        "unwieldy": unwieldy(),
    }
    seen, console = browse(tmp_path, {name: page(m) for name, m in made.items()})
    assert len(seen) == len(made) * len(WIDTHS)
    for (name, width), entry in seen.items():
        assert entry["width"] == width, (name, width, entry["out"])
        assert entry["out"] == [], (name, width)
        assert entry["cut"] == [], (name, width)
        assert entry["broken"] == entry["small"] == 0, (name, width)
    assert seen["digits", 360]["images"] == 64 + 64 + 30 + 45 + 32
    assert seen["digits", 360]["height"] > seen["digits", 1600]["height"]
    assert console == []


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_the_measurement_notices_what_it_is_for(tmp_path):
    policy = '<meta http-equiv="Content-Security-Policy" content="img-src \'none\'">'
    wide = f'{policy}<body style="margin:0"><div style="width:2000px">wide</div><img alt="" src="https://x.invalid/a">'
    seen, console = browse(tmp_path, {"wide": wide})
    assert all(entry["width"] == 2000 and entry["out"] and entry["broken"] == 1 for entry in seen.values())
    assert any("Content Security Policy" in line for line in console)
