"""Laws of branches: what leaves is what a sum has beside its stream, and without it the model is as if it were zero."""

import copy
import json
import tempfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache

import zoo
from secateur import load_shrunken, save_shrunken, shrink, verify_shrunken
from secateur.coupling import Removed, find_coupling
from secateur.kinds import Branches
from secateur.shrinking import plans_of
from secateur.shrinking.apply import carry_out
from secateur.shrinking.kinds.branches import choose_branches, influences
from secateur.shrinking.plan import Plan, plan_in, plan_without
from secateur.shrinking.proof import right_branches
from secateur.support import Fields, run_example, tensors_in
from support.measured import ByParameters
from support.unchanged import is_unchanged, state_of

# what makes a branch zero by hand, such that the proof is not its own judge; how many branches there are
ZEROED = {
    "resnet_basic": ("bn2", 6),
    "resnet_bottleneck": ("bn3", 4),
    "mlp_mixer": ("token.2 token.3 channel.2 channel.3", 4),
    "gpt2": ("c_proj", 4),
    "llama": ("o_proj down_proj", 4),
    "gpt_neox": ("attention.dense dense_4h_to_h", 4),
    "bert": ("attention.output.dense output.dense", 4),
    "t5": ("SelfAttention.o EncDecAttention.o DenseReluDense.wo", 8),
    "vit": ("o_proj fc2 output.dense", 4),
    "convnext": ("pwconv2", 4),
    "xlnet": ("ff.layer_2", 2),
}


class Block(nn.Module):
    """One residual branch, taken as the test says."""

    def __init__(self, form="x + f(x)", width=6, hidden=9):
        super().__init__()
        self.form, self.up, self.down = form, nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.norm, self.scale = nn.LayerNorm(width), nn.Parameter(torch.full((width,), 0.5))
        self.dropout, self.short = nn.Dropout(0.2), nn.Linear(width, width)

    def f(self, x):
        return self.down(F.gelu(self.up(x)))

    def forward(self, x):
        match self.form:
            case "x + f(x)":
                return x + self.f(x)
            case "torch.add":
                return torch.add(self.f(self.norm(x)), x, alpha=2)
            case "x - f(x)":
                return x - self.f(x)
            case "x += f(x)":
                x = x.clone()
                x += self.f(x)
                return x
            case "f(x).add_(x)":
                out = self.f(x)
                out.add_(x)
                return out
            case "norm after":
                return self.norm(self.dropout(self.f(x)) + x)
            case "scaled":
                return x + self.dropout(self.scale * self.f(self.norm(x)))
            case "dropped":
                keep = x.new_empty((x.shape[0],) + (1,) * (x.dim() - 1)).bernoulli_(0.7)
                return x + self.f(x).div(0.7) * keep
            case "shortcut":
                return self.short(x) + self.f(self.norm(x))
            case "transposed":
                return (x.transpose(0, 1) + self.f(x).transpose(0, 1)).transpose(0, 1)
            case "keyword":
                return torch.add(input=x, other=self.f(x))
            case "in place inside":
                h = self.up(x)
                h.relu_()
                return x + self.down(h)
        return None


FORMS = [
    "x + f(x)", "torch.add", "x - f(x)", "x += f(x)", "f(x).add_(x)", "norm after", "scaled", "dropped", "shortcut",
    "transposed", "keyword", "in place inside",
]  # fmt: skip


class Stack(nn.Sequential):
    def __init__(self, *forms, width=6):
        super().__init__(nn.Linear(4, width), *(Block(form, width) for form in forms), nn.Linear(width, 3))


def outputs(model, inputs):
    with torch.no_grad():
        return list(tensors_in(run_example(model, inputs)))


def assert_same(one, other, **tolerance):
    for first, second in zip(one, other, strict=True):
        torch.testing.assert_close(first, second, **tolerance)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_what_stays_of_an_attention_counts_tokens_in_a_cache_by_any_name(name):
    """The plan may be of another transformers than the one that runs."""
    cache, returns = DynamicCache(), {"zeros": None}
    for said in ("past_key_values", "cache"):
        gone = Removed({"was": "Attention", "input": "x", "cache": said, "layer": 0, "returns": returns})
        gone(x=torch.ones(1, 3, 4), **{name: cache})
    assert cache.get_seq_length() == 6


# ---- what is found, and that it is right ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ZEROED)
def test_zoo(name):
    """Half of the branches leave: what is left computes what the original does with them zeroed by hand."""
    model, inputs = zoo.ZOO[name]()
    ends, many = ZEROED[name]
    zeroed = copy.deepcopy(model)
    told = []
    shrink(model, inputs, leave=Branches(0.5), report=told.append)
    (done,) = told
    assert len(done.branches) == many
    assert done.stayed == {}
    assert [done.plans[0].takes(branch) for branch in done.branches].count(True) == many // 2
    names = {name for name, _ in zeroed.named_parameters()} - {name for name, _ in model.named_parameters()}
    assert names == {name for branch in done.branches if done.plans[0].takes(branch) for name in branch.parameters}
    with torch.no_grad():
        for path, module in zeroed.named_modules():
            if path.endswith(tuple(ends.split())) and f"{path}.weight" in names:
                for parameter in module.parameters():
                    parameter.zero_()
    assert_same(outputs(model, inputs), outputs(zeroed, inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_a_sum(form):
    model, x = Stack(form, "x + f(x)"), torch.randn(5, 7, 4)
    coupling = find_coupling(model, x)
    assert [branch.name for branch in coupling.branches] == ["1.up", "2.up"]
    right, wrong = right_branches(model, coupling, coupling.branches, [x])
    assert wrong == {}
    assert len(right) == 2
    zeroed = copy.deepcopy(model).eval()
    for parameter in (*zeroed[1].down.parameters(), *zeroed[2].down.parameters()):
        parameter.data.zero_()
    carry_out(model, plan_without(right), None)
    assert_same(outputs(model.eval(), x), outputs(zeroed, x))
    assert_same(outputs(model, x[:2, :3]), outputs(zeroed, x[:2, :3]))  # nothing of the example's sizes is left in it


class Odd(nn.Module):
    """Sums that are no residual branch."""

    def __init__(self, case):
        super().__init__()
        self.case = case
        self.one, self.two, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.words, self.places = nn.Embedding(9, 4), nn.Embedding(9, 4)

    def forward(self, x):
        match self.case:
            case "siblings":
                return self.out(self.one(x) + self.two(x))
            case "two embeddings":
                ids = torch.arange(5)
                return self.out(self.words(ids) + self.places(ids) + 0 * x)
            case "used twice":
                f = self.one(x)
                return self.out(x + f) * f.sum()
            case "returned":
                f = self.one(x)
                return self.out(x + f), f
            case "shared weights":
                x = x + self.one(x)
                return self.out(x + self.one(x))
            case "read":
                f = self.one(x)
                return self.out(x + f) * float(f.detach().sum())
            case "no stream":
                return self.out(self.one(x) + 1)
        return None


@pytest.mark.parametrize(
    "case", ["siblings", "two embeddings", "used twice", "returned", "shared weights", "read", "no stream"]
)
def test_no_branch(case):
    model, x = Odd(case), torch.randn(5, 4)
    assert find_coupling(model, x, modes=[False]).branches == []


def test_nested_branches_count():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 6), Block(), Block(), nn.Linear(6, 6))

        def forward(self, x):
            return x + self.body(x)

    model, x = nn.Sequential(Outer(), Block(), Block()), torch.randn(4, 6)
    coupling = find_coupling(model, x)
    assert [branch.name for branch in coupling.branches] == ["0.body.1.up", "0.body.2.up", "0.body", "1.up", "2.up"]
    # the outer one is worth least, but three branches would leave with it
    order = {"0.body": 0, "2.up": 1, "1.up": 2, "0.body.1.up": 3, "0.body.2.up": 4}

    def score(*_):
        return {branch: float(order[branch.name]) for branch in coupling.branches}

    def chosen(share):
        return [branch.name for branch in choose_branches(model, coupling, share, [x], score=score)[0]]

    assert chosen(0.4) == ["2.up", "1.up"]
    assert chosen(0.8) == ["0.body", "2.up"]


# ---- what the proof is for ------------------------------------------------------------------------------------------


def test_a_branch_that_is_read_stays_and_says_why():
    class Reads(Block):
        def forward(self, x):
            return (x + self.f(x)) * self.down.out_features

    model, x = nn.Sequential(Reads(), Block(), Block()), torch.randn(4, 6)
    told = []
    shrink(model, x, leave=Branches(0.6), report=told.append)
    assert set(told[0].stayed) <= {"0.up"}  # it was not among those that change least, or could not
    assert isinstance(model[0].up, nn.Linear)
    model = nn.Sequential(Reads(), Block(), Block())
    with pytest.raises(ValueError, match="0 of the 3 residual branches can leave, not 1") as error:
        shrink(model, x, leave=Branches(0.3), include="0.*")
    assert "0.up: the model without it: it raises AttributeError" in str(error.value)


def test_a_norm_that_is_read_stays_and_the_branch_leaves():
    class Reads(Block):
        def forward(self, x):
            return x + self.f(self.norm(x.to(self.norm.weight.dtype)))

    model, x = nn.Sequential(Reads(), Block()), torch.randn(4, 6)
    shrink(model, x, leave=Branches(0.5), include="0.*")
    assert isinstance(model[0].norm, nn.LayerNorm)
    assert isinstance(model[0].up, Removed)


# ---- what stays in place --------------------------------------------------------------------------------------------


@pytest.mark.long
def test_it_is_an_ordinary_module_afterwards():
    model, x = Stack("norm after", "scaled", "f(x).add_(x)", "dropped"), torch.randn(5, 4)
    shrink(model, x, 0.3, leave=Branches(0.75))
    model.eval()
    expected = model(x)
    assert_same([copy.deepcopy(model)(x)], [expected])
    assert_same([torch.export.export(model, (x,)).module()(x)], [expected])
    assert_same([torch.compile(model, backend="aot_eager")(x)], [expected])
    model.load_state_dict(model.state_dict())
    model.train()
    model(x).sum().backward()
    assert model[0].weight.grad is not None
    assert_same([model.eval().half()(x.half())], [expected.half()], rtol=0.1, atol=0.1)
    assert_same([model.bfloat16()(x.bfloat16())], [expected.bfloat16()], rtol=0.2, atol=0.2)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("use_cache", [True, False])
def test_decoders_still_generate(use_cache):
    """Every attention left, also the first, which a decoder asks how many words there were."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM(config).eval()
    words = torch.randint(3, 50, (2, 6))
    shrink(model, {"input_ids": words, "use_cache": use_cache}, leave=Branches(0.5), include="*self_attn*")
    assert model.model.layers[0].self_attn is not None
    assert isinstance(model.model.layers[0].self_attn, Removed) is not use_cache  # its keys are an output
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": 49}
    cached = model.generate(words, use_cache=True, **options)
    assert torch.equal(cached, model.generate(words, use_cache=False, **options))
    padded = torch.ones_like(words)
    padded[0, :3] = 0
    masked = model.generate(words, attention_mask=padded, use_cache=True, **options)
    assert torch.equal(masked, model.generate(words, attention_mask=padded, use_cache=False, **options))


# ---- plans ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "steps", [("branches", "channels"), ("channels", "branches", "channels"), ("both", "branches")]
)
def test_plans_compose(steps):
    """In any order, and what was saved is loaded into a fresh model, on meta, too."""
    forms = ("norm after", "scaled", "f(x).add_(x)", "x + f(x)", "shortcut")
    model, x = Stack(*forms), torch.randn(5, 4)
    original = copy.deepcopy(model)
    for step in steps:
        shrink(
            model, x, {"branches": 0.0, "channels": 0.15, "both": 0.4}[step], leave=Branches(0.2 * (step != "channels"))
        )
    verify_shrunken(original, model, x)
    with tempfile.TemporaryDirectory() as folder:
        save_shrunken(model, folder)
        loaded = load_shrunken(copy.deepcopy(original), folder)
        with torch.device("meta"):
            bare = Stack(*forms)
        real = load_shrunken(bare, folder)
    for each in (loaded, real):
        assert_same([each.eval()(x)], [model.eval()(x)], rtol=0, atol=0)


def test_plans_with_modules_have_a_version_of_their_own(tmp_path):
    model, x = Stack("x + f(x)", "scaled"), torch.randn(5, 4)
    shrink(model, x, 0.3)
    save_shrunken(model, tmp_path)
    assert json.loads((tmp_path / "plan.json").read_text())["version"] == 1
    shrink(model, x, leave=Branches(0.5))
    save_shrunken(model, tmp_path)
    read = json.loads((tmp_path / "plan.json").read_text())
    assert read["version"] == 2
    assert [bool(plan.get("modules")) for plan in read["plans"]] == [False, True]
    assert plan_in(Fields(read["plans"][1], Path("plan.json"))).to_json() == read["plans"][1]
    for broken in ({"was": "Linear"}, {"was": "Linear", "input": 0, "returns": {"zeros": [[1]]}}, 3):
        read["plans"][1]["modules"] = {"1.up": broken}
        (tmp_path / "plan.json").write_text(json.dumps(read))
        with pytest.raises(ValueError, match="is no plan that this version of secateur reads"):
            load_shrunken(Stack("x + f(x)", "scaled"), tmp_path)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ({"7.up": {"was": "Linear", "returns": "input"}}, "the model has no module 7.up, which the plan takes out"),
        ({"1.up": {"was": "Conv1d", "returns": "input"}}, "1.up is a Linear; the plan was made for Conv1d"),
        ({"": {"was": "Stack", "returns": "input"}}, "the model is a Stack; the plan was made for Stack"),
    ],
)
def test_a_plan_that_does_not_fit(modules, message):
    model = Stack("x + f(x)")
    state = state_of(model)
    with pytest.raises(ValueError, match=message):
        carry_out(model, Plan({}, [], modules=modules), None)
    assert is_unchanged(model, state)


def test_verify_finds_a_module_that_is_no_branch():
    model, x = Stack("x + f(x)", "scaled"), torch.randn(5, 4)
    other = copy.deepcopy(model)
    carry_out(other, Plan({}, [], modules={"1.norm": {"was": "LayerNorm", "returns": "input"}}), None)
    with pytest.raises(ValueError, match=r"1\.norm left, and lies in no residual branch"):
        verify_shrunken(model, other, x)


def test_the_optimizer_lets_go_and_training_goes_on():
    model, x = Stack("x + f(x)", "scaled"), torch.randn(5, 4)
    parts = [model[0], model[1]], [model[2], model[3]]
    optimizer = torch.optim.AdamW([{"params": [p for each in part for p in each.parameters()]} for part in parts])
    model(x).sum().backward()
    optimizer.step()
    kept = optimizer.state[model[0].weight]["exp_avg"].clone()
    shrink(model, x, leave=Branches(0.5), include="1.*", optimizer=optimizer)
    mine = {id(parameter) for parameter in model.parameters()}
    assert {id(each) for group in optimizer.param_groups for each in group["params"]} == mine
    assert {id(each) for each in optimizer.state} <= mine
    assert torch.equal(optimizer.state[model[0].weight]["exp_avg"], kept)
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()


def test_a_failing_call_changes_nothing():
    """The branches had left already when the channels could not."""
    model, x = Stack("x + f(x)", "scaled"), torch.randn(5, 4)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(x).sum().backward()
    optimizer.step()
    state, groups = state_of(model), [list(group["params"]) for group in optimizer.param_groups]
    with pytest.raises(ValueError, match="can leave"):
        shrink(model, x, 0.99, leave=Branches(0.5), optimizer=optimizer)
    assert is_unchanged(model, state)
    assert plans_of(model) == []
    assert [list(group["params"]) for group in optimizer.param_groups] == groups
    assert all(each in optimizer.state for each in groups[0] if each.grad is not None)
    find_coupling(model, x)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# ---- choosing -------------------------------------------------------------------------------------------------------


def test_influence_by_hand():
    """1 - cos between (3, 4) and (3, 4) + (1, -2), and over positions the mean; the sum may be taken in place."""

    class Adds(nn.Module):
        def __init__(self, in_place):
            super().__init__()
            self.f, self.in_place = nn.Linear(2, 2, bias=False), in_place
            self.f.weight.data = torch.tensor([[3.0, -2.0], [2.0, -2.0]])  # of (3, 4): (1, -2)

        def forward(self, x):
            out = self.f(x)
            if self.in_place:
                out += x
                return out
            return x + out

    x = torch.tensor([[3.0, 4.0]])
    expected = 1 - (3 * 4 + 4 * 2) / (5 * 20**0.5)
    for in_place in (False, True):
        model = Adds(in_place)
        (found,) = influences(model, find_coupling(model, x), [x]).values()
        assert found == pytest.approx(expected, rel=1e-5)
        model.f.weight.data.zero_()
        (found,) = influences(model, find_coupling(model, x), [x]).values()
        assert found == pytest.approx(0, abs=1e-6)
        model.f.weight.data = -2 * torch.eye(2)
        (found,) = influences(model, find_coupling(model, x), [x]).values()
        assert found == pytest.approx(2)


@pytest.mark.parametrize("target", ["macs", "units", "latency"])
def test_the_rest_of_any_target(target):
    model, x = Stack(*["x + f(x)"] * 4, width=16), torch.randn(5, 4)
    size = sum(parameter.numel() for parameter in model.parameters())
    told = []
    where = ByParameters() if target == "latency" else None
    shrink(model, x, 0.3, leave=Branches(0.25), target=target, runtime=where, report=told.append, round_to=1)
    before, after = told[0].multiply_adds
    assert after < 0.9 * before
    if target == "macs":
        assert after <= 0.7 * before
    if target == "latency":
        assert 0.6 * size < sum(parameter.numel() for parameter in model.parameters()) <= 0.7 * size


def test_errors():
    x = torch.randn(5, 4)
    model = Stack("x + f(x)", "scaled")
    state = state_of(model)
    with pytest.raises(ValueError, match="the model has no residual branch"):
        shrink(nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 3)), x, leave=Branches(0.5))
    with pytest.raises(ValueError, match=r"1\.up is the only residual branch of the model, and one stays at least"):
        shrink(Stack("x + f(x)"), x, leave=Branches(0.5))
    with pytest.raises(ValueError, match=r"branches must be a fraction in \[0, 1\), or a number of branches, not 1\.5"):
        shrink(model, x, leave=Branches(1.5))
    with pytest.raises(ValueError, match=r"no tensor or group matches 'nothing\.\*'"):
        shrink(model, x, leave=Branches(0.5), exclude="nothing.*")
    with pytest.raises(ValueError, match="0 of the 2 residual branches can leave, not 1"):
        shrink(model, x, leave=Branches(0.5), exclude=["1.up", "2.up"])
    bad = copy.deepcopy(model)
    bad[1].down.weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"the score of the branch 1\.up is NaN"):
        shrink(bad, x, leave=Branches(0.5))
    assert is_unchanged(model, state)
