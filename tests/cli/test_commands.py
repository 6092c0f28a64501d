"""The command as a whole: help, version, and the documentation of every option."""

import inspect
import pathlib
import re
import subprocess
import sys

import pytest
import typer

from secateur.cli import commands as cli
from secateur.cli.options import ARGUMENTS, OPTIONS
from secateur.native import describe
from secateur.version import __version__
from support.commands import run


def test_help_and_version():
    assert run("--version").stdout == f"secateur {__version__}\n{describe()}\n"
    text = run("--help").stdout
    for word in ("inspect", "prune", "shrink", "pack", "demo"):
        assert re.search(rf"^  {word} .*\.$", text, re.MULTILINE)  # a whole sentence on one line
    for command in [command.name or command.callback.__name__ for command in cli.app.registered_commands]:
        assert run(command, "-h").exit_code == 0
    assert run().exit_code == 2


@pytest.mark.parametrize("command", ["shrink", "bench", "pack"])
def test_help_says_that_code_is_run(command):
    text = " ".join(re.sub("[^a-z:. ]", " ", run(command, "--help").stdout).split())
    assert "the module is imported and its code is run" in text
    assert "name only what you trust" in text


def test_python_m_secateur():
    done = subprocess.run([sys.executable, "-m", "secateur", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"secateur {__version__}\n{describe()}\n"


def test_every_option_is_documented():
    text = (pathlib.Path(__file__).parents[2] / "docs/guides/command.md").read_text()
    for command in [command.name or command.callback.__name__ for command in cli.app.registered_commands]:
        for option in re.findall(r"--[a-z]+", run(command, "--help").stdout):
            assert option in text or option == "--help", option


def test_every_option_is_declared_once_and_there_are_not_many():
    made = typer.main.get_command(cli.app).commands
    shown = {name: each for name, each in made.items() if not each.hidden}  # trim is another name of one
    count = 0
    for name, each in shown.items():
        options = {option.name: option for option in each.params if option.param_type_name == "option"}
        assert ({"as_json"} if name == "demo" else {"as_json", "report"}) <= {*options}, name
        for key, option in options.items():
            assert option.help == OPTIONS[key].help, (name, key)
        count += len(options)
    assert count <= 155  # of them 27 are --json and --report; 140 in all was the goal
    assert {*OPTIONS} == {option.name for each in shown.values() for option in each.params} - {*ARGUMENTS}


def test_an_option_is_by_default_what_the_verb_says():
    from secateur import shrink
    from secateur.checkpoints import sparsify

    made = typer.main.get_command(cli.app).commands
    for verb, command in ((shrink, "shrink"), (sparsify, "prune")):
        said = {option.name: option.default for option in made[command].params}
        for name, parameter in inspect.signature(verb).parameters.items():
            if name in said and parameter.default not in (None, inspect.Parameter.empty):
                assert said[name] == getattr(parameter.default, "__name__", parameter.default), (command, name)
