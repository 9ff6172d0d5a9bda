"""The report as a page: sections that come and go, text that stays text, nothing from outside."""

import itertools
import re
from dataclasses import replace

import pytest
import torch

from iresnet.plots import plot_image_grid
from iresnet.report import Anomaly, SpectrumOfLayer, markup, page, write
from iresnet.report.document import PAPER, SECTIONS
from tests import material
from tests.material import digits, large, points, table
from tests.reading import Read

BAD = """<script>alert("x")</script> & 'quotes' </style></pre>"""


def sections(text):
    return re.findall(r'<section id="([a-z-]+)">', text)


@pytest.fixture(scope="module")
def digits_page():
    return page(digits())


# The page as a whole


@pytest.mark.parametrize("make", [digits, points, table])
def test_a_page_is_balanced_has_texts_for_its_images_and_needs_nothing_from_outside(make):
    text = page(make())
    read = Read(text)
    assert len(set(read.ids)) == len(read.ids)
    assert all("alt" in image for image in read.images)
    anchors = [link[1:] for link in read.links if link.startswith("#")]
    assert anchors == sections(text)
    outside = [link for link in read.links if not link.startswith(("#", "data:"))]
    assert outside == [PAPER]
    assert "url(" not in text
    assert "@import" not in text
    assert "default-src 'none'" in text.replace("&#x27;", "'")
    assert text.startswith("<!doctype html>\n<html lang=")


def test_headings_and_captions_are_in_order(digits_page):
    levels = [int(h) for h in re.findall(r"<h(\d)", digits_page)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b <= a + 1 for a, b in itertools.pairwise(levels))
    assert digits_page.count("<table") == digits_page.count("<caption")


def test_large_material_keeps_the_page_small(tmp_path):
    noise = plot_image_grid(255 * torch.rand(4, 3, 200, 300), tmp_path / "noise.png", columns=2)
    text = page(large(pictures=[("Noise", noise, "")]))
    assert len(text.encode()) < 1_500_000
    Read(text)


def test_everyday_pages_are_far_smaller(digits_page):
    assert len(digits_page.encode()) < 200_000


def test_writing_makes_folders_and_replaces_the_old_page_only_when_done(tmp_path, monkeypatch):
    path = write(digits(), tmp_path / "new" / "report.html")
    assert path.read_text(encoding="utf-8") == page(digits())

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="No space left on device"):
        write(points(), path)
    assert path.read_text(encoding="utf-8") == page(digits())
    assert list(path.parent.iterdir()) == [path]


def test_the_same_material_gives_the_same_page():
    assert page(table()) == page(table())


# Sections

PARTS = {
    "training": {"log": []},
    "samples": {"samples": None},
    "interpolation": {"interpolation": None},
    "anomalies": {"anomalies": []},
    "singular-values": {"spectra": []},
    "certificate": {"certificate": {}},
    "test-metrics": {"evaluation": {}},
}


def test_every_section_is_there_with_its_material(tmp_path):
    picture = plot_image_grid(torch.rand(1, 1, 8, 8), tmp_path / "a.png", levels=2)
    full = sections(page(digits(pictures=[("A picture", picture, "Its caption.")])))
    assert full == [title.lower().replace(" ", "-") for title in SECTIONS if title != "Data"]


@pytest.mark.parametrize("name", PARTS)
def test_a_section_without_material_is_left_out(digits_page, name):
    left = [s for s in sections(digits_page) if s != name]
    assert sections(page(digits(**PARTS[name]))) == left


def test_reconstructions_need_rows_or_numbers():
    assert "reconstructions" in sections(page(digits(reconstruction=None)))
    assert "reconstructions" in sections(page(digits(evaluation={})))
    assert "reconstructions" not in sections(page(digits(reconstruction=None, evaluation={})))


def test_almost_nothing_still_makes_a_page():
    empty = {key: value for part in PARTS.values() for key, value in part.items()}
    m = digits(**empty, data=None, reconstruction=None, environment={}, config="")
    assert sections(page(m)) == ["settings"]
    Read(page(m))


def test_samples_without_data():
    for make in (digits, points, table):
        assert "samples" in sections(page(make(data=None, interpolation=None)))


def test_one_value_one_layer_one_block():
    m = digits(spectra=[SpectrumOfLayer("only", None, 0.5, [0.4])], certificate=material.certificate(1), log=[])
    assert "1 of 1 block proven" in Read(page(m)).text


def test_a_missing_picture(tmp_path):
    with pytest.raises(FileNotFoundError):
        page(digits(pictures=[("A picture", tmp_path / "none.png", "")]))


# Text stays text


def test_text_from_a_user_is_shown_and_never_read_as_html(tmp_path):
    picture = plot_image_grid(torch.rand(1, 1, 8, 8), tmp_path / "a.png", levels=2)
    c = material.certificate(3)
    c["blocks"][0] |= {"name": BAD, "verdict": BAD, "remark": BAD}
    c["blocks"][1]["layers"][0] |= {"kind": BAD, "name": BAD}
    environment = {"command": BAD, BAD: {BAD: BAD}, "commit": BAD, "date": BAD, "hardware": [BAD]}
    log = [{"step": 1.0, BAD: 2.0}, {"step": 2.0, BAD: 1.0}]
    evaluation = digits().evaluation | {"split": BAD}
    evaluation["density"] = evaluation["density"] | {"unit": BAD}
    evaluation["inverse"] = evaluation["inverse"] | {"precision": BAD}
    m = digits(
        name=BAD, config=BAD, environment=environment, log=log, certificate=c, evaluation=evaluation,
        schema=material.Rows((1, 8, 8), 17, (), tuple(BAD + str(i) for i in range(10))),
        spectra=[SpectrumOfLayer(BAD, 0.9, 0.9, [0.5])], pictures=[(BAD, picture, BAD)],
        anomalies=[Anomaly(BAD, digits().data[:3], torch.rand(3), BAD)],
    )  # fmt: skip
    text = page(m)
    assert "<script" not in text
    assert "alert(" in text
    assert Read(text).text.count("alert(") > 20


def test_columns_with_bad_names_in_a_table():
    text = page(table(schema=material.Rows((7,), None, tuple(BAD + str(i) for i in range(7)), ("a", "b", "c"))))
    assert "<script" not in text
    Read(text)


def test_attributes_are_escaped_too():
    assert markup.tag("p", title='"><b>', hidden=True, id=None) == '<p title="&quot;&gt;&lt;b&gt;" hidden></p>'


# What is refused


def test_an_unknown_objective():
    with pytest.raises(ValueError, match="objective must be one of density, .*hybrid.*; got 'regression'."):
        digits(objective="regression")


@pytest.mark.parametrize("name", ["samples", "data"])
def test_rows_of_another_shape(name):
    with pytest.raises(ValueError, match=rf"{name} must have shape \(3, 1, 8, 8\); got \(3, 2\). Pass rows"):
        digits(**{name: torch.zeros(3, 2)})


def test_an_interpolation_of_another_shape():
    with pytest.raises(
        ValueError, match=r"interpolation must have shape \(pairs, steps, 1, 8, 8\); got \(3, 1, 8, 8\)"
    ):
        digits(interpolation=torch.zeros(3, 1, 8, 8))


def test_reconstructions_that_do_not_match():
    r = digits().reconstruction
    with pytest.raises(
        ValueError, match=r"rebuilt must have the shape of originals, \(12, 1, 8, 8\); got \(3, 1, 8, 8\)"
    ):
        replace(r, rebuilt=r.rebuilt[:3])
    with pytest.raises(ValueError, match=r"bounds must have shape \(12,\); got \(2,\). Pass one number a row."):
        replace(r, bounds=r.bounds[:2])
    with pytest.raises(ValueError, match=r"the originals of the reconstruction must have shape \(12, 2\)"):
        points(reconstruction=r)


def test_anomalies_that_do_not_match():
    x = torch.zeros(3, 1, 8, 8)
    with pytest.raises(ValueError, match=r"the scores of 'noise' must have shape \(3,\); got \(2,\)."):
        Anomaly("noise", x, torch.zeros(2))
    with pytest.raises(ValueError, match=r"the scores of 'noise' must lie in \[0, 1\]; got 0 to 1.5. Use the share"):
        Anomaly("noise", x, torch.tensor([0.0, 1.0, 1.5]))
    with pytest.raises(ValueError, match=r"the rows of 'noise' must have shape \(3, 2\)"):
        points(anomalies=[Anomaly("noise", x, torch.zeros(3))])
