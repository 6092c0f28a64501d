"""What follows a convolution in a model's run: the batch normalization and the activation that alone read its output.
Blocks with a shortcut: what is added to a packed convolution's output, and the ReLU after it, go into its store.
"""

from __future__ import annotations

import functools
import itertools
import operator
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from secateur.inference.convolution import BlockConv2d, SparseConv2d
from secateur.native import Chain, is_plain
from secateur.support import private

# What follows a convolution in a model's run: the batch normalization and the activation that alone read its output.
#
# Law: what is named reads the output alone; where anything else does, or the model returns it, nothing is named.

_RECTIFIERS = {nn.ReLU: "relu", nn.ReLU6: "relu6", nn.Hardswish: "hardswish", nn.SiLU: "silu"}


class Absorbed(nn.Identity):
    """In place of a module whose work is done by the packed layer before it.

    >>> Absorbed()
    Absorbed()
    """


def rectifier_of(module: nn.Module) -> str:
    """The word that `secateur.native.sparse_convolution` has for an activation; or "".

    >>> rectifier_of(nn.ReLU6()), rectifier_of(nn.Hardtanh(0, 6)), rectifier_of(nn.Hardtanh()), rectifier_of(nn.GELU())
    ('relu6', 'relu6', '', '')
    """
    if type(module) is nn.Hardtanh and (module.min_val, module.max_val) == (0, 6):
        return "relu6"
    return _RECTIFIERS.get(type(module), "")


def may_be_absorbed(module: nn.Module) -> bool:
    """Whether a packed convolution can do the work of a module that follows it: a batch normalization in evaluation
    mode, a ReLU or another activation that it has in its store, of torch's own classes and without hooks.

    >>> may_be_absorbed(nn.BatchNorm2d(4).eval()), may_be_absorbed(nn.BatchNorm2d(4)), may_be_absorbed(nn.ReLU())
    (True, False, True)
    """
    if private.hooks_of(module) or nn.utils.parametrize.is_parametrized(module):
        return False
    if type(module) in (nn.BatchNorm1d, nn.BatchNorm2d):
        return not module.training and module.running_mean is not None and module.running_var is not None
    return bool(rectifier_of(module))


def may_follow(model: nn.Module, which: Callable[[nn.Module], bool] = may_be_absorbed) -> dict[str, nn.Module]:
    """The modules that may be replaced and have one name only: another name would go on calling what was replaced."""
    names = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    return {name: each for name, each in model.named_modules() if names[id(each)] == 1 and which(each)}


def run_and_follow(
    convolutions: Mapping[str, nn.Module],
    followers: Mapping[str, nn.Module],
    run: Callable[[], Any],
    poolings: Mapping[str, nn.Module] = MappingProxyType({}),
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """What follows what, from one run of the model: the names of what may be absorbed after each convolution, in the
    order of their work; and for each convolution and follower that a pooling alone reads, that pooling.

    Args:
        followers: see `may_follow`.
        run: calls the model and returns its outputs.
        poolings: max-poolings, by their names.
    """
    watched = {**convolutions, **followers, **poolings}
    with _Readers() as readers:
        handles: list[Any] = []
        try:
            for name, module in watched.items():
                handles.append(module.register_forward_pre_hook(readers.entering(name)))
                handles.append(module.register_forward_hook(readers.leaving(name), always_call=True))
            readers.returned(run())
        finally:
            for handle in handles:
                handle.remove()
    found: dict[str, list[str]] = {}
    for name in convolutions:
        chain: list[str] = []
        normed = False
        while (follower := readers.only_reader(chain[-1] if chain else name)) in followers:
            rectifies = bool(rectifier_of(followers[follower]))
            if normed and not rectifies:
                break
            chain.append(follower)
            normed = True
            if rectifies:
                break
        found[name] = chain
    pooled = {name: readers.only_reader(name) for name in (*convolutions, *followers)}
    return found, {name: reader for name, reader in pooled.items() if reader in poolings}


class _Readers(private.DispatchMode):  # type: ignore[no-untyped-call]
    """Which watched module's operations read which watched module's output; "" is any other reader."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inside: list[str] = []
        self.calls: Counter[str] = Counter()
        self.made: dict[int, tuple[str, Tensor]] = {}  # by the id of the tensor, which is held to keep it
        self.read_by: dict[str, set[str]] = {}

    def entering(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any) -> None:
            del module, args
            self.inside.append(name)
            self.calls[name] += 1

        return enter

    def leaving(self, name: str) -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            del module, args
            self.inside.pop()
            if isinstance(output, Tensor):  # one that it was given and changed in place is its own from now on
                self.made[id(output)] = name, output
                self.read_by.setdefault(name, set())

        return leave

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.note([*args, *(kwargs or {}).values()], self.inside[-1] if self.inside else "")
        return func(*args, **(kwargs or {}))

    def note(self, values: Iterable[Any], reader: str) -> None:
        for value in private.tree_leaves(list(values)):
            known = self.made.get(id(value))
            if known is not None and known[1] is value:
                self.read_by[known[0]].add(reader)

    def returned(self, outputs: Any) -> None:
        self.note([outputs], "")

    def only_reader(self, name: str) -> str:
        """The one module that reads an output, where both are called once; or ""."""
        readers = self.read_by.get(name, set())
        if self.calls[name] != 1 or len(readers) != 1:
            return ""
        (reader,) = readers
        return reader if self.calls[reader] == 1 else ""


# Blocks with a shortcut: what is added to a packed convolution's output, and the ReLU after it, go into its store.
#
# Law: a block is rewritten only where its forward pass is calls of modules, sums and ReLUs, one after the other; it
# then computes the same within rounding. Every other block is left as it is. Only memory that a block made itself,
# and that no hook and no other module has seen, is written over; and only what packed convolutions alone read has
# planes that lie apart.

_SUMS = (operator.add, operator.iadd, torch.add)
_RELUS = (functional.relu, torch.relu)
_POSITIVE = ("relu", "relu6")  # after which a ReLU changes nothing
_SUM, _RELU = "+", "relu()"  # no names of modules
_MOST_CHAINS = 8  # of a module: shapes of inputs that are remembered
_NEAR_BYTES = 1 << 22  # of a batch whose images need not be taken one after the other


class FusedBlock(nn.Module):
    """A block of a residual network whose packed convolutions add and rectify, with its modules by their names; or a
    stage of such blocks. Batches of more than a few megabytes are taken image by image, as many at once as there are
    threads, where nothing but packed convolutions, sums and ReLUs computes.

    Args:
        block: whose modules these are.
        steps: what is done one after the other: the name of a module, or "+" or "relu()"; of which values (0 is the
            input, n what step n made); and which of them nothing needs afterwards.
        rectified: the names of the convolutions whose ReLUs were the block's.
    """

    _read_by: list[list[int]] | None = None  # the steps that read each value; a pickle of before does not have it

    def __init__(self, block: nn.Module, steps: list[tuple[str, list[int], list[int]]], rectified: list[str]) -> None:
        super().__init__()
        self.block, self.steps, self.rectified = type(block).__name__, steps, rectified
        self._read_by = _readers_of(steps)
        for name, module in block.named_children():
            self.add_module(name, module)
        self.train(block.training)

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        values: list[Any] = [*args, *kwargs.values()]
        if len(values) != 1:
            raise TypeError(f"a {self.block} that was fused takes one input, not {len(values)}.")
        x: Tensor = values[0]
        if _may_be_by_image(x) and self._is_by_image():
            return _one_after_the_other(x, functools.partial(_in_a_chain, self, [self]))
        return _in_a_chain(self, [self], x)

    def _made_of(
        self, x: Tensor, is_ours: bool = False, into: Tensor | None = None, apart: bool = False
    ) -> tuple[Tensor, bool]:
        """The output, and whether nobody else has it.

        Args:
            is_ours: whether nobody else has the input, so that its memory may take what is made.
            into: memory that the output may take.
            apart: whether planes of the output may lie apart.
        """
        values: list[Any] = [x]
        ours = [is_ours]
        modules: list[Any] = [self._module_of(n) for n in range(len(self.steps))]
        takes = [_reads_planes(each) for each in modules]
        for number, (name, inputs, done) in enumerate(self.steps, start=1):
            is_last, module = number == len(self.steps), modules[number - 1]
            where = into if is_last else None
            may_lie = apart if is_last else False not in [takes[n] for n in self._readers(number)]
            first, second = values[inputs[0]], values[inputs[1]] if len(inputs) > 1 else None
            # whether the last of what is given is needed by nobody else
            is_free = ours[inputs[-1]] and inputs[-1] in done and (len(inputs) == 1 or inputs[0] != inputs[-1])
            known = True
            if name == _SUM:
                made = first + second
            elif name == _RELU:
                made = functional.relu(first)
            elif not _is_known(module):  # who knows what it does with what it is given
                known = False
                for n in inputs:
                    if ours[n]:  # a hook that came in between
                        values[n] = values[n].contiguous()
                    ours[n] = False
                made = module(*(values[n] for n in inputs))
            elif type(module) is FusedBlock:
                for n in done:
                    values[n] = None
                made, known = module._made_of(first, is_free, where, may_lie)
            else:
                if where is None and second is not None and is_free:
                    where = second
                made = module.forward(first, second, where, may_lie)
            for n in done:
                values[n] = None
            values.append(made)
            ours.append(known)
        return values[-1], ours[-1]

    def _readers(self, value: int) -> list[int]:
        """The steps that read a value, counted from 0."""
        if self._read_by is None:
            self._read_by = _readers_of(self.steps)
        return self._read_by[value]

    def _is_by_image(self) -> bool:
        """Whether each image of a batch has its own output, which does not depend on others."""
        modules = [self._submodule(name) for name, _, _ in self.steps if name not in (_SUM, _RELU)]
        return all(_is_known(each) and (not isinstance(each, FusedBlock) or each._is_by_image()) for each in modules)

    @property
    def is_chain(self) -> bool:
        """Whether it is of blocks that were fused themselves."""
        return any(isinstance(each, FusedBlock) for each in self.modules() if each is not self)

    def _module_of(self, step: int) -> nn.Module | None:
        name = self.steps[step][0]
        return None if name in (_SUM, _RELU) else self._submodule(name)

    def _submodule(self, name: str) -> nn.Module:
        """As `get_submodule`, which takes ten times as long as this: a tenth of the layer's own time."""
        module: Any = self
        for key in name.split("."):
            module = private.submodules_of(module)[key]
        found: nn.Module = module
        return found

    def extra_repr(self) -> str:
        return f"of {self.block}"


def _is_known(module: nn.Module) -> bool:
    """Whether it keeps nothing of what it is given and makes, and shows it to nobody."""
    return type(module) in (SparseConv2d, BlockConv2d, FusedBlock) and not private.is_watched(module)


def _readers_of(steps: list[tuple[str, list[int], list[int]]]) -> list[list[int]]:
    return [[n for n, (_, inputs, _) in enumerate(steps) if value in inputs] for value in range(len(steps) + 1)]


def _reads_planes(module: nn.Module | None) -> bool:
    """Whether it is faster of an input whose planes lie apart: with a kernel of one place, which then needs no copy."""
    if module is None or not _is_known(module):
        return False
    if isinstance(module, FusedBlock):
        return all(_reads_planes(module._module_of(n)) for n in module._readers(0))
    return isinstance(module, SparseConv2d) and module.kernel == [1, 1] and not module.rounds_inputs


def _may_be_by_image(x: Tensor) -> bool:
    """Whether a batch is large enough to be taken image by image."""
    if not is_plain(x) or x.dim() != 4 or x.dtype != torch.float32 or x.nbytes <= _NEAR_BYTES:
        return False
    return x.shape[0] > torch.get_num_threads()


def _one_after_the_other(x: Tensor, make: Callable[[Tensor, Tensor | None], Tensor]) -> Tensor:
    """As many images at a time as there are threads, such that what one layer makes of them is still near when the next
    reads it. ``make``: of some images, and of memory that it may take or leave."""
    images = torch.get_num_threads()
    first, *others = (x[at : at + images] for at in range(0, x.shape[0], images))
    made = make(first, None)
    whole = made.new_empty(x.shape[0], *made.shape[1:])
    whole[:images] = made
    for n, piece in enumerate(others, start=1):
        into = whole[n * images : n * images + len(piece)]
        if (made := make(piece, into)) is not into:
            into.copy_(made)
    return whole


class FusedSequential(nn.Sequential):
    """An `nn.Sequential` whose packed layers that follow each other are one chain: each may write over what the one
    before it made, and a batch of more than a few megabytes goes through them image by image. Otherwise as that.

    >>> layers = [SparseConv2d.from_module(nn.Conv2d(4, 4, 3, padding=1)) for _ in range(2)]
    >>> model, x = nn.Sequential(*layers, nn.Flatten()), torch.randn(2, 4, 5, 5)
    >>> expected = model(x)
    >>> sequences(model)
    ['']
    >>> type(model).__name__, torch.equal(model(x), expected)
    ('FusedSequential', True)
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (as nn.Sequential calls it)
        modules, at, x = [*self], 0, input
        while at < len(modules):
            end = at
            while end < len(modules) and (_is_known(modules[end]) or _does_nothing(modules[end])):
                end += 1
            line = [each for each in modules[at:end] if not _does_nothing(each)]
            if not line:
                end = max(end, at + 1)
                if not _does_nothing(modules[at]):
                    x = modules[at](x)
            elif len(line) > 1 and _may_be_by_image(x) and all(_is_by_image(each) for each in line):
                x = _one_after_the_other(x, functools.partial(_in_a_chain, self, line))
            else:
                x = _in_a_chain(self, line, x)
            at = end
        return x


_CHAINS: WeakKeyDictionary[nn.Module, dict[Any, Chain | None]] = WeakKeyDictionary()


def _in_a_chain(owner: nn.Module, line: list[Any], x: Tensor, into: Tensor | None = None) -> Tensor:
    """What modules make one after the other, all of them known: from the second call of a shape on as a `Chain`, where
    nothing but packed convolutions computes."""
    is_one = is_plain(x) and x.is_cpu and x.dtype == torch.float32 and x.dim() == 4 and x.is_contiguous()
    if not is_one or (layers := _layers_of(line)) is None:
        return _made_in_line(line, x, into)
    known, looked_at = _CHAINS.setdefault(owner, {}), [each.looked_at() for each in layers]
    key = id(line[0]), x.shape
    chain = known.get(key)
    if chain is not None and chain.holds(looked_at):
        return chain.made(x, into)
    if chain is None and key in known:
        return _made_in_line(line, x, into)
    if len(known) >= _MOST_CHAINS:
        known.clear()
    made, known[key] = Chain.watched(x, lambda: _made_in_line(line, x, into))
    return made


def _layers_of(line: Iterable[Any]) -> list[SparseConv2d] | None:
    """The packed convolutions that compute, in their turn; None where anything else does."""
    layers: list[SparseConv2d] = []
    for each in line:
        if not isinstance(each, FusedBlock):
            layers.append(each)
            continue
        inner = [each._module_of(n) for n in range(len(each.steps))]
        if any(module is None or not _is_known(module) for module in inner):
            return None
        if (more := _layers_of(inner)) is None:
            return None
        layers += more
    return layers


def _made_in_line(line: list[Any], x: Tensor, into: Tensor | None) -> Tensor:
    """What modules make one after the other, all of them known."""
    is_ours = False
    for n, module in enumerate(line):
        is_last = n == len(line) - 1
        where, may_lie = (into, False) if is_last else (None, _reads_planes(line[n + 1]))
        if isinstance(module, FusedBlock):
            x, is_ours = module._made_of(x, is_ours, where, may_lie)
        else:
            x, is_ours = module.forward(x, None, where, may_lie), True
    return x


def _is_by_image(module: nn.Module) -> bool:
    return not isinstance(module, FusedBlock) or module._is_by_image()


def sequences(model: nn.Module, only: Collection[str] | None = None) -> list[str]:
    """Makes a `FusedSequential` of each `nn.Sequential` in which two packed layers or fused blocks follow each other.

    In place: it stays the same object, under all its names, and may be the model itself.

    Args:
        only: names; others are left.

    Returns:
        The names of what became one.
    """
    found = []
    for name, module in model.named_modules():
        if type(module) is not nn.Sequential or (only is not None and name not in only):
            continue
        line = [_is_packed(each) for each in module if not _does_nothing(each)]
        if any(a and b for a, b in itertools.pairwise(line)):
            module.__class__ = FusedSequential
            found.append(name)
    return found


def _is_packed(module: nn.Module) -> bool:
    return type(module) in (SparseConv2d, BlockConv2d, FusedBlock)


def fused_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """What takes the place of each block of a model in which something could be fused: ``{name: module}``.

    Blocks are the innermost modules that call packed convolutions in a forward pass of their own.
    """
    found: dict[str, nn.Module] = {}
    names = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    for name, module in reversed(list(model.named_modules())):  # the inner ones first
        if not name or names[id(module)] > 1 or any(other.startswith(f"{name}.") for other in found):
            continue
        if (fused := fused_block(module)) is not None:
            found[name] = fused
    return found


def chains(model: nn.Module) -> dict[str, nn.Module]:
    """What takes the place of each module that does nothing but call fused blocks, one after the other: a `FusedBlock`
    of these, in which a block's output, that nobody else has, may become the next one's: ``{name: module}``.
    """
    found: dict[str, nn.Module] = {}
    names = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    for name, module in reversed(list(model.named_modules())):
        if not name or names[id(module)] > 1 or any(other.startswith(f"{name}.") for other in found):
            continue
        if (chain := _chain(module)) is not None:
            found[name] = chain
    return found


def _chain(module: nn.Module) -> nn.Module | None:
    blocks = {name: each for name, each in module.named_modules() if isinstance(each, FusedBlock)}
    if len(blocks) < 2 or isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict | FusedBlock):
        return None
    if any(private.hooks_of(each) for each in module.modules()) or (graph := _traced(module, _BlockTracer())) is None:
        return None
    first, *others, output = graph.nodes
    line = [first, *others]
    is_line = all(
        node.op == "call_module" and node.target in blocks and node.args == (before,) and not node.kwargs
        for before, node in zip(line, others, strict=False)
    )
    if not is_line or first.op != "placeholder" or first.args or output.args[0] is not line[-1] or len(others) < 2:
        return None
    return FusedBlock(module, _steps(graph), [])


def _traced(module: nn.Module, tracer: fx.Tracer) -> fx.Graph | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return tracer.trace(module)
    except Exception:  # whatever a forward pass does with what stands for a tensor
        return None


def fused_block(block: nn.Module) -> nn.Module | None:
    """A module that computes what a block does, with sums and ReLUs in the stores of its packed convolutions; None
    where nothing can be fused. The block's layers are in it under the names that they have, and are themselves changed.

    >>> from torch import nn
    >>> class Block(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.conv = SparseConv2d.from_module(nn.Conv2d(4, 4, 3, padding=1))
    ...     def forward(self, x):
    ...         return torch.relu(x + self.conv(x))
    >>> fused_block(Block()).steps
    [('conv', [0, 0], [0])]
    """
    inlined = [each for each in block.modules() if _calls_convolutions(each)]
    if not inlined or isinstance(block, nn.Sequential | nn.ModuleList | nn.ModuleDict | FusedBlock):
        return None
    if any(private.hooks_of(each) or isinstance(each, FusedBlock) for each in inlined):
        return None
    if (graph := _traced(block, _Tracer())) is None:
        return None
    modules = dict(block.named_modules())
    calls = Counter(str(node.target) for node in graph.nodes if node.op == "call_module")
    if not _is_simple(graph, modules) or any(
        n > 1 and isinstance(modules[name], SparseConv2d) for name, n in calls.items()
    ):
        return None
    rectified: list[SparseConv2d] = []
    changed = False
    for node in list(graph.nodes):
        if _is_sum(node):
            changed |= _add_in_store(graph, node, modules, rectified)
        elif _is_relu(node, modules) and (convolution := _made_by(node.args[0], modules)) is not None:
            layer = modules[convolution.target]
            if layer.rectified and layer.rectifier not in _POSITIVE:
                continue
            if not layer.rectified:
                rectified.append(layer)
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
            changed = True
    if not changed:
        return None
    for layer in rectified:
        layer.rectified = True
    for node in list(graph.nodes):
        if node.op != "call_module" or not _does_nothing(modules[node.target]):
            continue
        if node.args[0] is node.prev or all(user.op != "output" for user in node.users):  # the last is what is returned
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    names = [name for name, module in modules.items() if module in rectified]
    return FusedBlock(block, _steps(graph), names)


def _does_nothing(module: nn.Module) -> bool:
    return type(module) in (nn.Identity, Absorbed) and not private.hooks_of(module)


def _steps(graph: fx.Graph) -> list[tuple[str, list[int], list[int]]]:
    """What the nodes of a graph do, as `FusedBlock` has it; the last makes the output."""
    nodes = [node for node in graph.nodes if node.op != "output"]
    at = {node: n for n, node in enumerate(nodes)}
    last = {at[given]: n for n, node in enumerate(nodes) for given in node.all_input_nodes}
    steps = []
    for n, node in enumerate(nodes[1:], start=1):
        name = str(node.target) if node.op == "call_module" else _SUM if _is_sum(node) else _RELU
        inputs = [at[given] for given in node.args]
        steps.append((name, inputs, sorted({given for given in inputs if last[given] == n})))
    return steps


def twin_of(module: nn.Module, instead: Mapping[str, nn.Module], name: str = "") -> nn.Module:
    """The same module of the same parameters, but for other modules under some names; the module itself stays."""
    if name in instead:
        return instead[name]
    inner = {
        key: None if each is None else twin_of(each, instead, f"{name}.{key}" if name else key)
        for key, each in private.submodules_of(module).items()
    }
    return private.copied_with(module, inner)


def _calls_convolutions(module: nn.Module) -> bool:
    """Whether there are packed convolutions inside."""
    return not isinstance(module, SparseConv2d) and any(isinstance(each, SparseConv2d) for each in module.modules())


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        del module_qualified_name
        return not _calls_convolutions(m)


class _BlockTracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        del module_qualified_name
        return isinstance(m, FusedBlock) or not any(isinstance(each, FusedBlock) for each in m.modules())


def _is_simple(graph: fx.Graph, modules: Mapping[str, nn.Module]) -> bool:
    """One input without a default, then nothing but calls of modules with tensors, sums and ReLUs, the last of which is
    what is returned."""
    first, *others, output = graph.nodes
    return (
        first.op == "placeholder"
        and not first.args
        and output.args[0] is (others or [None])[-1]
        and all(_is_sum(node) or _is_relu(node, modules) or _is_call(node) for node in others)
    )


def _is_call(node: fx.Node) -> bool:
    return node.op == "call_module" and not node.kwargs and all(isinstance(each, fx.Node) for each in node.args)


def _is_sum(node: fx.Node) -> bool:
    """Of two tensors, with no factor."""
    is_one = node.op == "call_function" and node.target in _SUMS and not node.kwargs
    return is_one and len(node.args) == 2 and all(isinstance(each, fx.Node) for each in node.args)


def _is_relu(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    """Which changes nothing but what it returns."""
    if node.op == "call_module":
        module = modules[str(node.target)]
        return type(module) is nn.ReLU and not private.hooks_of(module) and _is_call(node)
    is_one = (node.op == "call_function" and node.target in _RELUS) or (node.op, node.target) == ("call_method", "relu")
    return is_one and len(node.args) == 1 and not any(node.kwargs.values())


def _made_by(node: Any, modules: Mapping[str, nn.Module]) -> fx.Node | None:
    """The call of a packed convolution whose output a node is, where nothing else reads it on the way."""
    while isinstance(node, fx.Node) and node.op == "call_module" and len(node.users) == 1:
        module = modules[str(node.target)]
        if isinstance(module, SparseConv2d):
            return node
        if not isinstance(module, nn.Identity | Absorbed):
            return None
        node = node.args[0]
    return None


def _add_in_store(
    graph: fx.Graph, node: fx.Node, modules: Mapping[str, nn.Module], rectified: list[SparseConv2d]
) -> bool:
    """Whether one of two things that are added is a convolution's output, to which its store now adds the other."""
    for made, other in (node.args, node.args[::-1]):
        call = _made_by(made, modules)
        if call is None or len(call.args) != 1 or call.kwargs or made is other:
            continue
        convolution: Any = modules[str(call.target)]
        if convolution.rectified or convolution in rectified:  # the sum comes after the ReLU
            continue
        with graph.inserting_before(node):
            new = graph.call_module(str(call.target), (call.args[0], other))
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        for between in _way(made, call):
            graph.erase_node(between)
        return True
    return False


def _way(last: Any, first: fx.Node) -> Iterator[fx.Node]:
    """The nodes from the last back to the first."""
    nodes = [last]
    while nodes[-1] is not first:
        nodes.append(nodes[-1].args[0])
    yield from nodes
