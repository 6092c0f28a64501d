"""What a bug report needs is printed, whatever is missing."""

import getpass
import importlib.metadata
import platform
import subprocess
import sys

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


def test_an_accelerator_is_named(monkeypatch):
    assert env.described()["accelerator"] == "none that torch sees" or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: f"Accelerator {number}")
    assert env.described()["accelerator"].startswith("Accelerator 0, Accelerator 1 (CUDA ")


def test_it_runs_as_a_module_and_names_neither_person_nor_host():
    done = subprocess.run([sys.executable, "-m", "secateur.env"], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["secateur", "torch", "numpy"]
    assert platform.node() not in done.stdout or len(platform.node()) < 3
    assert f"/{getpass.getuser()}" not in done.stdout
    assert done.stderr == ""
