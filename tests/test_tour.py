"""docs/tour.ipynb: what is stored has been run, and it still runs."""

import json
import re

import pytest
from helpers import ROOT

TOUR = ROOT / "docs" / "tour.ipynb"
SHORTER = {"STEPS = 400": "STEPS = 20", "COUNT = 500": "COUNT = 100"}


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def pictures(notebook):
    """How many pictures each code cell shows."""
    return [sum("image/png" in output.get("data", {}) for output in cell["outputs"]) for cell in code_cells(notebook)]


def test_the_stored_tour_has_been_run():
    notebook = json.loads(TOUR.read_text())
    assert [cell["execution_count"] for cell in code_cells(notebook)] == [*range(1, len(code_cells(notebook)) + 1)]
    assert all(output["output_type"] != "error" for cell in code_cells(notebook) for output in cell["outputs"])
    assert sum(pictures(notebook)) >= 7
    text = "".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert target.startswith("https://") or (TOUR.parent / target).is_file(), target


@pytest.mark.slow
def test_the_tour_runs(tmp_path, monkeypatch):
    """In full but for the numbers of training steps and of images that are scored."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(TOUR, 4)
    stored = pictures(notebook)
    for long, short in SHORTER.items():
        (cell,) = (cell for cell in code_cells(notebook) if long in cell["source"])
        cell["source"] = cell["source"].replace(long, short)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # two threads beside another test take ten times as long
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert pictures(notebook) == stored
    assert "fd_pixels_100" in code_cells(notebook)[-1]["outputs"][-1]["text"]
    assert (tmp_path / "runs" / "tour" / "metrics.jsonl").read_text().count("\n") == 2
