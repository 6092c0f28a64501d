"""The command as a whole: help, version, and the documentation of every option."""

import pathlib
import re
import subprocess
import sys

import pytest

from secateur.cli import commands as cli
from secateur.native import describe
from secateur.version import __version__
from support.commands import run


def test_help_and_version():
    assert run("--version").stdout == f"secateur {__version__}\n{describe()}\n"
    text = run("--help").stdout
    for word in ("inspect", "prune", "shrink", "demo"):
        assert re.search(rf"^  {word} .*\.$", text, re.MULTILINE)  # a whole sentence on one line
    for command in [command.name or command.callback.__name__ for command in cli.app.registered_commands]:
        assert run(command, "-h").exit_code == 0
    assert run().exit_code == 2


@pytest.mark.parametrize("command", ["shrink", "bench"])
def test_help_says_that_code_is_run(command):
    text = " ".join(re.sub("[^a-z:. ]", " ", run(command, "--help").stdout).split())
    assert "the module is imported and its code is run" in text
    assert "name only what you trust" in text


def test_python_m_secateur():
    done = subprocess.run([sys.executable, "-m", "secateur", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"secateur {__version__}\n{describe()}\n"


def test_every_option_is_documented():
    text = (pathlib.Path(__file__).parents[2] / "docs/command.md").read_text()
    for command in [command.name or command.callback.__name__ for command in cli.app.registered_commands]:
        for option in re.findall(r"--[a-z]+", run(command, "--help").stdout):
            assert option in text or option == "--help", option
