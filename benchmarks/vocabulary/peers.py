"""Tools that take tokens out of models, told to keep what texts have: Secateur, hf-trim, vocabtrimmer, TextPruner.

Elsewhere, beside the environment of the tests, whose torch and transformers stay:

    pip install --no-deps --target FOLDER hf-trim==3.0.1 sentencepiece vocabtrimmer==0.0.2 textpruner
    PYTHONPATH=FOLDER:src python benchmarks/vocabulary/run.py combinations

They were written for transformers 4, whose tokenizers in Python they open up; here they run with the transformers that
is installed. What it has no more and they only look at, ``additional_special_tokens``, is given back to them, empty.
vocabtrimmer imports pandas, datasets and a class of huggingface_hub that is gone, for uploading and for mining; where
they are missing, empty ones stand in, and it is given the tokens that its mining would have found.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

TOOLS: dict[str, Callable[[Path, Path, str, Sequence[str]], tuple[Any, Any]]] = {}
PACKAGES = {"hf-trim": "hftrim", "vocabtrimmer": "vocabtrimmer", "textpruner": "textpruner"}


def missing(tool: str) -> str | None:
    """Why a tool cannot run here."""
    package = PACKAGES.get(tool)
    if package is None or importlib.util.find_spec(package) is not None:
        return None
    return f"{package} is not installed (see benchmarks/vocabulary/peers.py)"


def give_back() -> None:
    """What transformers 5 dropped, and the tools ask for."""
    from transformers import PreTrainedTokenizerBase

    kind: Any = PreTrainedTokenizerBase
    if not hasattr(kind, "additional_special_tokens"):
        kind.additional_special_tokens = ()


def _loaded(folder: Path, model: str) -> tuple[Any, Any]:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return getattr(transformers, model).from_pretrained(folder), tokenizer


def secateur(source: Path, out: Path, model: str, texts: Sequence[str]) -> tuple[Any, Any]:
    from secateur import shrink_vocabulary

    shrink_vocabulary(source, texts=texts, out=out)
    return _loaded(out, model)


def hf_trim(source: Path, out: Path, model: str, texts: Sequence[str]) -> tuple[Any, Any]:
    from hftrim import ModelTrimmers
    from hftrim.TokenizerTrimmer import TokenizerTrimmer

    whole, tokenizer = _loaded(source, model)
    trimmers = {"Bart": "BartTrimmer", "MBart": "MBartTrimmer", "T5": "T5Trimmer", "MT5": "MT5Trimmer"}
    family = type(whole).__name__.removesuffix("ForConditionalGeneration")
    if family not in trimmers:
        raise NotImplementedError(f"it has no trimmer for {family}")
    kind = getattr(ModelTrimmers, trimmers[family])
    trimmed = TokenizerTrimmer(tokenizer)
    trimmed.make_vocab(list(texts))
    trimmed.make_tokenizer()
    made = kind(whole, whole.config, trimmed.trimmed_tokenizer)
    made.make_weights(trimmed.trimmed_vocab_ids)
    made.make_model()
    made.trimmed_model.save_pretrained(out)
    trimmed.trimmed_tokenizer.save_pretrained(out)
    return _loaded(out, model)


def vocabtrimmer(source: Path, out: Path, model: str, texts: Sequence[str]) -> tuple[Any, Any]:
    for name, attributes in (
        ("pandas", ["DataFrame"]),
        ("datasets", ["load_dataset"]),
        ("huggingface_hub", ["Repository"]),
    ):
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            sys.modules[name] = types.ModuleType(name)
        module = importlib.import_module(name)
        for each in attributes:
            if not hasattr(module, each):
                setattr(module, each, None)
    from vocabtrimmer import VocabTrimmer

    trimmer = VocabTrimmer(str(source))
    counts = Counter(number for text in texts for number in trimmer.tokenizer(text)["input_ids"])
    found = {trimmer.tokenizer.convert_ids_to_tokens(number): number for number, _ in counts.most_common()}
    mined = source.parent / "mined.json"
    mined.write_text(json.dumps(found), "utf-8")
    out.mkdir()
    trimmer.trim_vocab("en", str(out), min_frequency=1, cache_file_vocab=str(mined), cache_file_frequency=str(mined))
    return _loaded(out, model)


def textpruner(source: Path, out: Path, model: str, texts: Sequence[str]) -> tuple[Any, Any]:
    import transformers
    from textpruner import GeneralConfig, VocabularyPruner

    whole, tokenizer = _loaded(source, model)
    settings = GeneralConfig(use_device="cpu", output_dir=str(out))
    made = VocabularyPruner(whole, tokenizer, general_config=settings).prune(dataiter=list(texts))
    return getattr(transformers, model).from_pretrained(made), type(tokenizer).from_pretrained(made)


TOOLS |= {"secateur": secateur, "hf-trim": hf_trim, "vocabtrimmer": vocabtrimmer, "textpruner": textpruner}
