"""The laws that every pattern and criterion obeys; each public one runs through here."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from secateur import NM, Block, Channels, Rows, Unstructured, criteria, make_masks
from secateur.allocation import uniform
from secateur.evidence import needs
from secateur.patterns import GroupedColumns


def largest(channels):
    return channels.amax(1)


PATTERNS = [
    Unstructured(), Rows(), NM(2, 4), NM(1, 4), NM(3, 8), NM(5, 16), NM(2, 4, axis=0), NM(1, 2, axis=-1), NM(0, 4),
    NM(4, 4), Block(1, 1), Block(4, 4), Block(16, 1), Block(3, 5), Channels(0), Channels(1),
    Channels(-1, reduce=largest), GroupedColumns(3),
]  # fmt: skip


def name(pattern):
    """The same in every process, for the names of the tests."""
    return str(pattern).split(" at 0x")[0]


CRITERIA = [each for name in criteria.__all__ if hasattr(each := getattr(criteria, name), "compares")]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@st.composite
def shapes(draw, pattern):
    """A shape of 2 to 4 dimensions that the pattern fits."""
    dims = draw(st.integers(2, 4))
    sizes = [draw(st.sampled_from([1, 2, 3, 4, 7, 8, 16, 32])) for _ in range(2)]
    sizes += [draw(st.integers(1, 3)) for _ in range(dims - 2)]
    if isinstance(pattern, NM):
        sizes[pattern.axis] = pattern.m * draw(st.integers(1, 3))
    return torch.Size(sizes)


@st.composite
def weights(draw, pattern):
    """Weights with many ties, of any dtype and memory layout."""
    shape = draw(shapes(pattern))
    seed = draw(st.integers(0, 2**16))
    kind = draw(st.sampled_from(["normal", "ties", "equal", "zeros", "sorted"]))
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(shape, generator=generator, dtype=torch.float64)
    w = {
        "normal": lambda: w,
        "ties": lambda: w.mul(2).round(),
        "equal": lambda: torch.full_like(w, -0.5),
        "zeros": lambda: w * (w > 0.5),
        "sorted": lambda: torch.linspace(-1, 1, w.numel(), dtype=torch.float64).reshape(shape),
    }[kind]()
    w = w.to(draw(st.sampled_from(DTYPES)))
    layout = draw(st.sampled_from(["contiguous", "transposed", "channels_last", "strided"]))
    if layout == "transposed":
        w = w.transpose(0, 1).contiguous().transpose(0, 1)
    elif layout == "channels_last" and w.dim() == 4:
        w = w.contiguous(memory_format=torch.channels_last)
    elif layout == "strided":
        w = torch.stack([w, torch.full_like(w, 7)], dim=-1)[..., 0]
    return w


def evidence_for(criterion, weight):
    """What a criterion names, for one weight: signed or not, many equal, halves for halves as a collector may give."""
    generator = torch.Generator().manual_seed(weight.numel())

    def drawn(shape):
        values = torch.randn(shape, generator=generator, dtype=torch.float64).mul(4).round().div(4)
        return values.to(weight)

    inputs = (1, *weight.shape[1:])
    made = {
        "grad": lambda: drawn(weight.shape),
        "grad_sq": lambda: drawn(weight.shape).square(),
        "hessian_grad": lambda: drawn(weight.shape),
        "flow": lambda: drawn(weight.shape).abs().double(),
        "movement": lambda: drawn(weight.shape),
        "input_norm": lambda: drawn(inputs).abs(),
    }
    return {word: made[word]() for word in needs(criterion)}


def scores_are_sound(criterion, weight):
    """Of the weight's shape, finite, the same twice, float32 or wider where evidence is multiplied; nothing written."""
    evidence = evidence_for(criterion, weight)
    before = weight.clone(), {word: tensor.clone() for word, tensor in evidence.items()}
    scores = []
    for _ in range(2):
        torch.manual_seed(5)
        scores.append(criterion(weight, **evidence))
    assert scores[0].shape == weight.shape
    assert bool(scores[0].isfinite().all())
    assert torch.equal(scores[0], scores[1])
    assert not scores[0].requires_grad
    assert not evidence or scores[0].dtype in (torch.float32, torch.float64)
    scores[0].fill_(7)  # what a caller does with its scores is no one else's matter
    assert torch.equal(weight, before[0])
    assert all(torch.equal(tensor, before[1][word]) for word, tensor in evidence.items())


def spread_of_ones_is_true(pattern, shape):
    table = pattern.pool(torch.zeros(shape))
    assert table.dim() == 2
    mask = pattern.spread(torch.ones(table.shape, dtype=torch.bool), shape)
    assert mask.shape == shape
    assert mask.dtype == torch.bool
    assert bool(mask.all())
    assert not bool(pattern.spread(torch.zeros(table.shape, dtype=torch.bool), shape).any())


def pool_inverts_spread(pattern, shape, generator):
    """Pooling a mask of whole units gives back the table it came from."""
    table = pattern.pool(torch.zeros(shape))
    keep = torch.rand(table.shape, generator=generator) < 0.5
    again = pattern.pool(pattern.spread(keep, shape).float())
    torch.testing.assert_close(again, keep.float())


def counts_are_exact(pattern, criterion, weight, sparsity):
    masks = make_masks(
        {"weight": weight}, None if pattern.density is not None else sparsity, pattern=pattern, criterion=criterion,
        allocate=uniform, evidence={"weight": evidence_for(criterion, weight)},
    )  # fmt: skip
    kept = pattern.pool(masks["weight"].double())
    assert set(kept.unique().tolist()) <= {0.0, 1.0}, "units are kept or removed as a whole"
    units = kept.shape[1]
    expected = round(pattern.density * units) if pattern.density is not None else units - round(sparsity * units)
    assert (kept.sum(1) == expected).all()
    return masks["weight"]


def masks_nest(pattern, criterion, weight, low, high):
    """As sparsity grows, weights only leave."""
    if pattern.density is not None:
        return
    seed = torch.get_rng_state()
    less = counts_are_exact(pattern, criterion, weight, low)
    torch.set_rng_state(seed)
    more = counts_are_exact(pattern, criterion, weight, high)
    assert bool((less | ~more).all())


def same_seed_same_mask(pattern, criterion, weight, sparsity):
    masks = []
    for layout in (weight, weight.contiguous(), weight.clone().transpose(0, 1).contiguous().transpose(0, 1)):
        torch.manual_seed(3)
        masks.append(counts_are_exact(pattern, criterion, layout, sparsity))
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[0], masks[2])


def ties_keep_the_first(pattern, shape):
    """Equal scores: the first units of each group stay."""
    if pattern.density is not None:
        expected_density = pattern.density
    else:
        expected_density = 0.5
    mask = counts_are_exact(pattern, criteria.magnitude, torch.ones(shape), 0.5)
    kept = pattern.pool(mask.double())
    units = kept.shape[1]
    count = round(expected_density * units) if pattern.density is not None else units - round(0.5 * units)
    assert kept[:, :count].all()
    assert not kept[:, count:].any()
