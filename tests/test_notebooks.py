"""Every notebook runs from top to bottom, keeps its outputs, and is small."""

import pathlib
import re

import pytest
from nightly import NIGHTLY

from jaxkv._files.packaged_model import smollm2

nbformat = pytest.importorskip("nbformat", reason="the extra 'notebooks' is not installed")
nbclient = pytest.importorskip("nbclient", reason="the extra 'notebooks' is not installed")

NOTEBOOKS = sorted((pathlib.Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
CHECKS = pathlib.Path(__file__).parent / "notebooks"


def test_there_are_notebooks():
    assert NOTEBOOKS and [file.stem for file in NOTEBOOKS] == [file.stem for file in sorted(CHECKS.glob("*.py"))]


@pytest.mark.filterwarnings("default")  # a kernel's own sockets and threads
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_notebook(file):
    """By day they are only looked at: the README and the pages of docs/ run then."""
    assert file.stat().st_size < 300_000
    notebook = nbformat.read(file, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert any(cell.outputs for cell in cells), "outputs are kept, so that the notebook can be read where it lies"
    assert not any(output.output_type == "error" for cell in cells for output in cell.outputs)
    if NIGHTLY and "load_smollm2" in cells[0].source:
        try:
            smollm2(quiet=True)
        except OSError as error:
            pytest.skip(str(error))
    stored = [read_text(cell) for cell in cells]
    if NIGHTLY:  # what must hold in the end is checked by the kernel, behind the notebook's last cell
        notebook.cells.append(nbformat.v4.new_code_cell((CHECKS / f"{file.stem}.py").read_text()))
        folder = {"metadata": {"path": str(file.parent)}}
        nbclient.NotebookClient(notebook, timeout=600, resources=folder).execute()
        assert [read_text(cell) for cell in cells] == stored, "run it again, and keep what it gives today"


def test_five_minutes_are_sixty_lines():
    (file,) = (file for file in NOTEBOOKS if file.stem.startswith("01"))
    cells = [cell.source for cell in nbformat.read(file, as_version=4).cells if cell.cell_type == "code"]
    lines = [line for source in cells for line in source.splitlines() if line.strip()]
    assert len(lines) <= 60, len(lines)


def test_notebooks_draw_with_one_helper():
    """Colours and frames are set in helpers.py alone."""
    for file in NOTEBOOKS:
        for cell in nbformat.read(file, as_version=4).cells:
            if cell.cell_type == "code":
                assert not re.search(r"\.spines\[\[|rcParams|COLOURS = ", cell.source), file.stem


def read_text(cell):
    """The text that a cell has put out, without pictures; times, and what follows from them, are masked."""
    texts = []
    for output in cell.get("outputs", ()):
        text = output.get("text") or output.get("data", {}).get("text/plain", "")
        texts.append(re.sub(r"\d[\d.,]*(?= ?(?:ms|s|µs|x|times|tokens/s|tokens per second)\b)|0x[0-9a-f]+", "#", text))
    return "".join(texts).replace("\n", "")  # a stream comes in pieces of any size


def test_times_are_masked_and_nothing_else():
    cell = nbformat.v4.new_code_cell(outputs=[nbformat.v4.new_output("stream", text="12.5 ms, 3.1x, 40 tokens, 7 s")])
    assert read_text(cell) == "# ms, #x, 40 tokens, # s"
