"""The weight that is aimed at is that of least squares, as far as is asked."""

import pytest
import torch

from secateur.solvers import aimed


def given(tokens=40, inputs=6, outputs=3):
    x = torch.randn(tokens, inputs, dtype=torch.float64)
    return torch.randn(outputs, inputs, dtype=torch.float64), x, x.T @ x


@pytest.mark.parametrize("aim", [0.0, 0.25, 1.0])
def test_what_a_weight_can_give_is_given_as_far_as_is_asked(aim):
    weight, x, gram = given()
    other = torch.randn_like(weight)
    residual_cross = (x @ other.T - x @ weight.T).T @ x
    found = aimed(weight, residual_cross, gram=gram, aim=aim, damping=0.0)
    torch.testing.assert_close(found, weight + aim * (other - weight))


def test_it_is_the_best_of_all_weights():
    weight, x, gram = given()
    wanted = torch.randn(40, 3, dtype=torch.float64)
    found = aimed(weight, (wanted - x @ weight.T).T @ x, gram=gram, damping=0.0)
    best = torch.linalg.lstsq(x, wanted).solution.T
    torch.testing.assert_close(found, best)


def test_nothing_lacking_changes_no_bit_and_nothing_is_written_to():
    weight, _, gram = given()
    kept = weight.clone(), gram.clone()
    assert torch.equal(aimed(weight, torch.zeros_like(weight), gram=gram), weight)
    assert torch.equal(weight, kept[0])
    assert torch.equal(gram, kept[1])


def test_inputs_that_never_were_leave_their_weights():
    weight, x, _ = given()
    x[:, 2] = 0
    residual_cross = torch.randn(3, 40, dtype=torch.float64) @ x
    found = aimed(weight, residual_cross, gram=x.T @ x)
    assert torch.equal(found[:, 2], weight[:, 2])
    assert not torch.equal(found, weight)


def test_what_does_not_fit():
    weight, _, gram = given()
    with pytest.raises(ValueError, match=r"residual_cross must have the weight's shape \(3, 6\), not \(2, 6\)"):
        aimed(weight, weight[:2], gram=gram)
    with pytest.raises(ValueError, match="not positive semidefinite"):
        aimed(weight, weight, gram=3 * torch.ones(6, 6) - 2 * torch.eye(6))
