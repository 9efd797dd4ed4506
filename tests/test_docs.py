"""The pages of docs: their code runs, what they link to is there, and every public name is among them."""

import argparse
import ast
import re
import shlex

import pytest
from documents import PAGES, ROOT, blocks, run_blocks
from nightly import NIGHTLY
from test_adoption import changed_lines

import jaxkv
import pallas_kernels
from jaxkv._cli.main import main
from jaxkv.models.checkpoints.gguf_metadata import ARCHITECTURES
from jaxkv.models.families import FAMILIES

MODULES = ("convert", "distributed", "hooks", "linen", "models", "nnx", "scores", "testing", "text")
WITH_CODE = [page for page in PAGES[1:] if blocks(page.read_text(), "python")]


# Pages with several engines: seconds of compiling for each. By day tests/test_own_model.py has what your_model.md has.
BY_NIGHT = ("chat", "recipes", "rollouts", "shared_prefixes", "store_less", "your_model")


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_its_code_runs(page, tmp_path, monkeypatch):
    if page.stem in BY_NIGHT and not NIGHTLY:
        pytest.skip("its programs take long to compile")
    assert run_blocks(page.read_text(), tmp_path, monkeypatch)


class Parsed(Exception):
    """A command line was read; it need not run."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_its_commands_are_read(page, monkeypatch):
    parse = argparse.ArgumentParser.parse_args

    def parse_alone(self, *arguments):
        parse(self, *arguments)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_alone)
    lines = [line for block in blocks(page.read_text(), "sh") for line in block.splitlines()]
    for line in lines:
        if line.startswith("python -m jaxkv"):
            with pytest.raises(Parsed):
                main(shlex.split(line, comments=True)[3:])


def slug(heading):
    """The anchor of a heading, as GitHub and mkdocs make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_it_links_to_is_there(page):
    for target in re.findall(r"\]\((?!https?:)([^)]*)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert anchor in map(slug, headings), target
    for path in re.findall(r"`((?:notebooks|benchmarks|tests|jaxkv|pallas_kernels)/[\w./-]+)", page.read_text()):
        assert (ROOT / path).exists(), path


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text().split("nav:")[1]
    assert {page.name for page in PAGES[1:]} == set(re.findall(r"[\w]+\.md", navigation))


def test_every_public_name_is_on_the_page_of_the_api():
    text = (ROOT / "docs/api.md").read_text()
    names = {f"jaxkv.{name}" for name in jaxkv.__all__} | {f"pallas_kernels.{name}" for name in pallas_kernels.__all__}
    names |= {f"jaxkv.{module}.{name}" for module in MODULES for name in getattr(jaxkv, module).__all__}
    of_tunix = re.search(r"^__all__ = (.+)$", (ROOT / "jaxkv/tunix.py").read_text(), re.MULTILINE)  # it may be missing
    names |= {f"jaxkv.tunix.{name}" for name in ast.literal_eval(of_tunix[1])}
    listed = set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))
    assert names - listed == {"pallas_kernels.IMPLEMENTATIONS", "pallas_kernels.SHAPES", "pallas_kernels.reference"}
    assert listed - names == {"pallas_kernels.testing"}


def test_the_lines_of_the_diff_are_those_of_a_decoder():
    """What the paged one has and the dense one has not, all of it and in this order."""
    (block,) = blocks((ROOT / "docs/your_model.md").read_text(), "diff")
    shown = [line[1:].strip() for line in block.splitlines() if line.startswith("+")]
    assert shown == [line.strip() for line in changed_lines("linen")]
    dense = (ROOT / "tests/adopted/linen_dense.py").read_text()
    unchanged = [line[1:] for line in block.splitlines() if line.startswith((" ", "-")) and "…" not in line]
    for line in unchanged:
        assert re.sub(r": [^,)]+", "", line) in re.sub(r": (?:Config|int)\b", "", dense), line


def test_a_refusal_names_a_page_that_there_is():
    for file in (ROOT / "jaxkv").rglob("*.py"):
        for page in re.findall(r"See docs/(\w+)\.md", file.read_text()):
            assert (ROOT / f"docs/{page}.md").exists(), (file, page)


def test_the_families_that_are_read_are_listed():
    """Each by its name in files, once, and no other."""
    table = (ROOT / "docs" / "checkpoints.md").read_text().partition("## Families")[2]
    *rows, of_gguf = [re.findall(r"`([\w-]+)`", row.split("|")[2]) for row in table.strip().splitlines()[2:]]
    named = [name for row in rows for name in row]
    assert sorted(named) == sorted(FAMILIES)
    assert sorted(of_gguf) == sorted(ARCHITECTURES)
