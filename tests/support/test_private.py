"""Private parts of torch: each does what its name says, on the torch that is installed."""

import collections
import copy
import dis
import functools
import inspect
import io
import sys
import types
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from secateur.support import private


class Seen(TorchFunctionMode):
    """The names of the functions that are called."""

    def __init__(self):
        super().__init__()
        self.names, self.functions = [], []

    def __torch_function__(self, func, kinds, args=(), kwargs=None):
        self.functions.append(func)
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_what_accelerate_offloads(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    for place, offloads in (("cpu", False), ("disk", True)):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        assert not private.offloads(model)
        model = accelerate.dispatch_model(model, {"0": "cpu", "1": place}, offload_dir=tmp_path, force_hooks=True)
        assert private.offloads(model) == offloads


def test_dispatch_mode_sees_what_no_function_of_torch_was_called_for():
    found = []

    class Operators(private.DispatchMode):
        def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
            found.append(str(func))
            return func(*args, **(kwargs or {}))

    with Operators():
        torch.nn.functional.silu(torch.ones(2))
    assert found[-1] == "aten.silu.default"


def test_indices_of_the_cpu_meet_weights_on_meta():
    with private.fake_values():
        weights, places = torch.empty(2, 2, device="meta"), torch.zeros(1, dtype=torch.int64)
        if private.are_fakes_of_one_device():
            with pytest.raises(RuntimeError, match="two different devices"):
                torch.embedding(weights, places)
            places = places.to("meta")
        assert torch.embedding(weights, places).shape == (1, 2)


def test_what_is_made_among_fakes_may_have_values():
    with private.fake_values():
        fake = torch.arange(3)
        with private.real_values():
            real = torch.arange(3)
    assert private.is_fake(fake)
    assert not private.is_fake(real)
    assert real.tolist() == [0, 1, 2]


def test_tables_that_transformers_computes_as_it_loads_them():
    from transformers import MarianConfig, MarianMTModel

    sizes = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 6, "pad_token_id": 0}
    config = MarianConfig(vocab_size=9, encoder_attention_heads=2, decoder_attention_heads=2, **sizes)
    model = MarianMTModel(config)
    with torch.device("meta"):
        empty = MarianMTModel(config)
    name = "model.encoder.embed_positions"
    made = private.made_on_loading(empty, empty.get_submodule(name), "weight", f"{name}.weight")
    assert torch.equal(made, model.get_parameter(f"{name}.weight"))
    assert private.made_on_loading(empty, empty.lm_head, "weight", "lm_head.weight") is None
    assert private.made_on_loading(nn.Linear(2, 2), nn.Linear(2, 2), "weight", f"{name}.weight") is None


def test_what_classes_of_modules_remember():
    def around(function):
        cached = functools.lru_cache(function)
        return lambda *given: cached(*given)

    class Remembering(nn.Module):
        itself = functools.lru_cache(lambda self: 1)
        wrapped = staticmethod(around(lambda size: size))

        def plain(self):
            return self.later

    module = Remembering()
    module.itself(), module.wrapped(3)
    caches = list(private.caches_of(nn.Sequential(module, nn.Linear(2, 2), Remembering())))
    assert [each.cache_info().currsize for each in caches] == [1, 1]
    assert not list(private.caches_of(nn.Linear(2, 2)))


def test_copies_that_modules_of_transformers_keep():
    module = nn.Module()
    for name, persistent in (
        ("inv_freq", False),
        ("original_inv_freq", False),
        ("mean", True),
        ("original_mean", True),
    ):
        module.register_buffer(name, torch.zeros(2), persistent=persistent)
    for kind in ("default", "longrope", {"full": "dynamic"}):
        module.rope_type = kind
        ((copy, buffer, again),) = private.copies_of_buffers(nn.Sequential(module))
        assert copy is module.original_inv_freq
        assert buffer is module.inv_freq
        assert again == (kind != "default")


def test_fake_values_are_not_to_be_had():
    x = torch.ones(3, device="meta")
    with private.fake_values():
        assert (x + 1).shape == (3,)
        with pytest.raises(Exception, match="_local_scalar_dense"):
            bool((x + 1).sum() > 0)


NORMS = [nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.SyncBatchNorm(2)]


@pytest.mark.parametrize(
    ("tells", "those", "others"),
    [
        (
            private.is_convolution,
            [nn.Conv1d(2, 2, 1), nn.Conv3d(2, 2, 1), nn.ConvTranspose2d(2, 2, 1)],
            nn.Linear(2, 2),
        ),
        (private.Convolution, [nn.ConvTranspose1d(2, 2, 1)], nn.Linear(2, 2)),
        (private.is_transposed_convolution, [nn.ConvTranspose2d(2, 2, 1)], nn.Conv2d(2, 2, 1)),
        (private.is_batchnorm, NORMS, nn.LayerNorm(2)),
        (private.normalizations(), [*NORMS, nn.InstanceNorm3d(2)], nn.LayerNorm(2)),
        (private.ChannelNorm, [*NORMS, nn.InstanceNorm2d(2)], nn.GroupNorm(1, 2)),
    ],
    ids=["convolution", "its class", "transposed", "batch normalization", "normalizations", "their class"],
)
def test_kinds_of_layers_and_what_comes_of_them(tells, those, others):
    is_one = tells if inspect.isfunction(tells) else lambda layer: isinstance(layer, tells)
    for each in those:
        own = copy.copy(each)
        own.__class__ = type("Own", (type(each),), {})
        assert is_one(each)
        assert is_one(own)
    assert not is_one(others)


def test_hooks_of_a_module():
    module = nn.Linear(2, 2)
    assert private.hooks_of(module) == []
    hooks = [lambda *_: None for _ in range(3)]
    module.register_forward_pre_hook(hooks[0])
    module.register_forward_hook(hooks[1])
    module.register_full_backward_hook(hooks[2])
    assert sorted(map(id, private.hooks_of(module))) == sorted(map(id, hooks))


def test_what_is_watched():
    module = nn.Linear(2, 2)
    assert not private.is_watched(module)
    for register in (module.register_forward_pre_hook, module.register_forward_hook):
        handle = register(lambda *_: None)
        assert private.is_watched(module)
        handle.remove()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert private.is_watched(module)
    handle.remove()
    assert not private.is_watched(module)


def test_frozen_linear_is_the_product():
    weight, bias, x = torch.randn(8, 16), torch.randn(8), torch.randn(4, 16)
    product = private.frozen_linear(weight, bias, x)
    if torch.backends.mkldnn.is_available():
        torch.testing.assert_close(product(x), nn.functional.linear(x, weight, bias))
    assert private.frozen_linear(weight, bias, torch.randn(4, 15)) is None


def test_int8_linear_is_nearly_the_product():
    weight, bias, x = torch.randn(8, 16), torch.randn(8), torch.randn(4, 16)
    if (product := private.int8_linear(weight, bias)) is not None:
        expected = nn.functional.linear(x, weight, bias)
        assert (product(x) - expected).norm() < 0.05 * expected.norm()


def test_copied_with_other_modules_has_the_same_parameters():
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    twin = private.copied_with(module, {"0": module[0], "1": nn.Tanh()})
    assert type(twin) is nn.Sequential
    assert twin[0].weight is module[0].weight
    assert [type(each) for each in (twin[1], module[1])] == [nn.Tanh, nn.ReLU]


def test_frozen_convolution_is_the_convolution():
    module, x = nn.Conv2d(3, 8, 3, 2, (1, 2), groups=1).requires_grad_(False), torch.randn(2, 3, 9, 9)
    convolved = private.frozen_convolution(module, x)
    if torch.backends.mkldnn.is_available():
        torch.testing.assert_close(convolved(x), module(x), rtol=1e-4, atol=1e-4)
    assert private.frozen_convolution(nn.Conv2d(3, 8, 2, padding="same"), x) is None
    assert private.frozen_convolution(module, torch.randn(2, 4, 9, 9)) is None


def test_is_wrapped_inside_vmap_only():
    found = []
    torch.vmap(lambda x: (found.append(private.is_wrapped(x)), x)[1])(torch.ones(2))
    assert found == [True]
    assert not private.is_wrapped(torch.ones(2))


def test_memory_of_views_is_one():
    x = torch.ones(4)
    assert private.memory_of(x) == private.memory_of(x[1:].view(-1, 1))
    assert private.memory_of(x) != private.memory_of(x.clone())


class Whole(int):
    """A whole number that knows more, as those do that remember where they came from."""


Pair = collections.namedtuple("Pair", "one other")  # noqa: PYI024 as code of others has it
things = st.sampled_from(
    [
        *(torch.ones(2), nn.Parameter(torch.ones(1)), nn.Buffer(torch.ones(1)), 3, True, Whole(2), "a", None, 1.5, ...),
        *(slice(1, 2), torch.float32, torch.strided, torch.preserve_format, torch.Size([2, 3]), torch.device("cpu")),
        *(Pair(1, torch.zeros(1)), torch.ones(3).topk(1), collections.OrderedDict(a=torch.ones(1))),
    ]
)
trees = st.recursive(
    things,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=8,
)


def test_tree_leaves_and_tree_map_only():
    tree = {"a": (torch.ones(1), 2), "b": [None, torch.zeros(1)]}
    assert [type(each) for each in private.tree_leaves(tree)] == [torch.Tensor, int, type(None), torch.Tensor]
    mapped = private.tree_map_only(int, lambda each: each + 1, tree)
    assert mapped["a"][1] == 3
    assert mapped["b"][1] is tree["b"][1]


@given(trees)
def test_trees_are_those_of_torch(tree):
    leaves = _pytree.tree_leaves(tree)
    assert [id(each) for each in private.tree_leaves(tree)] == [id(each) for each in leaves]
    tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
    assert [id(each) for each in private.tensors_of_tree(tree)] == [id(each) for each in tensors]
    for kind in (torch.Tensor, int):
        # no class: torch 2.11 gives what it makes of the function all that Python 3.12's functions have
        found = private.tree_map_only(kind, lambda each: type(each), tree)
        assert repr(found) == repr(_pytree.tree_map_only(kind, lambda each: type(each), tree))


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


def test_version_of_and_changes_of_count_writes():
    x = torch.ones(3)
    before = private.version_of(x)
    assert private.changes_of(x) == before
    x[:1].mul_(2)
    assert private.version_of(x) == private.changes_of(x) == before + 1
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


def late(x):
    from torch.overrides import handle_torch_function, has_torch_function

    return handle_torch_function(late, (x,), x) if has_torch_function((x,)) else x + 1


def test_written_in_python_is_never_handed_to_a_mode_again():
    """However it asks whether a mode wants it: by a name of its module, or through torch, as torch._assert does."""
    with Seen() as seen:
        private.written_in_python(torch._assert)(torch.tensor(True), "never")
        private.written_in_python(torch.nn.init.uniform_)(torch.empty(2))
    assert torch._assert not in seen.functions
    assert torch.nn.init.uniform_ not in seen.functions
    with pytest.raises(AssertionError, match="sizes"):
        private.written_in_python(torch._assert)(False, "sizes")
    assert private.written_in_python(late) is None  # it asks what it imports itself: it stays whole


def test_each_function_of_torch_that_is_written_in_python_can_be_opened():
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    found = 0
    for func in torch.overrides.get_testing_overrides():
        made = private.written_in_python(func)
        if made is not None:
            asked = [each.argval for each in dis.get_instructions(made) if each.argval in names]
            through = [each for each in dis.get_instructions(made) if each.argval == "overrides"]
            assert asked
            for name in asked:
                assert through or not made.__globals__[name](None), func
            found += 1
    assert found > 100


def test_experts_in_turn_is_a_field_of_configurations_with_experts():
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig()
    field, value = private.experts_in_turn()
    config._experts_implementation = value
    assert getattr(config, field) == value


@pytest.mark.parametrize("kind", ["LlamaConfig", "BertConfig", "T5Config", "CLIPConfig", "ViTConfig", "WhisperConfig"])
def test_a_configuration_is_what_from_dict_makes(kind):
    import transformers

    kind = getattr(transformers, kind)
    values = {**kind().to_dict(), "pad_token_id": 3, "id2label": {0: "a", 1: "b", 2: "c"}}
    made, expected = private.configuration_of(kind, values), kind.from_dict(dict(values))
    assert type(made) is kind
    assert made.to_dict() == expected.to_dict()
    assert vars(made).keys() == vars(expected).keys()


def test_a_configuration_of_one_s_own_is_made_its_own_way():
    import transformers

    class Own(transformers.LlamaConfig):
        @classmethod
        def from_dict(cls, config_dict, **kwargs):
            return super().from_dict({**config_dict, "hidden_size": 12}, **kwargs)

    assert private.configuration_of(Own, {"num_attention_heads": 2}).hidden_size == 12


def test_experts_at_once_is_a_way_that_models_have_to_run_their_experts():
    transformers = pytest.importorskip("transformers")
    field, value = private.experts_at_once()
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.MixtralConfig(vocab_size=9, num_hidden_layers=1, num_local_experts=3, **sizes)
    model = transformers.MixtralModel(config).eval()
    ids = torch.tensor([[1, 2, 3]])
    found = []
    for way in (value, private.experts_in_turn()[1]):
        setattr(model.config, field, way)
        found.append(model(ids).last_hidden_state)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("padding", [0, (2, 1), "same"])
def test_padding_of_a_convolution_is_what_it_computes_with(padding):
    layer, x = nn.Conv2d(1, 1, 3, padding=padding), torch.randn(1, 1, 6, 6)
    padded = torch.nn.functional.pad(x, private.padding_of(layer))
    torch.testing.assert_close(torch.nn.functional.conv2d(padded, layer.weight, layer.bias), layer(x))


def test_a_class_of_its_own_convolves_in_its_own_way():
    class Same(nn.Conv2d):
        def forward(self, x):
            return super().forward(x)

    class Padding(nn.Conv1d):
        def _conv_forward(self, x, weight, bias):
            return super()._conv_forward(x, weight, bias)

    assert all(private.convolves_as_torch(each(1, 1, 1)) for each in (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    assert not any(private.convolves_as_torch(each(1, 1, 1)) for each in (Same, Padding, nn.ConvTranspose2d, nn.Linear))


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


def test_is_tracing_while_torch_traces_only():
    seen = []

    class Asks(nn.Module):
        def forward(self, x):
            seen.append(private.is_tracing())
            return x + 1

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


def test_tables_of_a_module_are_what_it_looks_its_own_things_up_in():
    module = nn.Sequential(nn.BatchNorm1d(2))
    module.register_parameter("own", nn.Parameter(torch.ones(2)))
    assert private.parameters_of(module) == {"own": module.own}
    assert private.submodules_of(module) == {"0": module[0]}
    assert private.buffers_of(module) == {}
    assert private.buffers_of(module[0]).keys() == {"running_mean", "running_var", "num_batches_tracked"}
    private.buffers_of(module[0])["running_mean"] = other = torch.ones(2)
    private.parameters_of(module)["own"] = parameter = nn.Parameter(torch.zeros(2))
    private.submodules_of(module)["0"] = norm = module[0]
    assert module[0].running_mean is other
    assert module.own is parameter
    assert module[0] is norm
    assert vars(module)[private.PARAMETERS] is private.parameters_of(module)
    assert vars(module)[private.BUFFERS] is private.buffers_of(module)


def test_unsaved_buffers_of_are_those_that_a_state_dict_leaves_out():
    module = nn.Module()
    module.register_buffer("saved", torch.ones(1))
    module.register_buffer("unsaved", torch.ones(1), persistent=False)
    assert private.unsaved_buffers_of(module) == {"unsaved"}
    private.unsaved_buffers_of(module).discard("unsaved")
    assert module.state_dict().keys() == {"saved", "unsaved"}


def test_pre_hooks_of_are_called_in_their_order():
    layer, called = nn.Linear(2, 2), []
    handles = [layer.register_forward_pre_hook(lambda *_, word=word: called.append(word)) for word in "ab"]
    assert list(private.pre_hooks_of(layer)) == [handle.id for handle in handles]
    del private.pre_hooks_of(layer)[handles[0].id]
    layer(torch.ones(1, 2))
    assert called == ["b"]


def test_arrival_hooks_are_those_that_the_engine_calls():
    parameter, called = nn.Parameter(torch.ones(2)), []

    def arrives():
        called.clear()
        parameter.sum().backward()
        return list(called)

    assert private.arrival_hooks_of(parameter) is None
    parameter.register_post_accumulate_grad_hook(lambda _: called.append(1))
    hooks = private.arrival_hooks_of(parameter)
    assert arrives() == [1]
    private.set_arrival_hooks(parameter, {})
    assert arrives() == []
    private.set_arrival_hooks(parameter, hooks)
    assert private.arrival_hooks_of(parameter) is hooks
    assert arrives() == [1]
    private.set_arrival_hooks(parameter, None)
    assert private.arrival_hooks_of(parameter) is None
    assert arrives() == []


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_a_recurrent_module_computes_with_its_flat_weights(kind):
    module = kind(2, 3, num_layers=2, bidirectional=True)
    names = private.flat_names_of(module)
    listed = private.flat_weights_of(module)
    assert sorted(names) == sorted(name for name, _ in module.named_parameters())
    assert all(weight is module.get_parameter(name) for name, weight in zip(names, listed, strict=True))
    assert vars(module)[private.FLAT_WEIGHTS] is listed
    assert callable(getattr(module, private.UPDATE_FLAT_WEIGHTS))
    tables = set(vars(module)) - set(vars(nn.Module()))
    assert {name for name in tables if name.startswith("_")} == private.OF_RECURRENT
    assert private.flat_weights_of(nn.Linear(2, 2)) == []


def test_inside_compiled_is_the_module_itself():
    layer = nn.Linear(2, 2)
    assert private.inside_compiled(torch.compile(layer, backend="eager")) is layer
    assert private.inside_compiled(layer) is None
    assert private.inside_compiled(torch.jit.script(layer)) is None


@pytest.mark.parametrize(("widths", "one"), [({}, True), ({"kdim": 4, "vdim": 6}, False)])
def test_attention_that_shares_one_width_has_one_weight(widths, one):
    attention = nn.MultiheadAttention(8, 2, **widths)
    assert private.shares_one_width(attention) == one
    assert (attention.in_proj_weight is not None) == one


def test_optimizer_inside_of_wrappers():
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)

    class Lightning:
        def __init__(self):
            self._optimizer = optimizer

    class Accelerate:
        def __init__(self):
            self.optimizer = optimizer

    assert private.optimizer_inside(Lightning()) is optimizer
    assert private.optimizer_inside(Accelerate()) is optimizer
    assert private.optimizer_inside(object()) is None


def test_optimizer_inside_of_lightnings_wrapper():
    optimizers = pytest.importorskip("lightning.pytorch.core.optimizer")
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    assert private.optimizer_inside(optimizers.LightningOptimizer(optimizer)) is optimizer


def test_tells_implementation_of_fields_that_no_file_has():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(attn_implementation="eager")
    found = {key: value for key, value in vars(config).items() if private.tells_implementation(key)}
    assert "eager" in found.values()
    assert not found.keys() & config.to_dict().keys()


def test_composed_states_are_those_that_modules_have():
    """What ``fully_shard`` keeps is tested with ranks; here, that the table is where it was."""
    from torch.distributed import _composable_state as composable

    module, state = nn.Linear(2, 2), composable._State()
    composable._insert_module_state(module, state)
    assert any(each is state for each in private.composed_states())
    assert private.shard_groups_of(state) == []
    state._fsdp_param_group = 1
    assert private.shard_groups_of(state) == [1]
    state._fsdp_param_groups = [1, None, 2]
    assert private.shard_groups_of(state) == [1, 2]


def test_a_recurrent_module_lists_the_parameters_that_it_has_now():
    module, x = nn.LSTM(2, 3), torch.randn(4, 1, 2)
    before, old = module(x)[0], module.weight_hh_l0
    module._parameters["weight_hh_l0"] = nn.Parameter(torch.zeros(12, 3))
    assert module._flat_weights[1] is old
    private.flatten_anew(module)
    assert module._flat_weights[1] is module.weight_hh_l0
    assert not torch.equal(module(x)[0], before)


def test_arguments_of_an_operator_say_where_it_writes():
    written = [each.alias_info is not None for each in private.arguments_of(torch.ops.aten.add_.Tensor)]
    assert written[:2] == [True, False]


def test_einops_computes_shapes_at_every_call(monkeypatch):
    @functools.lru_cache
    def half(size):
        return size // 2

    module = types.ModuleType("einops.einops")
    module._reconstruct_from_shape = half
    monkeypatch.setitem(sys.modules, "einops.einops", module)
    with private.uncached_shapes():
        assert module._reconstruct_from_shape is half.__wrapped__
        with private.uncached_shapes():
            assert module._reconstruct_from_shape(6) == 3
    assert module._reconstruct_from_shape is half
    monkeypatch.setitem(sys.modules, "einops.einops", types.ModuleType("einops.einops"))
    with private.uncached_shapes():
        pass


@pytest.mark.filterwarnings("ignore")
def test_never_traced_exports_no_side_of_a_branch():
    class Turning(nn.Module):
        def forward(self, x):
            return x + 1 if x.sum() > 0 else x

    with private.never_traced(), pytest.raises(Exception, match="data-dependent"):
        torch.onnx.export(Turning(), (torch.ones(2),), dynamo=True, verbose=False)


def test_without_graphs_printed_the_exporter_that_traces_fails_in_silence(capfd):
    class SharedKeys(nn.Module):
        def forward(self, q, k):
            return nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)

    given = (torch.randn(1, 4, 3, 4), torch.randn(1, 2, 3, 4))
    with warnings.catch_warnings(), private.without_graphs_printed():
        warnings.simplefilter("ignore")
        with pytest.raises(Exception, match="enable_gqa"):
            torch.onnx.export(SharedKeys(), given, f=io.BytesIO(), dynamo=False)
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("padding", ["zeros", "circular"])
def test_a_convolution_computes_with_another_weight(padding):
    module, x = nn.Conv2d(2, 4, 3, padding=1, padding_mode=padding, groups=2), torch.randn(1, 2, 5, 5)
    wanted = module(x)
    weight = module.weight.detach().clone()
    nn.init.zeros_(module.weight)
    assert torch.equal(private.convolved(module, x, weight), wanted)
