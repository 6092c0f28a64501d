"""Observes every matrix product of an input with a block's weight, and sums statistics of the inputs.

Law: what is summed are the inputs X of which outputs = X · W' was computed, over the tokens that are no padding, in
float32, or in float64 where that would overflow; no product is changed, and nothing is held between batches but the
sums.

Products are watched where they happen, not where modules are called: a weight is recognised by its memory. So a
projection, transformers' ``Conv1D``, one expert of a fused 3-D tensor, the weight below an adapter and the three parts
of ``nn.MultiheadAttention``'s ``in_proj_weight`` are all alike: matrices that each have their inputs.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from secateur.evidence import CONVOLUTIONS, RECURRENT, Sums, gates, patches_of
from secateur.support import private

SAMPLE = 256  # tokens kept where a layer's error has no Gram matrix to come from


class AllMetError(BaseException):
    """Ends a forward pass early when all products were seen; no `Exception`, so that no model catches it."""


class Bias(NamedTuple):
    """Where what is added to a product's outputs lies: so many entries of a parameter of the block, from there on."""

    name: str
    offset: int
    size: int

    def of(self, parameter: Tensor) -> Tensor:
        """The entries, sharing the parameter's memory."""
        return parameter.detach()[self.offset : self.offset + self.size]


class WeightView(NamedTuple):
    """A matrix (outputs, inputs) inside a parameter's memory: ``as_strided(shape, strides, offset)``."""

    name: str
    offset: int
    shape: tuple[int, int]
    strides: tuple[int, int]

    def named(self, name: str) -> WeightView:
        """The same of a parameter of another name, as a block's has in its model."""
        return WeightView(name, self.offset, self.shape, self.strides)

    def of(self, parameter: Tensor) -> Tensor:
        """The matrix, sharing the parameter's memory.

        >>> weight = torch.arange(6.0).reshape(2, 3)
        >>> WeightView("weight", 0, (3, 2), (1, 3)).of(weight)
        tensor([[0., 3.],
                [1., 4.],
                [2., 5.]])
        """
        return parameter.detach().as_strided(self.shape, self.strides, parameter.storage_offset() + self.offset)


@dataclass(eq=False)
class InputStats:
    """Statistics of the inputs X of one matrix, or of several that share their inputs: sums over tokens, and a sample
    of tokens where the sums hold no Gram matrix.

    ``residual_cross`` is the product of residual and inputs, ``(T - X Wᵀ)ᵀ X``, (outputs, inputs), where T are the
    outputs that would restore the dense model; it is of one matrix, and there only where the dense model ran beside the
    pruned one. ``residual_sum`` is the sum of the residual over tokens, (outputs,). ``around`` has statistics of the
    sum that the outputs were added to, such as the residual stream. ``bias`` is added to this product's outputs alone.
    Of a block of a matrix' inputs, which is summed on its own, ``whole`` is the matrix.

    >>> met = InputStats(Sums(frozenset(["gram"])))
    >>> met.add(torch.tensor([[1.0, 2.0], [3.0, 0.0]]))
    >>> met.sums.finish(); met.sums.gram
    tensor([[10.,  2.],
            [ 2.,  4.]])
    """

    sums: Sums
    sample: list[Tensor] = field(default_factory=list)
    residual_cross: Tensor | None = None
    around: Sums | None = None
    residual_sum: Tensor | None = None
    bias: Bias | None = None
    whole: WeightView | None = None

    @property
    def tokens(self) -> int:
        return int(self.sums.tokens)

    def add(self, x: Tensor) -> None:
        """``x``: (tokens, inputs)."""
        if not x.shape[0]:
            return
        self.sums.add_inputs(x)
        if "gram" not in self.sums.words and (missing := SAMPLE - sum(len(part) for part in self.sample)) > 0:
            self.sample.append(x[:missing].clone())

    def with_residual(self, residual: Tensor | None) -> InputStats:
        """With ``residualᵀ [X 1]``, whose last column is the sum of the residual over tokens; None: there is no
        residual.
        """
        if residual is None:
            return self
        return replace(self, residual_cross=residual[:, :-1].contiguous(), residual_sum=residual[:, -1].contiguous())

    def is_finite(self) -> bool:
        parts = self.sample if self.residual_cross is None else [*self.sample, self.residual_cross]
        return self.sums.is_finite() and all(bool(part.isfinite().all()) for part in parts)

    def evidence(self, words: Iterable[str]) -> dict[str, Tensor]:
        """The evidence that a solver names by these words; vectors are (1, inputs)."""
        found = {word: self.sums.statistic(word) for word in words}
        return {word: value if word == "gram" else value[None] for word, value in found.items()}

    def error(self, before: Tensor, after: Tensor) -> tuple[float, float]:
        """``‖X(W' - W)ᵀ‖²`` and ``‖XWᵀ‖²``: the squared error of a layer's outputs, and their squares; over all tokens
        where there is a Gram matrix, else over a sample of them."""
        gram = self.sums.gram
        wide = torch.promote_types(before.dtype, torch.float32)
        old = before.to(wide)
        change = after.to(wide) - old
        if gram is None and not self.sample:
            return 0.0, 0.0
        # all is brought near to 1 by powers of 2, which round nothing: squares of squares leave float32 soon
        x = torch.cat(self.sample).to(wide) if gram is None else gram
        size = _power_of_2(x if gram is None else x.diagonal())
        both = torch.promote_types(wide, x.dtype)
        found = []
        for matrix in (change, old):
            by = _power_of_2(matrix)
            near = matrix.to(both) / by
            if gram is None:
                found.append((x / size @ near.T).square().sum().item() * size**2 * by**2)
            else:
                found.append((near / size @ x.to(both)).mul_(near).sum().item() * size * by**2)
        return max(found[0], 0.0), max(found[1], 0.0)


def _power_of_2(values: Tensor) -> float:
    """Of the size of the largest entry; 1 for a tensor of zeros."""
    largest = float(values.detach().abs().amax()) if values.numel() else 0.0
    return 2.0 ** (math.frexp(largest)[1] - 1) if 0 < largest < math.inf else 1.0


@dataclass
class Tokens:
    """Which tokens of a batch are no padding: ``own`` those of the model's input, ``other`` those of an encoder's.

    Both are bool (batch, sequence) or None for all.
    """

    own: Tensor | None = None
    other: Tensor | None = None

    @classmethod
    def of(cls, batch: Any) -> Tokens:
        """From the masks in a batch: ``attention_mask`` (1 = token), ``decoder_attention_mask``, or PyTorch's
        ``src_key_padding_mask`` (True = padding).

        >>> Tokens.of({"attention_mask": torch.tensor([[1, 0]])}).own
        tensor([[ True, False]])
        """
        if not isinstance(batch, Mapping):
            return cls()

        def mask(key: str) -> Tensor | None:
            found = batch.get(key)
            return found if isinstance(found, Tensor) and found.dim() == 2 else None

        own = mask("attention_mask")
        if own is not None:
            return cls(own.ne(0), None)
        padding = mask("src_key_padding_mask")
        return cls(None if padding is None else padding.eq(0) if padding.dtype == torch.bool else padding.eq(0.0), None)

    def for_block(self, block: nn.Module, args: Any, kwargs: Any, batch: Any) -> Tokens:
        """The masks as a block sees them: one that is given an encoder's states is a decoder's block."""
        states = encoder_states(block, args, kwargs)
        if states is None:
            return self
        decoder = batch.get("decoder_attention_mask") if isinstance(batch, Mapping) else None
        own = decoder.ne(0) if isinstance(decoder, Tensor) and decoder.dim() == 2 else None
        return Tokens(own, self.own)


def encoder_states(block: nn.Module, args: Any, kwargs: Any) -> Tensor | None:
    """The states of an encoder among a block's arguments, by the argument's name."""
    try:
        named = inspect.signature(type(block).forward).bind(block, *args, **kwargs).arguments
    except (TypeError, ValueError):
        named = dict(kwargs)
    for name, value in {**named, **kwargs}.items():
        if name in ("encoder_hidden_states", "memory") and isinstance(value, Tensor) and value.dim() == 3:
            return value
    return None


_PRODUCTS: dict[Any, tuple[str, str]] = {
    torch.matmul: ("input", "other"),
    torch.mm: ("input", "mat2"),
    torch.bmm: ("input", "mat2"),
    Tensor.matmul: ("self", "other"),
    Tensor.__matmul__: ("self", "other"),
    Tensor.mm: ("self", "mat2"),
    Tensor.bmm: ("self", "mat2"),
}


class Inputs(Protocol):
    """The inputs of a matrix in one product."""

    @property
    def x(self) -> Tensor:
        """As it came."""

    def rows(self) -> Iterator[Tensor]:
        """(tokens, inputs), in parts."""

    def copied(self) -> Inputs:
        """With memory of its own, which stays as it is now."""

    def columns(self, start: int, stop: int) -> Inputs:
        """These inputs alone."""


@dataclass(frozen=True, eq=False)
class Rows:
    """The inputs of a linear layer: one row for each token that is no padding."""

    x: Tensor
    every: Tensor
    index: Tensor | None = None  # which of them are no padding; None for all

    def rows(self) -> Iterator[Tensor]:
        yield self.every if self.index is None else self.every[self.index]

    def copied(self) -> Rows:
        kept = self.every.clone() if self.index is None else self.every[self.index]
        return Rows(self.x, kept)

    def columns(self, start: int, stop: int) -> Rows:
        return Rows(self.x, self.every[:, start:stop], self.index)


def _key(x: Tensor) -> tuple[Any, ...]:
    """Equal for what is the same tensor with the same values, as long as it lives."""
    return (x.data_ptr(), x.shape, x.stride(), x.dtype, private.version_of(x))


class Products(TorchFunctionMode):
    """Observes the products of inputs with the given parameters while it is entered, and sums statistics of the inputs.

    Args:
        parameters: ``{name: parameter}``.
        words: what to sum of the inputs; see `secateur.evidence.VOCABULARY`.
        unfolds: convolutions, which are products with patches, and the gates of recurrent layers are watched as well.
        widths: ``{name: inputs of a block}`` of those whose inputs are summed in blocks, each a piece of its own.

    >>> layer = nn.Linear(2, 3)
    >>> products = Products({"weight": layer.weight}, frozenset(["input_norm"]))
    >>> with torch.no_grad(), products.watching(Tokens()):
    ...     _ = layer(torch.tensor([[3.0, 0.0], [4.0, 1.0]]))
    >>> [(piece.name, met.evidence(["input_norm"])) for piece, met in products.found().items()]
    [('weight', {'input_norm': tensor([[5., 1.]])})]
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        words: frozenset[str],
        *,
        unfolds: bool = False,
        widths: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        self.words, self.unfolds, self.widths = words, unfolds, widths or {}
        self.wholes: dict[WeightView, WeightView] = {}  # of each block of inputs the matrix
        self.parameters = {p.untyped_storage().data_ptr(): (name, p) for name, p in parameters.items()}
        self.exactly = {p.data_ptr(): (name, p) for name, p in parameters.items()}
        self.met: dict[WeightView, InputStats] = {}
        self.shared: dict[WeightView, WeightView] = {}  # a piece whose inputs are another's, tensor for tensor
        self.seen: dict[
            Any, tuple[Tensor, WeightView]
        ] = {}  # in this forward pass; the tensors are held, so none is new
        self.counted: dict[WeightView, set[Any]] = {}  # in this forward pass: of each piece the keys of its inputs
        self.entries: Counter[str] = Counter()  # of each parameter's matrices that were counted
        self.convolved: list[Tensor] = []  # what was padded: a key says what it says as long as its tensor lives
        self.tokens = Tokens()
        self.states: Tensor | None = None
        self.biases: dict[WeightView, list[Tensor | None]] = {}  # what each product of a piece adds, each once
        self.stops = self.repeated = False

    def watching(self, tokens: Tokens, states: Tensor | None = None, *, stops: bool = False) -> Products:
        """For one forward pass: the tokens that count, and an encoder's states, whose tokens are ``tokens.other``.

        With ``stops`` it is ended by `AllMetError` at the last product, which is not computed.
        """
        self.tokens, self.states, self.stops = tokens, states, stops
        self.seen.clear()
        self.counted.clear()
        self.entries.clear()
        self.convolved.clear()
        return self

    def found(self) -> dict[WeightView, InputStats]:
        """The sums of each matrix; matrices that share their inputs share one object."""
        return {**self.met, **{piece: self.met[first] for piece, first in self.shared.items()}}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.linear:
            x, weight, bias = _pick(args, kwargs, ("input", "weight", "bias"))
            self._meet(x, weight, bias, transposed=False)
        elif func in _PRODUCTS:
            x, weight = _pick(args, kwargs, _PRODUCTS[func])
            self._meet(x, weight, transposed=True)
            if isinstance(weight, Tensor) and weight.dim() >= 2:  # W @ x, as in Mamba: tokens are columns
                self._meet(weight.mT, x, transposed=False)
        elif func in (torch.addmm, Tensor.addmm, torch.baddbmm):
            names = ("input", "batch1", "batch2") if func is torch.baddbmm else ("input", "mat1", "mat2")
            bias, x, weight = _pick(args, kwargs, names)
            is_sum = kwargs.get("beta", 1) == kwargs.get("alpha", 1) == 1
            self._meet(x, weight, bias if is_sum else None, transposed=True)
        elif func is functional.multi_head_attention_forward:
            self._attend(func, args, kwargs)
        elif self.unfolds and func in CONVOLUTIONS:
            self._convolve(func, args, kwargs)
        elif self.unfolds and func in RECURRENT:
            self._recur(func, args)
        return func(*args, **kwargs)

    def _meet(self, x: Any, weight: Any, bias: Any = None, *, transposed: bool, sequence_first: bool = False) -> None:
        if not isinstance(x, Tensor) or not isinstance(weight, Tensor) or weight.layout != torch.strided:
            return
        if weight.device.type == "meta" or not weight.numel():
            return
        owner = self._owner(weight)
        if owner is None or weight.dim() not in (2, 3) or not x.is_floating_point():
            return
        name, parameter = owner
        if weight.dim() == 3:
            if x.dim() == 3 and x.shape[0] == weight.shape[0]:
                for number in range(weight.shape[0]):
                    self._meet(x[number], weight[number], transposed=transposed)
            return
        rows = (weight.T if transposed else weight).detach()
        offset = rows.storage_offset() - parameter.storage_offset()
        piece = WeightView(name, int(offset), (rows.shape[0], rows.shape[1]), (rows.stride(0), rows.stride(1)))
        self._add_bias(piece, bias)
        key = (*_key(x), sequence_first)
        rows = x.reshape(-1, x.shape[-1]).detach()
        self._met(piece, Rows(x, rows, self._index(x, rows, sequence_first)), key)

    def _add_bias(self, piece: WeightView, bias: Any) -> None:
        found = bias if isinstance(bias, Tensor) and bias.shape == piece.shape[:1] and bias.stride() == (1,) else None
        known = self.biases.setdefault(piece, [])
        if _place(found) not in map(_place, known):
            known.append(found)

    def biases_in(self, parameters: Mapping[str, Tensor]) -> dict[WeightView, Bias]:
        """Of each piece where its bias lies, as far as it is its alone."""
        vectors = {name: each for name, each in parameters.items() if each.dim() == 1 and each.stride() == (1,)}
        found: dict[WeightView, Bias] = {}
        users = Counter(bias.data_ptr() for biases in self.biases.values() for bias in biases if bias is not None)
        for piece, (bias, *others) in self.biases.items():
            if bias is None or others or users[bias.data_ptr()] > 1:
                continue
            for name, vector in vectors.items():
                offset = (bias.data_ptr() - vector.data_ptr()) // bias.element_size()
                if _memory(bias) == _memory(vector) and 0 <= offset <= len(vector) - len(bias):
                    found[piece] = Bias(name, offset, len(bias))
        return found | {part: found[whole] for part, whole in self.wholes.items() if whole in found}

    def _met(self, piece: WeightView, inputs: Inputs, key: Any) -> None:
        """As one, or block by block of its inputs."""
        outputs, size = piece.shape
        width = self.widths.get(piece.name, size)
        if width >= size:
            self._met_one(piece, inputs, key)
            return
        for start in range(0, size, width):
            stop = min(start + width, size)
            offset = piece.offset + start * piece.strides[1]
            part = WeightView(piece.name, offset, (outputs, stop - start), piece.strides)
            self.wholes[part] = piece
            self._met_one(part, inputs.columns(start, stop), (*key, start))

    def _met_one(self, piece: WeightView, inputs: Inputs, key: Any) -> None:
        if not self.count_once(piece, key):
            return
        self._add(piece, inputs, key)
        if self.stops and self._has_seen_all():
            raise AllMetError

    def count_once(self, piece: WeightView, key: Any) -> bool:
        """Counts a product; False for the same one again, such as of a function that hands on to another."""
        keys = self.counted.setdefault(piece, set())
        if key in keys:
            return False
        self.repeated = self.repeated or bool(keys)
        keys.add(key)
        self.entries[piece.name] += math.prod(piece.shape)
        return True

    def _has_seen_all(self) -> bool:
        """Whether the rest of the pass shows nothing more, before the product that was just met is computed."""
        return self._has_met_all()

    def _has_met_all(self) -> bool:
        """Each matrix of all parameters; never where one of them was used twice in a pass that did not stop."""
        if self.repeated or len(self.entries) < len(self.parameters):  # `Pairs` asks at every call
            return False
        return all(self.entries[name] == parameter.numel() for name, parameter in self.parameters.values())

    def _add(self, piece: WeightView, inputs: Inputs, key: Any) -> None:
        if not inputs.x.numel():  # an expert that no token was sent to: it shares no input with another such
            return
        first = self.seen.setdefault(key, (inputs.x, piece))[1]
        if first != piece and piece not in self.met and self.shared.setdefault(piece, first) == first:
            return
        if piece in self.shared and self.counted[self.shared[piece]] == self.counted[piece] - {key}:
            self.met[piece] = copy.deepcopy(self.met[self.shared.pop(piece)])  # up to here it had the same
        if piece in self.shared:
            raise ValueError(
                f"{piece.name} and {self.shared[piece].name} had the same input in one batch and different ones in "
                "another; prune one of them by itself (include=, exclude=)."
            )
        if piece not in self.met:
            self.met[piece] = InputStats(Sums(self.words))
        for rows in inputs.rows():
            self.met[piece].add(rows)

    def _convolve(self, func: Any, args: Any, kwargs: Any) -> None:
        found = patches_of(func, args, kwargs)
        if found is None or (owner := self._owner(found[0])) is None:
            return
        weight, groups = found
        if weight.shape != owner[1].shape or not weight.is_contiguous():
            return
        outputs, inputs = weight.shape[0] // len(groups), math.prod(weight.shape[1:])
        given = args[0] if args else kwargs["input"]
        self.convolved.append(given)
        for number, patches in enumerate(groups):
            piece = WeightView(owner[0], number * outputs * inputs, (outputs, inputs), (inputs, 1))
            bias = _pick(args, kwargs, ("input", "weight", "bias"))[2]
            self._add_bias(piece, bias[number * outputs :][:outputs] if isinstance(bias, Tensor) else None)
            how = (patches.kernel, patches.stride, patches.dilation, number, len(groups))
            # padding makes another tensor each time, and what is padded is the same for the same input
            self._met(piece, patches, (*_key(given), how, patches.x.shape))

    def _recur(self, func: Any, args: Any) -> None:
        for _, weight, x in gates(func, args):
            if self._owner(weight) is not None:
                self._meet(x, weight, transposed=False, sequence_first=x.dim() == 3 and self._is_turned(x))

    def _is_turned(self, x: Tensor) -> bool:
        mask = self.tokens.own
        return mask is not None and x.shape[:2] != mask.shape and x.shape[:2] == mask.T.shape

    def _owner(self, weight: Tensor) -> tuple[str, Tensor] | None:
        """The parameter that a weight is, or a part of which; several may lie in one memory, each at its place."""
        exact = self.exactly.get(weight.data_ptr())
        return exact if exact is not None else self.parameters.get(weight.untyped_storage().data_ptr())

    def _index(self, x: Tensor, rows: Tensor, sequence_first: bool) -> Tensor | None:
        """Which of the rows are no padding; None for all."""
        of_encoder = (
            self.states is not None and x.untyped_storage().data_ptr() == self.states.untyped_storage().data_ptr()
        )
        mask = self.tokens.other if of_encoder else self.tokens.own
        if mask is None:
            return None
        mask = mask.to(x.device)
        if sequence_first or (x.dim() == 3 and x.shape[:2] != mask.shape and x.shape[:2] == mask.T.shape):
            mask = mask.T
        if rows.shape[0] == mask.numel():
            return mask.reshape(-1)
        # tokens that were sent to experts: those of padding are zeros, see `silenced`
        return rows.ne(0).any(1)

    def _attend(self, func: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """The products inside nn.MultiheadAttention, whose inputs are (sequence, batch, features)."""
        bound = inspect.signature(func).bind(*args, **kwargs).arguments
        query, key, value = (bound[name] for name in ("query", "key", "value"))
        together: Any = bound.get("in_proj_weight")
        biases: Any = bound.get("in_proj_bias")
        if bound.get("use_separate_proj_weight"):
            names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
            weights: Sequence[Any] = [bound[name] for name in names]
        else:
            weights = together.chunk(3)
        each: Sequence[Any] = (None, None, None) if biases is None else biases.chunk(3)
        parts: list[tuple[Any, Any, Any]] = list(zip((query, key, value), weights, each, strict=True))
        if not bound.get("use_separate_proj_weight") and query is key and key is value:
            parts = [(query, together, biases)]
        batched = query.dim() == 3
        for x, weight, bias in parts:
            self._meet(x, weight, bias, transposed=False, sequence_first=batched)
        weight, bias = bound["out_proj_weight"], bound.get("out_proj_bias")
        size = weight.shape[1]
        bound["out_proj_weight"] = torch.eye(size, dtype=weight.dtype, device=weight.device)
        bound["out_proj_bias"] = None
        attended = func(**bound)[0]  # what the attention would return with no output projection
        self._meet(attended, weight, bias, transposed=False, sequence_first=batched)


def _place(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _pick(args: Any, kwargs: Any, names: tuple[str, ...]) -> list[Any]:
    return [args[at] if at < len(args) else kwargs.get(name) for at, name in enumerate(names)]


def silenced(mask: Tensor | None) -> Callable[[nn.Module, Any, Any], Any]:
    """A forward pre-hook for what sends tokens to experts: padding goes as zeros, so that it adds nothing to a sum."""

    def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:  # noqa: ARG001
        if mask is None or bool(mask.all()):
            return None

        def silence(x: Any) -> Any:
            if not isinstance(x, Tensor) or not x.is_floating_point() or math.prod(x.shape[:-1]) != mask.numel():
                return x
            return x * mask.to(x.device).reshape(*x.shape[:-1], 1).to(x.dtype)

        if args:
            return (silence(args[0]), *args[1:]), kwargs
        first = next(iter(kwargs), None)
        return (args, kwargs) if first is None else (args, {**kwargs, first: silence(kwargs[first])})

    return hook
