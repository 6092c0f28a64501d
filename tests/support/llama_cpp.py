"""A stand-in for llama-cpp-python, which takes minutes to compile: it reads a GGUF file as llama.cpp's "llama" and
"deci" do (src/models/deci.cpp), by itself and in torch, and rounds by the quantizers of the gguf package."""

from __future__ import annotations

import ctypes
import itertools
import re
import types
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch.nn import functional

TYPES = {7: gguf.GGMLQuantizationType.Q8_0, 25: gguf.GGMLQuantizationType.IQ4_NL}
VALUES = np.array(gguf.quants.IQ4_NL.kvalues, np.float32)


def in_four_bits(weight: np.ndarray, importance: np.ndarray) -> np.ndarray:
    """IQ4_NL: of 32 weights a scale in half precision, the best of some by these weights, and places in a table."""
    blocks, squares = weight.reshape(-1, 32), np.broadcast_to(importance, weight.shape).reshape(-1, 32)
    extreme = np.take_along_axis(blocks, np.abs(blocks).argmax(1)[:, None], 1)
    best = np.full(len(blocks), np.inf)
    rows = np.zeros((len(blocks), 18), np.uint8)
    for share in (0.8, 0.9, 1.0, 1.1, 1.2):
        scale = (share * extreme / VALUES[0]).astype(np.float16)
        places = np.abs(blocks[:, :, None] - scale[:, :, None].astype(np.float32) * VALUES).argmin(2).astype(np.uint8)
        error = (squares * (blocks - scale.astype(np.float32) * VALUES[places]) ** 2).sum(1)
        row = np.concatenate([scale.view(np.uint8), places[:, :16] | places[:, 16:] << 4], 1)
        rows[error < best], best = row[error < best], np.minimum(best, error)
    return rows.reshape(len(weight), -1)


class Model:
    """A file that was read."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self.told = {name: field.contents() for name, field in reader.fields.items()}
        self.kind = self.told["general.architecture"]
        self.tensors = {
            each.name: torch.from_numpy(gguf.dequantize(each.data, each.tensor_type).copy()) for each in reader.tensors
        }

    def of(self, name: str, layer: int | None = None) -> Any:
        value = self.told[f"{self.kind}.{name}"]
        if isinstance(value, list):
            assert self.kind == "deci"  # the other reads one number of all layers
            return value[layer]
        return value

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def normed(self, name: str, x: torch.Tensor) -> torch.Tensor:
        near = self.of("attention.layer_norm_rms_epsilon")
        return functional.rms_norm(x, x.shape[-1:], self.tensors[f"{name}.weight"], near)

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        """Neighbours are turned together."""
        width, tokens = x.shape[-1], x.shape[-2]
        angles = self.of("rope.freq_base") ** (-torch.arange(0, width, 2).double() / width)
        angles = angles / self.tensors.get("rope_freqs.weight", torch.ones(width // 2))
        turns = torch.polar(torch.ones(tokens, width // 2).double(), torch.arange(tokens)[:, None] * angles)
        return torch.view_as_real(torch.view_as_complex(x.double().unflatten(-1, (-1, 2))) * turns).flatten(-2).float()

    def logits(self, tokens: list[int]) -> torch.Tensor:
        x = self.tensors["token_embd.weight"][tokens]
        for at in range(self.of("block_count")):
            heads, keys, hidden = (
                self.of(name, at) for name in ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
            )
            between = x
            if heads:
                y = self.normed(f"blk.{at}.attn_norm", x)
                query, key, value = (
                    self.linear(f"blk.{at}.attn_{name}", y).unflatten(-1, (many, -1)).transpose(0, 1)
                    for name, many in (("q", heads), ("k", keys), ("v", keys))
                )
                key, value = (each.repeat_interleave(heads // keys, 0) for each in (self.turned(key), value))
                y = functional.scaled_dot_product_attention(self.turned(query), key, value, is_causal=True)
                between = self.linear(f"blk.{at}.attn_output", y.transpose(0, 1).flatten(1)) + x
            if not hidden:
                continue  # with what attention gave
            y = self.normed(f"blk.{at}.ffn_norm", between)
            y = functional.silu(self.linear(f"blk.{at}.ffn_gate", y)) * self.linear(f"blk.{at}.ffn_up", y)
            x = self.linear(f"blk.{at}.ffn_down", y) + between
        x = self.normed("output_norm", x)
        return self.linear("output" if "output.weight" in self.tensors else "token_embd", x)

    def cut(self, text: str) -> list[int] | None:
        """Pairs of bytes are joined in the order of the merges; only one way of cutting is known."""
        if self.told["tokenizer.ggml.pre"] not in ("gpt-2", "default"):
            return None
        from tokenizers import Tokenizer, models, pre_tokenizers

        vocabulary = {text: at for at, text in enumerate(self.told["tokenizer.ggml.tokens"])}
        merges = [tuple(each.split(" ")) for each in self.told["tokenizer.ggml.merges"]]
        its = Tokenizer(models.BPE(vocabulary, merges))
        apart = self.told["tokenizer.ggml.pre"] == "gpt-2"
        its.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=apart)
        return its.encode(text).ids


class Importance(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("data", ctypes.POINTER(ctypes.c_float)), ("size", ctypes.c_size_t))


class Override(ctypes.Structure):
    _fields_ = (("pattern", ctypes.c_char_p), ("type", ctypes.c_int))


class Quantizing(ctypes.Structure):
    _fields_ = (
        ("ftype", ctypes.c_int), ("nthread", ctypes.c_int), ("pure", ctypes.c_bool),
        ("imatrix", ctypes.POINTER(Importance)), ("tt_overrides", ctypes.POINTER(Override)),
    )  # fmt: skip


def ended(rows: Any, name: str) -> Any:
    """Of a list that ends with a null pointer."""
    return itertools.takewhile(lambda each: getattr(each, name) is not None, rows) if rows else ()


class Library(types.ModuleType):
    """The functions that are called of it."""

    __version__ = "0.0"
    llama_model_imatrix_data, llama_model_tensor_override = Importance, Override
    llama_token = np.ctypeslib.as_ctypes_type(np.int32)

    def __init__(self) -> None:
        super().__init__("llama_cpp")
        self.open = 0  # models and contexts that were not freed

    def llama_log_callback(self, call: Any) -> Any:
        return call

    def llama_log_set(self, *_: Any) -> None: ...

    def llama_model_default_params(self) -> Any:
        return types.SimpleNamespace()

    llama_context_default_params = llama_model_default_params

    def llama_model_load_from_file(self, path: bytes, how: Any) -> Model | None:
        try:
            model = Model(Path(path.decode()))
        except Exception:  # as it gives nothing of what is damaged
            return None
        if getattr(how, "vocab_only", False) and model.cut("") is None:
            return None
        self.open += 1
        return model

    def llama_model_get_vocab(self, model: Model) -> Model:
        return model

    def llama_vocab_n_tokens(self, model: Model) -> int:
        return int(model.tensors["token_embd.weight"].shape[0])

    def llama_tokenize(self, model: Model, text: bytes, length: int, found: Any, room: int, *_: bool) -> int:
        cut = model.cut(text.decode())
        assert cut is not None
        assert (len(cut) <= room, length) == (True, len(text))
        found[: len(cut)] = cut
        return len(cut)

    def llama_init_from_model(self, model: Model, how: Any) -> Any:
        self.open += 1
        return types.SimpleNamespace(model=model, room=how.n_ctx, logits=None)

    def llama_get_memory(self, context: Any) -> Any:
        return context

    def llama_memory_clear(self, *_: Any) -> None: ...

    def llama_batch_init(self, tokens: int, *_: int) -> Any:
        lists = {name: [None] * tokens for name in ("token", "pos", "n_seq_id", "logits")}
        return types.SimpleNamespace(**lists, seq_id=[[None] for _ in range(tokens)])

    def llama_batch_free(self, batch: Any) -> None: ...

    def llama_decode(self, context: Any, batch: Any) -> int:
        if batch.n_tokens > context.room or batch.pos != list(range(batch.n_tokens)):
            return 1
        context.logits = context.model.logits(batch.token)
        return 0

    def llama_get_logits(self, context: Any) -> Any:
        flat = np.ascontiguousarray(context.logits.detach().numpy()).reshape(-1)
        return ctypes.cast(np.ctypeslib.as_ctypes(flat), ctypes.POINTER(ctypes.c_float))

    def llama_free(self, context: Any) -> None:
        self.open -= 1

    llama_model_free = llama_free

    def llama_model_quantize_default_params(self) -> Any:
        return Quantizing()

    def llama_model_quantize(self, source: bytes, out: bytes, how: Any) -> int:
        kind = TYPES[how._obj.ftype]
        importance = {
            each.name.decode(): np.ctypeslib.as_array(each.data, (each.size,))
            for each in ended(how._obj.imatrix, "name")
        }
        kinds = {each.pattern.decode(): each.type for each in ended(how._obj.tt_overrides, "pattern")}
        reader = gguf.GGUFReader(Path(source.decode()))
        writer = gguf.GGUFWriter(Path(out.decode()), reader.fields["general.architecture"].contents())
        for name, field in reader.fields.items():
            if not name.startswith("GGUF.") and name != "general.architecture":
                of = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(name, field.contents(), field.types[0], sub_type=of)
        names = {each.name for each in reader.tensors}
        head = "output.weight" if "output.weight" in names else "token_embd.weight"
        for each in reader.tensors:
            blocks = len(each.shape) > 1 and each.shape[0] % 32 == 0
            how_each = kind if blocks else gguf.GGMLQuantizationType.F32
            if each.name == head and blocks:
                how_each = gguf.GGMLQuantizationType.Q8_0
            for pattern, its in kinds.items() if blocks else ():
                if re.search(pattern, each.name):
                    how_each = gguf.GGMLQuantizationType(its)
            data = np.asarray(each.data)
            if how_each == gguf.GGMLQuantizationType.IQ4_NL:
                rounded = in_four_bits(data, importance.get(each.name, np.ones(data.shape[1], np.float32)))
            else:
                rounded = gguf.quantize(data, how_each)
            writer.add_tensor(each.name, rounded, raw_dtype=how_each)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return 0
