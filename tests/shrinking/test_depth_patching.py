"""What took over is a weight of the block before, told by what it does; on the calibration the stream is nearer."""

import pytest
import torch
from torch import nn

from secateur.kinds import Blocks
from secateur.shrinking import shrink
from secateur.shrinking.kinds.blocks import DepthCosts, passing, place_in
from support.families import batches, saved_deep


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.up, self.down, self.gate = nn.Linear(6, 9), nn.Linear(9, 6), nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, x):
        y = self.down(self.up(x).relu())
        if self.kind == "gated":
            return x + y * self.gate(x).sigmoid()
        if self.kind == "after":
            return self.norm(x + y)
        if self.kind == "turned":
            return x + y.transpose(0, 1).contiguous().transpose(0, 1)
        if self.kind == "twice":
            return x + y + self.down(self.up(x).tanh())
        if self.kind == "halved":
            return x + y / 2
        return x + y


@pytest.mark.parametrize(
    ("kind", "weight"),
    [("plain", "down.weight"), ("after", "norm.weight"), ("turned", "down.weight"), ("gated", None), ("twice", None)],
)
def test_the_place_is_what_is_added_to_what_the_block_returns(kind, weight):
    torch.manual_seed(0)
    block, x = Block(kind), torch.randn(2, 5, 6)
    own = {name for name, _ in block.named_parameters()}
    with torch.no_grad():
        found = place_in(block, own, lambda: block(x))
        assert (None if found is None else found.weight) == weight
        half = place_in(Block("halved"), own, lambda: Block("halved")(x))
        assert half is None
        if weight is not None:
            assert found.bias == weight.replace("weight", "bias")
            shared = place_in(block, own - {weight}, lambda: block(x))
            assert shared is None or shared.weight != weight
            assert block.training
    before = {name: each.clone() for name, each in block.named_parameters()}
    assert all(torch.equal(each, before[name]) for name, each in block.named_parameters())


def test_a_patch_that_makes_the_outputs_worse_is_taken_back(tmp_path, monkeypatch):
    saved_deep("llama", tmp_path / "dense")
    asked = {"include": "model.layers.3", "batches": batches("llama")}
    plain = shrink(tmp_path / "dense", leave=Blocks(0.25), out=tmp_path / "plain", repair=False, **asked)
    right = DepthCosts.__call__
    monkeypatch.setattr(
        DepthCosts,
        "__call__",
        lambda self, gone, more=(), written=False: {k: v + written for k, v in right(self, gone, more).items()},
    )
    done = shrink(tmp_path / "dense", leave=Blocks(0.25), out=tmp_path / "small", **asked)
    assert done.gone == plain.gone
    assert done.patched == {}
    for name in ("model.safetensors", "config.json", "blocks.json"):
        assert (tmp_path / "small" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()


@pytest.mark.parametrize("family", ["llama", "gpt2", "bart"])
def test_the_stream_behind_is_nearer_to_the_dense_models(tmp_path, family):
    """In bart it is a normalization that takes over, in gpt2 a matrix that lies the other way round."""
    model = saved_deep(family, tmp_path / "dense")
    stack = {"llama": "model.layers", "gpt2": "transformer.h", "bart": "model.decoder.layers"}[family]
    held = batches(family, count=16)
    asked = {"include": f"{stack}.3", "batches": held}
    share = 1 / 8 if family == "bart" else 1 / 4
    done = shrink(tmp_path / "dense", leave=Blocks(share), out=tmp_path / "small", **asked)
    plain = shrink(tmp_path / "dense", leave=Blocks(share), out=tmp_path / "plain", repair=False, **asked)
    assert done.gone == plain.gone == (f"{stack}.3",)
    assert plain.patched == {}
    assert done.patched
    assert all(name.startswith(f"{stack}.2.") and 0 < each < 1 for name, each in done.patched.items())
    streams = {}

    def seen(name):
        def see(_module, _args, output):
            streams.setdefault(name, []).append((output[0] if isinstance(output, tuple) else output).double())

        return see

    def run(model, at, name, gone=()):
        hook = model.get_submodule(f"{stack}.{at}").register_forward_hook(seen(name))
        with torch.no_grad(), passing(model, gone):
            for batch in held:
                model(**batch)
        hook.remove()

    run(model, 3, "dense")
    for name in ("small", "plain"):
        run(type(model).from_pretrained(tmp_path / name).eval(), 2, name)

    def residuals(name):
        masks = [each["decoder_attention_mask" if family == "bart" else "attention_mask"].bool() for each in held]
        pairs = zip(streams["dense"], streams[name], masks, strict=True)
        return float(sum((one - other)[mask].square().sum() for one, other, mask in pairs))

    (share,) = set(done.patched.values())
    assert residuals("small") == pytest.approx((1 - share) * residuals("plain"), rel=1e-3)
