"""Solvers made of criteria and of other solvers name what these need."""

import copy
import functools
import inspect
import pickle

import pytest
import torch

from secateur import criteria
from secateur.criteria import scope_of
from secateur.evidence import needs
from secateur.patterns import Rows, Unstructured
from secateur.solvers import admm, alps, dsnot, from_criterion, sparsegpt, with_refit
from support.solving import evidence_of, layer, name


def test_solvers_name_their_evidence():
    assert needs(sparsegpt) == needs(alps) == needs(admm) == ("gram",)
    assert needs(from_criterion(criteria.magnitude)) == ()
    assert needs(from_criterion(torch.abs)) == ()
    assert needs(from_criterion(criteria.wanda)) == ("input_norm",)
    assert needs(with_refit(from_criterion(criteria.wanda))) == ("input_norm", "gram")
    assert needs(with_refit(sparsegpt)) == ("gram",)
    assert needs(dsnot) == ("input_norm", "input_mean", "input_var")
    assert name(with_refit(from_criterion(criteria.wanda))) == "with_refit(from_criterion(wanda))"


def test_words_are_taken_as_everywhere():
    assert from_criterion("Wanda") == from_criterion(criteria.wanda)
    assert with_refit("wanda") == with_refit(from_criterion("wanda"))
    assert with_refit("sparsegpt") == with_refit(sparsegpt)
    assert with_refit("sparsegpt", iterations=3) != with_refit(sparsegpt)
    with pytest.raises(ValueError, match="no criterion is called 'wander'; did you mean wanda"):
        from_criterion("wander")
    with pytest.raises(ValueError, match="no solver is called 'sparsegtp'; did you mean sparsegpt"):
        with_refit("sparsegtp")
    with pytest.raises(TypeError, match="criterion is a function, or the word for one"):
        from_criterion(3)
    with pytest.raises(TypeError, match="solver is a function, or the word for one"):
        with_refit(None)


MADE = {
    "wanda": from_criterion("wanda"),
    "a partial": from_criterion(functools.partial(criteria.ria, power=1.0)),
    "refitted": with_refit("wanda", iterations=5, tolerance=1e-2),
    "refitted twice": with_refit(with_refit(sparsegpt)),
}


@pytest.mark.parametrize("copied", [lambda made: pickle.loads(pickle.dumps(made)), copy.copy, copy.deepcopy])
@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_an_adapter_is_a_value(made, copied):
    """What it is called, what it asks for, over what it compares and what it does travel with it."""
    again = copied(made)
    assert again.__name__ == made.__name__ or "0x" in made.__name__
    assert needs(again) == needs(made)
    assert scope_of(again) == scope_of(made)
    weight, gram = layer(8, 16)
    evidence = {word: evidence_of(gram)[word] for word in needs(made)}
    for pattern in (Unstructured(), Rows()):
        for ours, theirs in zip(
            again(weight, 0.5, pattern, **evidence), made(weight, 0.5, pattern, **evidence), strict=True
        ):
            assert torch.equal(ours, theirs)


def test_the_signature_shows_what_is_asked_for():
    shown = inspect.signature(with_refit("wanda"))
    assert list(shown.parameters) == ["weight", "sparsity", "pattern", "input_norm", "gram"]
    assert scope_of(with_refit("wanda")) == "row"
    assert scope_of(with_refit("sparsegpt")) == scope_of(sparsegpt, "layer")
