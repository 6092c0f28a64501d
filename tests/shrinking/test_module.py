"""Laws of `shrink`: what is left computes what the original does with zeros, and a call that fails changes nothing."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map_only

import zoo
from secateur import fit, load_shrunken, save_shrunken, shrink, verify_shrunken
from secateur.coupling import find_coupling
from secateur.inference import load_packed
from secateur.models import divergence
from secateur.pipeline import reestimate_batchnorm
from secateur.shrinking import request as subject
from secateur.shrinking.proof import outputs
from secateur.support import run_example, tensors_in
from support.unchanged import is_unchanged, state_of

NOTHING_LEAVES = {"shufflenet_v1", "unfold_attention"}  # their code fixes every width by a number or by neighbours


# those models that between them take every way through the rules; `make examples` has all
FIRST = {
    "cnn_flatten", "alex_net", "resnet_basic", "resnet_option_a", "yolo_v5", "bi_fpn", "shufflenet_v1",
    "shufflenet_v2", "espcn", "space_to_depth", "grouped_transposed", "rep_vgg", "film", "prelu_net",
    "layer_norm_image", "lstm_bidirectional", "lstm_cell_loop", "tcn", "conformer_convolution", "temporal_shift",
    "multihead_self", "gpt_interleaved", "mqa_qk_norm", "gqa_partial_rope", "gqa_sdpa_complex",
    "gqa_grouped_einsum", "gqa_interleave", "vit_mean_layer_scale", "hand_swin", "linear_attention",
    "unfold_attention", "detr", "queries_are_keys", "rows_replaced", "diffusion_unet", "variational_autoencoder",
    "dlrm", "topk_moe", "mixture_by_number", "mixture_in_groups", "mixture_by_place", "mixture_by_count",
    "mixture_of_pairs", "functional_parameters", "functional_convolutions", "weight_standardized", "two_tower",
    "bilinear_net", "max_feature_map", "keyword_inputs", "indexed_channels", "standardized_by_hand",
    "fourier_over_channels", "gram_matrix", "trap_attributes",
    "bert", "bloom", "clip", "deberta_v2", "gpt2", "llama", "mixtral", "phi3", "t5", "vit",
}  # fmt: skip

FROZEN_BY_PROOF = {"linear_attention", "weight_standardized"}  # a removed unit is not zero where it is summed over


# one of each family of transformers; the benchmark has them all
TRANSFORMERS = [
    "bart", "bert", "bloom", "clip", "convnext", "deberta_v2", "gemma2", "gpt2", "gpt_neox", "llama", "mamba",
    "mixtral", "phi3", "qwen3", "resnet", "segformer", "swin", "t5", "vit", "wav2vec2", "whisper",
]  # fmt: skip


def small(width=16):
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))


def uneven(seed):
    """Scores and counts that have nothing to do with the weights."""
    generator = torch.Generator().manual_seed(seed)

    def criterion(weight):
        return torch.rand(weight.shape, generator=generator) + 0.1

    def allocate(scores, sparsity, pattern):
        # at least two: of a single value there is no spread to standardize by
        return {name: int(torch.randint(2, len(each) + 1, (), generator=generator)) for name, each in scores.items()}

    return criterion, allocate


def built(name):
    """A model of the zoo, its inputs and the same model again, once they have shown what the law of the zoo says."""
    state = torch.get_rng_state()
    model, inputs = zoo.ZOO[name]()
    assert torch.equal(torch.get_rng_state(), state), "building drew from the caller's generator"
    torch.manual_seed(len(name))
    again, inputs_again = zoo.ZOO[name]()
    assert same(model.state_dict().values(), again.state_dict().values())
    assert same(tensors_in(inputs), tensors_in(inputs_again))
    assert not any(module.training for module in model.modules())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_000_000
    assert all(tensor.shape[0] == 2 for tensor in tensors_in(inputs))
    wide = tree_map_only(torch.Tensor, lambda each: each.double() if each.is_floating_point() else each, inputs)
    with torch.no_grad():
        singles = [*tensors_in(run_example(model, inputs))]
        assert same(singles, tensors_in(run_example(again, inputs)))
        doubles = [*tensors_in(run_example(again.double(), wide))]
    assert any(tensor.is_floating_point() and tensor.dim() > 0 for tensor in doubles)
    for single, double in zip(singles, doubles, strict=True):
        if double.is_floating_point():
            assert double.isfinite().all()
            torch.testing.assert_close(single.double(), double.double(), rtol=1e-3, atol=1e-3)
    return model, inputs, again.float()


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    "name",
    [name if name in FIRST else pytest.param(name, marks=pytest.mark.examples) for name in zoo.names("hand")],
)
def test_zoo(name, monkeypatch):
    """Both ways of choosing; the proof finds nothing wrong, so what the rules say is right."""
    frozen = []
    wrong = subject.wrong_groups

    def spy(*arguments):
        found = wrong(*arguments)
        frozen.extend(found)
        return found

    monkeypatch.setattr(subject, "wrong_groups", spy)
    model, inputs, other = built(name)
    if name in NOTHING_LEAVES:
        state = state_of(model)
        with pytest.raises(ValueError, match="nothing of the model can leave"):
            shrink(model, inputs, 0.5, target="units")
        assert is_unchanged(model, state)
        return
    before = sum(parameter.numel() for parameter in model.parameters())
    shapes = [tensor.shape for tensor in outputs(model.double(), inputs)]
    model.float()
    shrink(model, inputs, 0.5, target="units")
    assert sum(parameter.numel() for parameter in model.parameters()) < before
    assert [tensor.shape for tensor in outputs(copy.deepcopy(model).double(), inputs)] == shapes
    criterion, allocate = uneven(0)
    shrink(other, inputs, 0.5, target="units", criterion=criterion, allocate=allocate)
    assert bool(frozen) == (name in FROZEN_BY_PROOF)


def test_the_zoo_has_two_kinds_and_no_name_twice():
    assert [*zoo.names("hand"), *zoo.names("transformers")] == list(zoo.ZOO)
    with pytest.raises(ValueError, match='kind is "hand" or "transformers", not \'all\''):
        zoo.names("all")
    with pytest.raises(ValueError, match="the zoo has two models named 'mlp'"):
        zoo.hand(zoo.vector(3), name="mlp")(torch.nn.Identity)


@pytest.mark.parametrize(
    "name",
    [name if name in FIRST else pytest.param(name, marks=pytest.mark.examples) for name in TRANSFORMERS],
)
def test_zoo_of_transformers(name):
    model, inputs, original = built(name)
    shrink(model, inputs, 0.5, target="units")
    assert sum(p.numel() for p in model.parameters()) < sum(p.numel() for p in original.parameters())
    verify_shrunken(original, model, inputs)


def test_removed_channels_are_the_smallest_and_the_kept_are_bitwise_what_they_were():
    model, x = small(8), torch.randn(2, 4)
    with torch.no_grad():
        model[0].weight.copy_(torch.arange(8.0)[:, None].expand(8, 4))
        model[2].weight.fill_(1.0)
    kept = model[2].weight[:, 4:].clone()
    shrink(model, x, 0.5, target="units")
    assert torch.equal(model[0].weight, torch.arange(4.0, 8.0)[:, None].expand(4, 4))
    assert torch.equal(model[2].weight, kept)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"sparsity": 0.99}, "at most .* of the params can leave"),
        ({"criterion": lambda weight: weight * torch.nan}, "NaN"),
    ],
)
def test_errors_change_nothing(keywords, words):
    model, x = small(), torch.randn(2, 4)
    state = state_of(model)
    with pytest.raises(ValueError, match=words):
        shrink(model, x, **{"sparsity": 0.5, **keywords})
    assert is_unchanged(model, state)
    assert not hasattr(model, "shrink_plans")


@pytest.mark.parametrize(
    ("model", "x", "words"),
    [
        (nn.ReLU(), torch.ones(1, 4), "ReLU has no parameters"),
        (nn.Sequential(nn.LazyLinear(5), nn.Linear(5, 3)), torch.ones(1, 4), r"0\.weight has no shape yet"),
        (small(), torch.ones(0, 4), "in the example a tensor .* holds nothing; give at least one sample"),
        (nn.Linear(4, 3), torch.ones(1, 4), "nothing of the model can leave"),
    ],
)
def test_models_of_which_nothing_can_be_said(model, x, words):
    with pytest.raises(ValueError, match=words):
        shrink(model, x, 0.5)


@pytest.mark.parametrize("wrap", [functools.partial(torch.compile, backend="eager"), nn.DataParallel])
def test_the_model_inside_another_one_is_shrunken_and_saved_by_its_own_names(wrap, tmp_path):
    model, x = small(), torch.randn(2, 4)
    wrapped = wrap(model)
    assert shrink(wrapped, x, 0.5, target="units", include="0.*").model is wrapped
    assert model[0].out_features == 8
    assert wrapped(x).shape == (2, 3)
    save_shrunken(wrapped, tmp_path)
    assert torch.equal(load_shrunken(wrap(small()), tmp_path)(x), model(x))
    assert torch.equal(load_shrunken(small(), tmp_path)(x), model(x))


def test_replicas_that_send_gradients_of_the_old_shapes_are_refused(tmp_path):
    model, x = small(), torch.randn(2, 4)
    replicated = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(replicated)
    replicated.module = model
    before = state_of(model)
    for call in (
        lambda: shrink(replicated, x, 0.5),
        lambda: fit(replicated, [x], budget={"params": 0.5}),
        lambda: load_shrunken(replicated, tmp_path),
        lambda: load_packed(replicated, tmp_path / "packed"),
    ):
        with pytest.raises(ValueError, match=r"DistributedDataParallel .* pass model\.module"):
            call()
        assert is_unchanged(model, before)


def test_parameters_stay_the_same_objects_and_optimizers_go_on():
    torch.manual_seed(0)
    model, x = small(), torch.randn(8, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    identities = [id(parameter) for parameter in model.parameters()]
    moments = optimizer.state[model[0].weight]["exp_avg"].clone()
    gradient = model[0].weight.grad.clone()
    shrink(model, x, 0.5, target="units", optimizer=optimizer)
    (plan,) = model.shrink_plans
    kept = torch.from_numpy(plan.tensors["0.weight"][1][0])
    assert [id(parameter) for parameter in model.parameters()] == identities
    assert torch.equal(optimizer.state[model[0].weight]["exp_avg"], moments[kept])
    assert torch.equal(model[0].weight.grad, gradient[kept])
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()
    assert optimizer.state[model[0].weight]["exp_avg"].shape == (8, 4)


class Rotated(nn.Module):
    """Fills a table at the first call, as rotary embeddings do, and remembers in a number how much of it."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 16), nn.Linear(16, 3)
        self.register_buffer("table", torch.zeros(8), persistent=False)
        self.known = 0

    def forward(self, x):
        if self.known < x.shape[1]:
            self.known = x.shape[1]
            self.table[: self.known] = torch.arange(self.known).cos()
        return self.down(self.up(x).relu() * self.table[: x.shape[1], None])


def test_a_table_that_the_first_call_fills_is_not_left_empty_and_called_full():
    torch.manual_seed(0)
    model, x = Rotated(), torch.randn(2, 5, 4)
    smaller = shrink(model, x, 0.3).model
    assert smaller.known == 0
    other = copy.deepcopy(smaller)
    other.known, other.table = 5, torch.arange(8).cos()
    torch.testing.assert_close(smaller(x), other(x))


def test_tied_weights_stay_tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.mix = nn.Embedding(11, 12), nn.Linear(12, 12)
            self.head = nn.Linear(12, 11, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens):
            x = self.embedding(tokens)
            return self.head(x + torch.tanh(self.mix(x)))

    model, tokens = Tied(), torch.arange(5)
    shrink(model, tokens, 0.5, target="units")
    assert model.head.weight is model.embedding.weight
    assert model.embedding.weight.shape == (11, 6)
    assert model.head.in_features == model.embedding.embedding_dim == 6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_keep_theirs(dtype):
    model = small().to(dtype)
    with torch.no_grad():
        model[0].weight.copy_(model[0].weight.t().contiguous().t())  # not contiguous
    shrink(model, torch.randn(2, 4, dtype=dtype), 0.5)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}


class Standardized(nn.Module):
    """A weight that is divided by its spread over its inputs: of a single input there is none."""

    def __init__(self):
        super().__init__()
        self.up, self.mid, self.down = nn.Linear(4, 2), nn.Linear(2, 12), nn.Linear(12, 3)

    def forward(self, x):
        mean, spread = self.mid.weight.mean(1, keepdim=True), self.mid.weight.std(1, keepdim=True)
        return self.down(F.linear(self.up(x), (self.mid.weight - mean) / (spread + 1e-5), self.mid.bias))


def test_a_model_that_has_no_result_any_more_is_not_left_behind():
    model, x = Standardized(), torch.randn(3, 4)
    shrink(model, x, 0.5, target="units")
    assert (model.up.out_features, model.mid.out_features) == (2, 6)
    assert model(x).isfinite().all()


def test_numbers_of_modules_follow_and_unrelated_equal_numbers_do_not():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads, self.width, self.window = 4, 8, 4  # the window equals the heads by accident
            self.qkv, self.out = nn.Linear(6, 96), nn.Linear(32, 6)

        def forward(self, x):
            b, s, _ = x.shape
            q, k, v = self.qkv(x).view(b, s, 3, self.heads, self.width).permute(2, 0, 3, 1, 4)
            scores = (q @ k.transpose(-1, -2) * 0.3).softmax(-1)
            x = (scores @ v).transpose(1, 2).reshape(b, s, self.heads * self.width)
            return self.out(x)[:, : self.window]

    model, x = Attention(), torch.randn(2, 5, 6)
    original = copy.deepcopy(model)
    shrink(model, x, 0.5, target="units")
    assert (model.heads, model.width, model.window) == (2, 4, 4)
    assert model.qkv.out_features == 3 * 2 * 4
    verify_shrunken(original, model, x)


def test_a_shrunken_model_compiles_exports_and_copies():
    model, x = small(), torch.randn(2, 4)
    shrink(model, x, 0.5)
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(exported(x), model(x))
    torch.testing.assert_close(copy.deepcopy(model)(x), model(x))
    assert len(copy.deepcopy(model).shrink_plans) == 1


def test_a_model_on_meta_is_coupled_but_not_ranked():
    with torch.device("meta"):
        model, x = small(), torch.randn(2, 4)
    (group,) = find_coupling(model, x).groups
    assert group.size == 16
    with pytest.raises(ValueError, match=r"0\.weight is on the meta device"):
        shrink(model, x, 0.5)


class Positions(nn.Module):
    """Tables that are longer than the example, cut before and after they are computed with."""

    def __init__(self):
        super().__init__()
        self.position, self.other = nn.Parameter(torch.randn(1, 40, 6)), nn.Parameter(torch.randn(40, 6))
        self.register_buffer("mask", torch.ones(40, 40).tril())
        self.register_buffer("places", torch.arange(40)[None])
        self.table, self.up, self.down = nn.Embedding(40, 6), nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x):
        n = x.shape[1]
        x = x + self.position[:, :n] + (self.other * 2).cos()[:n] + self.table(self.places[:, :n])
        scores = (x @ x.transpose(1, 2)).masked_fill(self.mask[:n, :n] == 0, -1e4).softmax(-1)
        return self.down(F.gelu(self.up(scores @ x)))


def test_what_the_example_does_not_reach_stays():
    model = Positions()
    (group,) = find_coupling(model, torch.randn(2, 7, 6)).groups
    assert group.name == "up.weight"
    shrink(model, torch.randn(2, 7, 6), 0.5, target="units")
    assert model(torch.randn(2, 40, 6)).shape == (2, 40, 6)


@pytest.mark.parametrize("images", [6, 256])
def test_batch_normalizations_are_made_anew_only_where_outputs_come_nearer_by_that(images):
    """Of six images the statistics are far from those of a whole training."""
    torch.manual_seed(5)
    layers = [nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 12, 3), nn.BatchNorm2d(12), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(12 * 16, 5))
    reestimate_batchnorm(model, [torch.randn(512, 3, 8, 8)])
    model.eval()
    batches = [torch.randn(images, 3, 8, 8)]
    dense, statistics = copy.deepcopy(model), model[4].running_mean.clone()
    shrink(model, batches[0][:2], 0.3, batches=batches, verify=False)
    again = copy.deepcopy(model)
    reestimate_batchnorm(again, batches)
    with torch.no_grad():
        lost, rows = divergence(dense(batches[0]), model(batches[0]))
        more, _ = divergence(dense(batches[0]), again(batches[0]))
    assert rows == images
    assert lost <= more * (1 + 1e-4)
    assert torch.isin(model[4].running_mean, statistics).all() or images == 256


class Asserted(nn.Module):
    """Says by ``torch._assert`` what it is called with, as half of timm does: torch hands that call to a mode again."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 4)

    def forward(self, x):
        torch._assert(x.shape[-1] == 8, "the width of the input")
        hidden = self.norm(self.first(x).relu())
        torch._assert(hidden.shape[-1] == self.first.out_features, "the width inside")
        return self.last(hidden)


@pytest.mark.parametrize("calibrated", [False, True])
def test_a_model_that_asserts_what_it_is_called_with_loses_units(calibrated):
    model, x = Asserted(), torch.randn(16, 8)
    shrunk = shrink(model, x, 0.3, batches=[x] if calibrated else None)
    assert model.first.out_features < 32
    assert model(x).shape == (16, 4)
    assert shrunk.parameters[1] == sum(each.numel() for each in model.parameters())
