"""The notebooks run from first to last cell in a Jupyter kernel, and print what they show."""

from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs/notebooks").glob("*.ipynb"))

WIDGET = "application/vnd.jupyter.widget-view+json"

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]


def printed(notebook):
    """Return what each cell printed."""
    return [
        "".join(output["text"] for output in cell.outputs if output.get("name") == "stdout")
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_prints_its_stored_output(path, tmp_path, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    shown = nbformat.read(path, as_version=4)
    ran = nbformat.from_dict(shown)
    NotebookClient(ran, timeout=240, kernel_name="python3").execute(cwd=str(tmp_path))
    assert printed(ran) == printed(shown)
    assert any(printed(ran))
    outputs = [output for cell in ran.cells for output in cell.get("outputs", ())]
    assert not [output for output in outputs if output.get("name") == "stderr"]
    assert any(WIDGET in output.get("data", ()) for output in outputs)  # the progress
