"""Laws of making levels: the model stays, the same call gives the same bytes, a killed run goes on, what is refused."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional

from secateur.search import Levels, fit, make_levels, making, sensitivity
from secateur.search.levels import FILE
from support.fitting import blocks, inputs
from support.forks import interrupted
from support.measured import text, words
from support.stacks import contents
from support.unchanged import is_unchanged, state_of


def outputs(model, batches):
    with torch.no_grad():
        return torch.cat([model(each).flatten() for each in batches])


class Convolutions(nn.Module):
    """Channels that one convolution makes and another takes, a depthwise one, and a branch around."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(2, 12, 3, padding=1)
        self.norm = nn.BatchNorm2d(12)
        self.one, self.two = nn.Conv2d(12, 16, 1), nn.Conv2d(16, 12, 3, padding=1, bias=False)
        self.last = nn.Conv2d(12, 8, 3, stride=2)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.norm(self.stem(x)).relu()
        x = x + self.two(self.one(x).relu())
        return self.head(self.last(x).relu().mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.read, self.head = nn.LSTM(5, 12, batch_first=True), nn.Linear(12, 3)

    def forward(self, x):
        return self.head(self.read(x)[0])


class Counted(nn.Module):
    """A block whose hidden units are divided by the mean of what they are, as those of a ConvNeXt V2."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(5, 24), nn.Linear(24, 5)
        self.scale = nn.Parameter(torch.randn(24))

    def forward(self, x):
        hidden = functional.gelu(self.up(x))
        size = hidden.square().sum(1, keepdim=True).sqrt()
        hidden = hidden + self.scale * hidden * size / (size.mean(-1, keepdim=True) + 1e-6)
        return x + self.down(hidden)


def images(count=3):
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(6, 2, 8, 8, generator=generator) for _ in range(count)]


def sequences(count=3):
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(6, 7, 5, generator=generator) for _ in range(count)]


# ---- what it leaves as it is ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("over", ["shrink", "oneshot"])
def test_the_model_stays_as_it_is(over):
    model = words().train()
    state = state_of(model)
    make_levels(model, text(), over=over, shares=(0.5,))
    assert is_unchanged(model, state)
    assert model.training


def test_nothing_is_drawn_so_that_the_same_call_gives_the_same_files(tmp_path):
    for seed, name in enumerate(("one", "two")):
        model = words()
        torch.manual_seed(seed)
        make_levels(model, text(), over=("oneshot", "shrink"), shares=(0.5,)).save(tmp_path / name)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


# ---- kinds of networks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make_model", "batches"), [(Convolutions, images()), (Recurrent, sequences())])
def test_networks_of_layers_have_levels_that_compose(make_model, batches):
    torch.manual_seed(0)
    model = make_model().eval()
    levels = make_levels(model, batches, over=("shrink", "oneshot"), shares=(0.25, 0.5))
    assert {"layer"} < set(levels.kind.values())
    state, before = state_of(model), outputs(model, batches)
    for at in (1, 2):
        choice = {name: min(at, len(each) - 1) for name, each in levels.items()}
        with levels.assembled(model, choice):
            assert not torch.equal(outputs(model, batches), before)
        assert is_unchanged(model, state)
        assert torch.equal(outputs(model, batches), before)
        assert levels.cost(choice, "params") < levels.cost({}, "params")
    for each in levels.values():
        errors = [level.error for level in each]
        assert errors == sorted(errors)


def test_channels_of_a_convolution_come_apart_in_rows_and_columns():
    """A convolution's inputs and outputs belong to two groups: both leave, in either order the same."""
    torch.manual_seed(0)
    model = Convolutions().eval()
    levels = make_levels(model, images(), shares=(0.5,))
    stream, inner = "stem.weight", "one.weight"
    assert {stream, inner} <= set(levels)
    both = levels.weights(model, {stream: 1, inner: 1})
    turned = levels.weights(model, {inner: 1, stream: 1})
    assert both.keys() == turned.keys()
    assert all(torch.equal(both[name], turned[name]) for name in both)
    kept = {name: torch.from_numpy(mask) for name, mask in levels.kept({stream: 1, inner: 1}).items()}
    assert not both["one.weight"][~kept[inner]].any()
    assert not both["one.weight"][:, ~kept[stream]].any()
    assert not both["two.weight"][~kept[stream]].any()
    assert not both["two.weight"][:, ~kept[inner]].any()
    alone = levels.weights(model, {inner: 1})["two.weight"]
    assert torch.equal(both["two.weight"][kept[stream]], alone[kept[stream]])


def test_units_that_a_statistic_counts_are_made_as_before_within_a_level():
    """A mean over zeros is not one over fewer units; what consumes them is repaired on what the dense model makes."""
    torch.manual_seed(0)
    model, batches = nn.Sequential(Counted(), Counted()).eval(), sequences()
    levels = make_levels(model, batches, shares=(0.5,))
    assert list(levels) == ["0.up.weight", "1.up.weight"]
    kept = torch.from_numpy(levels.kept({"0.up.weight": 1})["0.up.weight"])
    assert int(kept.sum()) == 12
    made = levels.weights(model, {"0.up.weight": 1})
    assert torch.equal(made["0.scale"], model[0].scale)
    assert torch.equal(made["0.up.weight"], model[0].up.weight)
    assert not made["0.down.weight"][:, ~kept].any()
    assert not torch.equal(made["0.down.weight"][:, kept], model[0].down.weight[:, kept])
    with torch.no_grad():
        whole = torch.cat([model[0](each) - each for each in batches])
        with levels.assembled(model, {"0.up.weight": 1}):
            error = torch.cat([model[0](each) - each for each in batches]) - whole
        lost = float(error.square().sum() / (whole - model[0].down.bias).square().sum())
    assert lost == pytest.approx(levels["0.up.weight"][1].error, rel=1e-3)


@pytest.mark.parametrize("share", [0.85, 0.6])
def test_units_that_a_statistic_counts_leave_in_a_fit(share):
    torch.manual_seed(0)
    model, batches = nn.Sequential(Counted(), Counted()).eval(), sequences()
    before = sum(each.numel() for each in model.parameters())
    found = fit(model, batches, budget={"params": share}, finals=2)
    assert sum(each.numel() for each in model.parameters()) <= share * before
    assert model[0].scale.numel() == len(model[0].up.weight) == model[0].down.in_features
    assert found.loss < 1


# ---- what is not asked for, and what is wrong -----------------------------------------------------------------------


def test_only_what_globs_name_has_levels():
    model, batches = words(), text()
    levels = make_levels(model, batches, over=("shrink", "oneshot"), shares=(0.5,), include="blocks.1.up.*")
    assert list(levels) == ["blocks.1.up.weight", "blocks.1.up.weight:layer"]
    levels = make_levels(model, batches, shares=(0.5,), exclude=["embed.weight", "*.q.weight", "*.down.*"])
    assert list(levels) == [f"blocks.{at}.v.weight" for at in range(2)]


def test_a_model_of_which_nothing_can_leave_says_why():
    model = nn.Sequential(nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"nothing of the model has levels\.\n  0\.weight dimension 0: an output"):
        make_levels(model, [torch.randn(8, 4)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"over": "neither"}, "over says which kinds of levels, of 'shrink', 'oneshot'"),
        ({"over": ()}, "over says which kinds of levels"),
        ({"shares": ()}, r"shares must be fractions in \(0, 1\)"),
        ({"shares": (0.5, 1.0)}, r"shares must be fractions in \(0, 1\)"),
        ({"shares": (float("nan"),)}, r"shares must be fractions in \(0, 1\)"),
        ({"include": "nothing.*"}, "no tensor or group matches 'nothing"),
        ({"forward": lambda model, batch: model(batch)}, "pass example_inputs="),
        ({"shares": (0.001,), "include": "*.q.weight:2", "exclude": "embed.weight"}, "nothing of the model has levels"),
    ],
)
def test_what_is_wrong_is_said_before_the_model_runs(options, message):
    model = words()
    state = state_of(model)
    with pytest.raises(ValueError, match=message):
        make_levels(model, text(), **options)
    assert is_unchanged(model, state)


def test_a_weight_that_two_blocks_hold_has_no_levels_of_units():
    """What is right for one of them is wrong for the other; nor of entries."""
    model = words()
    model.blocks[1].up.weight = model.blocks[0].up.weight
    levels = make_levels(model, text(), over=("shrink", "oneshot"), shares=(0.5,))
    assert not [name for name in levels if "up.weight" in name]
    assert "in several blocks" in levels.left_alone["blocks.0.up.weight"]
    assert levels.left_alone["blocks.0.up.weight:layer"] == "shared with another block"


def test_a_model_without_values_is_refused():
    with torch.device("meta"):
        model = words()
    with pytest.raises(ValueError, match=r"embed\.weight is on the meta device"):
        make_levels(model, text())


@pytest.mark.parametrize("over", ["shrink", "oneshot"])
def test_all_levels_take_as_many_passes_as_one(over):
    """Of the dense model two over the batches, a backward pass of the first, here all, and some to find out."""
    counts = []
    for shares in ((0.5,), (0.1, 0.3, 0.5, 0.7)):
        model, calls = words(), []
        model.blocks[0].up.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        make_levels(model, text(count=20), over=over, shares=shares, verify=False)
        counts.append(len(calls))
    assert counts[0] == counts[1]
    assert counts[0] <= 2 * 20 + 20 + 5


def test_a_matrix_that_does_not_fit_the_pattern_has_no_level():
    levels = make_levels(blocks(2), inputs(), over="oneshot", pattern="2:4")
    assert {name: [level.share for level in each] for name, each in levels.items()} == {
        f"{at}.down.weight:layer": [0.0, 0.5] for at in range(2)
    }
    assert levels.left_alone["0.up.weight:layer"] == "of a shape that does not fit the pattern"


@pytest.mark.parametrize("verb", [make_levels, sensitivity, functools.partial(fit, budget={"params": 0.6})])
def test_data_without_a_sample_and_multiples_of_0_are_refused(verb):
    with pytest.raises(ValueError, match="the batches hold no token and no sample"):
        verb(blocks(2), [each[:0] for each in inputs()])
    for none in (0, -1):
        with pytest.raises(ValueError, match=f"round_to must be at least 1, not {none}"):
            verb(blocks(2), inputs(), round_to=none)


# ---- in a store -----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_killed_run_goes_on_to_the_same_bytes(tmp_path, monkeypatch):
    options = {"over": ("shrink", "oneshot"), "shares": (0.5,)}
    make_levels(words(), text(), store=tmp_path / "whole", **options)
    with interrupted(making, "write_entry", 6):
        make_levels(words(), text(), store=tmp_path / "killed", **options)
    assert not (tmp_path / "killed" / FILE).exists()
    written, real = contents(tmp_path / "killed"), making.write_entry
    assert len(written) == 5
    again = []
    monkeypatch.setattr(making, "write_entry", lambda *each: (again.append(real(*each).name), None)[1])
    make_levels(words(), text(), store=tmp_path / "killed", **options)
    assert again
    assert not {*again} & {*written}
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_what_is_there_already_is_loaded(tmp_path, monkeypatch):
    levels = make_levels(words(), text(), shares=(0.5,), store=tmp_path)
    monkeypatch.setattr(making, "InMemory", None)
    again = make_levels(words(), text(), shares=(0.5,), store=tmp_path)
    assert isinstance(again, Levels)
    assert dict(again) == dict(levels)


def test_a_store_of_something_else_is_refused(tmp_path):
    make_levels(words(), text(), shares=(0.5,), store=tmp_path)
    before = contents(tmp_path)
    for model, batches, shares in [
        (words(seed=1), text(), (0.5,)),
        (words(), text(seed=1), (0.5,)),
        (words(), text(), (0.25,)),
    ]:
        with pytest.raises(ValueError, match="another model, other batches or other arguments; name another folder"):
            make_levels(model, batches, shares=shares, store=tmp_path)
    assert contents(tmp_path) == before


@pytest.mark.long
def test_files_of_another_run_are_made_anew(tmp_path):
    """A run that was killed with other batches left its files there."""
    make_levels(words(), text(seed=1), shares=(0.5,), store=tmp_path / "one")
    (tmp_path / "one" / FILE).unlink()
    make_levels(words(), text(), shares=(0.5,), store=tmp_path / "one")
    make_levels(words(), text(), shares=(0.5,), store=tmp_path / "two")
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
