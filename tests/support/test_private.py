"""Private parts of torch: each does what its name says, on the torch that is installed."""

import warnings

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from secateur.support import private


class Seen(TorchFunctionMode):
    """The names of the functions that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, kinds, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_dispatch_mode_sees_what_no_function_of_torch_was_called_for():
    found = []

    class Operators(private.DispatchMode):
        def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
            found.append(str(func))
            return func(*args, **(kwargs or {}))

    with Operators():
        torch.nn.functional.silu(torch.ones(2))
    assert found[-1] == "aten.silu.default"


def test_fake_values_are_not_to_be_had():
    x = torch.ones(3, device="meta")
    with private.fake_values():
        assert (x + 1).shape == (3,)
        with pytest.raises(Exception, match="_local_scalar_dense"):
            bool((x + 1).sum() > 0)


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv3d, nn.ConvTranspose2d])
def test_is_convolution(kind):
    class Own(kind):
        pass

    assert private.is_convolution(Own(2, 2, 1))
    assert not private.is_convolution(nn.Linear(2, 2))


def test_is_wrapped_inside_vmap_only():
    found = []
    torch.vmap(lambda x: (found.append(private.is_wrapped(x)), x)[1])(torch.ones(2))
    assert found == [True]
    assert not private.is_wrapped(torch.ones(2))


def test_memory_of_views_is_one():
    x = torch.ones(4)
    assert private.memory_of(x) == private.memory_of(x[1:].view(-1, 1))
    assert private.memory_of(x) != private.memory_of(x.clone())


def test_tree_leaves_and_tree_map_only():
    tree = {"a": (torch.ones(1), 2), "b": [None, torch.zeros(1)]}
    assert [type(each) for each in private.tree_leaves(tree)] == [torch.Tensor, int, type(None), torch.Tensor]
    mapped = private.tree_map_only(int, lambda each: each + 1, tree)
    assert mapped["a"][1] == 3
    assert mapped["b"][1] is tree["b"][1]


def test_unwatched_calls_are_seen_by_no_mode():
    with Seen() as seen:
        torch.ones(2).neg()
        with private.unwatched():
            torch.ones(2).exp()
    assert "neg" in seen.names
    assert "exp" not in seen.names


def test_unwrapped_once_is_the_tensor_outside():
    outside = torch.arange(6.0).view(2, 3)
    shapes = []
    torch.vmap(lambda x: (shapes.append(private.unwrapped_once(x).shape), x)[1])(outside)
    assert shapes == [(2, 3)]


def test_version_of_counts_writes():
    x = torch.ones(3)
    before = private.version_of(x)
    x[:1].mul_(2)
    assert private.version_of(x) == before + 1
    with torch.inference_mode():
        assert private.version_of(torch.ones(1)) == 0


def test_written_in_python_shows_what_it_calls():
    x = torch.ones(1, 2, 3)
    body = private.written_in_python(torch.nn.functional.normalize)
    with Seen() as seen:
        out = body(x, dim=2)
    assert seen.names[0] != "normalize"
    assert len(seen.names) > 1
    torch.testing.assert_close(out, torch.nn.functional.normalize(x, dim=2))
    assert private.written_in_python(torch.relu) is None
    assert private.written_in_python(len) is None


def test_experts_in_turn_is_a_field_of_configurations_with_experts():
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig()
    field, value = private.experts_in_turn()
    config._experts_implementation = value
    assert getattr(config, field) == value


def test_is_transposed_convolution_but_not_a_plain_one():
    assert private.is_transposed_convolution(nn.ConvTranspose2d(2, 2, 1))
    assert not private.is_transposed_convolution(nn.Conv2d(2, 2, 1))


@pytest.mark.parametrize("padding", [0, (2, 1), "same"])
def test_padding_of_a_convolution_is_what_it_computes_with(padding):
    layer, x = nn.Conv2d(1, 1, 3, padding=padding), torch.randn(1, 1, 6, 6)
    padded = torch.nn.functional.pad(x, private.padding_of(layer))
    torch.testing.assert_close(torch.nn.functional.conv2d(padded, layer.weight, layer.bias), layer(x))


def test_tensors_in_files_become_those_of_a_model_and_these_again():
    """The experts of a Mixtral are a tensor each in files, and one in the model."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=8, hidden_size=4, intermediate_size=6, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, num_local_experts=2,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config)
    experts = "model.layers.0.block_sparse_moe.experts"
    files = {f"{experts}.{number}.w2.weight": torch.randn(4, 6) for number in range(2)}
    own = dict(model.named_parameters())
    ((target, (conversion, parts)),) = private.loaded_as(model, list(files), own).items()
    made = private.converted(conversion, target, [(name, pattern, files[name]) for name, pattern in parts], model)
    ((name, fused),) = made.items()
    assert fused.shape == own[name].shape
    assert torch.equal(fused, torch.stack(list(files.values())))
    again = private.reverted(model, made)
    assert again.keys() == files.keys()
    assert all(torch.equal(again[each], files[each]) for each in files)


def test_add_all_adds_to_each():
    tensors = [torch.ones(2), torch.zeros(3)]
    private.add_all(tensors, [torch.ones(2), torch.ones(3)], alpha=0.5)
    assert [tensor.tolist() for tensor in tensors] == [[1.5, 1.5], [0.5, 0.5, 0.5]]


def test_gathered_as_is_what_fully_shard_keeps():
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ParamModuleInfo

    layer = nn.Linear(2, 2)
    record = FSDPParam.__new__(FSDPParam)
    record._module_info = ParamModuleInfo(layer, "weight")
    place = private.gathered_as(record)
    assert (place.module, place.param_name, place.shared_modules, place.shared_param_names) == (layer, "weight", [], [])


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm])
def test_is_batchnorm(kind):
    class Own(kind):
        pass

    assert private.is_batchnorm(Own(2))
    assert not private.is_batchnorm(nn.LayerNorm(2))


def test_is_tracing_while_torch_traces_only():
    seen = []

    class Asks(nn.Module):
        def forward(self, x):
            seen.append(private.is_tracing())
            return x + 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit is on its way out
        torch.jit.trace(Asks(), torch.ones(2), check_trace=False)
    assert True in seen
    assert not private.is_tracing()


def test_multiply_all_multiplies_each():
    tensors = [torch.ones(2), torch.full((3,), 2.0)]
    private.multiply_all(tensors, [torch.zeros(2), torch.ones(3)])
    assert [tensor.tolist() for tensor in tensors] == [[0, 0], [2, 2, 2]]


def test_tells_of_steps_if_made_by_torchs_constructor():
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    assert private.tells_of_steps(optimizer)
    assert not private.tells_of_steps(object())
    assert not private.tells_of_steps(torch.optim.SGD.__new__(torch.optim.SGD))
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    optimizer.step()
    assert called == [1]


def test_a_recurrent_module_lists_the_parameters_that_it_has_now():
    module, x = nn.LSTM(2, 3), torch.randn(4, 1, 2)
    before, old = module(x)[0], module.weight_hh_l0
    module._parameters["weight_hh_l0"] = nn.Parameter(torch.zeros(12, 3))
    assert module._flat_weights[1] is old
    private.flatten_anew(module)
    assert module._flat_weights[1] is module.weight_hh_l0
    assert not torch.equal(module(x)[0], before)
