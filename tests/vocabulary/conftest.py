"""What tests of the vocabulary share."""

import pytest

from secateur.vocabulary import planning as proof


@pytest.fixture
def few_random_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of the proof's, where it is not what is tested; test_module.py has all, on each kind of tokenizer."""
    monkeypatch.setattr(proof, "RANDOM", proof.RANDOM // 10)
