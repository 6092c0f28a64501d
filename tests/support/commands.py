"""The command as tests call it, and what one line about what is wrong looks like."""

import re

from typer.testing import CliRunner

from secateur.cli import commands as cli


def run(*arguments, env=None):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments], env=env, prog_name="secateur")


def fails(result, message):
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert re.fullmatch(rf"secateur: .*{message}.*\n", result.stderr), result.stderr
