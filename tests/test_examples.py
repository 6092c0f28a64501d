"""Every example runs on this machine's own data, and its table says what a person would believe.

Law: nothing in examples/ is only read; a figure that an example prints is bounded here.
"""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
# these have tests beside what they are about
ELSEWHERE = {"accelerate_loop.py", "plain_loop.py", "digits.py"}


@pytest.fixture
def table(monkeypatch, capsys, tmp_path):
    """Runs an example; ``[(name, [number, ...]), ...]`` of the rows that it prints."""
    threads = torch.get_num_threads()

    def run(name):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [name, "--quick"])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        rows = []
        for line in capsys.readouterr().out.splitlines()[1:]:
            if found := re.fullmatch(r"(\s*\S.*?)\s{2,}(.*\d.*)", line):
                numbers = re.findall(r"\d[\d.,]*", found[2])
                rows.append((found[1].strip(), [float(each.replace(",", "")) for each in numbers]))
        return rows

    yield run
    torch.set_num_threads(threads)


def test_every_example_is_tested_and_in_the_index():
    here = Path(__file__).read_text(encoding="utf-8")
    index = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for file in [*EXAMPLES.glob("*.py"), *NOTEBOOKS]:
        assert f"]({file.name})" in index
        assert file.name in ELSEWHERE or file.name in here or file.suffix == ".ipynb"
    assert len(list(EXAMPLES.glob("*.py"))) >= 8
    assert len(NOTEBOOKS) == 2


@pytest.mark.examples
@pytest.mark.parametrize(("name", "zeros", "lost"), [("lightning_loop.py", 90.0, 5.0), ("trainer_loop.py", 80.0, 8.0)])
@pytest.mark.filterwarnings("ignore")  # the frameworks' own
def test_loops_of_frameworks_prune_while_they_train(table, name, zeros, lost):
    (_, dense), (_, longer), (_, pruned) = table(name)
    assert dense[0] == longer[0] == 0.0
    assert pruned[0] == pytest.approx(zeros, abs=0.1)
    assert pruned[1] > longer[1] - lost


@pytest.mark.examples
def test_a_recurrent_network_is_pruned_three_ways(table):
    dense, (_, plain), (_, repaired), (_, emptier), (_, repaired_more), (_, recovered), (_, trained) = table(
        "recurrent.py"
    )
    assert dense[1][1] > 80
    assert plain[0] == repaired[0] == 50.0
    assert emptier[0] == repaired_more[0] == recovered[0] == 70.0
    assert repaired[1] > dense[1][1] - 4
    assert repaired_more[1] > emptier[1] + 5  # what the repair is worth
    assert recovered[1] > dense[1][1] - 4
    assert trained[0] == 80.0
    assert trained[1] > dense[1][1] - 4


@pytest.mark.examples
def test_shrinking_comes_before_training_or_after(capsys):
    runpy.run_path(str(EXAMPLES / "shrink_and_train.py"))
    lines = capsys.readouterr().out.splitlines()
    sizes = [int(line.split("parameters")[0].split()[-1].replace(",", "")) for line in lines]
    accuracies = [float(line.split()[-2]) for line in lines]
    assert max(sizes[2], sizes[-2], sizes[-1]) <= sizes[0] / 3
    assert min(accuracies[0], accuracies[2], accuracies[-2], accuracies[-1]) > 85


@pytest.mark.examples
def test_int8_comes_on_top_of_shrink(table):
    rows = dict(table("quantized.py"))
    for name, (right, *_) in rows.items():
        assert right > 85, name
    dense, small = rows["dense"][1], rows["shrunken"][1]
    assert small < 0.4 * dense
    assert rows["dense, int8"][1] < 0.5 * dense
    assert rows["shrunken, int8"][1] < 0.6 * small


@pytest.mark.examples
def test_a_detector_with_three_heads_is_shrunken_and_trained_on(table):
    dense, small, trained, longer = (numbers for _, numbers in table("detector.py"))
    assert small[0] == trained[0] < 0.8 * dense[0] == 0.8 * longer[0]
    assert dense[1] > 45
    assert trained[1] > small[1] + 5
    assert trained[1] > dense[1] - 8  # trained on it is about what it was


@pytest.mark.examples
@pytest.mark.filterwarnings("ignore")  # the exporter's own
def test_a_sentence_encoder_goes_to_onnx_runtime(table):
    (_, dense), (_, small) = table("sentence_encoder.py")
    assert dense[1] == 1.0
    assert small[1] > 0.97
    assert small[0] < 0.85 * dense[0]
    assert small[2] < dense[2]


@pytest.mark.examples
def test_language_models_go_through_three_verbs(table):
    mixture, fewer, dense, small, sparse = (numbers for _, numbers in table("language_model.py"))
    assert fewer[0] < 0.85 * mixture[0]
    assert fewer[2] < 1.1 * mixture[2]
    assert small[0] == pytest.approx(0.8 * dense[0], rel=0.02)
    assert sparse[1] == 50.0
    assert 1.0 < dense[2] < 20
    assert small[2] < 1.1 * dense[2]
    assert sparse[2] < 1.1 * dense[2]


def cells_of(notebook):
    page = json.loads(notebook.read_text(encoding="utf-8"))
    assert page["nbformat"] == 4
    return page["cells"]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_are_stored_without_what_they_printed(notebook):
    cells = cells_of(notebook)
    assert {cell["cell_type"] for cell in cells} == {"markdown", "code"}
    for cell in cells:
        assert cell["id"]
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None


@pytest.mark.examples
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_run_from_top_to_bottom(notebook, monkeypatch, tmp_path):
    """As a notebook runs them: where a cell ends in an expression, its table is what the notebook would show."""
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": notebook.stem}
    shown = []
    for number, cell in enumerate(cell for cell in cells_of(notebook) if cell["cell_type"] == "code"):
        *lines, last = "".join(cell["source"]).strip().splitlines()
        where = f"{notebook.name}, cell {number}"
        if re.fullmatch(r"[\w.]+", last):
            exec(compile("\n".join(lines), where, "exec"), namespace)
            value = eval(last, namespace)
            shown.append(value._repr_html_() if hasattr(value, "_repr_html_") else repr(value))
        else:
            exec(compile("\n".join([*lines, last]), where, "exec"), namespace)
    assert any("<table" in each for each in shown)
