"""Laws of levels of what leaves in one piece: branches and experts are taken out, and come back as they were."""

import pytest
import torch

from secateur import shrink
from secateur.search import Levels, make_levels, scorer
from support.families import batches as family_batches
from support.families import make
from support.measured import text, words
from support.unchanged import is_unchanged, state_of


@pytest.fixture(scope="module")
def mixture():
    model, batches = make("mixtral").eval(), family_batches("mixtral")
    return model, batches, make_levels(model, batches, shares=(0.25, 0.5))


@pytest.fixture(scope="module")
def plain():
    model, batches = words(), text()
    return model, batches, make_levels(model, batches, shares=(0.5,))


def outputs(model, batches):
    with torch.no_grad():
        found = [model(**each) if isinstance(each, dict) else model(each) for each in batches]
        return torch.cat([getattr(each, "logits", each).flatten() for each in found])


def of_kind(levels, kind):
    return [name for name in levels if levels.kind[name] == kind]


def test_a_branch_is_zero_in_its_stream(plain):
    """The model without it computes what it computes where the branch adds nothing."""
    model, batches, levels = plain
    state, before = state_of(model), outputs(model, batches)
    assert of_kind(levels, "branch") == [f"blocks.{at}.{name}" for at in range(2) for name in ("q", "up")]
    with levels.assembled(model, {"blocks.1.up": 1}):
        found = outputs(model, batches)
    assert is_unchanged(model, state)
    assert torch.equal(outputs(model, batches), before)
    other = words()
    with torch.no_grad():
        other.blocks[1].down.weight.zero_()
        other.blocks[1].down.bias.zero_()
    torch.testing.assert_close(found, outputs(other, batches))


def test_its_error_is_its_share_of_the_stream(plain):
    model, batches, levels = plain
    term, total = [], []
    hooks = [
        model.blocks[1].down.register_forward_hook(lambda _, __, out: term.append(out.detach().square().sum())),
        model.blocks[1].register_forward_hook(lambda _, __, out: total.append(out.detach().square().sum())),
    ]
    outputs(model, batches[:4])
    for hook in hooks:
        hook.remove()
    expected = float(sum(term) / sum(total))
    assert levels["blocks.1.up"][1].error == pytest.approx(expected, rel=1e-4)


def test_its_loss_is_what_the_outputs_lose(plain):
    model, batches, levels = plain
    lost = scorer(model, batches[:4], "change")
    with levels.assembled(model, {"blocks.1.up": 1}):
        assert levels["blocks.1.up"][1].loss == pytest.approx(lost(model), rel=1e-3)


def test_what_a_branch_costs_is_what_leaves_with_it(plain):
    model, _, levels = plain
    everything = {name: 1 for name in levels if name.startswith("blocks.1.up")}
    assert len(everything) == 2
    assert levels.cost(everything, "params") == levels.cost({"blocks.1.up": 1}, "params")  # nothing leaves twice
    with levels.assembled(model, everything):
        assert sum(each.numel() for each in model.parameters()) == levels.cost(everything, "params")
    rows = 2 * 12  # of the example, of two texts
    assert levels.cost({}, "macs") - levels.cost({"blocks.1.up": 1}, "macs") == 2 * 12 * 20 * rows


def test_experts_leave_as_shrink_takes_them(mixture):
    """By the same scores; there a repair follows, which levels of experts have not."""
    model, batches, levels = mixture
    names = of_kind(levels, "experts")
    assert names == [f"model.layers.{at}.mlp.gate.weight" for at in range(2)]
    assert [level.kept for level in levels[names[0]]] == [4, 3, 2]
    other = make("mixtral").eval()
    example = {**batches[0], "use_cache": False}
    done = shrink(other, example, experts=0.5, batches=batches, repair=False)
    choice = dict.fromkeys(names, 2)
    state = state_of(model)
    with levels.assembled(model, choice):
        assert sum(each.numel() for each in model.parameters()) == done.parameters[1]
        torch.testing.assert_close(outputs(model, batches), outputs(other, batches))
    assert is_unchanged(model, state)
    assert levels.cost(choice, "params") == done.parameters[1]


def test_all_kinds_compose(mixture):
    model, batches, levels = mixture
    state, before = state_of(model), outputs(model, batches)
    choice = {name: 1 for name in levels if levels.kind[name] != "branch"} | {"model.layers.1.self_attn": 1}
    with levels.assembled(model, choice):
        found = outputs(model, batches)
        assert bool(found.isfinite().all())
        assert not torch.equal(found, before)
    assert is_unchanged(model, state)
    assert torch.equal(outputs(model, batches), before)


def test_errors_and_losses_rise(mixture):
    for each in mixture[2].values():
        for what in ("error", "loss"):
            values = [getattr(level, what) for level in each]
            assert values == sorted(values)
            assert values[-1] > 0


def test_they_are_saved_and_loaded(mixture, tmp_path):
    model, batches, levels = mixture
    levels.save(tmp_path)
    loaded = Levels.load(tmp_path)
    assert dict(loaded) == dict(levels)
    choice = dict.fromkeys([*of_kind(levels, "experts"), "model.layers.0.mlp"], 1)
    with levels.assembled(model, choice):
        one = outputs(model, batches)
    with loaded.assembled(model, choice):
        assert torch.equal(outputs(model, batches), one)


def test_what_a_glob_leaves_whole_has_no_level(plain):
    model, batches, _ = plain
    levels = make_levels(model, batches, shares=(0.5,), exclude=["blocks.0.*", "embed.weight"])
    assert of_kind(levels, "branch") == ["blocks.1.q", "blocks.1.up"]
