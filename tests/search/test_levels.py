"""Laws of levels: dense is the model, a choice is taken back bit for bit, more that leaves loses more, and files."""

import copy
import json
import pickle
import shutil
import struct

import pytest
import torch

from secateur import shrink
from secateur.search import Levels, make_levels
from secateur.search.levels import FILE, Kept, Stored, file_of, read_entry, rising, write_entry
from support.measured import text, words
from support.unchanged import is_unchanged, state_of

BOTH = ("shrink", "oneshot")


@pytest.fixture(scope="module")
def made():
    """A model, its batches, and levels of both kinds."""
    model, batches = words(), text()
    return model, batches, make_levels(model, batches, over=BOTH, shares=(0.25, 0.5, 0.75))


def outputs(model, batches):
    with torch.no_grad():
        return torch.cat([model(each).flatten() for each in batches])


def every(levels, at):
    return {name: min(at, len(each) - 1) for name, each in levels.items()}


def test_levels_can_be_pickled_after_use(made):
    model, batches, levels = made
    dense = outputs(model, batches)
    with levels.assembled(model, every(levels, 1)):
        wanted = outputs(model, batches)
    again = pickle.loads(pickle.dumps(levels))
    assert str(again) == str(levels)
    with again.assembled(model, every(again, 1)):
        assert torch.equal(outputs(model, batches), wanted)
    assert not torch.equal(wanted, dense)


# ---- what a level is ------------------------------------------------------------------------------------------------
def test_there_are_levels_of_each_kind(made):
    _, _, levels = made
    assert {levels.kind[name] for name in levels} == {"width", "heads", "layer"}
    assert all(name.endswith(":layer") == (levels.kind[name] == "layer") for name in levels)
    assert [level.kept for level in levels["blocks.0.up.weight"]] == [20, 15, 10, 5]
    assert levels["blocks.0.up.weight:layer"][2].kept == 120


def test_level_zero_is_the_model_bit_for_bit(made):
    model, batches, levels = made
    state = state_of(model)
    before = outputs(model, batches)
    assert levels.weights(model, every(levels, 0)) == {}
    with levels.assembled(model, every(levels, 0)):
        assert is_unchanged(model, state)
        assert torch.equal(outputs(model, batches), before)
    for each in levels.values():
        assert (each[0].share, each[0].error, each[0].loss) == (0, 0, 0)
        assert each[0].kept == each[0].of


def test_errors_and_losses_rise_with_the_share_and_costs_fall(made):
    _, _, levels = made
    for name, each in levels.items():
        assert [level.share for level in each] == sorted(level.share for level in each), name
        for what in ("error", "loss"):
            values = [getattr(level, what) for level in each]
            assert values == sorted(values), name
            assert values[-1] > 0, name
        kept = [level.kept for level in each]
        assert kept == sorted(kept, reverse=True), name
        for target in levels.fixed:
            costs = [level.costs[target] for level in each]
            assert costs == sorted(costs, reverse=True), name
            assert costs[-1] < costs[0], name


@pytest.mark.parametrize("at", [1, 2, 3])
def test_any_choice_composes_and_is_taken_back_bit_for_bit(made, at):
    """Units that left are zeros in all that has them; entries that left stay zeros beside what else changes."""
    model, batches, levels = made
    state, before = state_of(model), outputs(model, batches)
    choice = every(levels, at)
    with levels.assembled(model, choice) as inside:
        assert inside is model
        assert not torch.equal(outputs(model, batches), before)
        parameters = dict(model.named_parameters())
        kept = torch.from_numpy(levels.kept(choice)["blocks.0.up.weight"])
        assert int(kept.sum()) == levels["blocks.0.up.weight"][at].kept
        assert not parameters["blocks.0.up.weight"][~kept].any()
        assert not parameters["blocks.0.up.bias"][~kept].any()
        assert not parameters["blocks.0.down.weight"][:, ~kept].any()
        assert parameters["blocks.0.up.weight"].count_nonzero() <= levels["blocks.0.up.weight:layer"][at].kept
    assert is_unchanged(model, state)
    assert torch.equal(outputs(model, batches), before)


def test_it_is_taken_back_after_an_exception_too(made):
    model, _, levels = made
    state = state_of(model)
    with pytest.raises(KeyboardInterrupt), levels.assembled(model, every(levels, 2)):
        raise KeyboardInterrupt
    assert is_unchanged(model, state)


@pytest.mark.parametrize(("name", "level"), [("blocks.1.up.weight", 2), ("blocks.1.q.weight", 1)])
def test_one_level_is_what_shrink_gives_for_that_group_alone(made, name, level):
    """Which units stay, and what consumes them; of the last block, since `shrink` moves what is behind, too."""
    model, batches, levels = made
    assert name in levels
    other = copy.deepcopy(model)
    count = levels[name][level].kept
    done = shrink(
        other, batches[0], 1 - count / levels[name][0].of, target="units", batches=batches,
        include=f"blocks.1.{'up.bias' if 'up' in name else 'k.weight'}",
        exclude=["embed.weight", *([] if "up" in name else ["blocks.1.q.weight:2"])], round_to=1,
    )  # fmt: skip
    (group,) = [group for group in done.scope.groups if group.name in done.kept]
    assert group.name == name
    kept = levels.kept({name: level})[name]
    assert (done.kept[group.name] == kept).all()
    consumer = "blocks.1.down" if "up" in name else "blocks.1.o"
    new, found = levels.weights(model, {name: level}), dict(other.named_parameters())
    columns = new[f"{consumer}.weight"].any(dim=0)
    torch.testing.assert_close(
        found[f"{consumer}.weight"].detach(), new[f"{consumer}.weight"][:, columns], atol=1e-5, rtol=1e-3
    )
    if f"{consumer}.bias" in new:
        torch.testing.assert_close(found[f"{consumer}.bias"].detach(), new[f"{consumer}.bias"], atol=1e-5, rtol=1e-3)


def test_the_error_is_that_of_what_consumes_the_group(made):
    """On the calibration: the squares of what its outputs lost over what they were, but for the bias."""
    model, batches, levels = made
    seen = []
    hook = model.blocks[0].down.register_forward_hook(lambda _, __, out: seen.append(out.detach()))
    outputs(model, batches)
    before = torch.cat([each.flatten(0, 1) for each in seen])
    seen.clear()
    with levels.assembled(model, {"blocks.0.up.weight": 2}):
        outputs(model, batches)
    hook.remove()
    after = torch.cat([each.flatten(0, 1) for each in seen])
    whole = (before - model.blocks[0].down.bias.detach()).square().sum()
    error = float((after - before).square().sum() / whole)
    assert levels["blocks.0.up.weight"][2].error == pytest.approx(error, rel=1e-3)


# ---- what a choice costs --------------------------------------------------------------------------------------------
def test_costs_are_those_of_the_model_that_a_choice_comes_to(made):
    model, batches, levels = made
    total = sum(each.numel() for each in model.parameters())
    assert levels.cost({}, "params") == total
    assert levels.cost({}, "bytes") == 4 * total
    for target in levels.fixed:
        dense = levels.fixed[target] + sum(each[0].costs[target] for each in levels.values())
        assert dense == pytest.approx(levels.cost({}, target))
        for name, each in levels.items():
            for at, level in enumerate(each):
                alone = levels.cost({}, target) - each[0].costs[target] + level.costs[target]
                assert levels.cost({name: at}, target) == pytest.approx(alone)
    groups = {name: 2 for name in levels if name.endswith("up.weight")}
    other = copy.deepcopy(model)
    done = shrink(other, batches[0][:2], 0.5, target="units", include="*.up.bias", exclude="embed.weight", round_to=1)
    assert levels.cost(groups, "params") == done.parameters[1]
    assert levels.cost(groups, "macs") == done.multiply_adds[1]
    assert levels.cost(groups, "bytes") == done.nbytes[1]


def test_no_cost_of_another_word(made):
    with pytest.raises(ValueError, match="target must be one of 'params', 'macs', 'bytes', not 'latency'"):
        made[2].cost({}, "latency")


# ---- what is refused ------------------------------------------------------------------------------------------------
def test_another_model_is_refused_and_stays_as_it_is(made):
    levels = made[2]
    other = words(seed=3)
    state = state_of(other)
    with pytest.raises(ValueError, match="of another Words, or of one with other weights"), levels.assembled(other, {}):
        pass
    assert is_unchanged(other, state)


def test_no_group_and_no_level_of_that_name(made):
    model, _, levels = made
    with pytest.raises(KeyError, match="there are no levels of 'nothing'"):
        levels.cost({"nothing": 1}, "params")
    with (
        pytest.raises(ValueError, match="has levels 0 to 3, and none of 9"),
        levels.assembled(model, {"blocks.0.up.weight": 9}),
    ):
        pass


# ---- shown ----------------------------------------------------------------------------------------------------------
def test_they_are_shown_as_a_table(made):
    levels = made[2]
    assert "blocks.0.up.weight" in str(levels)
    assert "75%" in str(levels)
    assert "<table>" in levels._repr_html_()


# ---- on disk --------------------------------------------------------------------------------------------------------
def test_they_are_saved_and_loaded(made, tmp_path):
    model, _, levels = made
    levels.save(tmp_path / "levels")
    loaded = Levels.load(tmp_path / "levels")
    assert dict(loaded) == dict(levels)
    assert (loaded.kind, loaded.groups, loaded.fixed) == (levels.kind, levels.groups, levels.fixed)
    assert loaded.left_alone == levels.left_alone
    assert loaded.made.digest == levels.made.digest
    choice = every(levels, 2)
    one, two = levels.weights(model, choice), loaded.weights(model, choice)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert all(levels.cost(choice, target) == loaded.cost(choice, target) for target in levels.fixed)


@pytest.fixture(scope="module")
def saved(made, tmp_path_factory):
    folder = tmp_path_factory.mktemp("levels")
    made[2].save(folder)
    return folder


@pytest.mark.parametrize(
    "change",
    [
        lambda said: said.update(format="another"),
        lambda said: said.update(version=99),
        lambda said: said.update(more=1),
        lambda said: said.update(groups=["nothing"]),
        lambda said: said.update(groups=said["groups"][:1] * 2),
        lambda said: said.update(groups=said["groups"][:1]),
        lambda said: said.update(model="0" * 64),
        lambda said: said.update(asked={}),
        lambda said: said["costs"].update(dense=[-1.0]),
        lambda said: said["costs"]["terms"].update(params=[[1, [[[1, [10**9]]]]]]),
        lambda said: said["costs"]["terms"].update(params=[[1]]),
        lambda said: said["costs"]["terms"].update(params=[["one", []]]),
        lambda said: said["costs"]["terms"].pop("macs"),
        lambda said: said["left_alone"].update(x=3),
    ],
)
def test_a_hostile_record_gives_one_error(saved, tmp_path, change):
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    said = json.loads((folder / FILE).read_text())
    change(said)
    (folder / FILE).write_text(json.dumps(said))
    with pytest.raises((ValueError, FileNotFoundError), match=r"json|safetensors"):
        Levels.load(folder)


# ---- Laws of the file of a group's levels: read as it was written, and one error for whatever else it is. ----


LEFT = {"params": 2.0, "macs": 2.0, "bytes": 2.0}


def entry():
    """A group of four units, of which two stay; the second member has a position without a unit."""
    tensors = {
        "units.0": torch.arange(4, dtype=torch.int32),
        "units.1": torch.tensor([0, 0, 1, 1, 2, 3, -1], dtype=torch.int32),
        "kept.1.0": torch.tensor([1, 0, 0, 1], dtype=torch.uint8),
        "value.1.down.weight": torch.randn(3, 7),
    }
    level = Kept(0.5, 2, 0.25, None, LEFT, ("down.weight",))
    return Stored(
        "digest",
        "up.weight",
        "width",
        4,
        ("up.weight",),
        (4,),
        (("up.weight", 0, 0), ("down.weight", 1, 0)),
        (level,),
        tensors,
    )


def test_it_is_read_as_it_was_written(tmp_path):
    write_entry(tmp_path, entry())
    read = read_entry(tmp_path, "up.weight", "digest")
    assert (read.name, read.kind, read.of, read.levels, read.members) == (
        "up.weight", "width", 4, entry().levels, entry().members,
    )  # fmt: skip
    gone = {(name, dim): places.tolist() for name, dim, places in read.gone(1)}
    assert gone["up.weight", 0] == [False, True, True, False]
    assert gone["down.weight", 1] == [False, False, True, True, True, False, False]


def test_a_name_may_be_longer_than_that_of_a_file(tmp_path):
    assert len(file_of(tmp_path, "x" * 5000).name) < 64


def test_of_other_levels_or_another_group(tmp_path):
    path = write_entry(tmp_path, entry())
    with pytest.raises(ValueError, match="of other levels"):
        read_entry(tmp_path, "up.weight", "another")
    path.rename(file_of(tmp_path, "down.weight"))
    with pytest.raises(ValueError, match="of other levels"):
        read_entry(tmp_path, "down.weight", "digest")
    with pytest.raises(FileNotFoundError):
        read_entry(tmp_path, "up.weight", "digest")


def rewritten(path, change):
    """The file with another record."""
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + size])
    total, _, text = header["__metadata__"]["secateur"].partition(" ")
    said = json.loads(text)
    change(said, header)
    if "__metadata__" in header:
        header["__metadata__"]["secateur"] = f"{total} {json.dumps(said)}"
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])


@pytest.mark.parametrize(
    "change",
    [
        lambda said, _: said.update(kind="another"),
        lambda said, _: said.update(more=1),
        lambda said, _: said.update(of="four"),
        lambda said, _: said.update(of=1),
        lambda said, _: said.update(sizes=[9]),
        lambda said, _: said.update(sizes=[2]),
        lambda said, _: said.update(sizes=[4, 4]),
        lambda said, _: said.update(members=[["up.weight", 0, 7], ["down.weight", 1, 0]]),
        lambda said, _: said.update(members=[["up.weight", -1, 0], ["down.weight", 1, 0]]),
        lambda said, _: said.update(members=[["up.weight", 0, 0]]),
        lambda said, _: said["levels"][0].update(values=["other"]),
        lambda said, _: said["levels"][0].update(error=-1.0),
        lambda said, _: said["levels"][0].update(share=2.0),
        lambda said, _: said["levels"][0].update(left={}),
        lambda said, _: said.update(levels=[]),
        lambda _, header: header.pop("__metadata__"),
        lambda _, header: header["kept.1.0"].update(dtype="I8"),
        lambda _, header: header["units.0"].update(dtype="F32"),
        lambda _, header: header["units.0"].update(shape=[2, 2]),
        lambda said, _: said["levels"][0].update(error=0.0625),
    ],
)
def test_a_hostile_file_gives_one_error(tmp_path, change):
    path = write_entry(tmp_path, entry())
    rewritten(path, change)
    with pytest.raises(ValueError, match="safetensors: "):
        read_entry(tmp_path, "up.weight", "digest")


@pytest.mark.parametrize("content", [b"", b"\0" * 8, b"\xff" * 64, b"{}"])
def test_a_damaged_file_gives_one_error(tmp_path, content):
    file_of(tmp_path, "up.weight").write_bytes(content)
    with pytest.raises(ValueError, match="damaged: no safetensors file"):
        read_entry(tmp_path, "up.weight", "digest")


def test_cut_short(tmp_path):
    path = write_entry(tmp_path, entry())
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="damaged: no safetensors file"):
        read_entry(tmp_path, "up.weight", "digest")


def test_a_value_that_changed_on_the_disk_is_not_used(tmp_path):
    path = write_entry(tmp_path, entry())
    text = bytearray(path.read_bytes())
    text[-2] ^= 1
    path.write_bytes(text)
    with pytest.raises(ValueError, match="damaged: holds other values than were written"):
        read_entry(tmp_path, "up.weight", "digest")


def test_errors_rise():
    assert rising([]) == []
    assert rising([0.5, 0.25, 0.75]) == [0.5, 0.5, 0.75]
