"""Which kernels a machine has: found without torch, lowered by the environment, and no error where there are none."""

import importlib.util
import platform
import subprocess
import sys
from pathlib import Path

import pytest

import secateur
from secateur.native import available, describe, library, loading

FIND = loading._library.__wrapped__  # without its cache

# A house of which nothing is imported but the room that is asked for.
ALONE = f"""
import sys, types
house = types.ModuleType("secateur")
house.__path__ = {list(secateur.__path__)!r}
sys.modules["secateur"] = house
"""


def alone(code):
    done = subprocess.run([sys.executable, "-c", ALONE + code], capture_output=True, text=True, check=True)
    return done.stdout


def test_to_say_which_kernels_there_are_takes_no_torch():
    said = alone("from secateur.native import describe; print(describe(), 'torch' in sys.modules)")
    assert said == f"{describe()} False\n"


@pytest.mark.long
def test_the_door_has_every_name_and_no_other():
    code = (
        "from secateur import native; print(*native.__all__); print([getattr(native, n) for n in native.__all__][:0])"
    )
    names = alone(code).splitlines()[0].split()
    assert names == sorted(names)
    assert {"available", "csr_linear", "to_windows"} <= set(names)
    with pytest.raises(AttributeError, match="kernels_of_another"):
        _ = secateur.native.kernels_of_another


def test_the_library_is_asked_for_once():
    assert available() == (library() is not None)
    assert library() is library()


def test_without_kernels_it_is_said(monkeypatch):
    monkeypatch.setenv("SECATEUR_KERNELS", "0")
    found, words = FIND()
    assert found is None
    assert words == "not used (SECATEUR_KERNELS=0)"


@pytest.mark.skipif(not available(), reason="installed without kernels")
@pytest.mark.parametrize(("wanted", "most"), [("baseline", 1), ("v3", 3), ("v4", 4), ("1", 4)])
def test_the_environment_lowers_the_level(monkeypatch, wanted, most):
    monkeypatch.setenv("SECATEUR_KERNELS", wanted)
    opened = []
    real = loading._opened
    monkeypatch.setattr(loading, "_opened", lambda path: opened.append(path.name) or real(path))
    found, words = FIND()
    level = min(found.secateur_level(), most)
    assert opened[-1] == loading._FILES[level]
    assert words.endswith(f"v{level}") or not level


def test_a_broken_library_is_no_library(tmp_path, monkeypatch):
    for name in set(loading._FILES.values()):
        (tmp_path / name).write_bytes(b"not a shared object")
    monkeypatch.setattr(loading, "__file__", str(tmp_path / "kernels.py"))
    monkeypatch.delenv("SECATEUR_KERNELS", raising=False)
    found, words = FIND()
    assert found is None
    assert words.startswith("none, ")
    monkeypatch.setattr(loading, "__file__", str(tmp_path / "elsewhere" / "kernels.py"))
    assert FIND() == (None, "none, installed without a C compiler")


# ------------------------------------------------------------------------------------------------------- the build


def hook():
    spec = importlib.util.spec_from_file_location("hatch_build", Path(__file__).parents[2] / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("machine", "names"),
    [
        ("x86_64", ["libkernels.baseline.so", "libkernels.v3.so", "libkernels.v4.so"]),
        ("AMD64", ["libkernels.baseline.so", "libkernels.v3.so", "libkernels.v4.so"]),
        ("aarch64", ["libkernels.baseline.so"]),
        ("arm64", ["libkernels.baseline.so"]),
        ("riscv64", ["libkernels.baseline.so"]),
    ],
)
def test_levels_of_other_machines(monkeypatch, machine, names):
    """Where there is one level it is compiled for the machine as it is, and it is the file that is looked for."""
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.delenv("SECATEUR_PLATFORM", raising=False)
    levels = hook().levels()
    assert sorted(levels) == names
    assert all(flags == [] for flags in levels.values()) == (len(names) == 1)
    assert all(any(flag.startswith("-march=x86-64") for flag in flags) for flags in levels.values() if flags)
    assert loading._FILES[0] == "libkernels.baseline.so"


@pytest.mark.parametrize(("asked", "count"), [("linux-aarch64", 1), ("manylinux_2_28_x86_64", 3), ("linux_riscv64", 1)])
def test_another_machine_can_be_asked_for(monkeypatch, asked, count):
    monkeypatch.setenv("SECATEUR_PLATFORM", asked)
    built = hook()
    assert built.target() == asked.replace("-", "_")
    assert len(built.levels()) == count


def test_a_compiler_for_another_machine_than_was_asked_for_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("SECATEUR_PLATFORM", "linux-sparc64")
    compiler = tmp_path / "mycc"
    compiler.write_text("#!/bin/sh\necho x86_64-linux-gnu\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(OSError, match="mycc compiles for x86_64-linux-gnu, and SECATEUR_PLATFORM is linux_sparc64"):
        hook().compile_kernels(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["mycc"]


def test_a_machine_without_levels_says_its_name(tmp_path, monkeypatch):
    """aarch64, as far as Python sees it: the object says level 0."""
    (tmp_path / "libkernels.baseline.so").write_bytes(b"")
    other = type("Library", (), {"secateur_level": lambda self: 0, "secateur_team": lambda self, team: None})()
    monkeypatch.setattr(loading, "__file__", str(tmp_path / "kernels.py"))
    monkeypatch.setattr(loading, "_opened", lambda path: other)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.delenv("SECATEUR_KERNELS", raising=False)
    assert FIND() == (other, "compiled for aarch64")


def test_all_words_of_the_compiler_are_used(tmp_path, monkeypatch):
    """Those of CC, as ``ccache gcc``; of Python's own compiler only its name."""
    build, calls = hook(), []

    def call(command):
        calls.append(command)
        Path(command[-1]).write_bytes(b"")

    monkeypatch.setattr(build, "_call", call)
    monkeypatch.setenv("CC", "ccache 'my cc' -m64")
    build.compile_kernels(tmp_path)
    assert calls[0][:4] == ["ccache", "my cc", "-m64", *build.TUNING]
    monkeypatch.delenv("CC")
    monkeypatch.setattr(build.sysconfig, "get_config_var", lambda name: "cc -pthread")
    build.compile_kernels(tmp_path)
    assert calls[-1][:2] == ["cc", *build.TUNING]


def test_a_failed_compilation_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("CC", "false")
    with pytest.raises(subprocess.CalledProcessError):
        hook().compile_kernels(tmp_path)
    monkeypatch.setenv("CC", "/no/such/compiler")
    with pytest.raises(OSError):
        hook().compile_kernels(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_installation_goes_on_without_a_compiler(monkeypatch):
    build = hook()
    said = []
    app = type("App", (), {"display_warning": lambda self, text: said.append(text)})()
    each = type("Hook", (build.CustomBuildHook,), {"__init__": lambda self: None, "app": app})()
    data = {"artifacts": []}
    monkeypatch.delenv("SECATEUR_KERNELS", raising=False)
    monkeypatch.setenv("CC", "false")
    each.initialize("standard", data)
    assert data == {"artifacts": []}
    assert "installed without compiled kernels" in said[0]
    monkeypatch.setenv("SECATEUR_KERNELS", "1")
    with pytest.raises(RuntimeError, match="the kernels do not compile"):
        each.initialize("standard", data)
