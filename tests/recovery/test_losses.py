"""Losses between outputs: nothing is lost where they are equal, padding does not count, and each is what it says."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from secateur.recovery import losses
from secateur.recovery.losses import (
    WORDS,
    chosen_for,
    detector,
    features_of,
    heads_of,
    loss_between,
    mse,
    parse,
    rows_of,
    score_loss,
    text_loss,
)
from support.families import make


@pytest.mark.parametrize("word", WORDS)
@given(st.integers(0, 100))
def test_equal_outputs_lose_nothing_and_others_something(word, seed):
    torch.manual_seed(seed)
    outputs = torch.randn(5, 7)
    assert float(WORDS[word](outputs, outputs.clone())) == pytest.approx(0, abs=1e-6)
    assert float(WORDS[word](torch.randn(5, 7), outputs)) > 1e-3


HALF = torch.finfo(torch.bfloat16).min


@pytest.mark.parametrize("fills", [(-torch.inf, -torch.inf), (torch.finfo().min, HALF), (-1e4, -1e4), (-1e9, -1e9)])
def test_of_what_is_selected_from_each_place_counts_that_no_mask_hides(fills):
    torch.manual_seed(0)
    ours, theirs, like = torch.randn(3, 17, requires_grad=True), torch.randn(3, 17), torch.zeros(())
    hidden = torch.rand(3, 17) < 0.4
    masked = [each.masked_fill(hidden, fill) for each, fill in zip((ours, theirs), fills, strict=True)]
    wanted = mse(ours[~hidden][:, None], theirs[~hidden][:, None])
    found = score_loss({"a": masked[0]}, {"a": masked[1]}, like)
    assert torch.equal(found, wanted)
    (slopes,) = torch.autograd.grad(found, ours)
    assert torch.equal(slopes.ne(0), ~hidden)
    assert score_loss({"a": masked[1]}, {"a": masked[1]}, like) == 0
    every = torch.full_like(theirs, fills[0])
    assert score_loss({"a": every}, {"a": every}, like) == 0
    assert score_loss({"a": masked[0] * torch.nan}, {"a": masked[1]}, like).isnan(), "which is said of a step"


def test_selections_count_alike_and_those_that_have_no_like_do_not():
    torch.manual_seed(0)
    ours, theirs = ({at: torch.randn(2, 17) * size for at, size in enumerate((1, 1000))} for _ in range(2))
    like = torch.zeros(())
    each = [score_loss({at: ours[at]}, {at: theirs[at]}, like) for at in ours]
    assert torch.equal(score_loss(ours, theirs, like), torch.stack(each).mean())
    assert torch.equal(score_loss({0: ours[0]}, theirs, like), each[0])
    assert torch.equal(score_loss(ours, {**theirs, 1: torch.empty(2, 0)}, like), each[0])
    assert score_loss({2: ours[0]}, theirs, like) is None


def test_the_texts_own_loss_is_of_the_next_token_without_padding():
    model = make("llama")
    ids = torch.randint(3, 64, (2, 7))
    with torch.no_grad():
        outputs = model(input_ids=ids, labels=ids)
    wanted = float(outputs.loss)
    assert float(text_loss(outputs, {"input_ids": ids, "labels": ids}, None, writes=False)) == wanted
    assert float(text_loss({"logits": outputs.logits}, {"input_ids": ids}, None, writes=True)) == pytest.approx(wanted)
    assert float(text_loss(outputs.logits, ids, None, writes=True)) == pytest.approx(wanted)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, 2:] = False
    rows = [
        text_loss(outputs.logits[at, :to][None], ids[at, :to][None], None, writes=True) for at, to in ((0, 7), (1, 2))
    ]
    found = text_loss(outputs.logits, {"input_ids": ids}, mask, writes=True)
    assert float(found) == pytest.approx(float(6 * rows[0] + rows[1]) / 7)
    assert text_loss(outputs.logits, {"input_ids": ids}, torch.zeros_like(mask), writes=True) == 0


@pytest.mark.parametrize(
    ("batch", "writes"),
    [
        ({"input_ids": torch.ones(2, 3, dtype=torch.int64)}, False),
        ({"input_ids": torch.ones(2, 1, dtype=torch.int64)}, True),
        (torch.ones(2, 3), True),
        ({}, True),
        ({"labels": torch.ones(2, 3)}, True),
    ],
)
def test_a_batch_that_says_nothing_of_its_own_is_refused(batch, writes):
    with pytest.raises(ValueError, match="share= below 1 asks for the text's own loss"):
        text_loss({"logits": torch.zeros(2, 3, 4)}, batch, None, writes=writes)


def test_kl_is_forward_in_nats_for_each_row():
    p, q = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.5, 0.25])
    wanted = 0.5 * math.log(2) - 0.25 * math.log(2)
    both = loss_between({"logits": q.log().repeat(3, 1)}, {"logits": p.log().repeat(3, 1) + 7}, None, "kl", None)
    assert float(both) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("word", WORDS)
def test_padding_does_not_count(word):
    outputs, wanted = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    before = loss_between({"logits": outputs}, {"logits": wanted}, None, word, mask)
    outputs[~mask] = 100.0
    assert torch.equal(loss_between({"logits": outputs}, {"logits": wanted}, None, word, mask), before)
    assert rows_of(outputs, mask).shape == (3, 4)
    assert rows_of(torch.ones(2, 3, 5, 4), mask).shape == (15, 4)
    assert rows_of(torch.ones(3), mask).shape == (3, 1)


def test_the_loss_is_chosen_by_what_the_outputs_are():
    unit = torch.nn.functional.normalize(torch.randn(3, 5), dim=-1)
    assert chosen_for(SimpleNamespace(logits=torch.randn(2, 3, 5))) == "kl"
    assert chosen_for({"logits": torch.randn(2, 1)}) == "mse"
    assert (
        chosen_for(SimpleNamespace(last_hidden_state=torch.randn(2, 3, 5), pooler_output=torch.randn(2, 5))) == "cosine"
    )
    assert chosen_for({"sentence_embedding": torch.randn(2, 5)}) == "cosine"
    assert chosen_for(unit) == "cosine"
    assert chosen_for(torch.randn(4, 10)) == "kl"
    assert chosen_for(torch.randn(4)) == "mse"
    assert chosen_for((torch.randn(4, 10), torch.ones(1))) == "kl"


def test_all_that_a_model_answers_is_compared():
    """A detector's boxes, both ends of an answer: what the loss leaves out, training ruins."""
    torch.manual_seed(0)
    ends = {"start_logits": torch.randn(2, 7), "end_logits": torch.randn(2, 7), "hidden_states": (torch.randn(2, 7),)}
    boxes = {
        "last_hidden_state": torch.randn(2, 3, 9),
        "pred_boxes": torch.rand(2, 3, 4),
        "logits": torch.randn(2, 3, 5),
    }
    assert [chosen_for(each) for each in (ends, SimpleNamespace(**boxes))] == ["kl", "mse"]
    assert torch.equal(features_of(boxes), boxes["logits"])
    for wanted, word, names in (
        (ends, "kl", ("start_logits", "end_logits")),
        (boxes, "mse", ("logits", "pred_boxes")),
        (boxes, "cosine", ("logits", "pred_boxes")),
    ):
        other = {**wanted, **{name: wanted[name] + 1 + torch.randn_like(wanted[name]) for name in names}}
        parts = [loss_between({name: other[name]}, {name: wanted[name]}, None, word, None) for name in names]
        assert min(parts) > 0
        torch.testing.assert_close(loss_between(other, wanted, None, word, None), sum(parts))
    assert loss_between({**boxes, "last_hidden_state": torch.zeros(2, 3, 8)}, boxes, None, "mse", None) == 0
    assert chosen_for(torch.randn(4, 10).sigmoid()) == "mse", "probabilities are no logits"
    for picture in (torch.rand(2, 8, 8), torch.randn(2, 5, 8, 8)):  # whose columns are no classes
        assert chosen_for({"predicted_depth": picture}) == "mse"
    assert chosen_for({"logits": picture}) == chosen_for(picture) == "mse"


def a_detector_finds(seed=0, places=6, **more):
    """Decoded boxes and, beside them, two heads as a YOLO26 has them, of which the second finds masks, too."""
    torch.manual_seed(seed)
    heads = [{"boxes": torch.randn(2, 4, places), "scores": torch.randn(2, 3, places)} for _ in range(2)]
    heads[1] |= {"mask_coefficient": torch.randn(2, 5, places), "proto": torch.randn(2, 5, 4, 4), **more}
    return torch.rand(2, 7, places) * 99, {
        "one2many": {**heads[0], "feats": [torch.ones(2, 8, 2, 3)]},
        "other": heads[1],
    }


def test_of_places_counts_what_the_teacher_is_sure_of():
    wanted, outputs = a_detector_finds(0), a_detector_finds(1)
    assert chosen_for(wanted) == "detector"
    assert [sorted(each) for each in heads_of(wanted)] == [
        ["boxes", "scores"],
        ["boxes", "mask_coefficient", "proto", "scores"],
    ]
    assert torch.equal(features_of(wanted), wanted[1]["one2many"]["scores"].mT), "a row is a place"
    assert detector(wanted, a_detector_finds(0)) == 0
    by_hand = 0.0
    for ours, theirs in zip(heads_of(outputs), heads_of(wanted), strict=True):
        p, q = theirs["scores"].sigmoid().double(), ours["scores"].sigmoid().double()
        sure = p.amax(1)
        by_hand += float((p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).sum() / sure.sum())
        for name in sorted({"boxes", "mask_coefficient"} & set(ours)):
            mean = sum(sure[at // 6, at % 6] * theirs[name][at // 6, :, at % 6] for at in range(12)) / sure.sum()
            lost, varied = (
                sum(
                    float(sure[picture, place] * (each - theirs[name][picture, :, place]).square().sum())
                    for picture in range(2)
                    for place in range(6)
                    for each in [other if other.dim() == 1 else other[picture, :, place]]
                )
                for other in (ours[name], mean)
            )
            by_hand += 5 * lost / varied
    own, aim = (heads_of(each)[1]["proto"].movedim(1, -1).reshape(-1, 5) for each in (outputs, wanted))
    by_hand += 5 * float(mse(own, aim))
    assert float(loss_between(outputs, wanted, None, "detector", None)) == pytest.approx(by_hand, rel=1e-5)
    halves = [torch.utils._pytree.tree_map(lambda each: each.half(), found) for found in (outputs, wanted)]
    assert detector(*halves).dtype == torch.float32
    assert float(detector(*halves)) == pytest.approx(by_hand, rel=1e-2)
    assert detector(wanted[1]["other"], wanted[1]["other"]) == 0, "one head, as in training, is a dict of its own"


def test_where_little_or_nothing_is_found_no_loss_runs_away():
    torch.manual_seed(0)
    boxes, scores = torch.randn(1, 4, 50), torch.full((1, 3, 50), -25.0)
    other = {"boxes": boxes + 0.1, "scores": scores + 15}
    assert detector(other, {"boxes": boxes, "scores": scores}) < 1e-2, (
        "nothing is found, and nearly nothing by the other"
    )
    scores[0, 1, 7] = 9.0  # one thing, whose boxes have no variance
    other["scores"] = scores + 0.1
    assert detector(other, {"boxes": boxes + 5, "scores": scores}) > 1
    assert detector({**other, "boxes": boxes + 5.1}, {"boxes": boxes + 5, "scores": scores}) < 1
    alike = {"boxes": torch.full((1, 4, 50), 2.0), "scores": scores}
    assert detector({**alike, "boxes": alike["boxes"] + 1e-3}, alike) < 1e-3


def test_boxes_and_scores_without_names_are_a_head_where_sides_lie_between_0_and_1():
    torch.manual_seed(0)
    selected, boxes, scores = torch.rand(2, 6, 6), torch.rand(1, 2, 6, 4), torch.randn(1, 2, 6, 3)
    inner = torch.rand(2, 9, 4), torch.randn(2, 9, 3)
    outputs = selected, (boxes, scores, *inner, None)
    assert chosen_for(outputs) == "detector"
    named = [
        {"boxes": each[-2].reshape(2, -1, 4).mT, "scores": each[-1].reshape(2, -1, 3).mT}
        for each in ((boxes, scores), inner)
    ]
    for found, wanted in zip(heads_of(outputs), named, strict=True):
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    other = selected, (boxes.flip(2), scores + 1, *inner, None)
    moved = {"boxes": named[0]["boxes"].flip(2), "scores": named[0]["scores"] + 1}
    assert torch.equal(detector(other, outputs), detector([moved, named[1]], named))
    keys = tuple((torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 4)) for _ in range(2))
    assert chosen_for((torch.randn(2, 7, 9), keys)) == "kl", "what a decoder remembers is no box"


def test_what_is_no_head_of_a_detector_is_refused_as_one():
    for outputs in (
        torch.ones(2, 3),
        {"scores": torch.ones(3), "boxes": torch.ones(3, 4)},
        ({"boxes": torch.ones(3)},),
    ):
        with pytest.raises(ValueError, match=r"compares scores and boxes of places; the model returns no such head"):
            detector(outputs, outputs)
    with pytest.raises(ValueError, match=r"'scores': \(2, 3, 6\).* and the teacher .*'scores': \(2, 3, 7\)"):
        detector(a_detector_finds(), a_detector_finds(places=7))
    with pytest.raises(ValueError, match=r"'angle': \(2, 1, 6\).* and the teacher"):
        detector(a_detector_finds(angle=torch.ones(2, 1, 6)), a_detector_finds())


def test_what_is_wrong_is_said():
    with pytest.raises(
        ValueError, match=r"no loss is called 'kll'; did you mean kl\? There are cosine, detector, kl and mse"
    ):
        parse("kll")
    with pytest.raises(
        TypeError, match=r"loss= is one of kl, cosine, mse, detector, or \(outputs, wanted, batch\) -> scalar; got 3"
    ):
        parse(3)
    with pytest.raises(ValueError, match=r"returns shape \(2, 3\) and the teacher shape \(2, 4\): no two numbers"):
        loss_between(torch.ones(2, 3), torch.ones(2, 4), None, "kl", None)
    fewer, more = ({"logits": torch.ones(1, 2, 3), "pred_boxes": torch.ones(1, count, 4)} for count in (2, 5))
    with pytest.raises(
        ValueError, match=r"returns logits \(1, 2, 3\) and pred_boxes \(1, 2, 4\) and the teacher logits"
    ):
        loss_between(fewer, more, None, "mse", None)
    with pytest.raises(TypeError, match=r"loss= is to return one number.*got shape \(2,\)"):
        loss_between(torch.ones(2), None, None, lambda *_: torch.ones(2), None)
    with pytest.raises(TypeError, match=r"loss= is to return one number.*got float"):
        loss_between(torch.ones(2), None, None, lambda *_: 1.0, None)
    with pytest.raises(TypeError, match=r"the outputs \(dict\) hold no tensor of floating numbers to compare"):
        features_of({"tokens": torch.ones(3, dtype=torch.int64)})


def test_a_number_in_bfloat16_is_widened_and_a_wider_one_stays():
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        number = torch.ones(1, dtype=dtype)
        assert loss_between(None, None, None, lambda *_: number, None).dtype == wide  # noqa: B023
        assert text_loss({"loss": number}, {"labels": number}, None, writes=False).dtype == wide


def test_unit_vectors_that_were_rounded_are_embeddings():
    vectors = torch.nn.functional.normalize(torch.randn(50, 384), dim=-1)
    assert chosen_for(vectors) == chosen_for(vectors.bfloat16()) == "cosine"
    assert chosen_for(vectors * 1.005) == chosen_for(torch.randn(50, 384).bfloat16()) == "kl"


def in_one_go(outputs, wanted, ids, mask):
    """Both losses as torch has them, all rows at once."""
    kept = mask.reshape(-1)
    q, p = (each.float().log_softmax(-1).reshape(-1, each.shape[-1])[kept] for each in (outputs, wanted))
    taught = torch.nn.functional.kl_div(q, p, reduction="batchmean", log_target=True)
    pairs = (mask[:, 1:] & mask[:, :-1]).reshape(-1)
    rows = outputs[:, :-1].float().reshape(-1, outputs.shape[-1])[pairs]
    return taught, torch.nn.functional.cross_entropy(rows, ids[:, 1:].reshape(-1)[pairs])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@given(rows=st.integers(1, 9), at_once=st.integers(1, 80), seed=st.integers(0, 100))
def test_a_few_rows_at_a_time_are_all_rows_at_once(dtype, rows, at_once, seed):
    torch.manual_seed(seed)
    outputs, wanted = (3 * torch.randn(2, rows + 1, 11, dtype=dtype) for _ in range(2))
    ids, mask = torch.randint(0, 11, (2, rows + 1)), torch.rand(2, rows + 1) < 0.8
    mask[0, :2] = True
    found = []
    for few in (True, False):
        leaf = outputs.clone().requires_grad_()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(losses, "AT_ONCE", at_once)
            if few:
                taught = loss_between(leaf, wanted, None, "kl", mask)
                own = text_loss(leaf, {"input_ids": ids}, mask, writes=True)
            else:
                taught, own = in_one_go(leaf, wanted, ids, mask)
        (0.3 * taught + 0.7 * own).backward()
        found.append((taught.item(), own.item(), leaf.grad))
    assert found[0][:2] == pytest.approx(found[1][:2], rel=1e-5, abs=1e-6)
    assert found[0][2].dtype == dtype
    torch.testing.assert_close(
        *(each[2].float() for each in found), atol=2e-2 if dtype == torch.bfloat16 else 1e-6, rtol=1e-2
    )


def test_rows_that_name_nothing_and_no_rows_have_no_slope():
    logits = torch.randn(1, 3, 5, requires_grad=True)
    text_loss(
        logits, {"input_ids": torch.ones(1, 3, dtype=torch.long)}, torch.zeros(1, 3, dtype=torch.bool), writes=True
    ).backward()
    assert torch.equal(logits.grad, torch.zeros_like(logits))
    empty = torch.zeros(0, 5, requires_grad=True)
    WORDS["kl"](empty, empty.detach()).backward()
    assert empty.grad.shape == (0, 5)


def test_small_slopes_of_a_scaled_float16_loss_are_not_lost():
    outputs = torch.tensor([[9.0, -9.0, -9.5, -8.0]], dtype=torch.float16, requires_grad=True)
    wanted = torch.tensor([[9.0, -8.0, -9.0, -9.0]], dtype=torch.float16)
    (2**16 * WORDS["kl"](outputs, wanted)).backward()
    slopes = outputs.detach().double().softmax(-1) - wanted.double().softmax(-1)
    assert slopes[:, 1:].abs().max() < 2**-24, "unscaled, they are nothing in float16"
    torch.testing.assert_close(outputs.grad[:, 1:].double(), 2**16 * slopes[:, 1:], rtol=1e-2, atol=0.0)


@pytest.mark.parametrize("word", WORDS)
def test_padding_may_hold_anything_and_be_all_there_is(word):
    outputs, wanted = (torch.randn(2, 3, 6) for _ in range(2))
    mask = torch.tensor([[True, True, False], [True, False, False]])
    outputs[~mask] = wanted[~mask] = torch.nan
    leaf = outputs.requires_grad_()
    loss_between(leaf, wanted, None, word, mask).backward()
    assert leaf.grad[~mask].eq(0).all()
    assert leaf.grad[mask].isfinite().all()
    nothing = loss_between(leaf, wanted, None, word, torch.zeros_like(mask))
    assert nothing == 0
    nothing.backward()
    assert leaf.grad[mask].isfinite().all()


def test_slopes_go_when_they_were_used():
    outputs = torch.randn(4, 9, requires_grad=True)
    loss = WORDS["kl"](outputs, torch.randn(4, 9))
    summed = loss.grad_fn.next_functions[0][0]
    assert summed.saved_tensors[0].shape == (4, 9)
    loss.backward()
    with pytest.raises(RuntimeError, match="already been freed"):
        _ = summed.saved_tensors
