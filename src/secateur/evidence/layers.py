"""How each kind of layer meets its weight: which inputs are whose, and how features lie in the weight.

Law: what is summed are the unfolded inputs X with which the layer is outputs = X · weight', whatever its stride,
padding, dilation or groups.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from secateur.evidence.statistics import STATISTICS, Sums, widest
from secateur.evidence.unfolding import CONVOLUTIONS, RECURRENT, Calls, gates, patches_of, unfolded
from secateur.support import private


class Layer(Protocol):
    """How a kind of module meets one of its weights."""

    @property
    def module(self) -> nn.Module:
        """The one whose calls are watched."""

    @property
    def words(self) -> frozenset[str]:
        """What can be said about it."""

    @property
    def kind(self) -> str:
        """Two layers that share a weight mean the same features by it if their kinds are equal."""

    def observe(self, sums: Sums, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, keep: Any) -> None:
        """Add one call; ``keep``: bool (batch, sequence), the tokens that are no padding, or None."""

    def inputs(self, vector: Tensor, shape: torch.Size) -> Tensor:
        """One number for each input feature, broadcastable to a weight of ``shape``."""


_ALL = frozenset(STATISTICS)


@dataclass(frozen=True, eq=False)
class _Dense:
    """x · Wᵀ with W (outputs, inputs), or transformers' Conv1D, x · W with W (inputs, outputs)."""

    module: nn.Module
    inputs_first: bool = False
    words: frozenset[str] = _ALL

    @property
    def kind(self) -> str:
        return "rows of inputs" if self.inputs_first else "columns of inputs"

    def observe(self, sums: Sums, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, keep: Any) -> None:  # noqa: ARG002
        sums.add_inputs(_rows(args[0] if args else next(iter(kwargs.values())), keep))

    def inputs(self, vector: Tensor, shape: torch.Size) -> Tensor:  # noqa: ARG002
        return vector[:, None] if self.inputs_first else vector[None, :]


@dataclass(frozen=True, eq=False)
class _Lookup:
    """An embedding: one-hot tokens times W (tokens of the vocabulary, outputs)."""

    module: nn.Embedding
    words: frozenset[str] = _ALL - {"gram"}

    @property
    def kind(self) -> str:
        return "lookup"

    def observe(self, sums: Sums, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, keep: Any) -> None:
        ids = args[0] if args else kwargs["input"]
        if keep is not None and ids.shape == keep.shape:
            ids, output = ids[keep], output[keep]
        counts = torch.bincount(ids.reshape(-1), minlength=self.module.num_embeddings).to(widest(ids))
        sums.add(counts, counts.clone(), ids.numel())
        sums.see(output)

    def inputs(self, vector: Tensor, shape: torch.Size) -> Tensor:  # noqa: ARG002
        return vector[:, None]


@dataclass(frozen=True, eq=False)
class _Convolution:
    """An input feature is a channel at a place of the kernel; a token is a place of the output.

    Where a class of its own computes it, as those do that pad as TensorFlow pads, a second run says on what.
    """

    module: Any

    @property
    def words(self) -> frozenset[str]:
        return _ALL if self.module.groups == 1 else _ALL - {"gram"}

    @property
    def kind(self) -> str:
        return f"convolution in {self.module.groups} groups"

    def observe(self, sums: Sums, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, keep: Any) -> None:  # noqa: ARG002
        spatial = len(self.module.kernel_size)
        x, y = args[0] if args else kwargs["input"], output
        if x.dim() == spatial + 1:
            x, y = x[None], y[None]
        if its_own := not private.convolves_as_torch(self.module):
            x = self._met(args, kwargs)
        # squaring and summing over the batch come before unfolding, which only copies: one example's work for a batch
        places = tuple(range(2, 2 + spatial))
        totals, squares = (
            None if summed is None else self._patches(summed[None], padded=its_own).sum(places)[0]
            for summed in (sums.total(x), sums.square(x))
        )
        sums.add(totals, squares, y.numel() // y.shape[1])
        if "gram" in sums.words:
            for example in x:
                patches = self._patches(example[None], padded=its_own)[0].movedim(
                    0, spatial
                )  # (*places, channels, *kernel)
                sums.add_gram(patches.flatten(spatial).flatten(0, spatial - 1))

    def _met(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """What the first convolution of a second run is computed on, padded."""
        found: list[Tensor] = []

        def see(func: Any, given: Sequence[Any], more: Mapping[str, Any]) -> None:
            if not found and (seen := patches_of(func, given, more)) is not None:
                found.append(seen[1][0].x)

        with Calls(CONVOLUTIONS, see):
            self.module.forward(*args, **kwargs)
        if not found:
            raise ValueError(
                f"a {type(self.module).__name__} convolves by no function of torch, so its inputs are not known; leave "
                "it out by exclude= (weights= here), or take a criterion that asks for no inputs."
            )
        return found[0]

    def _patches(self, x: Tensor, *, padded: bool) -> Tensor:
        """A view (batch, channels, *places, *kernel) of the padded input."""
        module = self.module
        if not padded:
            mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
            x = functional.pad(x, private.padding_of(module), mode=mode)
        return unfolded(x, module.kernel_size, module.stride, module.dilation)

    def inputs(self, vector: Tensor, shape: torch.Size) -> Tensor:
        groups = self.module.groups
        return vector.reshape(groups, *shape[1:]).repeat_interleave(1 if groups == 1 else shape[0] // groups, 0)


@dataclass(frozen=True, eq=False)
class _TransposedConvolution:
    """W (inputs, outputs / groups, *kernel): an input feature is a channel; a token is a place of the input."""

    module: Any
    words: frozenset[str] = _ALL - {"gram"}

    @property
    def kind(self) -> str:
        return f"transposed convolution in {self.module.groups} groups"

    def observe(self, sums: Sums, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, keep: Any) -> None:  # noqa: ARG002
        spatial = len(self.module.kernel_size)
        x = args[0] if args else kwargs["input"]
        if x.dim() == spatial + 1:
            x = x[None]
        dims = (0, *range(2, 2 + spatial))
        sums.add(sums.total(x, dims), sums.square(x, dims), x.numel() // x.shape[1])

    def inputs(self, vector: Tensor, shape: torch.Size) -> Tensor:
        return vector.reshape(-1, *[1] * (len(shape) - 1))


@dataclass(frozen=True, eq=False)
class _AttentionInput:
    """``in_proj_weight`` of MultiheadAttention, (query, key, value rows; inputs), or one of the three apart."""

    module: nn.MultiheadAttention
    key: str
    words: frozenset[str] = frozenset(["input_norm", "input_mean", "input_var"])

    @property
    def kind(self) -> str:
        return "attention"

    def observe(self, sums: Sums, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, keep: Any) -> None:  # noqa: ARG002
        names = ("query", "key", "value")
        given = {**dict(zip(names, args, strict=False)), **{name: kwargs[name] for name in names if name in kwargs}}
        wanted = names if self.key == "in_proj_weight" else [name for name in names if name[0] == self.key[0]]
        rows = [_rows(given[name], keep) for name in wanted]
        parts = [[summed(x) for x in rows] for summed in (sums.total, sums.square)]
        totals, squares = (None if each[0] is None else torch.stack(each) for each in parts)  # type: ignore[arg-type]
        sums.add(totals, squares, torch.tensor([[float(x.shape[0])] for x in rows], dtype=torch.float32, device="cpu"))

    def inputs(self, vector: Tensor, shape: torch.Size) -> Tensor:
        return vector if vector.shape[0] == 1 else vector.repeat_interleave(shape[0] // vector.shape[0], 0)


@dataclass(frozen=True, eq=False)
class _AttentionOutput:
    """``out_proj.weight`` of MultiheadAttention, which torch reads without calling ``out_proj``.

    Its input is what the attention returns with an identity in the weight's place: a second run of the attention.
    """

    module: nn.MultiheadAttention
    words: frozenset[str] = _ALL
    _dense: _Dense = field(default_factory=lambda: _Dense(nn.Identity()))

    @property
    def kind(self) -> str:
        return self._dense.kind

    def observe(self, sums: Sums, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, keep: Any) -> None:  # noqa: ARG002
        size = self.module.embed_dim
        projection, like = private.submodules_of(self.module)["out_proj"], self.module.out_proj.weight
        identity = torch.eye(size, device=like.device, dtype=like.dtype)
        nothing = torch.zeros(size, device=like.device, dtype=like.dtype)
        private.submodules_of(self.module)["out_proj"] = types.SimpleNamespace(weight=identity, bias=nothing)  # type: ignore[assignment]
        try:
            x = self.module.forward(*args, **kwargs)[0]
        finally:
            private.submodules_of(self.module)["out_proj"] = projection
        sums.add_inputs(_rows(x, keep))

    def inputs(self, vector: Tensor, shape: torch.Size) -> Tensor:
        return self._dense.inputs(vector, shape)


@dataclass(frozen=True, eq=False)
class _Gates:
    """``weight_ih`` or ``weight_hh`` of a recurrent layer or cell: x or the state before, at each step.

    What reaches them is found by a second run of the module, layer by layer; padding that is packed is not among it.
    """

    module: Any
    key: str
    words: frozenset[str] = _ALL

    @property
    def kind(self) -> str:
        return "gates"

    def observe(self, sums: Sums, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, keep: Any) -> None:  # noqa: ARG002
        def see(func: Any, given: Sequence[Any], _: Any) -> None:
            for name, _, x in gates(func, given):
                if name == self.key:
                    sums.add_inputs(_rows(x, keep))
                    return

        with Calls(RECURRENT, see):
            self.module.forward(*args, **kwargs)

    def inputs(self, vector: Tensor, shape: torch.Size) -> Tensor:  # noqa: ARG002
        return vector[None, :]


def _rows(x: Tensor, keep: Tensor | None) -> Tensor:
    """(tokens, features), without padding where x is (batch, sequence, features) or (batch · sequence, features)."""
    rows = x.reshape(-1, x.shape[-1])
    if keep is None or not (
        (x.dim() == 3 and x.shape[:2] == keep.shape) or (x.dim() == 2 and x.shape[0] == keep.numel())
    ):
        return rows
    return rows[keep.reshape(-1).to(rows.device)]


def layer_of(module: nn.Module, key: str, parent: nn.Module | None = None) -> Layer | None:
    """How ``module`` meets its parameter ``key``, or None for kinds whose inputs are not known here.

    Args:
        key: ``weight``, or ``weight_orig`` where a mask is attached.
        parent: the MultiheadAttention whose ``out_proj`` the module is, if it is one.

    >>> layer_of(nn.Linear(2, 3), "weight").inputs(torch.ones(2), torch.Size([3, 2])).shape
    torch.Size([1, 2])
    """
    key = key.removesuffix("_orig")
    if isinstance(module, nn.MultiheadAttention):
        known = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
        return _AttentionInput(module, key) if key in known else None
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return _Gates(module, key) if key.startswith(("weight_ih", "weight_hh")) else None
    if key != "weight":
        return None
    if isinstance(parent, nn.MultiheadAttention):
        return _AttentionOutput(parent)
    if isinstance(module, nn.Linear):
        return _Dense(module)
    if isinstance(module, nn.Embedding):
        return _Lookup(module)
    if private.is_transposed_convolution(module):
        return _TransposedConvolution(module)
    if private.is_convolution(module):
        return _Convolution(module)
    # transformers' own, known by name, so that transformers need not be there
    if hasattr(module, "nf") and any(cls.__name__ == "Conv1D" for cls in type(module).__mro__):
        return _Dense(module, inputs_first=True)
    return None
