"""Criteria that need evidence: the published formulas by hand, what their signs mean, dtypes, one test a message."""

import importlib.util
import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from secateur import Rows, criteria, make_masks, schedules, sparsify
from secateur.allocation import above, uniform
from secateur.evidence import collect, needs
from secateur.targets import find_targets
from support.laws import CRITERIA

ROOT = Path(__file__).parent.parent
W = torch.tensor([[1.0, -4.0, 0.5, 2.0], [3.0, -0.25, 6.0, -1.5], [-5.0, 0.75, -2.5, 0.5]])
G = torch.tensor([[2.0, 0.5, -4.0, 0.0], [1.0, -8.0, 0.5, 2.0], [-0.2, -4.0, 2.0, -6.0]])
NORM = torch.tensor([[1.0, 4.0, 9.0, 0.25]])


def close(found, expected):
    torch.testing.assert_close(found, torch.tensor(expected, dtype=found.dtype), rtol=1e-6, atol=0)


# ---- formulas ------------------------------------------------------------------------------------------------------


def test_taylor_is_the_squared_first_order_change_of_each_minibatch():
    gradients = torch.stack([G, -2 * G, 0 * G])
    mean_of_squares = (gradients**2).mean(0)
    per_batch = torch.stack([(W * g) ** 2 for g in gradients])  # eq. 8 of the paper, averaged
    torch.testing.assert_close(criteria.taylor(W, grad_sq=mean_of_squares), per_batch.mean(0))


def test_half_of_taylor_is_the_fisher_rise_of_a_gaussian_likelihood():
    """``y ~ N(w x, 1)``: the Hessian's diagonal is E[x²], and so is the mean square of per-example gradients."""
    x = torch.linspace(-2, 2, 50, dtype=torch.float64)
    noise = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(25)  # unit variance, so E[g²] = E[x² noise²] = E[x²]
    weight = torch.tensor([1.5], dtype=torch.float64)
    gradients = -x * noise  # of ½(y - w x)² at y - w x = noise
    rise = 0.5 * weight**2 * (x**2).mean()  # of the mean loss, second-order term, as w goes to 0
    torch.testing.assert_close(criteria.taylor(weight, grad_sq=(gradients**2).mean().reshape(1)) / 2, rise)


def test_snip():
    close(criteria.snip(W, grad=G), [[2.0, 2.0, 2.0, 0.0], [3.0, 2.0, 3.0, 3.0], [1.0, 3.0, 5.0, 3.0]])
    gates = torch.ones_like(W, requires_grad=True)
    x = torch.tensor([1.0, -2.0, 0.5, 3.0])
    (gradient_of_gates,) = torch.autograd.grad(((W * gates) @ x).tanh().sum(), gates)
    weight = W.clone().requires_grad_()
    (gradient,) = torch.autograd.grad((weight @ x).tanh().sum(), weight)
    torch.testing.assert_close(criteria.snip(W, grad=gradient), gradient_of_gates.abs())


def test_snip_ranks_as_the_papers_normalized_scores_do():
    weights, grads = {"a": W, "b": W.flip(0) * 0.3}, {"a": G, "b": G.flip(1)}
    total = sum(float((weights[name] * grads[name]).abs().sum()) for name in weights)

    def normalized(weight, *, grad):
        return (weight * grad).abs() / total

    evidence = {name: {"grad": grad} for name, grad in grads.items()}
    ours = make_masks(weights, 0.5, criterion=criteria.snip, evidence=evidence)
    theirs = make_masks(weights, 0.5, criterion=normalized, evidence=evidence)
    assert all(torch.equal(ours[name], theirs[name]) for name in weights)


def test_grasp():
    close(criteria.grasp(W, hessian_grad=G), [[2.0, -2.0, -2.0, 0.0], [3.0, 2.0, 3.0, -3.0], [1.0, -3.0, -5.0, -3.0]])
    # the paper removes the largest -w Hg
    removed = (-W * G).reshape(-1).topk(4).indices
    mask = make_masks({"w": W}, 4 / 12, criterion=criteria.grasp, evidence={"w": {"hessian_grad": G}})["w"]
    assert sorted(removed.tolist()) == (~mask).reshape(-1).nonzero().reshape(-1).tolist()


def test_a_high_grasp_score_is_gradient_norm_lost_with_the_weight():
    torch.manual_seed(0)
    x, y = torch.randn(20, 4, dtype=torch.float64), torch.randn(20, 3, dtype=torch.float64)
    weight = W.double().clone().requires_grad_()

    def slope(at):
        (gradient,) = torch.autograd.grad(((x @ at.T).tanh() - y).square().mean(), at, create_graph=True)
        return gradient

    gradient = slope(weight)
    (product,) = torch.autograd.grad((gradient * gradient.detach()).sum(), weight)
    step = 1e-6
    for row in range(3):
        for column in range(4):
            smaller = weight.detach().clone()
            smaller[row, column] *= 1 - step
            lost = slope(weight).square().sum() - slope(smaller.requires_grad_()).square().sum()
            score = criteria.grasp(weight.detach(), hessian_grad=product)[row, column]
            torch.testing.assert_close(lost / step, 2 * score, rtol=1e-3, atol=1e-6)


def test_synflow_adds_up_to_the_same_in_every_layer_and_survives_what_float32_does_not():
    torch.manual_seed(0)
    layers = [torch.randn(64, 64) * 10 for _ in range(40)]
    sizes = [layer.double().abs().requires_grad_() for layer in layers]
    signal = torch.ones(64, dtype=torch.float64)
    for size in sizes:
        signal = size @ signal
    flows = torch.autograd.grad(signal.sum(), sizes)
    assert float(signal.detach().max()) > torch.finfo(torch.float32).max
    scores = [criteria.synflow(layer, flow=flow) for layer, flow in zip(layers, flows, strict=True)]
    for score in scores:
        assert bool(score.isfinite().all())
        torch.testing.assert_close(score.sum(), signal.detach().sum())


def test_synflow_in_the_papers_rounds_keeps_a_path_through_every_layer():
    """100 rounds of exponentially falling density; one round at the same sparsity cuts the network."""
    torch.manual_seed(0)
    weights = {name: torch.randn(size) for name, size in {"0": (40, 20), "1": (40, 40), "2": (4, 40)}.items()}

    def flows(masks):
        sizes = [(weights[name].double().abs() * masks[name]).requires_grad_() for name in weights]
        signal = torch.ones(20, dtype=torch.float64)
        for size in sizes:
            signal = size @ signal
        found = torch.autograd.grad(signal.sum(), sizes)
        return {name: {"flow": flow} for name, flow in zip(weights, found, strict=True)}

    def pruned(sparsities):
        masks = {name: torch.ones_like(weight, dtype=torch.bool) for name, weight in weights.items()}
        for sparsity in sparsities:
            masks = make_masks(weights, sparsity, criterion=criteria.synflow, within=masks, evidence=flows(masks))
        assert sum(int(mask.sum()) for mask in masks.values()) == 2560 - round(0.995 * 2560)
        flow = flows(masks)["0"]["flow"]
        return float((criteria.synflow(weights["0"], flow=flow) * masks["0"]).sum())

    assert pruned(map(schedules.exponential(0.995, end=100), range(1, 101))) > 0
    assert pruned([0.995]) == 0


def test_movement():
    """Two steps of plain gradient descent, and S is positive where the weight moved away from 0."""
    weight = torch.tensor([2.0, -1.0, 0.5])
    gradients = torch.tensor([[1.0, 1.0, -2.0], [0.5, 2.0, 1.0]])
    score, now = torch.zeros(3), weight.clone()
    for gradient in gradients:
        score -= now * gradient
        now -= 0.1 * gradient
    close(score, [-2.0 - 0.95, 1.0 + 2.2, 1.0 - 0.7])
    assert torch.equal(criteria.movement(now, movement=score), score)
    assert torch.equal(score > 0, now.abs() > weight.abs())
    mask = make_masks({"w": now}, 1 / 3, criterion=criteria.movement, evidence={"w": {"movement": score}})["w"]
    assert mask.tolist() == [False, True, True]


def test_soft_movement_is_a_threshold_on_the_sigmoid():
    scores = torch.tensor([[-3.0, -2.0, 0.0, 1.0], [-9.0, -2.3, -2.1, 5.0]])
    close(
        criteria.soft_movement(W[:2], movement=scores)[0],
        [1 / (1 + math.e**3), 1 / (1 + math.e**2), 0.5, 1 / (1 + 1 / math.e)],
    )
    masks = make_masks({"w": W[:2]}, 0.995, criterion=criteria.soft_movement, allocate=above(0.1),
                       evidence={"w": {"movement": scores}})  # fmt: skip
    assert torch.equal(masks["w"], torch.sigmoid(scores) > 0.1)
    assert torch.equal(masks["w"], scores > math.log(0.1 / 0.9))
    far = torch.tensor([[30.0, 31.0], [-700.0, -699.0]])
    apart = criteria.soft_movement(far, movement=far)
    assert apart[0, 0] < apart[0, 1]
    assert 0 < apart[1, 0] < apart[1, 1]


def test_wanda():
    close(criteria.wanda(W, input_norm=NORM), [[1, 16, 4.5, 0.5], [3, 1, 54, 0.375], [5, 3, 22.5, 0.125]])
    mask = make_masks({"w": W}, 0.5, pattern=Rows(), allocate=uniform, criterion=criteria.wanda,
                      evidence={"w": {"input_norm": NORM}})["w"]  # fmt: skip
    assert mask.int().tolist() == [[0, 1, 1, 0], [1, 0, 1, 0], [1, 0, 1, 0]]


def test_ria():
    # sums of magnitudes: rows 7.5, 10.75, 8.75; columns 9, 5, 9, 4; square roots of the norms 1, 2, 3, ½
    close(
        criteria.ria(W, input_norm=NORM),
        [
            [1 / 7.5 + 1 / 9, (4 / 7.5 + 4 / 5) * 2, (0.5 / 7.5 + 0.5 / 9) * 3, (2 / 7.5 + 2 / 4) / 2],
            [3 / 10.75 + 3 / 9, (0.25 / 10.75 + 0.25 / 5) * 2, (6 / 10.75 + 6 / 9) * 3, (1.5 / 10.75 + 1.5 / 4) / 2],
            [5 / 8.75 + 5 / 9, (0.75 / 8.75 + 0.75 / 5) * 2, (2.5 / 8.75 + 2.5 / 9) * 3, (0.5 / 8.75 + 0.5 / 4) / 2],
        ],
    )  # fmt: skip
    relative = criteria.ria(W, input_norm=NORM, power=0)
    torch.testing.assert_close(relative, criteria.ria(W, input_norm=torch.ones(1, 4)))
    torch.testing.assert_close(relative.sum(), torch.tensor(3.0 + 4.0))  # each row and each column has shares of 1
    torch.testing.assert_close(criteria.ria(W, input_norm=NORM, power=1), relative * NORM)


@pytest.mark.parametrize("criterion", [criteria.wanda, criteria.ria])
def test_layouts_of_the_weight(criterion):
    expected = criterion(W, input_norm=NORM)
    # stored transposed, as GPT-2's Conv1D does: (in, out), and the norms (in, 1)
    torch.testing.assert_close(criterion(W.T, input_norm=NORM.T), expected.T)
    # a convolution is the matrix (out, in · kernel)
    torch.testing.assert_close(
        criterion(W.reshape(3, 2, 1, 2), input_norm=NORM.reshape(1, 2, 1, 2)).reshape(3, 4), expected
    )
    # of a grouped convolution each output has its own inputs
    own = NORM * torch.tensor([[1.0], [2.0], [3.0]])
    grouped = criterion(W.reshape(3, 2, 1, 2), input_norm=own.reshape(3, 2, 1, 2)).reshape(3, 4)
    torch.testing.assert_close(
        grouped, torch.stack([criterion(W, input_norm=own[row : row + 1])[row] for row in range(3)])
    )
    assert torch.equal(criterion(W, input_norm=NORM[0]), expected)


# ---- one fact each -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_do_not_overflow_or_vanish(dtype):
    weight = torch.tensor([60000.0, -3e-5], dtype=dtype)
    big, small = torch.tensor([60000.0, 60000.0], dtype=dtype), torch.tensor([3e-5, 3e-5], dtype=dtype)
    for criterion, word in [
        (criteria.taylor, "grad_sq"),
        (criteria.snip, "grad"),
        (criteria.grasp, "hessian_grad"),
        (criteria.synflow, "flow"),
        (criteria.wanda, "input_norm"),
        (criteria.ria, "input_norm"),
    ]:
        for evidence in (big, small):
            scores = criterion(weight, **{word: evidence})
            wide = criterion(weight.double(), **{word: evidence.double()})
            assert bool(scores.isfinite().all()), criterion.__name__
            assert bool(scores.ne(0).all()), criterion.__name__
            torch.testing.assert_close(scores.double(), wide, rtol=1e-6, atol=0)


def test_a_whole_tensor_is_scored_where_there_is_evidence_also_if_marked_elementwise():
    """Pieces of the weight would meet evidence of another shape."""
    seen = []

    @criteria.elementwise
    def mine(weight, *, input_norm):
        seen.append(weight.shape)
        return weight.abs() * input_norm

    weight = torch.randn(700, 500)  # more than one piece
    evidence = {"w": {"input_norm": torch.rand(1, 500)}}
    mask = make_masks({"w": weight}, 0.5, criterion=mine, evidence=evidence)["w"]
    assert set(seen) == {weight.shape}
    scores = weight.abs() * evidence["w"]["input_norm"]
    assert int(mask.sum()) == 175000
    assert float(scores[mask].min()) >= float(scores[~mask].max())
    assert not [criterion for criterion in CRITERIA if needs(criterion) and getattr(criterion, "elementwise", False)]


def test_a_users_own_combination():
    def mine(weight, *, grad, input_norm):
        return (weight * grad).abs() * input_norm

    assert needs(mine) == ("grad", "input_norm")
    evidence = {"w": {"grad": G, "input_norm": NORM}}
    mask = make_masks({"w": W}, 0.5, criterion=mine, evidence=evidence)["w"]
    # |w g| ‖x‖: 2 8 18 0 / 3 8 27 .75 / 1 12 45 .75
    assert mask.int().tolist() == [[0, 1, 1, 0], [0, 1, 1, 0], [0, 1, 1, 0]]

    def both(weight, *, grad, input_norm):
        return criteria.snip(weight, grad=grad) + criteria.wanda(weight, input_norm=input_norm)

    scores = criteria.snip(W, grad=G) + criteria.wanda(W, input_norm=NORM)
    mask = make_masks({"w": W}, 0.75, criterion=both, evidence=evidence)["w"]
    assert float(scores[mask].min()) > float(scores[~mask].max())


@pytest.mark.parametrize("criterion", CRITERIA, ids=lambda criterion: criterion.__name__)
def test_every_criterion_prunes_a_model_with_what_is_collected(criterion):
    """Convolutions, one of them grouped, and a Linear, at the criterion's own default."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
    )
    weights = find_targets(model)
    batches = [(torch.randn(5, 2, 6, 6), torch.randint(3, (5,))) for _ in range(3)]
    if "movement" in needs(criterion):  # gathered over the steps of training; here of one
        slopes = collect(model, batches, ["grad"], loss=nn.functional.cross_entropy)
        evidence = {name: {"movement": -weights[name].detach() * slopes[name]["grad"]} for name in weights}
    else:
        evidence = collect(model, batches, criterion, loss=nn.functional.cross_entropy)
    for name, weight in weights.items():
        scores = criterion(weight.detach(), **evidence[name])
        assert scores.shape == weight.shape
        assert bool(scores.isfinite().all())
        assert scores.unique().numel() > 1
    masks = sparsify(model, 0.6, criterion=criterion, evidence=evidence)
    rows = {"0.weight": 4 * 7, "2.weight": 4 * 7, "5.weight": 3 * 6}  # of 18, 18 and 16: rounded in each
    kept = sum(rows.values()) if criterion.compares == "row" else 192 - round(0.6 * 192)
    assert sum(int(mask.sum()) for mask in masks.values()) == kept


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: criteria.taylor(W, grad_sq=G.T),
            r"grad_sq has shape \(4, 3\); it must have the weight's, \(3, 4\)",
        ),
        (lambda: criteria.taylor(W, grad_sq=G[0]), r"grad_sq has shape \(4,\); it must have"),
        (lambda: criteria.snip(W, grad=torch.tensor(1.0)), r"grad has shape \(\); it must have"),
        (lambda: criteria.grasp(W, hessian_grad=G[None]), r"hessian_grad has shape \(1, 3, 4\)"),
        (lambda: criteria.synflow(W, flow=G[:1]), r"flow has shape \(1, 4\)"),
        (lambda: criteria.movement(W, movement=G[:, :1]), r"movement has shape \(3, 1\)"),
        (lambda: criteria.soft_movement(W, movement=G[:, :1]), r"movement has shape \(3, 1\)"),
        (lambda: criteria.wanda(W, input_norm=NORM.T), r"input_norm has shape \(4, 1\); it must broadcast to the w"),
        (lambda: criteria.ria(W, input_norm=NORM[None]), r"input_norm has shape \(1, 1, 4\); it must broadcast"),
        (lambda: criteria.ria(W, input_norm=NORM, power=-1), "finite and not negative, not -1"),
        (lambda: criteria.ria(W, input_norm=NORM, power=math.nan), "finite and not negative, not nan"),
    ],
)
def test_messages(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# ---- the pages made from docstrings --------------------------------------------------------------------------------


def test_the_page_of_criteria_is_what_the_docstrings_say():
    spec = importlib.util.spec_from_file_location("make_criteria", ROOT / "docs" / "make_criteria.py")
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    assert maker.PAGE == ROOT / "docs" / "guides" / "criteria.md"
    message = "the docstrings changed; write the page again: python docs/make_criteria.py"
    assert maker.PAGE.read_text(encoding="utf-8") == maker.page(), message


@pytest.mark.parametrize("criterion", CRITERIA, ids=lambda criterion: criterion.__name__)
def test_every_criterion_has_its_row_and_its_card(criterion):
    page = (ROOT / "docs" / "guides" / "criteria.md").read_text(encoding="utf-8")
    (row,) = [line for line in page.splitlines() if line.startswith(f"| [`{criterion.__name__}`]")]
    _, name, formula, evidence, scope, paper, published, _ = [
        cell.strip() for cell in row.replace(r"\|", "¦").split("|")
    ]
    assert name == f"[`{criterion.__name__}`](#{criterion.__name__})"
    assert len(formula) > 2
    assert evidence == (", ".join(f"`{word}`" for word in needs(criterion)) or "none")
    assert re.search(r"\d{4}", paper)
    assert "https://arxiv.org/abs/" in paper or "ICLR" in paper
    assert published
    assert scope.split()[1] == criteria.scope_of(criterion)
    assert f"Compares over: {scope}." in page
    assert f"\n## {criterion.__name__}\n" in page


def test_examples_of_ones_own_are_short():
    page = (ROOT / "docs" / "guides" / "your-own.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        assert len(block.splitlines()) < 15
