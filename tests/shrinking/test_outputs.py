"""Outputs of a head that leave: what stays is what it was, whatever the others would have been, or they stay."""

import copy
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    ViTConfig,
    ViTForImageClassification,
    YolosConfig,
    YolosForObjectDetection,
)

from secateur import load_shrunken, save_shrunken, shrink, verify_checkpoint
from secateur.kinds import Outputs
from secateur.shrinking import directory, verify_shrunken
from support.told import tables_of

PICTURES = torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16)


def cnn(classes=6):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes)
    ).eval()


class Towers(nn.Module):
    """Of each class a tower of its own, as grouped convolutions; classes of each pixel."""

    def __init__(self, classes=5):
        super().__init__()
        self.body = nn.Conv2d(3, 4 * classes, 3, padding=1)
        self.tower = nn.Sequential(
            nn.Conv2d(4 * classes, 2 * classes, 3, padding=1, groups=classes),
            nn.ReLU(),
            nn.Conv2d(2 * classes, classes, 1, groups=classes),
        )

    def forward(self, x):
        return {"out": self.tower(self.body(x).relu())}


class Detector(nn.Module):
    """As Ultralytics detects: for each scale boxes and classes, joined, reshaped, and taken apart by plain integers."""

    def __init__(self, classes=7, bins=4):
        super().__init__()
        self.names = {number: f"thing {number}" for number in range(classes)}
        self.nc, self.bins = classes, bins
        self.yaml = {"nc": classes, "depth": classes}  # what it was built from
        self.no = classes + 4 * bins
        self.stem, self.deep = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1)
        self.cv2, self.cv3 = (
            nn.ModuleList(
                nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1, groups=8), nn.Conv2d(8, 6, 1), nn.SiLU(), nn.Conv2d(6, count, 1))
                for _ in "ab"
            )
            for count in (4 * bins, classes)
        )

    def forward(self, x):
        found = [self.stem(x).relu()]
        found.append(self.deep(found[0]).relu())
        maps = [torch.cat((box(y), thing(y)), 1) for y, box, thing in zip(found, self.cv2, self.cv3, strict=True)]
        if self.training:
            return maps
        joined = torch.cat([each.view(each.shape[0], self.no, -1) for each in maps], 2)
        boxes, things = joined.split((4 * self.bins, self.nc), 1)
        shares = boxes.view(boxes.shape[0], 4, self.bins, -1).softmax(2)
        edges = (shares * torch.arange(self.bins, dtype=shares.dtype).view(1, 1, -1, 1)).sum(2)
        return torch.cat((edges, things.sigmoid()), 1), maps, found


def picked(outputs, keep, boxes=0):
    """These classes, which are the last of the dimension that holds them; boxes before them stay."""
    if isinstance(outputs, dict):
        return {key: picked(each, keep, boxes) for key, each in outputs.items()}
    return outputs[:, [*range(boxes), *(boxes + number for number in keep)]]


def run(model, x=PICTURES):
    with torch.no_grad():
        return model(x)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5, unique=True).map(sorted), st.integers(0, 99))
@settings(max_examples=8)
def test_classes_that_stay_are_what_they_were(keep, seed):
    torch.manual_seed(seed)
    model = cnn().double()
    expected = run(model, PICTURES.double())[:, keep]
    shrink(model, PICTURES.double(), leave=Outputs("5", keep=keep))
    torch.testing.assert_close(run(model, PICTURES.double()), expected, rtol=1e-12, atol=1e-12)
    assert model[5].out_features == len(keep)


def test_data_decides_about_the_rest_of_a_network_with_batch_normalizations():
    torch.manual_seed(0)
    model = cnn().double()
    batches = [torch.randn(16, 3, 16, 16).double() for _ in range(2)]
    done = shrink(model, PICTURES.double(), 0.3, leave=Outputs("5", keep=[1, 4]), batches=batches)
    assert run(model, PICTURES.double()).shape == (2, 2)
    assert 0 < model[0].out_channels < 8
    assert done.got > 0.2


def test_a_tower_of_a_class_leaves_with_it():
    model = Towers()
    expected = picked(run(model), [1, 4])
    done = shrink(model, PICTURES, leave=Outputs("tower", keep=[1, 4]))
    torch.testing.assert_close(run(model), expected)
    assert [model.tower[0].groups, model.tower[2].groups, model.body.out_channels] == [2, 2, 8]
    assert tables_of(done.content())["outputs"]
    assert done.parameters[1] == sum(each.numel() for each in model.parameters())


def test_classes_of_a_detector_leave_every_scale_and_the_numbers_that_count_them(tmp_path):
    model = Detector().eval()
    dense, fresh = copy.deepcopy(model), copy.deepcopy(model)
    expected, maps, features = run(model)
    shrink(model, PICTURES, leave=Outputs("cv3", keep=[0, 5]))
    found, small, same = run(model)
    torch.testing.assert_close(same, features, rtol=0, atol=0)
    torch.testing.assert_close(found, picked(expected, [0, 5], boxes=4))
    torch.testing.assert_close(small, [picked(each, [0, 5], boxes=16) for each in maps])
    assert (model.nc, model.no, model.names) == (2, 18, {0: "thing 0", 1: "thing 5"})
    assert (model.yaml, dense.yaml) == ({"nc": 2, "depth": 7}, {"nc": 7, "depth": 7})
    assert [each[1].out_channels for each in model.cv3] == [6, 6]
    verify_shrunken(dense, model, PICTURES)
    save_shrunken(model, tmp_path / "small.safetensors")
    again = load_shrunken(fresh, tmp_path / "small.safetensors").eval()
    torch.testing.assert_close(run(again), run(model), rtol=0, atol=0)
    shrink(model, PICTURES, 0.1)  # and units leave what is left
    assert run(model)[0].shape == found.shape


class Chooser(Detector):
    """As detectors without suppression of their own: the best of all places and classes."""

    read = True  # how many classes there are, also in training

    def forward(self, x):
        found = self.stem(x).relu()
        boxes, things = self.cv2[0](found).flatten(2), self.cv3[0](found)
        things = things.view(len(x), self.nc, -1) if self.read else things.flatten(2)
        if self.training:
            return boxes, things
        boxes, things = torch.cat([boxes, things.sigmoid()], 1).transpose(1, 2).split([16, self.nc], 2)
        places = things.amax(2).topk(6).indices[..., None]
        boxes, things = (each.gather(1, places.expand(-1, -1, each.shape[2])) for each in (boxes, things))
        best, index = things.flatten(1).topk(6)
        at = (index // things.shape[2])[..., None]
        return torch.cat([boxes.gather(1, at.expand(-1, -1, 16)), best[..., None], (index % self.nc)[..., None]], 2)


def test_where_outputs_are_compared_those_that_stay_are():
    model = Chooser().eval()
    with torch.no_grad():  # those that leave are never chosen
        model.cv3[0][-1].bias[[1, 2, 3, 4, 6]] = -100.0
    dense = copy.deepcopy(model)
    found, raw = run(model), run(dense.train())
    done = shrink(model, PICTURES, leave=Outputs("cv3.0", keep=["thing 5", "thing 0"]))
    assert "In one of its modes the model compares them, as a softmax does: now those that stay." in str(done)
    found[..., 17] = (found[..., 17] == 5).float()
    torch.testing.assert_close(run(model), found)
    torch.testing.assert_close(run(copy.deepcopy(model).train()), (raw[0], picked(raw[1], [0, 5])))
    verify_shrunken(dense, model, PICTURES)


class Classifier(nn.Module):
    """As Ultralytics classifies: shares of 1 and what they are made of; or as timm, told by a method how many."""

    def __init__(self, shares, classes=6):
        super().__init__()
        self.shares, self.num_classes, self.depth = shares, classes, classes
        self.body, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, classes)

    def forward(self, x):
        x = self.head(self.body(x).relu().mean((2, 3)))
        return (x.softmax(1), x) if self.shares and not self.training else x

    def reset_classifier(self, classes):
        self.num_classes, self.head = classes, nn.Linear(8, classes)


def test_shares_of_1_are_of_the_classes_that_stay():
    model = Classifier(True).eval()
    _, logits = run(model)
    done = shrink(model, PICTURES, leave=Outputs("head", keep=[1, 4]))
    shares, found = run(model)
    torch.testing.assert_close(found, logits[:, [1, 4]])
    torch.testing.assert_close(shares, logits[:, [1, 4]].softmax(1))
    assert "the model compares them, as a softmax does: now those that stay." in str(done)


def test_what_the_model_counts_when_it_is_asked_for_fewer_classes_follows():
    model = Classifier(False).eval()
    dense = copy.deepcopy(model)
    done = shrink(model, PICTURES, leave=Outputs("head", keep=[1, 4]))
    assert (model.num_classes, model.depth, done.unread) == (2, 6, {"depth": 6})
    torch.testing.assert_close(run(model), run(dense)[:, [1, 4]])
    with pytest.raises(ValueError, match="has outputs 0 to 1"):
        shrink(model, PICTURES, leave=Outputs("head", keep=[4]))
    assert model.num_classes == 2


def test_where_the_mode_that_chooses_does_not_run_nothing_leaves():
    model = Chooser().eval()
    model.read = False
    with pytest.raises(
        ValueError, match=r"the outputs of cv3.0 cannot leave: without them it raises RuntimeError: spl"
    ):
        shrink(model, PICTURES, leave=Outputs("cv3.0", keep=[0, 5]))
    assert (model.nc, len(model.names), model.cv3[0][-1].out_channels) == (7, 7, 7)


def test_names_that_are_not_there_are_told_with_those_near():
    model = Detector()
    with pytest.raises(ValueError, match=r"cv3 has no output that is called 'thing8'; near are 'thing 6', .*"):
        shrink(model, PICTURES, leave=Outputs("cv3", keep=["thing 1", "thing8"]))
    with pytest.raises(ValueError, match="Detector has no configuration with a label for each output, so name the mod"):
        shrink(model, PICTURES, leave="outputs:thing 1")
    assert model.nc == 7


def test_labels_of_a_configuration_follow(tmp_path):
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}
    labels = dict(enumerate(["ant", "bee", "cat", "dog"]))
    config = ViTConfig(
        image_size=16, patch_size=8, id2label=labels, label2id={v: k for k, v in labels.items()}, **sizes
    )
    model = ViTForImageClassification(config).eval()
    expected = run(model).logits[:, [1, 3]]
    shrink(model, PICTURES, leave=Outputs("classifier", keep=[1, 3]))
    torch.testing.assert_close(run(model).logits, expected)
    assert (model.config.id2label, model.config.label2id) == ({0: "bee", 1: "dog"}, {"bee": 0, "dog": 1})
    assert (model.num_labels, model.config.num_labels, config.num_labels) == (2, 2, 4)
    assert torch.isfinite(model(PICTURES, labels=torch.tensor([0, 1])).loss)
    model.save_pretrained(tmp_path)
    again = ViTForImageClassification.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(run(again).logits, run(model).logits)


LABELS = ["ant", "bee, honeybee", "cat", "dog"]


@pytest.fixture
def saved(tmp_path):
    """Directories of a classifier of texts and of a detector, whose head has one output more than labels."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 24}
    labels = {"id2label": dict(enumerate(LABELS)), "label2id": {name: at for at, name in enumerate(LABELS)}}
    image = {"image_size": [16, 16], "patch_size": 8, "num_detection_tokens": 3}
    bert = BertConfig(vocab_size=30, max_position_embeddings=64, **sizes, **labels)
    BertForSequenceClassification(bert).save_pretrained(tmp_path / "bert")
    YolosForObjectDetection(YolosConfig(**sizes, **image, **labels)).save_pretrained(tmp_path / "yolos")
    return tmp_path


def test_labels_leave_a_directory(saved):
    done = shrink(saved / "bert", leave="outputs:Dog,bee, honeybee", out=saved / "small")
    dense = BertForSequenceClassification.from_pretrained(saved / "bert").eval()
    small = BertForSequenceClassification.from_pretrained(saved / "small").eval()
    ids = {"input_ids": torch.arange(2, 12)[None], "attention_mask": torch.ones(1, 10, dtype=torch.long)}
    with torch.no_grad():
        torch.testing.assert_close(small(**ids).logits, dense(**ids).logits[:, [1, 3]], rtol=0, atol=1e-6)
    assert small.config.id2label == {0: "bee, honeybee", 1: "dog"}
    assert (small.config.label2id, small.num_labels) == ({"bee, honeybee": 0, "dog": 1}, 2)
    assert done.counts == {"classifier.weight": (4, 2)}
    assert done.parameters == (dense.num_parameters(), small.num_parameters())
    for name, tensor in small.state_dict().items():  # what stays has its bytes
        whole = dense.state_dict()[name]
        assert torch.equal(tensor, whole if whole.shape == tensor.shape else whole[[1, 3]])
    found = verify_checkpoint(saved / "small", saved / "bert")
    assert found.ok, found
    assert len(tables_of(done.content())["fields"].rows) == 2
    _forged(saved / "small")
    assert not verify_checkpoint(saved / "small", saved / "bert").ok


def _forged(directory):
    """Another label's weights in place of one that stays."""
    tensors = load_file(directory / "model.safetensors")
    tensors["classifier.weight"] = tensors["classifier.weight"].flip(0).contiguous()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def test_what_no_label_names_stays(saved):
    shrink(saved / "yolos", leave=Outputs(keep=["cat"]), out=saved / "small")
    dense, small = (YolosForObjectDetection.from_pretrained(saved / name).eval() for name in ("yolos", "small"))
    found, whole = run(small), run(dense)
    torch.testing.assert_close(found.logits, whole.logits[..., [2, 4]])  # the cat, and that there is nothing
    torch.testing.assert_close(found.pred_boxes, whole.pred_boxes)
    assert (small.config.id2label, small.config.num_labels) == ({0: "cat"}, 1)
    assert verify_checkpoint(saved / "small", saved / "yolos").ok
    shrink(dense, PICTURES, leave="outputs:2")  # the model itself
    assert dense.config.id2label == {0: "cat"}
    torch.testing.assert_close(run(dense).logits, found.logits)


def test_labels_of_a_large_directory_are_proved_on_a_smaller_model(saved, monkeypatch):
    whole = BertForSequenceClassification.from_pretrained(saved / "bert").num_parameters()
    monkeypatch.setattr(directory, "PROVED", whole - 300)
    done = shrink(saved / "bert", leave="outputs:ant,cat", out=saved / "small")
    assert re.fullmatch(r"on BertForSequenceClassification with random weights and \S.*", done.proof), done.proof
    small = load_file(saved / "small" / "model.safetensors")["classifier.weight"]
    assert torch.equal(small, load_file(saved / "bert" / "model.safetensors")["classifier.weight"][[0, 2]])


@pytest.mark.parametrize(
    ("leave", "said"),
    [
        ("outputs:cot", "the model has no output that is called 'cot'; near are 'cat'"),
        ("outputs:1,4", "the model has outputs 0 to 3, and no 4"),
        ("outputs:0,1,2,3", "keep= names all of them, so that none leaves"),
        (Outputs("classifier", keep=[0]), "outputs leave by their names or numbers: leave out batches="),
    ],
)
def test_labels_that_are_not_there_leave_no_directory(saved, leave, said):
    batches = [torch.ones(1, 4, dtype=torch.long)] if isinstance(leave, Outputs) else None
    with pytest.raises(ValueError, match=said):
        shrink(saved / "bert", leave=leave, out=saved / "small", batches=batches)
    assert {path.name for path in saved.iterdir()} == {"bert", "yolos"}


class Reads(nn.Module):
    """A head whose classes something reads before they are returned."""

    def __init__(self, read):
        super().__init__()
        self.head, self.other, self.read = nn.Linear(4, 5), nn.Linear(5, 3), read

    def forward(self, x):
        return self.read(self, self.head(x))


def test_what_is_not_finite_and_an_example_of_nothing_are_told():
    model = cnn()
    with pytest.raises(ValueError, match=r"in the example a tensor of shape \(0, 3, 16, 16\) holds nothing; give at l"):
        shrink(model, PICTURES[:0], leave=Outputs("5", keep=[0]))
    with torch.no_grad():
        model[5].weight[3] = math.nan
    with pytest.raises(ValueError, match=r"5\.weight: the weight of shape \(6, 8\) has entries that are NaN or infin"):
        shrink(model, PICTURES, leave=Outputs("5", keep=[0]))
    assert model[5].out_features == 6


class Twice(nn.Module):
    def __init__(self, *classes):
        super().__init__()
        self.classes = classes[0]  # which nothing reads
        self.heads = nn.ModuleList(nn.Linear(4, count) for count in classes)

    def forward(self, x):
        return [head(x) for head in self.heads]


READS = {
    "softmax": (lambda _, y: y.softmax(1), "softmax along it"),
    "argmax": (lambda _, y: (y, y.argmax(1)), "argmax"),
    "mean": (lambda _, y: y - y.mean(1, keepdim=True), "computed something else"),
    "another layer": (lambda model, y: (y, model.other(y)), "computed something else"),
    "norm": (lambda _, y: nn.functional.layer_norm(y, y.shape[1:]), "computed something else"),
}


@pytest.mark.parametrize("read", READS)
def test_classes_stay_where_what_stays_would_be_another(read):
    model = Reads(READS[read][0])
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=f"the outputs of head cannot leave; .*{READS[read][1]}|{READS[read][1]}"):
        shrink(model, torch.randn(3, 4), leave=Outputs("head", keep=[0, 2]))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "keep", "said"),
    [
        ("heads", [0], "no module matches 'heads'"),
        ("cv3", [0, 7], "cv3 has outputs 0 to 6, and no 7"),
        ("cv3", range(7), "names all of them, so that none leaves"),
        ("stem", [0], "the outputs of stem cannot leave: without them .* computed something else, so others need them"),
        ("cv3.0.1", [0], "the outputs of cv3.0.1 cannot leave; the model returns none of them"),
    ],
)
def test_what_is_no_output_is_told_and_nothing_changes(name, keep, said):
    model = Detector()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=said):
        shrink(model, PICTURES, leave=Outputs(name, keep=keep))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert (model.nc, len(model.names)) == (7, 7)


def test_heads_of_one_size_lose_the_same_and_others_are_named_apart():
    with pytest.raises(ValueError, match=r"outputs of several kinds, .*name the module of one"):
        shrink(Twice(5, 3), torch.randn(3, 4), leave=Outputs("heads.*", keep=[0]))
    model = Twice(5, 5)
    x = torch.randn(3, 4)
    expected = [each[:, [0, 3]] for each in run(model, x)]
    done = shrink(model, x, leave=Outputs("heads.*", keep=[0, 3]))
    torch.testing.assert_close(run(model, x), expected)
    assert done.unread == {"classes": 5}
    assert "no forward pass reads it: classes = 5" in str(done)


class Tasks(nn.Module):
    """Several tasks, of which one may be missing."""

    def __init__(self):
        super().__init__()
        self.body, self.main, self.aux = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 2)
        self.more = nn.ModuleDict({"depth": nn.Linear(6, 1), "edges": nn.Linear(6, 2)})

    def forward(self, x):
        x = self.body(x).relu()
        found = {"main": self.main(x), **{name: head(x) for name, head in self.more.items()}}
        return found if self.aux is None else {**found, "aux": self.aux(x)}


@pytest.mark.parametrize(
    ("name", "left"), [("aux", ["main", "depth", "edges"]), ("more.depth", ["main", "edges", "aux"])]
)
def test_a_whole_head_leaves_where_the_model_runs_without_it(name, left, tmp_path):
    model, fresh, x = Tasks(), Tasks(), torch.randn(3, 4)
    dense = copy.deepcopy(model)
    expected = {task: value for task, value in run(model, x).items() if task in left}
    done = shrink(model, x, leave=Outputs(name, keep=[]))
    assert [*run(model, x)] == left
    torch.testing.assert_close(run(model, x), expected, rtol=0, atol=0)
    assert not any(each.startswith(f"{name}.") for each in model.state_dict())
    assert done.parameters[1] == sum(each.numel() for each in model.parameters())
    verify_shrunken(dense, model, x)
    save_shrunken(model, tmp_path / "small.safetensors")
    torch.testing.assert_close(run(load_shrunken(fresh, tmp_path / "small.safetensors"), x), expected, rtol=0, atol=0)


class Attributes(nn.Module):
    """A tower of its own for each class, beside boxes."""

    def __init__(self, classes=12, indexed=False):
        super().__init__()
        self.labels, self.indexed, self.boxes = [f"is {number}" for number in range(classes)], indexed, nn.Linear(4, 2)
        self.towers = nn.ModuleList(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1)) for _ in range(classes))

    def forward(self, x):
        towers = [self.towers[at] for at in range(12)] if self.indexed else self.towers
        return torch.cat([self.boxes(x), *(tower(x) for tower in towers)], 1)


def test_a_module_for_each_class_leaves_with_it(tmp_path):
    model, fresh, x = Attributes(), Attributes(), torch.randn(3, 4)
    dense = copy.deepcopy(model)
    expected = run(model, x)[:, [0, 1, 4, 12]]
    shrink(model, x, leave=Outputs("towers.*", keep=[2, 10]))
    torch.testing.assert_close(run(model, x), expected, rtol=0, atol=0)
    assert (model.labels, len(model.towers)) == (["is 2", "is 10"], 2)
    verify_shrunken(dense, model, x)
    save_shrunken(model, tmp_path / "small.safetensors")
    torch.testing.assert_close(run(load_shrunken(fresh, tmp_path / "small.safetensors"), x), expected, rtol=0, atol=0)
    indexed = Attributes(indexed=True)
    with pytest.raises(ValueError, match="cannot leave the model as a whole: without it it raises"):
        shrink(indexed, x, leave=Outputs("towers.*", keep=[2, 10]))
    assert len(indexed.towers) == len(indexed.labels) == 12


def test_a_whole_head_stays_where_the_model_needs_it():
    model, x = Tasks(), torch.randn(3, 4)
    before = [*model.state_dict()]
    with pytest.raises(ValueError, match="main cannot leave the model as a whole: without it it raises TypeError"):
        shrink(model, x, leave=Outputs("main", keep=[]))
    assert [*model.state_dict()] == before


@pytest.mark.parametrize(("keep", "said"), [([2, 0], "in ascending order"), ([1, 1], "once each")])
def test_what_stays_is_named_in_order(keep, said):
    with pytest.raises(ValueError, match=said):
        Outputs("head", keep=keep)
