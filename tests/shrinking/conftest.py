"""Fixtures of several files."""

import pytest

from secateur.shrinking.kinds import experts_directory as expert_directory
from support.mixtures import found_once


@pytest.fixture(scope="module")
def known_mixtures(dense):
    return found_once(dense)


@pytest.fixture
def known(known_mixtures, monkeypatch):
    """The mixtures of a file's `dense` are found once, for processes that are forked, and calls that are refused."""
    monkeypatch.setattr(expert_directory, "mixtures_of", known_mixtures)
