"""llama.cpp, as `secateur.deploy` runs it: a GGUF file of a language model of Llama's shape, whose layers may differ in
heads and in width.

Law: before a file is kept, llama.cpp computes from it what the model computes, and cuts a text into the tokens into
which the model's tokenizer cuts it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import json
import re
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from secateur.runtimes import Loaded, clock_of_threads
from secateur.support import batch_inputs, in_mode, run_example, tensors_in

__all__ = ["BLOCK", "FILE", "LlamaCpp"]

FILE = "model.gguf"
_IMPORTANCE = "imatrix.gguf"  # beside it, as llama.cpp's own llama-imatrix writes it
_LIKE_LLAMA = ("llama", "mistral", "qwen2")  # model types, which differ in biases and tokenizers alone
_TYPES = {8: 7, 4: 25, 32: 0}  # llama_ftype: Q8_0, IQ4_NL, F32
_Q8_0 = 8  # ggml_type
BLOCK = 32  # numbers that share a scale: rows of other lengths stay in 16 bits
_CLOSE = 1e-2  # of the norm of the logits, that the file's may be from the model's
# how a text is cut before pairs are joined, as llama.cpp calls it; which one is found by trying them
_CUTS = (
    "smollm", "gpt-2", "llama-bpe", "qwen2", "tekken", "deepseek-llm", "deepseek-coder", "starcoder", "falcon", "mpt",
    "refact", "command-r", "dbrx", "olmo", "stablelm2", "smaug-bpe", "gpt-4o", "superbpe", "default",
)  # fmt: skip
_ATTENTION = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj"}
_HIDDEN = {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}
_PRODUCT = re.compile(rf"blk\.\d+\.({'|'.join(_ATTENTION | _HIDDEN)})\.weight")
_FLOATS = ctypes.POINTER(ctypes.c_float)
_TEXT = (
    "It's 12345 o'clock,\n\n  isn't IT?\t\tÜber 3.14 naïve cafés  … 東京 2024 😀!! "
    "def f(x):\n    return x**2 ## end\r\n "
)


@dataclass(frozen=True)
class LlamaCpp:
    """llama.cpp on the processor; ``pip install "secateur[llamacpp]"``, which compiles it, some minutes long.

    Attributes:
        bits: 8: weights in 8 bits, 32 of them with a scale (Q8_0); 4: in 4, by a table of 16 values (IQ4_NL), and by
            how large their inputs are, where `weigh` wrote it; 32: as they are.
        tokenizer: a directory with the ``tokenizer.json`` that goes into the file; without it tokens are numbers.

    >>> LlamaCpp(8)
    LlamaCpp(bits=8, tokenizer=None)
    """

    bits: int = 32
    tokenizer: Path | None = None
    whole: ClassVar[bool] = True  # it runs no part of a model

    def __post_init__(self) -> None:
        if self.bits not in _TYPES:
            raise ValueError(f"bits is 32, 8 or 4; got {self.bits!r}.")

    def package(self) -> Any:
        """Of it; ImportError with what to install."""
        try:
            importlib.import_module("gguf")
            library = importlib.import_module("llama_cpp")
        except ImportError as error:
            raise ImportError('llama.cpp is not installed: pip install "secateur[llamacpp]"') from error
        library.llama_log_set(_unheard(library), ctypes.c_void_p())  # what failed is seen by what it returns
        return library

    def __call__(self, model: nn.Module, example_inputs: Any, **_: Any) -> Callable[[], object]:
        self.package()
        with tempfile.TemporaryDirectory(prefix="secateur-") as folder:
            self.write(model, example_inputs, Path(folder))
            if self.bits < 32:
                self.rounded(Path(folder), Path(folder, "rounded"))
            loaded = self.load(Path(folder, "rounded") if self.bits < 32 else Path(folder))
        return functools.partial(loaded.run, {"input_ids": next(tensors_in(example_inputs)).numpy()})

    @property
    def clock(self) -> Callable[[], float]:
        return clock_of_threads()  # with one thread it computes in the one that calls

    def write(self, model: nn.Module, example_inputs: Any, folder: Path) -> None:
        """``model.gguf`` in a folder, in float32.

        Raises:
            ValueError: the model is not of Llama's shape, its tokenizer is not one of pairs of bytes, or llama.cpp
                computes something else.
        """
        import gguf

        path = folder / FILE
        writer = gguf.GGUFWriter(path, "llama" if (shape := _Shape.of(model)).uniform else "deci")
        shape.tell(writer)
        if self.tokenizer is None:
            writer.add_tokenizer_model("none")
        else:
            tokens = _Tokens.read(self.tokenizer, shape.vocabulary)
            tokens.tell(writer, self._cut(tokens))
        for name, tensor in shape.tensors():
            writer.add_tensor(name, tensor.detach().cpu().float().contiguous().numpy())
        _finish(writer)
        self._check(model, example_inputs, folder)

    def _check(self, model: nn.Module, example_inputs: Any, folder: Path) -> None:
        ids = next(tensors_in(example_inputs))[:1]
        with torch.no_grad(), in_mode(model, training=False):
            told = next(iter(tensors_in(run_example(model, {"input_ids": ids})))).numpy()
        [found] = self.load(folder).run({"input_ids": ids.numpy()})
        apart = np.linalg.norm(found - told) / np.linalg.norm(told)
        if not apart < _CLOSE:
            raise ValueError(f"llama.cpp computes something else than the model: its logits are {apart:.3g} apart.")

    def _cut(self, tokens: _Tokens) -> str:
        """How texts are cut, such that llama.cpp's tokens are those of the tokenizer; ValueError if in no way."""
        import gguf
        from transformers import AutoTokenizer

        asked = AutoTokenizer.from_pretrained(tokens.folder).encode(_TEXT, add_special_tokens=False)
        with tempfile.TemporaryDirectory(prefix="secateur-") as folder:
            for cut in _CUTS:
                writer = gguf.GGUFWriter(path := Path(folder, f"{cut}.gguf"), "llama")
                _Shape.smallest(writer)
                tokens.tell(writer, cut)
                _finish(writer)
                if self._tokens(path) == asked:
                    return cut
        raise ValueError(f"{tokens.folder}: llama.cpp cuts texts in none of the ways in which this tokenizer does.")

    def _tokens(self, path: Path) -> list[int] | None:
        """Of the text that tells ways of cutting apart; None where llama.cpp does not know one."""
        library = self.package()
        how = library.llama_model_default_params()
        how.vocab_only = True
        model = library.llama_model_load_from_file(str(path).encode(), how)
        if not model:
            return None
        text = _TEXT.encode()
        found = (library.llama_token * (4 * len(text)))()
        count = library.llama_tokenize(
            library.llama_model_get_vocab(model), text, len(text), found, len(found), False, True
        )
        library.llama_model_free(model)
        return list(found[:count])

    def load(self, folder: Path) -> Loaded:
        """What `write` or `rounded` wrote, with as many threads as torch has; it takes texts without padding."""
        library = self.package()
        how = library.llama_model_default_params()
        model = library.llama_model_load_from_file(str(folder / FILE).encode(), how)
        if not model:
            raise ValueError(
                f"{self} does not read {folder / FILE}: it is damaged, or of a kind that it does not know."
            )
        return Loaded(("input_ids", "attention_mask"), ("logits",), _Texts(library, model))

    def weigh(self, model: nn.Module, batches: Iterable[Any], folder: Path) -> None:
        """Beside the file of `write`, ``imatrix.gguf``: the sums of squares of what each matrix reads on batches."""
        import gguf

        sums: dict[str, Tensor] = {}
        rows: dict[str, int] = {}

        def watched(name: str) -> Callable[[nn.Module, Any], None]:
            def watch(_: nn.Module, inputs: Any) -> None:
                x = inputs[0].detach().flatten(0, -2).cpu().double()
                sums[name] = sums.get(name, 0) + x.square().sum(0)
                rows[name] = rows.get(name, 0) + len(x)

            return watch

        with contextlib.ExitStack() as stack, torch.no_grad(), in_mode(model, training=False):
            for name, part in _Shape.of(model).matrices():
                stack.callback(part.register_forward_pre_hook(watched(name)).remove)
            for batch in batches:
                run_example(model, batch_inputs(batch))
        writer = gguf.GGUFWriter(folder / _IMPORTANCE, "imatrix")
        writer.add_type("imatrix")
        writer.add_array("imatrix.datasets", ["batches"])
        writer.add_uint32("imatrix.chunk_count", 1)
        writer.add_uint32("imatrix.chunk_size", max(rows.values()))
        for name, many in rows.items():
            writer.add_tensor(f"{name}.in_sum2", sums[name][None].float().numpy())
            writer.add_tensor(f"{name}.counts", np.array([[many]], np.float32))
        _finish(writer)

    def rounded(
        self, source: Path, folder: Path, feeds: Iterable[Mapping[str, Any]] = (), keep: Collection[str] = ()
    ) -> None:
        """Writes the file of a folder to another one in 8 bits, or in 4, by llama.cpp's own quantizer.

        Args:
            feeds: nothing; in 4 bits weights are rounded by what `weigh` wrote into the folder, if it did.
            keep: tensors that get 8 bits where others get 4, by the names of `matrices`.

        Raises:
            ValueError: it cannot.
        """
        del feeds
        folder.mkdir(exist_ok=True)
        library = self.package()
        how = library.llama_model_quantize_default_params()
        how.ftype, how.nthread, how.pure = _TYPES[self.bits], torch.get_num_threads(), self.bits == 8
        if self.bits == 4:
            weights = [(name.encode(), its.ctypes.data_as(_FLOATS), its.size) for name, its in _importance(source)]
            if weights:
                how.imatrix = _ended(library.llama_model_imatrix_data, weights)
            eight = [(f"^{re.escape(name)}$".encode(), _Q8_0) for name in keep]
            how.tt_overrides = _ended(library.llama_model_tensor_override, eight)
        failed = library.llama_model_quantize(
            str(source / FILE).encode(), str(folder / FILE).encode(), ctypes.byref(how)
        )
        if failed:
            raise ValueError(f"{self} does not round the model.")

    def matrices(self, folder: Path) -> dict[str, str]:
        """``{tensor: tensor}`` of those that are rounded to 4 bits; none of 8, of which llama.cpp rounds all."""
        import gguf

        found = gguf.GGUFReader(folder / FILE).tensors if self.bits == 4 else ()
        return {each.name: each.name for each in found if _PRODUCT.fullmatch(each.name)}

    def errors(self, folder: Path, feeds: Mapping[str, Any]) -> dict[str, float]:
        """``{tensor: share of its output's norm}`` by which the output moves if it is rounded, of those of `matrices`,
        as if what it reads were independent and as large as `weigh` met it."""
        import gguf

        del feeds
        with tempfile.TemporaryDirectory(prefix="secateur-") as place:
            self.rounded(folder, Path(place))
            near = {each.name: each for each in gguf.GGUFReader(Path(place, FILE)).tensors}
            weights, found = dict(_importance(folder)), dict[str, float]()
            for each in gguf.GGUFReader(folder / FILE).tensors:
                if _PRODUCT.fullmatch(each.name):
                    apart = gguf.dequantize(near[each.name].data, near[each.name].tensor_type) - each.data
                    of = weights.get(each.name, np.ones(each.data.shape[1]))
                    found[each.name] = float(np.sqrt((apart**2 @ of).sum() / max((each.data**2 @ of).sum(), 1e-300)))
        return found

    def __str__(self) -> str:
        how = "" if self.bits == 32 else f", int{self.bits}"
        return f"llama.cpp of llama-cpp-python {self.package().__version__}{how}"


class _Texts:
    """Logits of texts, one after the other, by one context of llama.cpp that has room for the longest so far."""

    def __init__(self, library: Any, model: Any) -> None:
        self.library, self.model, self.room = library, model, 0
        self.context: Any = None
        self.vocabulary = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))

    def __call__(self, feeds: Mapping[str, Any]) -> list[Any]:
        ids = np.asarray(feeds["input_ids"])
        if not np.all(feeds.get("attention_mask", 1)):
            raise ValueError("llama.cpp takes texts without padding here")
        return [np.stack([self._of(row) for row in ids])]

    def _of(self, row: Any) -> Any:
        library = self.library
        self._make_room(len(row))
        library.llama_memory_clear(library.llama_get_memory(self.context), True)
        batch = library.llama_batch_init(len(row), 0, 1)
        try:
            batch.n_tokens = len(row)
            for at, token in enumerate(row):
                batch.token[at], batch.pos[at], batch.n_seq_id[at] = int(token), at, 1
                batch.seq_id[at][0], batch.logits[at] = 0, True
            if library.llama_decode(self.context, batch):
                raise ValueError(f"llama.cpp does not run {len(row)} tokens")
            found = np.ctypeslib.as_array(library.llama_get_logits(self.context), (len(row), self.vocabulary))
            return found.copy()
        finally:
            library.llama_batch_free(batch)

    def _make_room(self, tokens: int) -> None:
        if tokens <= self.room:
            return
        self._close()
        how = self.library.llama_context_default_params()
        how.n_ctx = how.n_batch = how.n_ubatch = tokens
        how.n_threads = how.n_threads_batch = torch.get_num_threads()
        self.context = self.library.llama_init_from_model(self.model, how)
        if not self.context:
            raise ValueError(f"llama.cpp has no room for {tokens} tokens")
        self.room = tokens

    def _close(self) -> None:
        if self.room:
            self.library.llama_free(self.context)
        self.room = 0

    def __del__(self) -> None:
        self._close()
        self.library.llama_model_free(self.model)


@dataclass(frozen=True)
class _Layer:
    """Its parts that are there, and how many heads, heads of keys and hidden units they have."""

    attention: Any
    mlp: Any
    block: Any
    heads: int
    keys: int
    hidden: int

    def parts(self) -> Iterator[tuple[str, nn.Module]]:
        """Its matrix products, by the names that files give them."""
        for branch, names in ((self.attention, _ATTENTION), (self.mlp, _HIDDEN)):
            for name, part in names.items() if branch is not None else ():
                yield name, getattr(branch, part)


@dataclass(frozen=True)
class _Shape:
    """What a file says of a model."""

    model: Any
    layers: Sequence[_Layer]
    width: int

    @classmethod
    def of(cls, model: Any) -> _Shape:
        config: Any = getattr(model, "config", None)
        kind = getattr(config, "model_type", type(model).__name__)
        if kind not in _LIKE_LLAMA or not hasattr(model, "lm_head"):
            raise ValueError(
                f"GGUF is written of language models of {', '.join(_LIKE_LLAMA)}; this is of {kind}. For others there "
                "is llama.cpp's own converter, which takes directories that shrink and oneshot wrote."
            )
        layers = [cls._layer(each) for each in model.model.layers]
        widths = {int(its.attention.head_dim) for its in layers if its.attention is not None}
        if len(widths) > 1:
            raise ValueError(f"in GGUF all heads are of one width; these are of {sorted(widths)}.")
        shape = cls(model, layers, widths.pop() if widths else config.head_dim)
        if any(getattr(each, "sliding_window", None) for each in (config, *model.modules())) and getattr(
            config, "use_sliding_window", True
        ):
            raise ValueError("GGUF of this architecture has no sliding window.")
        if getattr(model.model.rotary_emb, "attention_scaling", 1.0) != 1.0 or config.hidden_act != "silu":
            raise ValueError("GGUF of this architecture scales no logits by a length, and its activation is silu.")
        return shape

    @staticmethod
    def _layer(block: Any) -> _Layer:
        # what stays of a branch that left gives zeros, and has no parts
        attention = block.self_attn if hasattr(block.self_attn, "q_proj") else None
        mlp = block.mlp if hasattr(block.mlp, "down_proj") else None
        heads = keys = 0
        if attention is not None:
            heads, keys = (each.weight.shape[0] // attention.head_dim for each in (attention.q_proj, attention.k_proj))
        return _Layer(attention, mlp, block, heads, keys, 0 if mlp is None else mlp.down_proj.weight.shape[1])

    @property
    def uniform(self) -> bool:
        counts = {(its.heads, its.keys, its.hidden) for its in self.layers}
        return len(counts) == 1 and 0 not in next(iter(counts))

    @property
    def vocabulary(self) -> int:
        return int(self.model.model.embed_tokens.weight.shape[0])

    def tell(self, writer: Any) -> None:
        config, model = self.model.config, self.model.model
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(model.embed_tokens.weight.shape[1])
        writer.add_block_count(len(self.layers))
        writer.add_vocab_size(self.vocabulary)
        heads, keys, hidden = ([getattr(its, of) for its in self.layers] for of in ("heads", "keys", "hidden"))
        # llama.cpp reads no first layer without a head, and leaves out all of a layer without hidden units: they get a
        # head, and hidden units, of zeros
        heads[0], keys[0] = heads[0] or 1, keys[0] or 1
        hidden = [many or BLOCK for many in hidden]
        writer.add_head_count(heads[0] if self.uniform else heads)
        writer.add_head_count_kv(keys[0] if self.uniform else keys)
        writer.add_feed_forward_length(hidden[0] if self.uniform else hidden)
        for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
            add(self.width)
        writer.add_rope_freq_base(self._base)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)

    @staticmethod
    def smallest(writer: Any) -> None:
        """What a file says of a model of which only the tokens are read."""
        for add in (writer.add_context_length, writer.add_embedding_length, writer.add_feed_forward_length):
            add(BLOCK)
        for add in (writer.add_block_count, writer.add_head_count, writer.add_head_count_kv):
            add(1)
        writer.add_layer_norm_rms_eps(1e-5)

    @property
    def _base(self) -> float:
        config = self.model.config
        return float((getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10000.0))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        model = self.model.model
        embedding, head = model.embed_tokens.weight, self.model.lm_head.weight
        yield "token_embd.weight", embedding
        usual = self._base ** (-torch.arange(0, self.width, 2, dtype=torch.float64, device="cpu") / self.width)
        factors = usual / model.rotary_emb.inv_freq.double().cpu()
        if not torch.allclose(factors, torch.ones_like(factors), rtol=1e-4):
            yield "rope_freqs.weight", factors
        for at, its in enumerate(self.layers):
            for name, tensor in (*self._of_layer(its), *self._of_zeros(its, first=not at)):
                yield f"blk.{at}.{name}", tensor
        yield "output_norm.weight", model.norm.weight
        if head is not embedding:
            yield "output.weight", head
        if getattr(self.model.lm_head, "bias", None) is not None:
            raise ValueError("the head has a bias, which GGUF of this architecture has not.")

    def _of_layer(self, its: _Layer) -> Iterator[tuple[str, Tensor]]:
        turned: dict[str, tuple[int, float]] = {}
        if its.attention is not None:
            yield "attn_norm.weight", its.block.input_layernorm.weight
            scale = its.attention.scaling * self.width**0.5  # which is 1, unless dimensions of heads left
            turned = {"attn_q": (its.heads, scale), "attn_k": (its.keys, 1.0)}
        if its.mlp is not None:
            yield "ffn_norm.weight", its.block.post_attention_layernorm.weight
        for name, part in its.parts():
            heads, factor = turned.get(name, (0, 1.0))
            for of, tensor in part.named_parameters():
                yield f"{name}.{of}", _paired(tensor, heads) * factor if heads else tensor

    def matrices(self) -> Iterator[tuple[str, nn.Module]]:
        """Of the layers, by the names of their tensors."""
        for at, its in enumerate(self.layers):
            yield from ((f"blk.{at}.{name}.weight", part) for name, part in its.parts())

    def _of_zeros(self, its: _Layer, *, first: bool) -> Iterator[tuple[str, Tensor]]:
        norm = self.model.model.norm.weight
        if first and its.attention is None:
            yield "attn_norm.weight", torch.ones_like(norm)
            for name in ("q", "k", "v"):
                yield f"attn_{name}.weight", norm.new_zeros(self.width, len(norm))
            yield "attn_output.weight", norm.new_zeros(len(norm), self.width)
        if its.mlp is None:
            yield "ffn_norm.weight", torch.ones_like(norm)
            for name in ("gate", "up"):
                yield f"ffn_{name}.weight", norm.new_zeros(BLOCK, len(norm))
            yield "ffn_down.weight", norm.new_zeros(len(norm), BLOCK)


def _paired(tensor: Tensor, heads: int) -> Tensor:
    """Rows of queries or keys, of which those that are turned together lie side by side there.

    >>> _paired(torch.arange(4.0), 1)
    tensor([0., 2., 1., 3.])
    """
    return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


@dataclass(frozen=True)
class _Tokens:
    """What a file says of a tokenizer of pairs of bytes."""

    folder: Path
    texts: Sequence[str]
    kinds: Sequence[int]

    @classmethod
    def read(cls, folder: Path, vocabulary: int) -> _Tokens:
        import gguf

        kinds = gguf.TokenType
        try:
            told = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
            pairs, decoder = told["model"], told["decoder"]["type"]
            if (pairs["type"], decoder) != ("BPE", "ByteLevel"):
                raise ValueError(f"its model is {pairs['type']}, its decoder {decoder}")
            found = {number: (text, kinds.NORMAL) for text, number in pairs["vocab"].items()}
            for each in told.get("added_tokens") or ():
                found[each["id"]] = each["content"], kinds.CONTROL if each["special"] else kinds.USER_DEFINED
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{folder}: GGUF is written with a tokenizer.json of pairs of bytes (BPE, ByteLevel), and here is "
                f"none: {error}."
            ) from error
        listed = [found.get(number, (f"[PAD{number}]", kinds.UNUSED)) for number in range(vocabulary)]
        return cls(folder, *zip(*listed, strict=True))

    def tell(self, writer: Any, cut: str) -> None:
        import gguf

        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(cut)
        writer.add_token_list(self.texts)
        writer.add_token_types(self.kinds)
        gguf.SpecialVocab(self.folder, load_merges=True, n_vocab=len(self.texts)).add_to_gguf(writer, quiet=True)


def _importance(folder: Path) -> Iterator[tuple[str, Any]]:
    """``(tensor, mean square of each of its inputs)``, as `LlamaCpp.weigh` wrote them, if it did."""
    import gguf

    if not (folder / _IMPORTANCE).exists():
        return
    found = {each.name: each.data for each in gguf.GGUFReader(folder / _IMPORTANCE).tensors}
    for name, sums in found.items():
        if name.endswith(".in_sum2"):
            of = name.removesuffix(".in_sum2")
            yield of, np.ascontiguousarray(sums[0] / found[f"{of}.counts"].item())


def _ended(kind: Any, rows: Sequence[tuple[Any, ...]]) -> Any:
    """A list as C reads it, which ends with zeros."""
    return (kind * (len(rows) + 1))(*(kind(*row) for row in rows))


def _finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@functools.cache
def _unheard(library: Any) -> Any:
    return library.llama_log_callback(lambda *_: None)
