"""Solvers made of criteria and of other solvers name what these need."""

import torch

from secateur import criteria
from secateur.evidence import needs
from secateur.solvers import admm, alps, dsnot, from_criterion, sparsegpt, with_refit
from support.solving import name


def test_solvers_name_their_evidence():
    assert needs(sparsegpt) == needs(alps) == needs(admm) == ("gram",)
    assert needs(from_criterion(criteria.magnitude)) == ()
    assert needs(from_criterion(torch.abs)) == ()
    assert needs(from_criterion(criteria.wanda)) == ("input_norm",)
    assert needs(with_refit(from_criterion(criteria.wanda))) == ("input_norm", "gram")
    assert needs(with_refit(sparsegpt)) == ("gram",)
    assert needs(dsnot) == ("input_norm", "input_mean", "input_var")
    assert name(with_refit(from_criterion(criteria.wanda))) == "with_refit(from_criterion(wanda))"
