"""The ``secateur`` command: one file a command."""

from secateur.cli.commands import main as main
