"""The command as a whole: help, version, and the documentation of every option."""

import pathlib
import re
import subprocess
import sys
import typing

import pytest

from secateur.cli import commands as cli
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


# Of these, commands mean different things by one name.
OWN = {
    "sparsity": {"bench", "shrink"},  # several; the fraction of a target
    "pattern": {"bench"},  # several
    "allocate": {"shrink"},  # among groups
    "criterion": {"prune", "shrink"},  # of weights, of units
    "target": {"fit"},  # what a budget counts, not what a share is of
    "keep": {"vocabulary"},  # how many tokens, not how much of a score
    "share": {"recover"},  # of a loss, not of what leaves
    "values": {"pack"},  # of its kernels, not of what a solver leaves
    "rank": {"vocabulary"},  # of tokens, not of experts
    "include": {
        "shrink",
        "pack",
        "experts",
        "recover",
        "sensitivity",
        "fit",
    },  # groups, layers, mixtures; what is trained
    "exclude": {"shrink", "pack", "experts", "sensitivity", "fit"},
    "out": {
        "shrink",
        "pack",
        "demo",
        "compress",
        "expand",
        "vocabulary",
        "experts",
    },  # may be left out; a directory or a file
    "no_verify": {"experts"},  # on a small model of the class
    "seed": {"prune"},  # of the criterion, not of the text
    # nothing without; several, all of which are counted; or a plan; it is trained on
    "data": {"oneshot", "vocabulary", "experts", "recover", "sensitivity", "fit"},
}


def test_an_option_of_one_name_is_declared_once():
    declared = {}
    for command in (each for each in cli.app.registered_commands if not each.hidden):  # another name of one
        name = command.name or command.callback.__name__
        for word, hint in typing.get_type_hints(command.callback, include_extras=True).items():
            if word != "return" and name not in OWN.get(word, ()):
                declared.setdefault(word, {})[name] = hint.__metadata__[0]
    for word, each in declared.items():
        if word in ("directory", "path"):  # what a command is about: arguments of its own
            continue
        assert len({id(option) for option in each.values()}) == 1, (word, [*each])
    shared = {word for word, each in declared.items() if len(each) > 1}
    assert shared >= {
        "report",
        "sparsity",
        "pattern",
        "allocate",
        "include",
        "exclude",
        "example",
        "threads",
        "as_json",
    }
