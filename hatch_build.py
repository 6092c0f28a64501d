"""Compiles the C files of src/secateur/native/csrc where there is a C compiler; without one the package is pure Python.

Law: a failed compilation never fails the installation; SECATEUR_KERNELS=0 leaves the kernels out and
SECATEUR_KERNELS=1 insists on them. SECATEUR_PLATFORM=linux-aarch64 builds for another processor, by the compiler that
CC names; a kernel that it makes for this one is never put into such a wheel. SECATEUR_PLATFORM=manylinux_2_28_x86_64
builds what any Linux of that age or younger can load.

    python hatch_build.py          compiles into src/secateur/native, which is what an editable installation loads from
    python hatch_build.py DIR --sanitize    the same with AddressSanitizer and UBSan, into DIR
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a command, without hatchling
    BuildHookInterface = object  # type: ignore[assignment,misc]

ROOT = Path(__file__).parent
PACKAGE = ROOT / "src" / "secateur" / "native"
SOURCE = PACKAGE / "csrc" / "kernels.c"
MORE = [SOURCE.with_name(f"{name}.c") for name in ("convolution", "convolution_int8", "expand")]  # into the same object
FLAGS = ["-std=c11", "-O3", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-ffp-contract=fast"]
# gcc's; tried first, and left out where a compiler does not know them
TUNING = ["-fno-tree-loop-distribute-patterns"]
# no symbol that is younger than the name says; threads were a library of their own before glibc 2.34
MANY = ["-DSECATEUR_ANY_GLIBC", "-Wl,--no-as-needed", "-l:libpthread.so.0"]
SANITIZERS = ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g"]


def target() -> str:
    """What is built for, as in a wheel's name: this machine, or SECATEUR_PLATFORM."""
    asked = os.environ.get("SECATEUR_PLATFORM") or sysconfig.get_platform()
    return asked.replace("-", "_").replace(".", "_")


def levels() -> dict[str, list[str]]:
    """``{file name: flags}``: one shared object for each level of x86-64, one elsewhere."""
    elsewhere = os.environ.get("SECATEUR_PLATFORM")
    machine = elsewhere.replace("-", "_") if elsewhere else platform.machine()
    if machine.lower().endswith(("x86_64", "amd64")) and sys.maxsize > 2**32:
        return {
            "libkernels.baseline.so": ["-march=x86-64"],
            "libkernels.v3.so": ["-march=x86-64-v3"],
            "libkernels.v4.so": ["-march=x86-64-v4", "-mprefer-vector-width=512"],
        }
    return {"libkernels.baseline.so": []}


def compile_kernels(folder: Path, extra: list[str] | None = None) -> list[Path]:
    """Compiles all levels into the folder, or raises OSError or CalledProcessError and writes nothing."""
    # all that CC says, such as ccache's; of Python's own compiler its name: its flags are of where that was built
    compiler = shlex.split(os.environ.get("CC", "")) or shlex.split(sysconfig.get_config_var("CC") or "cc")[:1]
    _check_target(compiler)
    many = MANY if target().startswith("manylinux") else []
    with tempfile.TemporaryDirectory(dir=folder) as temporary:

        def compiled(level: tuple[str, list[str]]) -> Path:
            name, march = level
            out = Path(temporary, name)
            command = [*FLAGS, *march, *(extra or []), str(SOURCE), *map(str, MORE), *many, "-o", str(out)]
            try:
                _call([*compiler, *TUNING, *command])
            except subprocess.CalledProcessError:
                _call([*compiler, *command])
            return out

        with ThreadPoolExecutor(os.cpu_count()) as pool:  # each waits for a process
            done = [*pool.map(compiled, reversed(levels().items()))]  # the widest takes longest
        return [Path(out.replace(folder / out.name)) for out in done]


def _check_target(compiler: list[str]) -> None:
    """OSError where another processor is asked for than the compiler compiles for."""
    if not os.environ.get("SECATEUR_PLATFORM"):
        return
    made = subprocess.run([*compiler, "-dumpmachine"], check=True, capture_output=True, text=True).stdout.strip()
    if not target().endswith(made.split("-")[0].replace("amd64", "x86_64")):
        said = f"{shlex.join(compiler)} compiles for {made}, and SECATEUR_PLATFORM is {target()}"
        raise OSError(f"{said}; name another by CC")


def _call(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


class CustomBuildHook(BuildHookInterface):  # type: ignore[misc,valid-type]
    """What hatchling calls for a wheel, and for an editable installation, which is one too."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        del version
        wanted = os.environ.get("SECATEUR_KERNELS", "")
        if wanted == "0" or os.name != "posix":
            return
        # those for another processor never take the place of this one's, which a checkout loads from
        elsewhere = ROOT / "build" / "kernels" / target() if os.environ.get("SECATEUR_PLATFORM") else None
        folder = elsewhere or PACKAGE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            files = compile_kernels(folder)
        except (OSError, subprocess.CalledProcessError) as error:
            if wanted == "1":
                raise RuntimeError(f"the kernels do not compile: {getattr(error, 'stderr', '') or error}") from error
            self.app.display_warning(f"secateur is installed without compiled kernels: {error}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{target()}"
        if elsewhere is None:
            build_data["artifacts"] += [f"/src/secateur/native/{file.name}" for file in files]
        else:
            build_data["force_include"].update({str(file): f"secateur/native/{file.name}" for file in files})


if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    folder = Path(arguments[0]) if arguments else PACKAGE
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for file in compile_kernels(folder, SANITIZERS if "--sanitize" in sys.argv else None):
            print(file)
    except subprocess.CalledProcessError as error:
        sys.exit(error.stderr)
