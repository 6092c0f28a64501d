"""A pruned weight is computed when it is read: in every kind of forward, copy, transform and export."""

from __future__ import annotations

import copy
import io
import pickle
import pickletools
import threading
import warnings
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from secateur import prune
from secateur.prune import masked_weight
from secateur.prune.masked_weight import masked
from support.pruned import assert_unchanged, linear, snapshot, through_file, two_layers


def test_the_class_looks_the_same_and_is_shared_and_restored():
    one, other = prune.identity(linear(), "weight"), prune.identity(linear(), "weight")
    assert type(one) is type(other) is not nn.Linear
    assert isinstance(one, nn.Linear)
    assert repr(one) == repr(linear())
    assert (type(one).__name__, type(one).__qualname__, type(one).__module__) == (
        "Linear", "Linear", nn.Linear.__module__,
    )  # fmt: skip
    prune.identity(one, "bias")
    prune.remove(one, "weight")
    assert one.bias.shape == (4,)
    prune.remove(one, "bias")
    assert type(one) is nn.Linear


def test_what_is_assigned_to_a_pruned_weight_is_not_kept():
    layer = prune.l1_unstructured(linear(), "weight", 3)
    expected = layer.weight.detach()
    layer.weight = torch.zeros(4, 6)
    assert torch.equal(layer.weight, expected)
    with pytest.raises(KeyError, match="attribute 'weight' already exists"):
        layer.weight = nn.Parameter(torch.zeros(4, 6))


def test_row_03_fused_encoder_layer_and_direct_forward():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    dense = copy.deepcopy(layer)
    for module, name in (
        (layer.linear1, "weight"),
        (layer.self_attn, "in_proj_weight"),
        (layer.self_attn.out_proj, "weight"),
    ):
        prune.l1_unstructured(module, name, 0.5)
    for source, target in ((layer.linear1, dense.linear1), (layer.self_attn.out_proj, dense.self_attn.out_proj)):
        target.weight.data = source.weight.detach()
    dense.self_attn.in_proj_weight.data = layer.self_attn.in_proj_weight.detach()
    x = torch.randn(2, 3, 8)
    with torch.no_grad():
        assert torch.allclose(layer(x), dense(x), atol=1e-6)
    single = prune.l1_unstructured(linear(), "weight", 8)
    for _ in range(2):
        single.forward(torch.randn(2, 6)).sum().backward()
    single.weight_orig.data.fill_(2.0)
    assert torch.allclose(single.forward(torch.eye(6)) - single.bias, 2 * single.weight_mask.t(), atol=1e-5)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_row_07_what_is_masked_is_exactly_zero(value):
    layer = linear()
    mask = torch.ones(4, 6)
    mask[1, 2] = mask[0, 0] = 0
    layer.weight.data[1, 2] = value
    layer.weight.data[3, 3] = value
    prune.custom_from_mask(layer, "weight", mask)
    assert layer.weight[1, 2] == 0
    assert layer.weight[3, 3].equal(torch.tensor(value)) or value != value
    layer(torch.randn(2, 6)).sum().backward()
    assert layer.weight_orig.grad[1, 2] == 0
    prune.remove(layer, "weight")
    assert layer.weight[1, 2] == layer.weight[0, 0] == 0
    t = torch.tensor([value, 1.0])
    assert torch.equal(
        prune.L1Unstructured(1).prune(t, importance_scores=torch.tensor([0.0, 1.0])), torch.tensor([0.0, 1])
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("values", [[torch.inf, 1.0], [torch.inf, -torch.inf], [torch.nan, 1.0], [60000.0, 60000.0]])
def test_row_07_zeros_are_exact_wherever_the_infinities_are(dtype, values):
    layer = nn.Linear(2, 4).to(dtype)
    layer.weight.data = torch.tensor(values).expand(4, 2).to(dtype).contiguous()
    mask = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
    prune.custom_from_mask(layer, "weight", mask)
    assert torch.equal(layer.weight[mask == 0], torch.zeros(4, dtype=dtype))
    kept = layer.weight_orig[mask == 1]
    assert torch.equal(layer.weight[mask == 1].nan_to_num(7.0), kept.nan_to_num(7.0))


def test_row_07_a_mask_that_the_user_made_soft_is_still_a_factor():
    layer = prune.identity(linear(), "weight")
    layer.weight_mask[0] = 0.5
    layer.weight_mask[1] = 0
    assert torch.equal(layer.weight[0], layer.weight_orig[0] / 2)
    assert torch.equal(layer.weight[1], torch.zeros(6))


def after_training(net: nn.Module, *inputs: Tensor) -> nn.Module:
    out = net(*inputs)
    (out[0] if isinstance(out, tuple) else out).sum().backward()
    return net


PRUNED = {
    "linear": lambda: after_training(prune.l1_unstructured(linear(), "weight", 0.5), torch.randn(2, 6)),
    "conv": lambda: after_training(prune.ln_structured(nn.Conv2d(2, 4, 3), "weight", 2, 2, 0), torch.randn(1, 2, 5, 5)),
    "lstm": lambda: after_training(prune.l1_unstructured(nn.LSTM(2, 3), "weight_hh_l0", 0.5), torch.randn(4, 1, 2)),
    "gru": lambda: after_training(prune.l1_unstructured(nn.GRU(2, 3), "weight_ih_l0", 0.5), torch.randn(4, 1, 2)),
}


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "oldest pickle": lambda module: pickle.loads(pickle.dumps(module, protocol=0)),
    "torch.save": through_file,
    "averaged": lambda module: torch.optim.swa_utils.AveragedModel(module).module,
    "multiprocessing": lambda module: pickle.loads(bytes(ForkingPickler.dumps(module))),
}


@pytest.mark.parametrize("kind", PRUNED)
@pytest.mark.parametrize("how", COPIES)
def test_row_09_copies_of_a_pruned_module_work(kind, how):
    torch.manual_seed(0)
    module = PRUNED[kind]()
    duplicate = COPIES[how](module)
    assert type(duplicate) is type(module)
    (name,) = [hook._tensor_name for hook in duplicate._forward_pre_hooks.values()]
    assert torch.equal(getattr(duplicate, name), getattr(module, name))
    before = getattr(module, name).detach()
    prune.l1_unstructured(duplicate, name, 2)
    assert torch.equal(getattr(module, name), before)
    prune.remove(duplicate, name)
    assert type(duplicate) is type(module).__bases__[0]
    assert prune.is_pruned(module)


def test_row_09_transformer_encoder_clones_a_pruned_layer():
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    prune.l1_unstructured(layer.linear1, "weight", 0.5)
    x = torch.randn(1, 2, 4)
    layer(x).sum().backward()
    encoder = nn.TransformerEncoder(layer, 2)
    encoder(x).sum().backward()
    assert encoder.layers[0].linear1.weight_orig is not encoder.layers[1].linear1.weight_orig
    encoder.layers[0].linear1.weight_orig.data.zero_()
    assert encoder.layers[1].linear1.weight.count_nonzero() > 0


def test_row_16_functional_transforms_leave_an_ordinary_tensor():
    layer = prune.l1_unstructured(linear(), "weight", 8)
    parameters = {name: value.detach() for name, value in layer.named_parameters()}
    x = torch.randn(3, 6)

    def loss(parameters):
        return torch.func.functional_call(layer, parameters, (x,)).square().sum()

    gradients = torch.func.grad(loss)(parameters)
    assert torch.equal(gradients["weight_orig"], gradients["weight_orig"] * layer.weight_mask)
    assert type(layer.weight) is Tensor
    assert torch.equal(layer.weight, layer.weight_mask * layer.weight_orig)
    layer(x).square().sum().backward()
    assert torch.allclose(layer.weight_orig.grad, gradients["weight_orig"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        tangents = {name: torch.ones_like(value) for name, value in parameters.items()}
        _, slope = torch.func.jvp(loss, (parameters,), (tangents,))
    assert torch.allclose(slope, sum(gradient.sum() for gradient in gradients.values()), rtol=1e-4)
    batched = torch.func.vmap(lambda w: torch.func.functional_call(layer, {"weight_orig": w}, (x,)))
    assert batched(torch.randn(5, 4, 6)).shape == (5, 3, 4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager"])
def test_compiles_into_one_graph(backend):
    net, x = two_layers(), torch.randn(2, 6)
    torch._dynamo.reset()
    compiled = torch.compile(net, fullgraph=True, backend=backend)
    out = compiled(x)
    assert torch.equal(out, net(x))
    out.square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in net.parameters()]
    net.zero_grad()
    net(x).square().sum().backward()
    for gradient, parameter in zip(gradients, net.parameters(), strict=True):
        assert torch.equal(gradient, parameter.grad)
    with torch.no_grad():
        net[0].weight_orig.mul_(2)
        net[0].weight_orig[0, 0] = torch.inf
        net[0].weight_mask[0, 0] = 0
    assert torch.equal(compiled(x), net(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_traces():
    net, x = two_layers(), torch.randn(2, 6)
    traced = torch.jit.trace(net, x)
    assert torch.equal(traced(x), net(x))
    assert set(traced.state_dict()) == set(net.state_dict())
    buffer = io.BytesIO()
    torch.jit.save(traced, buffer)
    buffer.seek(0)
    assert torch.equal(torch.jit.load(buffer)(x), net(x))
    rnn, steps = prune.l1_unstructured(nn.LSTM(2, 3), "weight_hh_l0", 0.5), torch.randn(4, 1, 2)
    assert torch.equal(torch.jit.trace(rnn, steps)(steps)[0], rnn(steps)[0])


@pytest.mark.filterwarnings("ignore")
def test_exports_to_onnx():
    onnx_reference = pytest.importorskip("onnx.reference")
    pytest.importorskip("onnxscript")
    net, x = two_layers().eval(), torch.randn(2, 6)
    program = torch.onnx.export(net, (x,), dynamo=True, verbose=False)
    (out,) = onnx_reference.ReferenceEvaluator(program.model_proto).run(
        None, {program.model_proto.graph.input[0].name: x.numpy()}
    )
    assert torch.allclose(torch.from_numpy(out), net(x).detach(), atol=1e-5)


def counted_products(monkeypatch) -> list[Tensor]:
    computed: list[Tensor] = []

    def counted(orig, mask):
        computed.append(masked(orig, mask))
        return computed[-1]

    monkeypatch.setattr(masked_weight, "masked", counted)
    return computed


def recurrent() -> tuple[nn.Module, tuple[Tensor, ...], list[str]]:
    return nn.LSTM(4, 4), (torch.randn(2, 1, 4),), ["weight_ih_l0", "weight_hh_l0"]


def attention() -> tuple[nn.Module, tuple[Tensor, ...], list[str]]:
    x = torch.randn(2, 3, 4)
    return nn.MultiheadAttention(4, 2, batch_first=True), (x, x, x), ["in_proj_weight", "in_proj_bias"]


@pytest.mark.parametrize("make", [recurrent, attention])
@pytest.mark.parametrize("train", [True, False])
def test_forwards_that_read_a_weight_repeatedly_compute_its_product_once(make, train, monkeypatch):
    torch.manual_seed(0)
    module, inputs, names = make()
    module.train(train)
    for name in names:
        prune.l1_unstructured(module, name, amount=0.5)
    computed = counted_products(monkeypatch)
    with torch.set_grad_enabled(train):
        for forwards in (1, 2):
            module(*inputs)
            assert len(computed) == forwards * len(names)
            assert len(masked_weight._forward.__dict__) == 0  # nothing outlives the call


@pytest.mark.parametrize("make", [recurrent, attention])
def test_a_forward_that_fails_leaves_nothing_behind_that_could_be_read(make):
    torch.manual_seed(0)
    module, inputs, names = make()
    prune.l1_unstructured(module, names[0], amount=0.5)
    with pytest.raises((RuntimeError, ValueError, AssertionError)):
        module(*(x.double() for x in inputs))
    getattr(module, names[0] + "_orig").data.fill_(3.0)
    assert torch.equal(getattr(module, names[0]), 3 * getattr(module, names[0] + "_mask"))
    with torch.no_grad():
        assert getattr(module, names[0]).grad_fn is None
    assert getattr(module, names[0]).grad_fn is not None


def test_what_a_forward_shares_is_seen_by_its_own_thread_and_module_only(monkeypatch):
    torch.manual_seed(0)
    module, inputs, (name, _) = attention()
    other, other_inputs, _ = attention()
    for each in (module, other):
        prune.l1_unstructured(each, name, amount=0.5)
    forward, seen = nn.functional.multi_head_attention_forward, {}

    def watched(*args, **kwargs):
        if not seen:
            seen["here"] = [module.in_proj_weight, module.in_proj_weight]
            thread = threading.Thread(target=lambda: seen.update(there=module.in_proj_weight))
            thread.start()
            thread.join()
            other(*other_inputs)
            seen["other"] = [other.in_proj_weight, other.in_proj_weight]
            seen["after"] = module.in_proj_weight
        return forward(*args, **kwargs)

    monkeypatch.setattr(nn.functional, "multi_head_attention_forward", watched)
    module(*inputs)
    assert seen["here"][0] is seen["here"][1] is seen["after"]
    assert seen["there"] is not seen["here"][0]
    assert seen["other"][0] is not seen["other"][1]
    assert module.in_proj_weight is not module.in_proj_weight


def test_where_code_of_others_runs_in_a_forward_every_read_computes(monkeypatch):
    """A parametrization may write to what was read before it."""

    class Growing(nn.Module):
        def forward(self, bias):
            with torch.no_grad():
                module.in_proj_weight_orig.add_(1.0)
            return bias

    torch.manual_seed(0)
    module, inputs, (name, bias) = attention()
    prune.l1_unstructured(module, name, amount=0.5)
    parametrize.register_parametrization(module, bias, Growing(), unsafe=True)
    seen, forward = [], nn.functional.multi_head_attention_forward

    def watched(*args, **kwargs):
        seen.append(module.in_proj_weight)
        return forward(*args, **kwargs)

    monkeypatch.setattr(nn.functional, "multi_head_attention_forward", watched)
    module(*inputs)
    assert torch.equal(seen[0], module.in_proj_weight_orig * module.in_proj_weight_mask)
    assert "_secateur_own" not in type(module).__dict__


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("grad", [True, False])
def test_a_read_costs_one_product_one_sum_and_no_lookup(grad, monkeypatch):
    """The original multiplies once, looks two names up and assigns a third; that is all there is to be as fast."""
    layer = prune.l1_unstructured(linear(), "weight", 8)
    looked_up, find = [], nn.Module.__getattr__

    def watched(module, name):
        looked_up.append(name)
        return find(module, name)

    monkeypatch.setattr(nn.Module, "__getattr__", watched)
    with torch.set_grad_enabled(grad), Operations() as operations:
        weight = layer.weight
    assert looked_up == []
    assert sorted(name for name in operations.names if name != "detach") == ["_local_scalar_dense", "mul", "sum"]
    assert weight.requires_grad == grad


def orig_of(module: nn.Module, name: str) -> Any:
    return getattr(module, name + "_orig")


def all_one_more(module: nn.Module) -> dict[str, Tensor]:
    return {key: value + 1 for key, value in module.state_dict().items()}


WRITES: dict[str, Callable[[nn.Module, str], object]] = {
    "data": lambda m, name: orig_of(m, name).data.mul_(2),
    "data replaced": lambda m, name: setattr(orig_of(m, name), "data", orig_of(m, name).data * 2),
    "numpy": lambda m, name: np.copyto(orig_of(m, name).detach().numpy(), 3.0),
    "mask through data": lambda m, name: getattr(m, name + "_mask").data.mul_(0.5),
    "mask replaced": lambda m, name: setattr(m, name + "_mask", torch.zeros_like(orig_of(m, name))),
    "parameter replaced": lambda m, name: setattr(m, name + "_orig", nn.Parameter(orig_of(m, name).detach() + 1)),
    "step": lambda m, name: torch.optim.SGD(m.parameters(), lr=1.0).step(),
    "load": lambda m, name: m.load_state_dict(all_one_more(m)),
    "load by assigning": lambda m, name: m.load_state_dict(all_one_more(m), assign=True),
    "to": lambda m, name: m.to(torch.float64),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("make", [lambda: (linear(), (torch.randn(2, 6),), ["weight"]), recurrent, attention])
def test_no_write_leaves_a_product_of_before(make, write):
    torch.manual_seed(0)
    module, inputs, names = make()
    name = names[0]
    prune.l1_unstructured(module, name, amount=0.5)
    out = module(*inputs)
    (out[0] if isinstance(out, tuple) else out).sum().backward()
    before = getattr(module, name).detach().clone()
    WRITES[write](module, name)
    now = getattr(module, name)
    assert torch.equal(now, orig_of(module, name) * getattr(module, name + "_mask"))
    assert now.dtype != before.dtype or not torch.equal(now, before)
    copied = copy.deepcopy(module)
    assert torch.equal(getattr(copied, name), now)
    inputs = tuple(x.to(now.dtype) for x in inputs) if write == "to" else inputs
    dense = copy.deepcopy(module)
    prune.remove(dense, name)
    results = [each(*inputs) for each in (module, copied, dense)]
    for result in results[:2]:
        pair = [r[0] if isinstance(r, tuple) else r for r in (result, results[2])]
        assert torch.allclose(*pair, atol=1e-6)


def test_a_parametrized_original_is_read_through_its_parametrization():
    class Doubled(nn.Module):
        def forward(self, x):
            return 2 * x

    layer = prune.l1_unstructured(linear(), "weight", 8)
    before = layer.weight.detach()
    parametrize.register_parametrization(layer, "weight_orig", Doubled())
    assert torch.equal(layer.weight, 2 * before)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("how", ["compile", "export", "trace"])
def test_pruned_attention_compiles_exports_and_traces(how):
    torch.manual_seed(0)
    module, inputs, names = attention()
    for name in names:
        prune.l1_unstructured(module, name, amount=0.5)
    torch._dynamo.reset()
    call: Any
    if how == "compile":
        call = torch.compile(module, fullgraph=True, backend="aot_eager")
    elif how == "export":
        call = torch.export.export(module, inputs, strict=False).module()  # the default since torch 2.8
    else:
        call = torch.jit.trace(module, inputs)
    assert torch.allclose(call(*inputs)[0], module(*inputs)[0], atol=1e-6)


def test_checkpointing_and_autocast():
    net, x = two_layers(), torch.randn(2, 6)
    for reentrant in (False, True):
        net.zero_grad()
        checkpoint(net, x.clone().requires_grad_(), use_reentrant=reentrant).sum().backward()
        gradient = net[0].weight_orig.grad.clone()
        net.zero_grad()
        net(x).sum().backward()
        assert torch.equal(gradient, net[0].weight_orig.grad)
    with torch.autocast("cpu", torch.bfloat16):
        out = net(x)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert net[0].weight_orig.grad.dtype == torch.float32


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripting_and_quantization_ask_to_remove_first():
    net = two_layers()
    with pytest.raises(RuntimeError, match=r"prune.remove on weight first, or use torch.jit.trace"):
        torch.jit.script(net)
    before = snapshot(net)
    with pytest.raises(RuntimeError, match=r"quantization: call prune.remove on weight first"):
        torch.ao.quantization.quantize_dynamic(net)
    assert_unchanged(before, net)
    for layer in (net[0], net[2]):
        prune.remove(layer, "weight")
    torch.jit.script(net)


def test_row_24_each_read_is_a_new_tensor():
    layer = prune.l1_unstructured(linear(), "weight", 6)
    assert layer.weight is not layer.weight
    layer(torch.randn(2, 6)).sum().backward()
    assert layer.weight.grad_fn is not None
    assert layer.weight_orig.grad.count_nonzero() == 18


def names_in(pickled: bytes) -> set[str]:
    """What a pickle of the newest protocol asks the library for."""
    strings = [str(argument) for opcode, argument, _ in pickletools.genops(pickled) if "UNICODE" in opcode.name]
    return {string for string in strings if string.startswith("secateur")}


@pytest.mark.parametrize("kind", PRUNED)
def test_a_pickle_of_a_pruned_module_names_the_package_alone(kind):
    assert names_in(pickle.dumps(PRUNED[kind]())) == {"secateur.prune"}


def test_a_pickle_of_a_method_names_the_package_alone():
    methods = [
        prune.Identity(), prune.RandomUnstructured(1), prune.L1Unstructured(1), prune.RandomStructured(1, 0),
        prune.LnStructured(1, 2, 0), prune.CustomFromMask(torch.ones(2)),
    ]  # fmt: skip
    for method in [*methods, prune.PruningContainer(*methods)]:
        assert names_in(pickle.dumps(method)) == {"secateur.prune"}
