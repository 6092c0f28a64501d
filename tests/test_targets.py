"""What is left alone by default: one table, with a module and with a name."""

import re
import warnings
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from secateur import Pruner, attach, criteria, fit, make_masks, shrink, sparsify
from secateur.models import oneshot
from secateur.models.solving import NOT_A_PRODUCT
from secateur.targets import KINDS, check_lengths, find_layers, find_targets, kinds_by_name, kinds_within, left_alone
from support.families import EVERY_FAMILY, FAMILIES, SMALL, batches, make, without

NAMES = {"embed_out.weight": "lm_head.weight"}  # GPT-NeoX's, as transformers reads it


def matrices(model):
    """Of tied ones the first of their names."""
    return {name for name, parameter in model.named_parameters() if parameter.dim() >= 2}


def of_one_expert_or_all(names):
    """A directory may hold a matrix for each expert where the module has one for all of them."""
    return {name for name in names if not re.search(r"(^|\.)[a-z_]*experts(\.|$)", name)}


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_a_module_a_directory_and_blocks_leave_the_same_alone(family, tmp_path):
    """But for what only one of them sees.

    A directory: buffers, and a matrix for each expert. A walk through the blocks: what a weight
    is multiplied with, and what lies outside of them (here embeddings and heads).
    """
    model = make(family)
    in_memory = of_one_expert_or_all(matrices(model) - find_targets(model).keys())
    assert in_memory == of_one_expert_or_all(kinds_within(model))

    model.save_pretrained(tmp_path / "dense")
    done = sparsify(tmp_path / "dense", 0.5, out=tmp_path / "sparse")
    stored = {NAMES.get(name, name) for names in done.left_alone.values() for name in names}
    stored = {name.replace("block_sparse_moe", "mlp") for name in stored}  # Mixtral's, as transformers reads it
    assert of_one_expert_or_all(stored & matrices(model)) == in_memory

    done = oneshot(model, batches(family), 0.5, solver="magnitude")
    in_blocks = {name for reason, names in done.left_alone.items() for name in names if reason != NOT_A_PRODUCT}
    assert of_one_expert_or_all(in_blocks & matrices(model)) == in_memory


def transformers_model(kind, config, settings):
    import transformers

    torch.manual_seed(0)
    return getattr(transformers, kind)(getattr(transformers, config)(**settings)).eval()


ENCODER = without(SMALL, "num_key_value_heads", "vocab_size", "max_position_embeddings") | {"num_labels": 2}
MODELS = {
    "llama": lambda: make("llama"),
    "llama that scores": lambda: transformers_model("LlamaForSequenceClassification", "LlamaConfig", SMALL),
    "gpt2, tied": lambda: make("gpt2"),
    "gpt2, its own head": lambda: transformers_model(
        "GPT2LMHeadModel", "GPT2Config", FAMILIES["gpt2"][2] | {"tie_word_embeddings": False}
    ),
    "bert": lambda: make("bert"),
    "bert, a classifier": lambda: transformers_model(
        "BertForSequenceClassification", "BertConfig", ENCODER | {"vocab_size": 64}
    ),
    "vit": lambda: transformers_model(
        "ViTForImageClassification", "ViTConfig", ENCODER | {"image_size": 8, "patch_size": 4}
    ),
    "swin": lambda: transformers_model(
        "SwinForImageClassification",
        "SwinConfig",
        {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
    ),
    "whisper": lambda: transformers_model(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            "vocab_size": 64, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
            "decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "pad_token_id": 0,
            "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "num_mel_bins": 8,
        },
    ),
    "mixtral": lambda: make("mixtral"),
    "mamba": lambda: make("mamba"),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_model_and_the_directory_that_it_is_saved_in_have_the_same_targets(name, tmp_path):
    model = MODELS[name]()
    model.save_pretrained(tmp_path / "dense")
    sparsify(tmp_path / "dense", 0.5, out=tmp_path / "sparse")
    pruned = type(model).from_pretrained(tmp_path / "sparse")  # which reads files that name tensors otherwise, too
    changed = {name for name, each in pruned.named_parameters() if not torch.equal(each, model.get_parameter(name))}
    assert changed == set(find_targets(model))


IMAGES = [{"pixel_values": torch.ones(4, 3, 8, 8) * torch.arange(1, 5).view(4, 1, 1, 1)}]


@pytest.mark.parametrize(
    ("name", "data"), [("llama", batches("llama")), ("bert, a classifier", batches("bert")), ("vit", IMAGES)]
)
def test_a_walk_through_the_blocks_has_those_targets_that_are_in_blocks(name, data):
    model = MODELS[name]()
    done = oneshot(model, data, 0.5, solver="magnitude")
    outside = set(done.left_alone["outside the blocks"])
    assert {layer.name for layer in done.layers} == set(find_targets(model)) - outside
    assert outside


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.rnn, self.fc = nn.Embedding(30, 8), nn.LSTM(8, 8, 2, bidirectional=True), nn.Linear(16, 2)
        self.attention, self.token = nn.MultiheadAttention(8, 2, add_bias_kv=True), nn.Parameter(torch.zeros(1, 8))
        self.words_embed = self.words
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 6))
        self.older = nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))


def test_modules_of_torch_have_the_same_targets_in_a_file(tmp_path):
    model = Recurrent()
    (tmp_path / "dense").mkdir()
    state = {name: each.clone().contiguous() for name, each in model.state_dict().items() if name != "words.weight"}
    save_file(state, tmp_path / "dense/model.safetensors")
    done = sparsify(tmp_path / "dense", 0.5, out=tmp_path / "sparse")
    assert set(done.targets) == set(find_targets(model))
    assert "rnn.weight_hh_l1_reverse" in done.targets


class Classifier(nn.Module):
    def __init__(self, first=nn.Embedding):
        super().__init__()
        self.words = first(30, 8)
        self.norm = nn.Linear(8, 8)
        self.embed = nn.Linear(8, 8)
        self.body = nn.LSTM(8, 8)
        self.class_token = nn.Parameter(torch.zeros(5, 8))
        self.head = nn.Linear(8, 10)


def shapes_of(model):
    return {name: tuple(each.shape) for name, each in model.named_parameters() if each.dim() >= 2}


def test_names_decide_where_there_is_a_module_too():
    """What only a class tells are the words; all else is as in a directory."""
    model = Classifier()
    assert list(find_targets(model)) == ["body.weight_ih_l0", "body.weight_hh_l0"]
    kinds = kinds_within(model)
    assert kinds.pop("words.weight") == "embeddings"
    assert kinds == kinds_by_name(shapes_of(model), ["words.weight"])
    assert kinds == {
        "class_token": "not named *.weight", "norm.weight": "normalizations", "embed.weight": "embeddings",
        "head.weight": "output heads",
    }  # fmt: skip
    assert list(find_targets(model, include="head.weight")) == ["head.weight"]
    assert left_alone(model, find_layers(model, include="body.*"))["head.weight"] == "output heads"


class LinearOfAGraph(nn.Module):
    """As torch_geometric's ``Linear``, which is none of torch's."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 3))


def test_a_linear_layer_of_another_library_is_one():
    model = nn.ModuleDict({"conv": LinearOfAGraph(), "rnn": nn.GRU(4, 4)})
    assert list(find_layers(model)) == ["conv.weight"]


def test_a_classifiers_head_is_one_where_there_are_embeddings():
    images = nn.ModuleDict({"stem": nn.Conv2d(3, 8, 3), "classifier": nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))})
    assert list(find_targets(images)) == ["stem.weight", "classifier.0.weight", "classifier.1.weight"]
    assert not kinds_by_name(shapes_of(images))
    images["patch_embed"] = nn.Conv2d(3, 8, 4)
    assert list(find_targets(images)) == ["stem.weight"]
    plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 10))
    assert list(find_targets(plain)) == ["0.weight", "3.weight"]


def test_a_head_of_attention_in_a_numbered_block_is_none():
    shapes = {"embed.weight": (9, 8), "blocks.0.heads.0.key.weight": (4, 8), "heads.0.weight": (9, 8)}
    assert kinds_by_name(shapes) == {"embed.weight": "embeddings", "heads.0.weight": "output heads"}


class Head(nn.Module):
    """As BERT's: what lies between the stream and the words is a part of it."""

    def __init__(self):
        super().__init__()
        self.transform, self.decoder = nn.Linear(8, 8), nn.Linear(8, 31)


class Given(nn.Module):
    """A model that says which is its head."""

    def __init__(self):
        super().__init__()
        self.words, self.body, self.last = nn.Embedding(30, 8), nn.Linear(8, 8), nn.Linear(8, 29)
        self.lm_head = Head()

    def get_output_embeddings(self):
        return self.last


def test_a_head_is_what_the_model_says_and_all_of_the_module_that_is_called_one():
    assert list(find_targets(Given())) == ["body.weight"]
    model = Given()
    model.get_output_embeddings = lambda: model.lm_head.decoder
    assert list(find_targets(model)) == ["body.weight", "last.weight"]

    def fails():
        raise NotImplementedError

    model.get_output_embeddings = fails
    assert "last.weight" in find_targets(model)


def test_a_model_inside_a_module_called_head_is_no_head():
    model = Given()
    model.get_output_embeddings = lambda: model.lm_head.decoder
    assert list(find_targets(nn.ModuleDict({"head": model}))) == ["head.body.weight", "head.last.weight"]


def test_a_normalization_among_embeddings_is_called_what_it_is():
    model = nn.ModuleDict({"embeddings": nn.ModuleDict({"words": nn.Embedding(9, 4), "LayerNorm": nn.LayerNorm(4)})})
    assert left_alone(model, []) == {
        "embeddings.words.weight": "embeddings",
        "embeddings.LayerNorm.weight": "normalizations",
        "embeddings.LayerNorm.bias": "normalizations",
    }


def test_a_gate_is_a_router_beside_experts_and_adapters_are_left_alone():
    block = nn.ModuleDict({"gate": nn.Linear(4, 2), "experts": nn.ModuleList([nn.Linear(4, 4)])})
    model = nn.ModuleDict({"moe": block, "gate": nn.Linear(4, 4), "up": nn.ModuleDict({"lora_A": nn.Linear(4, 2)})})
    assert kinds_within(model) == {"moe.gate.weight": "routers", "up.lora_A.weight": "adapters"}
    assert list(find_targets(model)) == ["moe.experts.0.weight", "gate.weight"]
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters() if each.dim() >= 2}
    assert kinds_by_name(shapes) == kinds_within(model)


def test_an_embedding_with_a_parametrization_is_an_embedding():
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4))
    nn.utils.parametrize.register_parametrization(model[0], "weight", nn.Identity())
    assert list(find_targets(model)) == ["1.weight"]


def test_every_kind_says_why():
    reasons = [kind.reason for kind in KINDS]
    assert len(set(reasons)) == len(reasons)
    for kind in KINDS:
        assert kind.why.endswith(".")
        assert kind.modules or kind.named.pattern != "(?!)"


def test_many_names_take_time_in_proportion():
    """Each name is looked at once: a million pairs of a gate and experts would not end."""
    shapes = {}
    for at in range(20_000):
        shapes |= {f"layers.{at}.mlp.gate.weight": (4, 8)}
    shapes |= {f"layers.{at}.mlp.experts.0.up.weight": (8, 8) for at in range(20_000)}
    assert len(kinds_by_name(shapes)) == 20_000


# ---- Weight normalization: a direction of which nothing stays has no length, and the model would compute NaN. ----


@pytest.fixture(params=["parametrization", "hook"])
def normalized(request):
    """Three layers whose first has outputs of tiny directions; the name of their last part."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 8, 3), nn.ReLU(), nn.Conv1d(8, 4, 3)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the older hook
        for module in (model[0], model[2]):
            new = request.param == "parametrization"
            (nn.utils.parametrizations.weight_norm if new else nn.utils.weight_norm)(module)
    name = "0.parametrizations.weight.original1" if new else "0.weight_v"
    model.get_parameter(name).data[:3] *= 1e-3
    return model, name


def trained(model, **how):
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)
    Pruner(model, optimizer, criterion=criteria.magnitude, verbose=False, **how)
    for _ in range(4):
        model(torch.randn(2, 2, 9)).sum().backward()
        optimizer.step()


def attached(model):
    attach(model, make_masks(find_targets(model), 0.5))


@pytest.mark.parametrize(
    "verb", [lambda model: sparsify(model, 0.5), attached, lambda model: trained(model, schedule=lambda step: 0.5)]
)
def test_masks_that_leave_nothing_of_a_normalized_output_are_refused(verb, normalized):
    model, name = normalized
    with pytest.raises(ValueError, match=rf"^{re.escape(name)}: of 3 outputs nothing .* NaN.*remove_weight_norm"):
        verb(model)
    assert model.get_parameter(name).all()
    sparsify(model, 0.1)
    assert model(torch.randn(2, 2, 9)).isfinite().all()


def test_of_a_directory_they_are_refused_and_nothing_is_left(normalized, tmp_path):
    model, name = normalized
    (tmp_path / "dense").mkdir()
    save_file(model.state_dict(), tmp_path / "dense/model.safetensors")
    how = {"include": ["*_v" if name.endswith("_v") else "*.original1"], "out": tmp_path / "sparse"}
    with pytest.raises(ValueError, match=rf"^{re.escape(name)}: of 3 outputs nothing would stay"):
        sparsify(tmp_path / "dense", 0.5, **how)
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]
    sparsify(tmp_path / "dense", 0.1, **how)
    model.load_state_dict(load_file(tmp_path / "sparse/model.safetensors"))
    assert model(torch.randn(2, 2, 9)).isfinite().all()


def test_they_are_refused_in_the_midst_of_training(normalized):
    with pytest.raises(ValueError, match="of 3 outputs nothing would stay"):
        trained(normalized[0], schedule=0.5, total_steps=4)


@pytest.mark.parametrize("dim", [0, 1, 2, None])
def test_the_length_is_over_all_dimensions_but_one(dim):
    layer = nn.utils.parametrizations.weight_norm(nn.Conv1d(3, 4, 5), dim=dim)
    name, mask = "parametrizations.weight.original1", torch.zeros(4, 3, 5, dtype=torch.bool)
    mask[torch.arange(4), torch.arange(4).clamp(max=2), torch.arange(4)] = True
    shapes = {other: each.shape for other, each in layer.named_parameters()}
    if dim in (0, 1, None):
        check_lengths(layer, {name: mask})
        check_lengths(shapes, {name: mask})
    mask[0] = False
    with pytest.raises(ValueError, match=r"of [12] outputs nothing would stay") if dim is not None else nullcontext():
        check_lengths(layer, {name: mask})
    with pytest.raises(ValueError, match=r"of [12] outputs nothing would stay") if dim is not None else nullcontext():
        check_lengths(shapes, {name: mask})
    check_lengths(layer, {"bias": torch.zeros(4, dtype=torch.bool)})


def test_what_hides_products_is_told(normalized):
    model, _ = normalized
    given = [torch.randn(2, 2, 9) for _ in range(2)]
    said = r" 2 of its weights, such as 0\.weight, are computed at every pass, .* the model computes the same\."
    for verb in (
        lambda: oneshot(model, given, 0.5),
        lambda: shrink(model, given[0], 0.3, batches=given),
        lambda: fit(model, given, budget={"params": 0.8}, over="oneshot", example_inputs=given[0]),
    ):
        with pytest.raises(ValueError, match=said):
            verb()
