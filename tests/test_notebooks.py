"""The notebooks run from top to bottom; they are stored without outputs."""

import functools
import json
from pathlib import Path

import pytest
import torch
from torch._dynamo.backends import registry
from torch._inductor.compile_fx import compile_fx

from hot_compile import accounting, stock
from hot_compile.backend import hot
from hot_compile.record import run_uncompiled

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples" / "notebooks").glob("*.ipynb"))
NEEDS = {"finetune_lora": "peft", "vit_digits": "timm"}


def cells(path):
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


@pytest.fixture
def node_by_node(monkeypatch):
    """Nothing is lowered, "hot" and Inductor alike; the slow test lowers."""
    unlowered = functools.partial(hot, inner_compile=run_uncompiled)
    registry.lookup_backend("hot")
    monkeypatch.setitem(registry._COMPILER_FNS, "hot", unlowered)
    monkeypatch.setattr(stock, "hot", unlowered)
    whole = functools.partial(compile_fx, inner_compile=run_uncompiled)
    monkeypatch.setattr(accounting, "compile_fx", whole)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_both_are_there_and_stored_without_outputs():
    assert [path.stem for path in NOTEBOOKS] == sorted(NEEDS)
    for path in NOTEBOOKS:
        assert not any(cell["outputs"] for cell in cells(path))


@pytest.mark.slow
@pytest.mark.usefixtures("node_by_node")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path):
    """Cell by cell, without a kernel."""
    pytest.importorskip(NEEDS[path.stem])
    pytest.importorskip("matplotlib").use("Agg")
    space = {}
    for cell in cells(path):
        exec("".join(cell["source"]), space)
    assert space["losses"][-1] < space["losses"][0]
    assert space["ours"].points[-1].stored == 0
    assert max(p.stored for p in space["ours"].points) < max(
        p.stored for p in space["others"]["exact"].points
    )
    assert space["certificate"].errors.median < 0.25
    assert len(space["certificate"].looks) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_in_a_kernel(path, tmp_path):
    """As Jupyter does it: the last output is the certificate, and there is a picture."""
    pytest.importorskip(NEEDS[path.stem])
    pytest.importorskip("ipykernel")
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    book = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(book, timeout=900, resources={"metadata": {"path": tmp_path}}).execute()
    outputs = [output for cell in book.cells for output in cell.get("outputs", [])]
    shown = [output["data"] for output in outputs if "data" in output]
    assert any("image/png" in data for data in shown)
    assert "gradients within" in shown[-1]["text/html"]
