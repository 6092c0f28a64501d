"""Laws of counting: what is asked is what leaves, to half of the smallest step."""

import itertools
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from secateur import shrink
from secateur.coupling import Scope, find_coupling
from secateur.shrinking.configuration import Configured
from secateur.shrinking.costs import TiedGroups, by_tie, cost_of
from secateur.shrinking.counting import solve_counts
from secateur.shrinking.request import Request, pruning_target
from support.published import PUBLISHED

SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7)
LAWS = [  # uniform (None: as in the one before), target, round_to, shares
    (False, "params", None, SHARES),
    (None, "params", 1, (0.1, 0.3)),
    (None, "macs", None, (0.1, 0.5)),
    (True, "params", None, SHARES),
    (None, "macs", 1, (0.1, 0.3)),
]

FEW = [(False, "params", None, (0.01, 0.3, 0.7)), (True, "params", None, (0.2,))]
# what `benchmarks/shrinking/run.py nearest` has all of: of some all is tested here, of the others a little
SOME = [
    "SmolLM2 135M", "Llama 3 8B", "Qwen2.5 0.5B", "Gemma 2 2B", "Phi-3 mini", "GPT-2", "BERT base", "ViT-B/16",
    "Whisper tiny",
]  # fmt: skip
LONG = ["ResNet-50", "ConvNeXt-T", "Whisper base"]  # seconds of coupling


def smallest_step(groups, counts, round_to, cost, is_possible):
    """What the smallest step from there changes: one choice of one tie up or down, if there is such a model."""
    here, found = cost(counts), []
    for each in by_tie(groups):
        tied = TiedGroups(each, round_to, {})
        parts, choices = round(tied.mean(counts)), tied.choices().tolist()
        fewer = max((choice for choice in choices if choice < parts), default=None)
        more = min((choice for choice in choices if choice > parts), default=None)
        for choice in (fewer, more):
            beside = {} if choice is None else counts | tied.counts(choice)
            if beside and is_possible(beside) and cost(beside) != here:
                found.append(abs(cost(beside) - here))
    return min(found, default=0.0)


def is_nearest_by_two(groups, counts, round_to, cost, goal, is_possible):
    """Whether no counts of two ties lead nearer: where one step is coarse and another tie too small to make up."""
    tied = [TiedGroups(each, round_to, {}) for each in by_tie(groups)]
    off = abs(cost(counts) - goal)
    for one, other in itertools.combinations(tied, 2):
        for many, few in itertools.product(one.choices().tolist(), other.choices().tolist()):
            beside = counts | one.counts(many) | other.counts(few)
            if abs(cost(beside) - goal) < off * (1 - 1e-9) and is_possible(beside):
                return False
    return True


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name not in LONG])
def test_what_is_asked_is_what_leaves_published_models(name):
    make, inputs = PUBLISHED[name]
    model = make()
    coupling = find_coupling(model, inputs)
    for uniform, target, round_to, shares in LAWS if name in SOME else FEW:
        if uniform is not None:
            configured = Configured(model, Scope.of(coupling)) if uniform else None
            scope = Scope.of(coupling) if configured is None else configured.scope
            subject, groups = pruning_target(model, scope, [inputs], configured=configured), scope.groups
        cost = cost_of(model, coupling, inputs, target)
        whole = cost({})
        for share in shares:
            asked = Request(sparsity=share, target=target, round_to=round_to)
            try:
                counts = solve_counts(subject, groups, asked).counts
            except ValueError as error:
                most = float(re.search(r"at most ([0-9.]+)% of the", str(error))[1]) / 100
                counts = solve_counts(subject, groups, replace(asked, sparsity=most)).counts
                assert share > 1 - cost(counts) / whole == pytest.approx(most, abs=1e-4)
                continue
            off = abs(1 - cost(counts) / whole - share)
            step = smallest_step(groups, counts, round_to, cost, subject.is_possible) / whole
            assert step < 0.1, "no coarse steps here"
            assert off <= step / 2 + 1e-9 or is_nearest_by_two(
                groups, counts, round_to, cost, (1 - share) * whole, subject.is_possible
            ), (uniform, target, round_to, share)


def attention(width, heads, shared):
    """A small Llama, of which 135 million times as much is published."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": width, "num_attention_heads": heads, "num_key_value_heads": shared, "head_dim": 4}
    config = LlamaConfig(vocab_size=11, intermediate_size=3 * width, num_hidden_layers=2, **sizes)
    return LlamaForCausalLM(config), {"input_ids": torch.tensor([[1, 2, 3]]), "use_cache": False}


@pytest.mark.parametrize("share", [0.1, 0.2, 0.3])
def test_nine_heads_that_can_only_be_six_stay_and_others_make_it_up(share):
    model, inputs = attention(36, 9, 3)
    done = shrink(model, inputs, share, uniform=True, verify=False)
    assert done.got == pytest.approx(share, abs=0.01)
    assert model.config.num_attention_heads == 9
    assert model.config.hidden_size == 36
    assert model.config.intermediate_size < 108


def test_where_steps_are_coarse_the_two_nearest_are_named_and_the_smaller_taken():
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.ReLU(), nn.Linear(3, 2, bias=False))
    done = shrink(model, torch.ones(1, 4), 0.1)
    assert done.beside == (0, pytest.approx(1 / 3))
    assert done.got == done.beside[1]
    assert "Asked: 10.0% of the params. Gone: 33.3%. The nearest that exist are 0% and 33.3%." in str(done).splitlines()


def test_less_than_half_a_step_is_not_refused_and_what_can_leave_is_exact():
    layers = nn.Linear(4, 10, bias=False), nn.ReLU(), nn.Linear(10, 2, bias=False)
    assert shrink(nn.Sequential(*layers), torch.ones(1, 4), 0.949).model[0].out_features == 1  # 0.9 can, 0.1 is a step
    fresh = nn.Linear(4, 10, bias=False), nn.ReLU(), nn.Linear(10, 2, bias=False)
    with pytest.raises(ValueError, match=r"at most 90\.00% of the params can leave, not 96\.0%"):
        shrink(nn.Sequential(*fresh), torch.ones(1, 4), 0.96)


def a_model():
    layers = nn.Linear(4, 40), nn.ReLU(), nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 2)
    model, x = nn.Sequential(*layers), torch.ones(1, 4)
    return pruning_target(model, Scope.of(find_coupling(model, x)), [x])


@pytest.mark.parametrize("share", [0.1, 0.4, 0.8])
def test_a_loss_decides_which_steps_are_taken(share):
    subject = a_model()
    first, second = subject.coupling.groups
    for dear, cheap in ((first, second), (second, first)):

        def loss(tied, parts, dear=dear):
            return (1000.0 if tied.groups[0] is dear else 1.0) * (1 - parts / tied.parts) ** 2

        counts = solve_counts(subject, subject.coupling.groups, Request(sparsity=share), loss=loss).counts
        assert 1 - counts[dear.name] / dear.size < 1 - counts[cheap.name] / cheap.size


def test_a_coarse_step_is_taken_only_when_all_of_it_is_worth_it():
    """Ten units that together cost nothing, and any five of them much: none leaves before the others have."""
    subject = a_model()
    first, second = subject.coupling.groups

    def loss(tied, parts):
        gone = tied.parts - parts
        return float(gone) if tied.groups[0] is first else 200.0 * min(gone, 5) + 10.0 * max(gone - 5, 0)

    few = solve_counts(subject, subject.coupling.groups, Request(sparsity=0.3), loss=loss).counts
    assert few[second.name] == 30
    most = solve_counts(subject, subject.coupling.groups, Request(sparsity=0.97), loss=loss).counts
    assert most[second.name] < 25


def test_without_data_all_lose_the_same_share_streams_later_and_heads_last():
    make, inputs = PUBLISHED["Llama 3 8B"]
    model = make()
    coupling = find_coupling(model, inputs)
    subject = pruning_target(model, Scope.of(coupling), [inputs])
    left = {}
    for share in (0.1, 0.5):
        counts = solve_counts(subject, coupling.groups, Request(sparsity=share, round_to=1)).counts
        left[share] = {(group.name, group.size): counts[group.name] / group.size for group in coupling.groups}
    inner = [stays for (_, size), stays in left[0.1].items() if size in (14336, 64, 128)]
    assert max(inner) - min(inner) < 1 / 64
    assert max(inner) < 1 == min(stays for (_, size), stays in left[0.1].items() if size in (4096, 8, 4))
    assert min(stays for (_, size), stays in left[0.5].items() if size == 4096) < 1


def test_a_refusal_names_what_takes_no_part_and_what_freezes_most():
    class Cut(nn.Module):
        """Of its encoder only the first layer runs, and its output is ordered along its width."""

        def __init__(self):
            super().__init__()
            self.encoder = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("first", "second", "third")})
            self.wide = nn.Linear(8, 24)
            self.head = nn.Linear(24, 2)

        def forward(self, x):
            return self.head(self.wide(self.encoder["first"](x)).cumsum(1))

    with pytest.raises(ValueError, match="the rest is frozen or kept") as found:
        shrink(Cut(), torch.randn(3, 8), 0.8)
    words = "29.9% of all parameters take no part in the forward pass: encoder.second, encoder.third."
    assert words in str(found.value)
    assert "(cumsum" in str(found.value)
