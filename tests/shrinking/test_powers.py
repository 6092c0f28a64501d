"""Laws of powers and equations: what is told of sizes is what they were made of."""

from fractions import Fraction

import torch
from hypothesis import given
from hypothesis import strategies as st

from secateur.shrinking.powers import row_echelon as _reduced


@given(st.lists(st.lists(st.integers(-2, 2), min_size=5, max_size=5), max_size=5))
def test_reduced_rows_have_the_same_solutions(matrix):
    rows = [{at: Fraction(value) for at, value in enumerate(row) if value} for row in matrix]
    solved = _reduced([row for row in rows if row], range(5))
    for pivot, row in solved.items():
        assert row[pivot] == 1
        assert not any(pivot in other for each, other in solved.items() if each != pivot)
    for free in set(range(5)) - solved.keys():  # each solution of the one is one of the other
        values = {free: Fraction(1)} | {pivot: -row.get(free, Fraction(0)) for pivot, row in solved.items()}
        assert all(sum(value * values.get(at, 0) for at, value in row.items()) == 0 for row in rows)
    assert len(solved) == torch.linalg.matrix_rank(torch.tensor(matrix or [[0]], dtype=torch.float64))
