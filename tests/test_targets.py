"""What is left alone by default: one table, with a module and with a name."""

import re

import pytest
import torch
from torch import nn

from secateur.blockwise import oneshot
from secateur.blockwise.solving import NOT_A_PRODUCT
from secateur.checkpoints import sparsify_checkpoint
from secateur.targets import KINDS, find_layers, find_targets, kinds_by_name, kinds_within, left_alone
from support.families import FAMILIES, batches, make

NAMES = {"embed_out.weight": "lm_head.weight"}  # GPT-NeoX's, as transformers reads it


def matrices(model):
    """Of tied ones the first of their names."""
    return {name for name, parameter in model.named_parameters() if parameter.dim() >= 2}


def of_one_expert_or_all(names):
    """A directory may hold a matrix for each expert where the module has one for all of them."""
    return {name for name in names if not re.search(r"(^|\.)[a-z_]*experts(\.|$)", name)}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_module_a_directory_and_blocks_leave_the_same_alone(family, tmp_path):
    """But for what only one of them sees.

    A module: that a classifier scores no words, and that a layer with the name of an embedding is a convolution (these
    families have neither). A directory: buffers, and a matrix for each expert. A walk through the blocks: what a weight
    is multiplied with, and what lies outside of them (here embeddings and heads).
    """
    model = make(family)
    in_memory = of_one_expert_or_all(matrices(model) - find_targets(model).keys())
    assert in_memory == of_one_expert_or_all(kinds_within(model))

    model.save_pretrained(tmp_path / "dense")
    done = sparsify_checkpoint(tmp_path / "dense", tmp_path / "sparse", 0.5)
    stored = {NAMES.get(name, name) for names in done.left_alone.values() for name in names}
    stored = {name.replace("block_sparse_moe", "mlp") for name in stored}  # Mixtral's, as transformers reads it
    assert of_one_expert_or_all(stored & matrices(model)) == in_memory

    done = oneshot(model, batches(family), 0.5, solver="magnitude")
    in_blocks = {name for reason, names in done.left_alone.items() for name in names if reason != NOT_A_PRODUCT}
    assert of_one_expert_or_all(in_blocks & matrices(model)) == in_memory


class Classifier(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.words = nn.Embedding(30, 8)
        self.norm = nn.Linear(8, 8)
        self.embed = nn.Linear(8, 8)
        self.pos_embed = nn.Parameter(torch.zeros(5, 8))
        self.head = nn.Linear(8, classes)


def test_the_last_layer_of_a_classifier_is_a_layer_like_others():
    assert list(find_targets(Classifier(10))) == ["norm.weight", "embed.weight", "head.weight"]
    assert list(find_targets(Classifier(30))) == ["norm.weight", "embed.weight"]
    assert list(find_targets(Classifier(30), include="head.weight")) == ["head.weight"]
    reasons = left_alone(Classifier(30), find_layers(Classifier(30)))
    assert (reasons["head.weight"], reasons["pos_embed"]) == ("output heads", "embeddings")
    plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 10))
    assert list(find_targets(plain)) == ["0.weight", "3.weight"]


def test_where_there_is_only_a_name_what_looks_like_one_is_one_and_nothing_else():
    shapes = {name: tuple(each.shape) for name, each in Classifier(10).named_parameters() if each.dim() >= 2}
    assert kinds_by_name({**shapes, "rnn.weight_ih_l0": (8, 8), "fc.weight": (8, 8), "up.weight": (8, 8)}) == {
        "pos_embed": "embeddings",
        "norm.weight": "normalizations",
        "embed.weight": "embeddings",
        "head.weight": "output heads",
        "rnn.weight_ih_l0": "not named *.weight",
        "fc.weight": "output heads",
    }


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
    assert list(find_targets(Given())) == ["body.weight", "lm_head.transform.weight", "lm_head.decoder.weight"]
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
