"""The laws that all solvers keep, and the errors at their door."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from secateur import NM, Block, Channels, Rows, Unstructured, criteria
from secateur.evidence import needs
from secateur.solvers import admm, alps, best_mask, dsnot, from_criterion, output_error, sparsegpt, with_refit
from support.solving import Diagonals, evidence_of, layer, name


def solved(solver, weight, sparsity, pattern, gram):
    evidence = evidence_of(gram)
    return solver(weight, sparsity, pattern, **{word: evidence[word] for word in needs(solver)})


SOLVERS = [
    sparsegpt,
    alps,
    admm,
    dsnot,
    from_criterion(criteria.magnitude),
    from_criterion(criteria.wanda),
    from_criterion(functools.partial(criteria.ria, power=1.0)),
    with_refit(from_criterion(criteria.wanda)),
    with_refit(sparsegpt),
]


SPARSEGPT_REFITTED = SOLVERS[-1]


REPAIRING = [sparsegpt, alps, admm, with_refit(from_criterion(criteria.wanda)), SPARSEGPT_REFITTED]


PATTERNS = [
    Unstructured(), Rows(), NM(2, 4), NM(1, 4, axis=0), NM(5, 10, axis=-1), NM(30, 60), Block(4, 4), Block(3, 7),
    Channels(0), Channels(1), Diagonals(),
]  # fmt: skip


@pytest.mark.parametrize("solver", [sparsegpt, admm], ids=name)
def test_a_diagonal_gram_leaves_what_is_kept(solver):
    """No input can stand in for another: nothing to repair, and the score is w² · G_jj."""
    weight, gram = layer(12, 64)
    gram = torch.diag(gram.diagonal())
    new, mask = solver(weight, 0.5, Rows(), gram=gram, damping=0.0)
    assert torch.equal(mask, best_mask(weight**2 * gram.diagonal(), 0.5, Rows()))
    torch.testing.assert_close(new, weight * mask)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("solver", SOLVERS, ids=name)
def test_laws_of_solvers(solver, pattern):
    """Exact counts, zeros where the mask is False, the weight's dtype, nothing written to, not worse than no repair."""
    if solver is dsnot and not (type(pattern) in (Rows, Unstructured) or (type(pattern) is NM and pattern.axis % 2)):
        return  # refused: test_dsnot_errors
    weight, gram = layer(60, 60, seed=3)
    before = weight.clone(), gram.clone()
    sparsity = None if pattern.density is not None else 0.45
    new, mask = solved(solver, weight, sparsity, pattern, gram)
    assert torch.equal(weight, before[0])
    assert torch.equal(gram, before[1])
    assert (new.shape, new.dtype, mask.dtype) == (weight.shape, weight.dtype, torch.bool)
    assert not new[~mask].any()
    assert not torch.signbit(new[~mask]).any()
    table = pattern.pool(mask.double())
    assert set(table.unique().tolist()) <= {0.0, 1.0}
    units = table.shape[1]
    kept = round(pattern.density * units) if sparsity is None else units - round(sparsity * units)
    assert (table.sum(1) == kept).all()
    if solver in REPAIRING and type(pattern) is not Channels:
        assert output_error(weight, new, gram) < output_error(weight, weight * mask, gram)


@given(
    outputs=st.integers(1, 9),
    inputs=st.integers(1, 150),
    sparsity=st.floats(0, 1),
    seed=st.integers(0, 99),
    kind=st.sampled_from(["normal", "ties", "zeros", "dead", "one token", "tiny", "huge"]),
    solver=st.sampled_from([sparsegpt, admm]),
    pattern=st.sampled_from([Unstructured(), Rows(), Block(2, 3)]),
)
@settings(max_examples=60)
def test_counts_are_exact_whatever_comes(outputs, inputs, sparsity, seed, kind, solver, pattern):
    weight, gram = layer(outputs, inputs, tokens=1 if kind == "one token" else None, seed=seed)
    if kind == "ties":
        weight = weight.sign()
    elif kind == "zeros":
        weight = torch.zeros_like(weight)
    elif kind == "dead":
        gram[::2] = gram[:, ::2] = 0
    elif kind in ("tiny", "huge"):
        gram *= 1e-30 if kind == "tiny" else 1e30
    new, mask = solver(weight, sparsity, pattern, gram=gram)
    units = pattern.pool(mask.double())
    assert (units.sum(1) == units.shape[1] - round(sparsity * units.shape[1])).all()
    assert bool(new.isfinite().all())
    assert not new[~mask].any()


@pytest.mark.parametrize("solver", SOLVERS, ids=name)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_the_float32_result_rounded(solver, dtype):
    """Sums are in float32: a half gives what its float32 copy gives, rounded once."""
    weight, gram = layer(16, 60, dtype=dtype)
    new, mask = solved(solver, weight, 0.5, Rows(), gram)
    wide, wide_mask = solved(solver, weight.float(), 0.5, Rows(), gram)
    assert new.dtype == dtype
    if dtype == torch.float64 or solver is SPARSEGPT_REFITTED:
        # float64 is computed in it, and in a search one exchange leads to another; the refit begins at rounded weights
        near = [float(output_error(weight, w.to(dtype), gram.to(dtype))) for w in (new, wide)]
        assert abs(near[0] / near[1] - 1) < 0.02
        return
    assert torch.equal(mask, wide_mask)
    assert torch.equal(new, wide.to(dtype))


@pytest.mark.parametrize("solver", SOLVERS, ids=name)
def test_the_layout_in_memory_does_not_matter(solver):
    weight, gram = layer(16, 60)
    new, mask = solved(solver, weight, 0.5, Rows(), gram)
    for other in (weight.T.contiguous().T, torch.stack([weight, weight], -1)[..., 0], torch.nn.Parameter(weight)):
        again, again_mask = solved(solver, other, 0.5, Rows(), gram.T.contiguous().T)
        assert torch.equal(mask, again_mask)
        assert torch.equal(new, again)
        assert not again.requires_grad


@pytest.mark.parametrize("solver", [sparsegpt, admm], ids=name)
def test_rows_that_compete_for_themselves_can_be_stacked(solver):
    """Weights that share an input and are pruned per row or n:m may be solved as one."""
    (first, gram), (second, _) = layer(8, 64), layer(5, 64, seed=1)
    for sparsity, pattern in ((0.5, Rows()), (None, NM(2, 4))):
        both, _ = solver(torch.cat([first, second]), sparsity, pattern, gram=gram)
        each = [solver(weight, sparsity, pattern, gram=gram)[0] for weight in (first, second)]
        assert ((both != 0) == (torch.cat(each) != 0)).double().mean() > 0.99
        torch.testing.assert_close(output_error(torch.cat([first, second]), both, gram),
                                   output_error(torch.cat([first, second]), torch.cat(each), gram),
                                   rtol=0.01, atol=0)  # fmt: skip


@pytest.mark.parametrize("solver", SOLVERS, ids=name)
@pytest.mark.parametrize("shape", [(0, 8), (4, 0)])
def test_empty_weights_stay_as_they_are(solver, shape):
    new, mask = solved(solver, torch.zeros(shape), 0.5, Rows(), torch.zeros(shape[1], shape[1]))
    assert new.shape == mask.shape == shape


@pytest.mark.parametrize("sparsity", [0, 1])
@pytest.mark.parametrize("solver", [sparsegpt, alps, admm, dsnot], ids=name)
def test_nothing_and_everything(solver, sparsity):
    weight, gram = layer(8, 40)
    new, mask = solved(solver, weight, sparsity, Unstructured(), gram)
    assert bool((mask == (sparsity == 0)).all())
    torch.testing.assert_close(new, weight * (1 - sparsity))


def test_the_papers_order():
    """Magnitude, Wanda, SparseGPT, that and least squares, ALPS: each has less error; the short search ties ALPS."""
    weight, gram = layer(64, 256, seed=5)
    order = (from_criterion(criteria.magnitude), from_criterion(criteria.wanda), sparsegpt, with_refit(sparsegpt), alps)
    errors = [float(output_error(weight, solved(solver, weight, None, NM(2, 4), gram)[0], gram)) for solver in order]
    assert errors == sorted(errors, reverse=True)
    assert float(output_error(weight, admm(weight, None, NM(2, 4), gram=gram)[0], gram)) < 1.05 * errors[-1]


@pytest.mark.parametrize("solver", [sparsegpt, alps, admm], ids=name)
def test_dead_inputs_go_first_and_keep_their_weights(solver):
    weight, gram = layer(16, 60)
    dead = torch.arange(60) % 3 == 0
    gram[dead] = gram[:, dead] = 0
    new, mask = solver(weight, 0.2, Rows(), gram=gram)
    assert bool(mask[:, ~dead].all()), "a fifth goes, a third is dead"
    if solver is not alps:
        assert torch.equal(mask[:, dead], best_mask(weight[:, dead].abs(), 12 / 20, Rows())), "the largest stay"
    torch.testing.assert_close(new[mask], weight[mask])


@pytest.mark.parametrize("solver", [sparsegpt, alps, admm], ids=name)
def test_what_is_no_gram_matrix_is_refused(solver):
    weight, gram = layer(4, 60)
    gram[0, 1:] = gram[1:, 0] = 100 * gram.diagonal().amax()
    with pytest.raises(ValueError, match=r"\(60, 60\) is not positive semidefinite"):
        solver(weight, 0.5, Rows(), gram=gram)


@pytest.mark.parametrize("solver", [sparsegpt, alps, admm, with_refit(sparsegpt)], ids=name)
def test_errors_at_the_door(solver):
    weight, gram = layer(4, 8)
    bad = gram.clone()
    bad[2, 3] = torch.nan
    negative = gram.clone()
    negative[1, 1] = -1
    for changed, kind, message in [
        ({"weight": weight.long()}, TypeError, "floating dtypes; this one is torch.int64"),
        ({"weight": weight[None]}, ValueError, r"\(outputs, inputs\), not \(1, 4, 8\); flatten a convolution"),
        ({"weight": weight.to("meta")}, ValueError, "meta device"),
        ({"weight": weight / 0}, ValueError, r"the weight of shape \(4, 8\) has entries that are NaN or infinite"),
        ({"gram": gram[:4]}, ValueError, r"shape \(4, 8\); a weight of shape \(4, 8\) needs \(8, 8\)"),
        ({"gram": gram.long()}, TypeError, "this one is torch.int64"),
        ({"gram": gram.to("meta")}, ValueError, "meta device"),
        ({"gram": bad}, ValueError, r"Gram matrix of shape \(8, 8\) has entries that are NaN"),
        ({"gram": negative}, ValueError, "negative diagonal entry"),
        ({"sparsity": None}, ValueError, r"Rows\(\) needs a sparsity"),
        ({"sparsity": 50}, ValueError, "For 50 percent write 0.5"),
        ({"pattern": NM(2, 4)}, ValueError, "removes 0.5 of the weights, not 0.4; pass None"),
        ({"pattern": NM(1, 3), "sparsity": None}, ValueError, "divisible by 3"),
    ]:
        arguments = {"weight": weight, "sparsity": 0.4, "pattern": Rows(), "gram": gram} | changed
        with pytest.raises(kind, match=message):
            solver(arguments.pop("weight"), arguments.pop("sparsity"), arguments.pop("pattern"), **arguments)


@pytest.mark.parametrize("solver", [sparsegpt, alps, admm], ids=name)
def test_damping_has_a_range(solver):
    with pytest.raises(ValueError, match=r"fraction of the mean diagonal entry, in \[0, 1\]; got 2"):
        solver(*layer(4, 8)[:1], 0.5, Rows(), gram=layer(4, 8)[1], damping=2.0)


@pytest.mark.parametrize("solver", [sparsegpt, alps, admm], ids=name)
def test_a_gram_matrix_that_changes_is_seen(solver):
    weight, gram = layer(8, 40)
    _, other = layer(8, 40, seed=1)
    expected = solver(weight, 0.5, Rows(), gram=other.clone())[0]
    solver(weight, 0.5, Rows(), gram=gram)
    gram.copy_(other)
    assert torch.equal(solver(weight, 0.5, Rows(), gram=gram)[0], expected)
