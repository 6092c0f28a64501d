"""The command as a whole: help, version, and the documentation of every option."""

import inspect
import json
import pathlib
import re
import subprocess
import sys

import pytest
import typer

from secateur.cli import commands as cli
from secateur.cli.options import ARGUMENTS, OPTIONS, SHARED
from secateur.native import describe
from secateur.version import __version__
from support.commands import fails, run


def test_help_and_version():
    assert run("--version").stdout == f"secateur {__version__}\n{describe()}\n"
    text = run("--help").stdout
    for word in ("inspect", "prune", "shrink", "pack", "demo"):
        assert re.search(rf"^  {word} .*\.$", text, re.MULTILINE)  # a whole sentence on one line
    for command in [command.name or command.callback.__name__ for command in cli.app.registered_commands]:
        assert run(command, "-h").exit_code == 0
    assert run().exit_code == 2


@pytest.mark.parametrize("command", ["shrink", "bench", "pack", "deploy"])
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
    whole = typer.main.get_command(cli.app)
    shown = {name: each for name, each in whole.commands.items() if not each.hidden}  # trim is another name of one
    assert [option.name for option in whole.params] == ["version", *SHARED]
    count = len(whole.params)
    for name, each in shown.items():
        options = {option.name: option for option in each.params if option.param_type_name == "option"}
        assert not {*options} & {*SHARED}
        for key, option in options.items():
            assert option.help == OPTIONS[key].help, (name, key)
        count += len(options)
    assert count <= 163
    assert {*OPTIONS} == {option.name for each in shown.values() for option in each.params} - {*ARGUMENTS}


@pytest.mark.parametrize("before", [True, False])
def test_what_every_command_takes_stands_before_its_name_or_behind_it(model, tmp_path, before):
    shared = ["--json", "--report", tmp_path / "page.html"]
    result = run(*shared, "inspect", model) if before else run("inspect", *shared, model)
    assert json.loads(result.stdout)["path"] == str(model)
    assert (tmp_path / "page.html").exists()
    assert run("inspect", "--help").stdout.count("--json") == 1
    assert run("inspect", model, "--report").exit_code == 2


def test_the_demo_has_a_page_of_its_own():
    fails(run("demo", "--report", "page.html"), "leave --report out")


def test_an_option_is_by_default_what_the_verb_says():
    from secateur import shrink, sparsify

    made = typer.main.get_command(cli.app).commands
    for verb, command in ((shrink, "shrink"), (sparsify, "prune")):
        said = {option.name: option.default for option in made[command].params}
        for name, parameter in inspect.signature(verb).parameters.items():
            if name in said and parameter.default not in (None, inspect.Parameter.empty):
                assert said[name] == getattr(parameter.default, "__name__", parameter.default), (command, name)
