"""The order of batches, and routers that move first where experts have left."""

import copy
import itertools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from secateur.checkpoints import CheckpointError
from secateur.recovery import recover
from secateur.recovery.descent import Descent, Whole
from secateur.recovery.outputs import Steps, batches_from, digest_of, load_state, narrower_routers, save_state
from support.families import make
from support.measured import TwoStage


def test_the_batches_of_a_step_follow_from_its_number():
    whole = list(itertools.islice(batches_from(list("abcde"), 3, 0), 17))
    assert sorted(whole[:5]) == sorted(whole[5:10]) == list("abcde")
    assert whole[:5] != whole[5:10] or whole[5:10] != whole[10:15]
    for start in range(17):
        assert list(itertools.islice(batches_from(list("abcde"), 3, start), 17 - start)) == whole[start:]


def test_what_is_no_sequence_is_gone_through_again():
    class Loader:
        def __iter__(self):
            return iter("ab")

    assert list(itertools.islice(batches_from(Loader(), 0, 0), 5)) == list("ababa")
    with pytest.raises(ValueError, match="there are no batches"):
        next(batches_from(iter(()), 0, 0))


def test_a_share_of_the_loss_is_the_texts_own(pair):
    model, teacher, tokens = pair
    both = {}
    for share in (0, 0.25, 1):
        done = recover(copy.deepcopy(model), teacher, tokens[:1], steps=1, local=0, share=share)
        both[share] = done.first
    assert both[0.25] == pytest.approx(0.25 * both[1] + 0.75 * both[0], rel=1e-5)
    with torch.no_grad():
        assert both[0] == pytest.approx(float(model(**tokens[0], labels=tokens[0]["input_ids"]).loss), rel=1e-5)
    assert recover(copy.deepcopy(model), teacher, tokens, steps=1, local=0, share=0.25).loss == (
        "0.25 kl + 0.75 the text's own"
    )


def test_of_the_text_alone_no_teacher_is_run(pair):
    model, teacher, tokens = pair
    teacher.forward = None
    done = recover(model, teacher, tokens, steps=30, local=0, share=0, rate=1e-2)
    assert done.last < done.first
    assert done.loss == "the text's own"
    assert all(before == after for before, after in done.zeros.values())


def test_what_is_no_text_has_no_loss_of_its_own():
    model, other = nn.Linear(4, 3), nn.Linear(4, 3)
    before = model.weight.detach().clone()
    with pytest.raises(ValueError, match="share= below 1 asks for the text's own loss"):
        recover(model, other, iter([torch.randn(5, 4)]), steps=1, local=0, share=0.5)  # it is known at the first step
    assert torch.equal(model.weight, before)
    model.forward = other.forward = None
    with pytest.raises(ValueError, match="share= below 1 asks for the text's own loss"):
        recover(model, other, [torch.randn(5, 4)], steps=1, local=0, share=0.5)  # before anything is run


def test_routers_move_first_where_experts_have_left():
    teacher = make("mixtral")
    config = copy.deepcopy(teacher.config)
    config.num_local_experts = 3
    model = type(teacher)(config)
    own = dict(teacher.named_parameters())
    with torch.no_grad():
        for name, each in model.named_parameters():
            each.copy_(own[name][: len(each)] if each.shape != own[name].shape else own[name])
    routers = [name for name, _ in model.named_parameters() if name.endswith("gate.weight")]
    assert narrower_routers(model, teacher, routers) == routers
    assert narrower_routers(teacher, teacher, routers) == []
    start = {name: each.detach().clone() for name, each in model.named_parameters()}
    batches = [{"input_ids": torch.randint(3, 64, (4, 12))} for _ in range(2)]
    recover(model, teacher, batches, steps=1, local=0, rate=1e-3)
    assert any(not torch.equal(each, start[name]) for name, each in model.named_parameters() if name not in routers)
    with torch.no_grad():
        for name, each in model.named_parameters():
            each.copy_(start[name])
    seen = []

    def loss(outputs, wanted, batch):
        if torch.is_grad_enabled():  # and not while it is judged
            seen.append({name for name, each in model.named_parameters() if each.requires_grad})
        return (outputs.logits - wanted.logits).square().mean()

    recover(model, teacher, batches, steps=10, local=0, rate=1e-3, loss=loss)
    assert seen[0] == seen[1] == set(routers)
    assert seen[2] == seen[9] == set(start) - {"model.embed_tokens.weight"}
    done = recover(model, teacher, batches, steps=5, local=0, rate=1e-3, adapters=2)
    assert done.loss == "kl", "experts are chosen by top-k, and are no rows"


def test_a_batch_that_one_of_the_models_does_not_take_is_named():
    teacher = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    model = copy.deepcopy(teacher)
    tokens = [torch.randn(3, 4), torch.randn(3, 5)]
    for options in ({"local": 0}, {"local": 0, "steps": 4}):
        with pytest.raises(ValueError, match=r"the teacher does not run on batch 1 of 2 \(shape \(3, 5\), float32\)"):
            recover(model, teacher, tokens, loss="mse", **options)
    wider = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 2))
    with pytest.raises(ValueError, match=r"the model does not run on batch \d of 2 \(shape \(3, \d\), float32\)"):
        recover(wider, teacher, [tokens[0]] * 2, loss="mse", steps=2, local=0)

    def forward(model, batch):
        return model(batch[:, :4] if len(batch) == 3 else batch)

    with pytest.raises(RuntimeError) as found:
        recover(model, teacher, [torch.randn(2, 5)], loss="mse", steps=2, local=0, forward=forward)
    assert "This was batch 0 of 1 (shape (2, 5), float32)." in found.value.__notes__


def test_block_by_block_a_batch_that_does_not_run_is_named(pair):
    model, teacher, tokens = pair
    tokens.append({"input_ids": torch.full((1, 3), 99)})
    with pytest.raises(ValueError, match=r"batch 3 of 4 \(input_ids of shape \(1, 3\), int64\) \(IndexError"):
        recover(model, teacher, tokens, steps=0)


def dtypes_seen(modules):
    """What linear layers give while this is attached."""
    seen = {}
    for key, model in modules.items():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(
                    lambda _module, _args, output, key=key: seen.setdefault(key, set()).add(output.dtype)
                )
    return seen


@pytest.mark.parametrize("options", [{}, {"adapters": 2}, {"share": 0.5}, {"loss": "mse"}], ids=str)
def test_matrices_are_multiplied_in_bfloat16_and_all_that_is_kept_is_float32(pair, options):
    model, teacher, tokens = pair
    wide, zeros = copy.deepcopy(model), {name: each.eq(0) for name, each in model.named_parameters()}
    seen = dtypes_seen({"model": model, "teacher": teacher})
    done = recover(model, teacher, tokens, steps=20, local=0, rate=1e-2, autocast=torch.bfloat16, **options)
    assert seen == {"model": {torch.bfloat16}, "teacher": {torch.bfloat16}}
    assert done.last < done.first
    assert all(before == after for before, after in done.zeros.values())
    plain = recover(wide, teacher, tokens, steps=20, local=0, rate=1e-2, **options)
    assert done.first == pytest.approx(plain.first, rel=0.05)
    for name, each in model.named_parameters():
        assert each.dtype == torch.float32
        assert torch.equal(each.eq(0), zeros[name]) or name not in done.zeros
    assert any(each.ne(each.bfloat16()).any() for each in model.parameters()), "nothing was rounded to bfloat16"


def test_a_callers_autocast_does_not_count_and_the_local_part_stays_wide(pair):
    model, teacher, tokens = pair
    found = {}
    for word, around, own in (("plain", False, None), ("around", True, None), ("own", False, "bfloat16")):
        each, theirs = copy.deepcopy(model), copy.deepcopy(teacher)
        seen = dtypes_seen({"model": each})
        with torch.autocast("cpu", torch.bfloat16, enabled=around):
            recover(each, theirs, tokens, steps=3, local=0 if own else 1, rate=1e-2, autocast=own)
        assert seen["model"] == {torch.bfloat16 if own else torch.float32}
        found[word] = each
    weights = dict(found["plain"].named_parameters())
    assert all(torch.equal(each, weights[name]) for name, each in found["around"].named_parameters())
    seen = dtypes_seen({"model": model})
    recover(model, teacher, tokens, steps=0, local=1, autocast="bfloat16")
    assert seen["model"] == {torch.float32}


def test_within_an_autocast_of_the_callers_no_weight_is_remembered_from_an_earlier_step(pair):
    model, teacher, tokens = pair
    other = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        inside = recover(model, teacher, tokens[:1], steps=3, local=0, rate=1e-2, autocast="bfloat16")
    outside = recover(other, teacher, tokens[:1], steps=3, local=0, rate=1e-2, autocast="bfloat16")
    assert inside.losses == outside.losses
    assert len(set(inside.losses)) == 3


def test_after_a_step_the_model_can_be_looked_at(pair):
    model, teacher, tokens = pair
    said = []

    def look(number, loss):
        with torch.no_grad():
            said.append((number, loss, float(model(**tokens[0]).logits.square().mean())))

    done = recover(model, teacher, tokens, steps=4, local=0, rate=1e-2, on_step=look)
    assert [(number, loss) for number, loss, _ in said] == list(enumerate(done.losses, 1))
    assert len({size for *_, size in said}) == 4
    with torch.no_grad():
        assert float(model(**tokens[0]).logits.square().mean()) == said[-1][-1]


# ---- The state of a run that was stopped: what was saved is what is read, or an error of one line. ----


def made(loss="mse"):
    torch.manual_seed(0)
    model, teacher = nn.Linear(3, 3), nn.Linear(3, 3)
    return Steps(model, teacher, Descent([Whole(each) for each in model.parameters()], 6, rate=0.1), loss)


@pytest.fixture
def saved(tmp_path):
    steps = made()
    steps.descent.steps = 3
    steps.run([torch.ones(2, 3), torch.randn(2, 3)], 0)
    steps.descent.steps = 6
    save_state(tmp_path / "state.safetensors", steps)
    return tmp_path / "state.safetensors", steps


def test_what_was_saved_is_what_is_read(saved):
    path, steps = saved
    again = made(loss=None)
    load_state(path, again)
    assert (again.losses, again.rows, again.loss, again.descent.done) == (steps.losses, steps.rows, "mse", 3)
    batches = [torch.ones(2, 3), torch.randn(2, 3)]
    for each in (again, steps):
        each.run(batches, 0)
    assert again.losses == steps.losses
    assert all(torch.equal(*pair) for pair in zip(again.model.parameters(), steps.model.parameters(), strict=True))


def test_a_run_that_selects_goes_on_as_if_it_had_not_been_stopped(tmp_path):
    def begun():
        torch.manual_seed(0)
        teacher = TwoStage().eval()
        model = copy.deepcopy(teacher)
        torch.nn.init.normal_(model.score.weight)
        return Steps(model, teacher, Descent([Whole(each) for each in model.parameters()], 6, rate=0.1), None)

    torch.manual_seed(1)
    batches = [torch.randn(4, 17, 6) for _ in range(3)]
    whole, half, rest, named = (begun() for _ in range(4))
    whole.train(batches, 0)

    def save(number, _loss):
        if number == 3:
            save_state(tmp_path / "state", half)

    half.train(batches, 0, save)
    rest.train(batches, 0, resume=lambda: load_state(tmp_path / "state", rest))
    assert rest.losses == whole.losses
    assert rest.verdict == whole.verdict
    assert rest.verdict.loss == "kl + what selects"
    assert all(torch.equal(*pair) for pair in zip(rest.model.parameters(), whole.model.parameters(), strict=True))
    load_state(tmp_path / "state", named)
    assert named.loss == "kl", "of the outputs, which a run that goes on asks for by this word"


def with_metadata(path, **changes):
    tensors = load_file(path)
    said = {"done": 3, "losses": [1.0, 1.0, 1.0], "rows": 6, "loss": "mse"} | changes
    text = json.dumps({"steps": said})
    save_file(tensors, path, metadata={"said": text, "sha256": digest_of(tensors, text)})


def test_a_damaged_file_is_one_line(saved):
    path, _ = saved
    whole = path.read_bytes()
    for damaged in (b"", whole[:100], whole[:-1] + b"x", b"x" * 50):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"the state of a run that was stopped, and damaged \(.*hint"):
            load_state(path, made(), "hint")
    for change, message in (
        ({"done": 7}, "done"),
        ({"done": 2}, "losses is not one for each of 2 steps"),
        ({"losses": [1, 2, "x"]}, "losses"),
        ({"rows": -1}, "rows"),
    ):
        path.write_bytes(whole)
        with_metadata(path, **change)
        with pytest.raises(CheckpointError, match=message):
            load_state(path, made())
    path.write_bytes(whole)
    other = made()
    other.descent = Descent([Whole(nn.Linear(2, 2).weight)], 6, rate=0.1)
    with pytest.raises(CheckpointError, match="it is of another run"):
        load_state(path, other)
    save_file({"0.value": torch.ones(1)}, path)
    with pytest.raises(CheckpointError, match="damaged"):
        load_state(path, made())
