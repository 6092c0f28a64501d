"""The words for solvers, and `secateur.solvers`, where each name is a function though modules have the same."""

import pytest

from secateur import criteria, solvers
from secateur.solvers import parse


@pytest.mark.parametrize("name", ["admm", "alps", "sparsegpt", "dsnot"])
def test_a_solvers_word_is_its_name(name):
    assert parse(name) is getattr(solvers, name)
    assert parse(getattr(solvers, name)) is getattr(solvers, name)


@pytest.mark.parametrize("name", ["magnitude", "wanda", "ria"])
def test_a_criterions_word_keeps_its_scope(name):
    assert parse(name).__name__ == f"from_criterion({name})"
    assert parse(name).compares == criteria.scope_of(getattr(criteria, name), "layer")


def test_what_is_no_solver_is_refused():
    with pytest.raises(ValueError, match="no solver is called 'admn'; did you mean admm"):
        parse("admn")
    with pytest.raises(TypeError):
        parse(5)
