"""Which combinations of tokenizer and model class each tool gets right: as transformers loads them, and saves them.

Law: every tool is given the same directory and the same texts. It is right if the directory that it leaves loads, and
reads each of these texts as the same tokens with the same hidden states and the same logits of tokens that stay, in
both within 1e-5; else it is wrong, or it raises.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.support import corpora
from benchmarks.support.tables import head, row
from benchmarks.vocabulary import peers

_SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4}
_SIDES = {
    f"{side}_{key}": value
    for side in ("encoder", "decoder")
    for key, value in {"layers": 1, "attention_heads": 4, "ffn_dim": 48}.items()
}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
_DISTIL = {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}
_XGLM = {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48}
COMBINATIONS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("BertTokenizer", "BertForMaskedLM", "BertConfig", _SMALL),
    ("BertTokenizer", "BertModel", "BertConfig", _SMALL),
    ("DistilBertTokenizer", "DistilBertForMaskedLM", "DistilBertConfig", _DISTIL),
    ("ElectraTokenizer", "ElectraForMaskedLM", "ElectraConfig", {**_SMALL, "embedding_size": 16}),
    ("MPNetTokenizer", "MPNetForMaskedLM", "MPNetConfig", _SMALL),
    ("RobertaTokenizer", "RobertaForMaskedLM", "RobertaConfig", _SMALL),
    ("XLMRobertaTokenizer", "XLMRobertaForMaskedLM", "XLMRobertaConfig", _SMALL),
    ("CamembertTokenizer", "CamembertForMaskedLM", "CamembertConfig", _SMALL),
    ("AlbertTokenizer", "AlbertForMaskedLM", "AlbertConfig", {**_SMALL, "embedding_size": 16}),
    ("DebertaV2Tokenizer", "DebertaV2ForMaskedLM", "DebertaV2Config", _SMALL),
    ("DebertaTokenizer", "DebertaModel", "DebertaConfig", _SMALL),
    ("GPT2Tokenizer", "GPT2LMHeadModel", "GPT2Config", _GPT),
    ("GPT2Tokenizer", "GPTJForCausalLM", "GPTJConfig", {**_GPT, "rotary_dim": 4}),
    ("GPTNeoXTokenizer", "GPTNeoXForCausalLM", "GPTNeoXConfig", _SMALL),
    ("LlamaTokenizer", "LlamaForCausalLM", "LlamaConfig", _SMALL),
    ("GemmaTokenizer", "Gemma3ForCausalLM", "Gemma3TextConfig", {**_SMALL, "num_key_value_heads": 4, "head_dim": 8}),
    ("Qwen2Tokenizer", "Qwen2ForCausalLM", "Qwen2Config", {**_SMALL, "num_key_value_heads": 4}),
    ("BartTokenizer", "BartForConditionalGeneration", "BartConfig", {"d_model": 32, **_SIDES}),
    ("MBartTokenizer", "MBartForConditionalGeneration", "MBartConfig", {"d_model": 32, **_SIDES}),
    ("NllbTokenizer", "M2M100ForConditionalGeneration", "M2M100Config", {"d_model": 32, **_SIDES}),
    ("T5Tokenizer", "T5ForConditionalGeneration", "T5Config", _T5),
    ("T5Tokenizer", "MT5ForConditionalGeneration", "MT5Config", {**_T5, "tie_word_embeddings": False}),
    ("CLIPTokenizer", "CLIPTextModel", "CLIPTextConfig", _SMALL),
    ("XGLMTokenizer", "XGLMForCausalLM", "XGLMConfig", _XGLM),
)  # fmt: skip
TEXTS = 40  # that tools are given
SIZE = 900  # tokens


def combinations(tools: Sequence[str]) -> None:
    """A table: a row a combination, a column a tool."""
    import transformers

    transformers.logging.set_verbosity_error()
    texts = [text for text in corpora.of_modules()[0].split("\n\n") if len(text) > 40]
    given = [" ".join(text.split())[:150] for text in texts[:TEXTS]]
    peers.give_back()
    there = {tool: peers.missing(tool) for tool in tools}
    for tool, why in there.items():
        if why is not None:
            print(f"{tool} is left out: {why}")
    chosen = [tool for tool, why in there.items() if why is None]
    right = dict.fromkeys(chosen, 0)
    print(head(["tokenizer", "model", *chosen]))
    for kind, model, config, sizes in COMBINATIONS:
        with tempfile.TemporaryDirectory() as scratch:
            dense = Path(scratch, "dense")
            with _silent():
                _write(dense, kind, model, config, sizes, texts)
            said = []
            for tool in chosen:
                with _silent():
                    found = _judged(peers.TOOLS[tool], dense, Path(scratch, tool), model, given)
                right[tool] += found == "right"
                said.append(found)
            print(row([kind, model, *said]), flush=True)
    print(row(["", "right", *(f"{right[tool]} of {len(COMBINATIONS)}" for tool in chosen)]))


@contextlib.contextmanager
def _silent() -> Any:
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield


def _write(folder: Path, kind: str, model: str, config: str, sizes: dict[str, Any], texts: Sequence[str]) -> None:
    import transformers

    tokenizer = getattr(transformers, kind)().train_new_from_iterator(texts[:1500], SIZE, show_progress=False)
    ids = {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id")
        for name in ("pad", "bos", "eos", "unk", "sep", "cls")
    }
    named = {key: value for key, value in ids.items() if value is not None}
    if "d_model" in sizes:
        named["decoder_start_token_id"] = next(iter(named.values()))
    torch.manual_seed(0)
    made = getattr(transformers, model)(
        getattr(transformers, config)(vocab_size=len(tokenizer), max_position_embeddings=128, **named, **sizes)
    )
    for parameter in made.parameters():  # biases too, which begin as zeros
        torch.nn.init.normal_(parameter, std=0.2)
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _judged(
    tool: Callable[[Path, Path, str, Sequence[str]], tuple[Any, Any]],
    dense: Path,
    out: Path,
    model: str,
    texts: Sequence[str],
) -> str:
    import transformers

    kind = getattr(transformers, model)
    old, before = kind.from_pretrained(dense).eval(), transformers.AutoTokenizer.from_pretrained(dense)
    try:
        new, after = tool(dense, out, model, texts)
    except BaseException as error:  # whatever a tool raises
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"raises {type(error).__name__}"
    if sum(p.numel() for p in new.parameters()) >= sum(p.numel() for p in old.parameters()):
        return "nothing left"
    try:
        return _compared(old, before, new.eval(), after, texts) or "right"
    except Exception as error:  # a model that does not run on what its tokenizer makes
        return f"does not run: {type(error).__name__}"


@torch.no_grad()
def _compared(old: Any, before: Any, new: Any, after: Any, texts: Sequence[str]) -> str | None:
    stays = after.get_vocab()
    both = [(number, stays[token]) for token, number in before.get_vocab().items() if token in stays]
    for text in texts:
        one, other = before(text)["input_ids"], after(text)["input_ids"]
        if before.convert_ids_to_tokens(one) != after.convert_ids_to_tokens(other):
            return "other tokens"
        first, second = (_run(model, torch.tensor([ids])) for model, ids in ((old, one), (new, other)))
        if not all(torch.allclose(a, b, atol=1e-5) for a, b in zip(first[0], second[0], strict=True)):
            return "other hidden states"
        if first[1] is not None:
            left, right = zip(*both, strict=True)
            if second[1] is None or not torch.allclose(first[1][..., left], second[1][..., right], atol=1e-4):
                return "other logits"
    return None


def _run(model: Any, ids: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    out = model(input_ids=ids, output_hidden_states=True, **more)
    inside = [value for key, value in out.items() if "hidden_states" in key]
    return [each for several in inside for each in several], out.get("logits")
