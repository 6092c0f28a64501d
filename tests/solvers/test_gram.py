"""The Gram matrix: its factors, its correlation, and what layers share of it."""

import itertools

import torch

from secateur.solvers.gram import correlation, factor, once_for
from support.solving import layer


def test_the_factor_is_that_of_the_inverse():
    _, gram = layer(1, 50)
    R, dead = factor(gram, 0.01)
    H = gram.double() / gram.diagonal().double().mean() + 0.01 * torch.eye(50)
    torch.testing.assert_close(torch.linalg.inv(R.double()).T @ torch.linalg.inv(R.double()), torch.linalg.inv(H),
                               rtol=1e-3, atol=1e-3)  # fmt: skip
    assert not dead.any()


def test_what_layers_share_is_computed_once_for_a_live_tensor():
    calls = itertools.count()
    gram = torch.eye(3)
    assert [once_for(gram, "a", lambda: next(calls)) for _ in range(2)] == [0, 0]
    assert once_for(gram, "b", lambda: next(calls)) == 1
    assert once_for(gram.clone(), "a", lambda: next(calls)) == 2, "equal is not the same"
    assert once_for(gram, "a", lambda: next(calls)) == 3, "only the last is remembered"
    gram.mul_(2)
    assert once_for(gram, "a", lambda: next(calls)) == 4, "it has changed"
    del gram
    assert once_for(torch.eye(3), "a", lambda: next(calls)) == 5, "an address that was another's"
    with torch.inference_mode():
        counted = torch.eye(3)
        assert [once_for(counted, "a", lambda: next(calls)) for _ in range(2)] == [6, 7]


def test_correlation_has_ones_on_its_diagonal():
    _, gram = layer(1, 20)
    gram[3] = gram[:, 3] = 0
    H, scale = correlation(gram, 0.01)
    damped = gram / gram.diagonal().mean()
    damped.diagonal().add_(0.01)
    alive = torch.arange(20) != 3
    torch.testing.assert_close((H * scale * scale[:, None])[alive][:, alive], damped[alive][:, alive])
    assert bool((H.diagonal() == 1).all())
    assert H[3, alive].abs().amax() == 0
    assert scale[3] < 1e-5 * scale[alive].amin()
