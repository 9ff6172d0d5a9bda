"""The pages show what the commands print."""

from pathlib import Path

import pytest

from tools import console

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(p for p in (ROOT / "docs").rglob("*.md") if "<!-- console -->" in p.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_print_the_words_on_the_page(page):
    assert console.main(["--check", str(page)]) == 0


def test_no_console_block_leaves_out_its_numbers():
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        blocks = page.read_text(encoding="utf-8").split("```console\n")[1:]
        assert not any("…" in block.partition("```")[0] for block in blocks), page


def test_commands_run_after_snippets_and_files(tmp_path):
    page = (
        "```python\nimport pathlib\npathlib.Path('a').write_text('snippet')\n```\n\n"
        "<!-- file:b.txt -->\n```text\nfile\n```\n\n"
        "<!-- console -->\n```console\n$ cat a\nold\n$ cat \\\n    b.txt\n```\n\n```console\n$ false\n```\n"
    )
    made = console.render(page, tmp_path)
    assert "$ cat a\nsnippet\n$ cat \\\n    b.txt\nfile\n```" in made
    assert made.endswith("```console\n$ false\n```\n")  # a block without the marker is not run


def test_long_lines_are_wrapped_and_words_compared_without_numbers(tmp_path):
    assert console.output("echo " + "word " * 20, tmp_path).count("\n  word") == 1
    assert console.without_numbers("a 1.5e-3,\n  of -2") == console.without_numbers("a 7, of 22") == "a #, of #"


def test_a_command_that_fails_is_an_error(tmp_path):
    with pytest.raises(Exception, match="status 3"):
        console.output("exit 3", tmp_path)
