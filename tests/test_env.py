"""What a bug report needs is printed, whatever is missing."""

import getpass
import importlib.metadata
import itertools
import platform
import re
import subprocess
import sys

import pytest
import torch

from secateur import env


def test_the_versions_that_are_installed():
    found = env.described()
    assert found["torch"] == torch.__version__
    assert found["safetensors"] == importlib.metadata.version("safetensors")
    assert found["kernels"].startswith(("compiled for", "none", "not used"))
    assert found["torch's instructions"] == torch.backends.cpu.get_cpu_capability()


def test_a_package_that_is_missing_is_a_line(monkeypatch):
    def version(name):
        if name == "peft":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.2.3"

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert env.described()["peft"] == "not installed"
    assert env.described()["onnx"] == "1.2.3"


def test_what_torch_was_built_for_is_not_what_is_there(monkeypatch, capsys):
    """From PyPI torch comes for CUDA, also where there is no GPU."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert env.described()["accelerator"] == "none that torch sees"
    monkeypatch.setattr(sys, "argv", ["env", "--help"])
    with pytest.raises(SystemExit):
        env._main()
    assert "default: cpu" in capsys.readouterr().out


def test_an_accelerator_is_named(monkeypatch):
    assert env.described()["accelerator"] == "none that torch sees" or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: f"Accelerator {number}")
    assert env.described()["accelerator"].startswith("Accelerator 0, Accelerator 1 (CUDA ")


@pytest.mark.long
def test_it_runs_as_a_module_and_names_neither_person_nor_host():
    done = subprocess.run([sys.executable, "-m", "secateur.env"], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["secateur", "torch", "numpy"]
    assert platform.node() not in done.stdout or len(platform.node()) < 3
    assert f"/{getpass.getuser()}" not in done.stdout
    assert done.stderr == ""


def fails(device):
    raise RuntimeError("no such kernel\nand more")


@pytest.fixture
def checks(monkeypatch):
    """In the place of the verbs."""
    calls = itertools.count(1)
    found = {
        "sure": lambda device: {"x": torch.ones(2)},
        "fails": fails,
        "drifts": lambda device: {"x": 1 + 1e-3 * torch.ones(2) * next(calls)},
        "differs": lambda device: {"x": torch.ones(2, dtype=torch.int64) * next(calls)},
    }
    monkeypatch.setattr(env, "_CHECKS", found)
    return found


def test_a_verb_that_fails_or_differs_is_a_line(checks):
    rows = list(env.checked("cpu"))
    assert [row.says for row in rows] == ["the same", "FAILS: RuntimeError: no such kernel", "alike", "DIFFERS"]
    assert [row.holds for row in rows] == [True, False, True, False]
    assert rows[2].distance == pytest.approx(1e-3, rel=0.01)
    assert rows[3].distance == float("inf")  # whole numbers are equal or not


def test_what_cannot_be_tried_is_left_out(checks, monkeypatch):
    checks |= {"sure, a directory": fails, "pack, 2:4 on sparse tensor cores": fails}
    monkeypatch.setattr(env, "_version", lambda name: "not installed")
    says = {row.verb: row.says for row in env.checked("cpu")}
    assert says["sure, a directory"] == "left out: it needs transformers"
    assert says["pack, 2:4 on sparse tensor cores"].startswith("left out: 2:4 runs on CUDA devices")


def test_the_page_of_a_check(checks, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["env", "--check", "--device", "cpu"])
    assert env._main() == 1
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == "2 of 4 verbs hold on cpu."
    assert re.search(r"^fails +FAILS: RuntimeError: no such kernel$", out, re.MULTILINE)
    assert "in fails" in err  # the traceback, for who mends it
    for name in ("fails", "differs"):
        del checks[name]
    assert env._main() == 0
    monkeypatch.setattr(sys, "argv", ["env", "--check", "--device", "warp"])
    with pytest.raises(SystemExit):
        env._main()
    assert "device 'warp' can't be used here" in capsys.readouterr().err


def test_nothing_is_checked_unless_asked(checks, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["env"])
    assert env._main() == 0
    assert "sure" not in capsys.readouterr().out


def test_other_tensors_are_no_distance():
    ones = {"x": torch.ones(2)}
    for other in ({"y": torch.ones(2)}, {"x": torch.ones(3)}, {"x": torch.ones(2).double()}, {}):
        assert env._distance(other, ones) == float("inf")
    assert env._distance({"x": torch.ones(2) * 1.5}, ones) == pytest.approx(0.5)
    assert env._distance({"x": torch.zeros(2)}, {"x": torch.zeros(2)}) == 0
