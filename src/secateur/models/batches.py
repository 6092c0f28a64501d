"""Calibration data: token batches from a text file, a file of JSON records, or what the caller has. Errors of a model
on a batch are re-raised with the number and the shapes of the batch.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from secateur.checkpoints import CheckpointError, blaming_config, read_json
from secateur.models.replay import LostOutputError
from secateur.support import (
    Forward,
    batch_inputs,
    check_batches,
    device_of,
    documents,
    is_empty,
    is_our_own,
    local,
    mapped,
    moved,
    printable,
    run_batch,
    shapes_in_words,
    tensors_in,
    track,
    warn,
)

# ---- Calibration data: token batches from a text file, a file of JSON records, or what the caller has.
#
# Law: the same source, tokenizer, numbers and seed give the same tokens; the whole source has its chance, and of a
# large file only what is used is read. Nothing is downloaded, and no code of a tokenizer's directory is run.

Batch = Tensor | dict[str, Any]
Tokens = npt.NDArray[np.int64]

LONGEST = 2048  # tokens of a sequence, where the caller names no length
_SPARSE = 16  # bytes of file a token: a file with more than this for each that is needed is sampled, not read
_UNKNOWN = 0.5  # of all tokens: more is no text in a language of the model
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx", "max_sequence_length")
# These count positions from beyond the padding token's number.
_OFFSET_MODELS = ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "longformer", "data2vec-text", "mpnet")


class NamedTexts(list[Batch]):
    """Calibration batches of texts that have names; ``names`` says of each batch whose it is.

    >>> NamedTexts([torch.ones(1), torch.zeros(1)], ["code", "maths"]).by_name()
    {'code': [tensor([1.])], 'maths': [tensor([0.])]}
    """

    def __init__(self, batches: Iterable[Batch], names: Iterable[str]) -> None:
        super().__init__(batches)
        self.names = tuple(names)

    @classmethod
    def of(cls, batches: Any) -> list[Batch]:
        """These batches as a list; of ``{name: batches}`` with their names, which they also keep if they have them.

        >>> NamedTexts.of({"mine": [torch.ones(1)], "theirs": [torch.zeros(1)]}).names
        ('mine', 'theirs')
        """
        if isinstance(batches, Mapping) and all(isinstance(its, list | tuple) for its in batches.values()):
            return cls(itertools.chain(*batches.values()), (name for name, its in batches.items() for _ in its))
        check_batches(batches)
        return batches if isinstance(batches, cls) else list(batches)

    def by_name(self) -> dict[str, list[Batch]]:
        """The batches of each text, in the order of the names."""
        found: dict[str, list[Batch]] = {name: [] for name in sorted({*self.names}, key=self.names.index)}
        for batch, name in zip(self, self.names, strict=True):
            found[name].append(batch)
        return found


def read_calibration(
    source: str | Path | Iterable[Any] | Mapping[str, Any],
    *,
    tokenizer_directory: Path | str,
    samples: int = 128,
    sequence_length: int | None = None,
    seed: int = 0,
    field: str = "text",
) -> list[Batch]:
    """``samples`` sequences of ``sequence_length`` tokens each, as int64 tensors of shape (1, sequence_length).

    Documents are joined with the tokenizer's end-of-text between them and cut into sequences, so that no padding is
    needed; each sequence begins and ends with what the tokenizer puts around a text (Llama's ``<s>``, BERT's ``[CLS]``
    and ``[SEP]``). Which sequences are taken, and in which order, follows from the seed. Of a file that is much larger
    than what is needed, text is read at places spread over the whole of it. A text that is too short is used as far as
    it goes: fewer sequences, or one shorter one, with a warning of one line that says how many. A text that is mostly
    unknown to the tokenizer is warned of, too.

    Args:
        source: a ``.txt`` file, which is one document; a ``.jsonl`` or ``.json`` file of records (or strings); or an
            iterable of documents or records, or of token batches: tensors, lists of numbers, mappings with
            ``input_ids`` and perhaps ``attention_mask``. Batches are taken as they are, until there are ``samples``
            sequences. The string ``"random"`` asks for random tokens, with a warning. Of a model of pictures a folder
            of them: each is a batch of one, as the directory's own processor prepares it. Several texts have names:
            ``{"code": "a.txt", "maths": "b.txt"}``, or the string ``"code=a.txt,maths=b.txt"``. Each gives as many
            sequences, or by weights, ``"code:2=a.txt"``. `reached` says what each never reaches.
        tokenizer_directory: the model's directory, with its tokenizer and ``config.json``.
        sequence_length: by default 2048, or less where the model or its tokenizer takes less.
        field: of the records that holds the text.

    Raises:
        ValueError: no text at all; a record without the field; a token beyond the vocabulary; a length beyond the
            model's positions.
        CheckpointError: there is no tokenizer in the directory; or, of a folder of pictures, no processor.

    >>> read_calibration([[1, 2, 3], torch.tensor([[4, 5]])], tokenizer_directory=".", samples=2)
    [tensor([[1, 2, 3]]), tensor([[4, 5]])]
    """
    if samples < 1:
        raise ValueError(f"samples must be at least 1, not {samples}.")
    directory = Path(tokenizer_directory)
    config = _config(directory)
    vocabulary = _number(config, ("vocab_size",))
    if (several := named_sources(source)) is not None:
        how = {"tokenizer_directory": directory, "sequence_length": sequence_length, "seed": seed, "field": field}
        return _of_several(several, samples, seed, how)
    assert not isinstance(source, Mapping)
    if isinstance(source, str | Path) and Path(source).is_dir():
        return _pictures(Path(source), samples, seed, _processor(directory, config))
    if not isinstance(source, str | Path):
        items: Iterator[Any] = iter(source)
        if (first := next(items, None)) is None:
            raise ValueError("the calibration data is empty.")
        source = itertools.chain([first], items)
        if not (isinstance(first, str) or (isinstance(first, Mapping) and isinstance(first.get(field), str))):
            return _given(source, samples, vocabulary)
    tokenizer = _tokenizer(directory)
    longest = longest_sequence(config, tokenizer)
    length = min(LONGEST, longest or LONGEST) if sequence_length is None else sequence_length
    if longest is not None and length > longest:
        raise ValueError(f"the model in {directory} takes at most {longest:,} tokens at a time, not {length:,}.")
    text = _Text.of(tokenizer, length)
    generator = np.random.default_rng(seed)
    if isinstance(source, str) and source == "random":
        return _random(text, samples, vocabulary or len(tokenizer), generator)
    if isinstance(source, str | Path):
        bodies = _from_file(Path(source), text, samples, generator, field)
    else:
        texts = (documents.text_of(each, f"document {number}", field) for number, each in enumerate(source))
        bodies = _packed(text.joined(track(texts, "tokenizing")), text, samples, generator, "the list of documents")
    found = [text.whole(body) for body in bodies]
    if len(found) < samples or len(found[0]) < length:
        sequences = "sequence" if len(found) == 1 else "sequences"
        warn(
            f"{source if isinstance(source, str | Path) else 'the list of documents'} is short: calibrating with "
            f"{len(found):,} {sequences} of {len(found[0]):,} tokens, not {samples:,} of {length:,}.",
        )
    _warn_of_unknown(bodies, tokenizer, source if isinstance(source, str | Path) else "the list of documents")
    _check_vocabulary((int(tokens.max()) for tokens in found), vocabulary, f"the tokenizer in {directory}")
    return [torch.from_numpy(tokens)[None] for tokens in found]


def named_sources(source: Any) -> dict[str, tuple[float, Any]] | None:
    """``{name: (weight, source)}`` of several texts; None where it is one.

    >>> named_sources("code:2=a.txt,maths=b.txt")
    {'code': (2.0, 'a.txt'), 'maths': (1.0, 'b.txt')}
    """
    if isinstance(source, str) and "=" in source and not Path(source).exists():
        parts = [part.partition("=") for part in source.split(",")]
        if not all(name and text for name, _, text in parts):
            raise ValueError(f"{source!r} names no texts; write NAME=FILE,NAME=FILE, or one FILE that exists.")
        source = {name: text for name, _, text in parts}
    if not isinstance(source, Mapping):
        return None
    if not source or "input_ids" in source:
        raise ValueError("this is a single batch; pass a list of batches.")
    found = {}
    for name, text in source.items():
        plain, _, weight = str(name).partition(":")
        try:
            found[plain] = (float(weight or 1), text)
        except ValueError:
            raise ValueError(f"{name!r}: {weight!r} is no weight; write NAME:2, a positive number.") from None
        if not 0 < found[plain][0] < float("inf"):
            raise ValueError(f"{name!r}: {weight} is no weight; write a positive number.")
    return found


def _of_several(texts: Mapping[str, tuple[float, Any]], samples: int, seed: int, how: Mapping[str, Any]) -> NamedTexts:
    """Of each text its share of the sequences, at least one, in an order that follows from the seed."""
    every = sum(weight for weight, _ in texts.values())
    found: list[tuple[str, Batch]] = []
    for name, (weight, text) in texts.items():
        share = max(1, round(samples * weight / every))
        found += [(name, batch) for batch in read_calibration(text, samples=share, **how)]
    order = np.random.default_rng(seed).permutation(len(found))
    return NamedTexts((found[at][1] for at in order), (found[at][0] for at in order))


def longest_sequence(config: Mapping[str, Any], tokenizer: Any = None) -> int | None:
    """The largest number of tokens that a model takes, from its configuration and its tokenizer; None if neither says.

    >>> longest_sequence({"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1})
    512
    """
    positions = _number(config, _POSITIONS)
    if positions is not None and config.get("model_type") in _OFFSET_MODELS:
        positions -= (_number(config, ("pad_token_id",)) or 0) + 1
    limit = getattr(tokenizer, "model_max_length", None)  # an absurdly large number where there is none, or anything
    known = [int(each) for each in (positions, limit) if isinstance(each, int | float) and 1 <= each < 1 << 40]
    return min(known, default=None)


# ---- text and tokens ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Text:
    """How text becomes sequences: ``body`` tokens of text between what the tokenizer puts around them."""

    encode: Callable[[str], Tokens]
    before: Tokens
    after: Tokens
    end: Tokens  # of a document
    body: int

    @staticmethod
    def of(tokenizer: Any, length: int) -> _Text:
        def encode(text: str, special: bool = False) -> Tokens:
            try:
                found = tokenizer(text, add_special_tokens=special, return_attention_mask=False, verbose=False)
            except Exception as error:  # a bare Exception, of a word that its table lacks
                if isinstance(error, MemoryError | OSError):
                    raise
                raise CheckpointError(f"the tokenizer does not take a text: {printable(str(error))}.") from error
            return np.asarray(found["input_ids"], dtype=np.int64).reshape(-1)

        plain, around = encode("a"), encode("a", special=True)
        places = [at for at in range(len(around)) if np.array_equal(around[at : at + len(plain)], plain)]
        before, after = (around[: places[0]], around[places[0] + len(plain) :]) if places else (plain[:0], plain[:0])
        end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
        body = length - len(before) - len(after)
        if body < 1:
            own = len(before) + len(after)
            raise ValueError(f"a sequence of {length} tokens has no room for text beside the tokenizer's own {own}.")
        ends = np.asarray([] if end is None else [end], dtype=np.int64)
        return _Text(encode, before, after, ends, body)

    def whole(self, tokens: Tokens) -> Tokens:
        """A sequence, with what goes around it."""
        return np.concatenate([self.before, tokens, self.after])

    def joined(self, documents: Iterable[str]) -> Iterator[Tokens]:
        """The tokens of each document, and the end of it."""
        for document in documents:
            if document:
                yield np.concatenate([self.encode(document), self.end])


def _packed(
    pieces: Iterable[Tokens], text: _Text, samples: int, generator: np.random.Generator, where: str
) -> list[Tokens]:
    """Consecutive sequences that do not overlap, until the tokens end; of too few tokens one shorter sequence."""
    needed = samples * text.body
    held: list[Tokens] = []
    count = 0
    for piece in pieces:
        held.append(piece)
        count += len(piece)
        if count >= _SPARSE * needed:
            break
    if not count:
        raise ValueError(f"{where} has no tokens: there is nothing to calibrate with.")
    tokens, whole = np.concatenate(held), count // text.body
    if not whole:
        return [tokens]
    chosen = generator.permutation(whole)[:samples]
    return [tokens[at * text.body : (at + 1) * text.body] for at in chosen]


# ---- files ----------------------------------------------------------------------------------------------------------


def _from_file(path: Path, text: _Text, samples: int, generator: np.random.Generator, field: str) -> list[Tokens]:
    kind = documents.checked_kind(path)
    size = path.stat().st_size
    if kind == ".json" and documents.first_byte(path) == b"[":
        return _packed(text.joined(documents.array(path, field)), text, samples, generator, str(path))
    lines = kind != ".txt"
    if size > _SPARSE * samples * text.body:
        spread = (_records if lines else _places)(path, size, text, samples, generator, field)
        if spread is not None:
            return spread
    with open(path, "rb") as file:
        if lines:
            pieces = text.joined(track(documents.records_in(file, path, field), "tokenizing"))
        else:
            pieces = (text.encode(piece) for piece in track(documents.pieces(file, path), "tokenizing"))
        return _packed(pieces, text, samples, generator, str(path))


def _places(
    path: Path, size: int, text: _Text, samples: int, generator: np.random.Generator, _field: str
) -> list[Tokens] | None:
    """A sequence from each of as many equal parts of a text; None if one has not so many tokens."""
    found = []
    span = _SPARSE * text.body
    with open(path, "rb") as file:
        for number in track(range(samples), "tokenizing"):
            low, high = size * number // samples, size * (number + 1) // samples
            begin = low + int(generator.integers(max(high - low - span, 0) + 1))
            file.seek(begin)
            tokens = text.encode(documents.decoded(file.read(min(span, high - begin)), path, begin))
            if len(tokens) < text.body:
                return None
            found.append(tokens[: text.body])
    return [found[at] for at in generator.permutation(samples)]


def _records(
    path: Path, size: int, text: _Text, samples: int, generator: np.random.Generator, field: str
) -> list[Tokens] | None:
    """A sequence from records at each of as many equal parts, none used twice; None if there are too few."""
    found: list[Tokens] = []
    used: set[int] = set()
    with open(path, "rb") as file:
        for number in track(range(samples), "tokenizing"):
            low, high = size * number // samples, size * (number + 1) // samples
            begin = low + int(generator.integers(max(high - low, 1)))
            file.seek(max(begin - 1, 0))
            if begin:
                documents.line_of(file, path)  # the rest of the line before
            parts: list[Tokens] = []
            count, wrapped = 0, False
            while count < text.body:
                at = file.tell()
                line = documents.line_of(file, path)
                if at in used:
                    if wrapped:
                        return None
                    continue
                if not line:
                    if wrapped:
                        return None
                    wrapped = True
                    file.seek(0)
                    continue
                used.add(at)
                document = documents.document_in(line, path, at, field)
                if len(document) > _SPARSE * text.body:  # of a book a part, anywhere
                    start = int(generator.integers(len(document) - _SPARSE * text.body + 1))
                    document = document[start : start + _SPARSE * text.body]
                if document:
                    parts.append(np.concatenate([text.encode(document), text.end]))
                    count += len(parts[-1])
            found.append(np.concatenate(parts)[: text.body])
    return [found[at] for at in generator.permutation(samples)]


# ---- what is not text -----------------------------------------------------------------------------------------------


def _given(items: Iterable[Any], samples: int, vocabulary: int | None) -> list[Batch]:
    """Token batches as they are, until there are so many sequences."""
    found: list[Batch] = []
    count = 0
    for number, item in enumerate(items):
        where = f"batch {number}"
        if isinstance(item, Mapping):
            if "input_ids" not in item:
                raise ValueError(f"{where}: a mapping without 'input_ids': {sorted(map(str, item))[:8]}.")
            batch = {str(name): value for name, value in item.items()}
            batch["input_ids"] = tokens = _tensor(item["input_ids"], where)
            if batch.get("attention_mask") is not None:
                mask = torch.as_tensor(item["attention_mask"])
                batch["attention_mask"] = mask = mask[None] if mask.dim() == 1 else mask
                if mask.shape != tokens.shape:
                    raise ValueError(
                        f"{where}: an attention_mask of shape {tuple(mask.shape)} for tokens {tuple(tokens.shape)}."
                    )
                if not mask.any():
                    raise ValueError(f"{where}: the attention_mask calls all tokens padding.")
            found.append(batch)
        else:
            tokens = _tensor(item, where)
            found.append(tokens)
        _check_vocabulary([int(tokens.max())], vocabulary, where)
        if int(tokens.min()) < 0:
            raise ValueError(f"{where}: {int(tokens.min())} is no token; pad with the padding token and a mask.")
        count += len(tokens)
        if count >= samples:
            break
    return found


def _tensor(tokens: Any, where: str) -> Tensor:
    try:
        made: Tensor = torch.as_tensor(tokens)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(
            f"{where}: not tokens ({str(error).splitlines()[0]}); rows of one batch must be equally long."
        ) from None
    if made.is_floating_point() or made.is_complex() or made.dtype == torch.bool:
        raise ValueError(f"{where}: tokens are integers, not {made.dtype}.")
    if made.dim() not in (1, 2) or not made.numel():
        raise ValueError(f"{where}: tokens have shape (sequences, length) or (length,), not {tuple(made.shape)}.")
    made = made.to(torch.int64)
    return made[None] if made.dim() == 1 else made


def _random(text: _Text, samples: int, vocabulary: int, generator: np.random.Generator) -> list[Batch]:
    warn(
        "random tokens are no language: what is pruned by them is worse than by any text. Use them for trials.",
    )
    drawn = [generator.integers(vocabulary, size=text.body, dtype=np.int64) for _ in range(samples)]
    return [torch.from_numpy(text.whole(tokens))[None] for tokens in drawn]


def _warn_of_unknown(bodies: Iterable[Tokens], tokenizer: Any, where: str | Path) -> None:
    if tokenizer.unk_token_id is None:
        return
    share = float(np.mean(np.concatenate([*bodies]) == tokenizer.unk_token_id))
    if share > _UNKNOWN:
        warn(
            f"{where}: {share:.0%} of its tokens are {tokenizer.unk_token}, which stands for what the tokenizer does "
            "not know. They say little: give a text in a language of the model.",
        )


def _check_vocabulary(highest: Iterable[int], vocabulary: int | None, where: str) -> None:
    if vocabulary is None:
        return
    for token in highest:
        if token >= vocabulary:
            raise ValueError(
                f"{where} gives token {token:,}, but the model has a vocabulary of {vocabulary:,}: the tokenizer is "
                "another model's."
            )


def _tokenizer(directory: Path) -> Any:
    from transformers import AutoTokenizer

    if not directory.is_dir():  # or transformers would look for a name on its hub
        raise CheckpointError(f"{directory}: no such directory.")
    try:
        found: Any = AutoTokenizer.from_pretrained(os.fspath(directory), local_files_only=True, trust_remote_code=False)
        found("a")  # a setting of another type is only met by a text
        _ = found.unk_token_id  # where the unknown token is unknown itself it is looked for without end
        return found
    except Exception as error:  # whatever its many kinds of tokenizers raise
        why = printable(str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__, 150)
        raise CheckpointError(f"{directory}: no tokenizer that transformers can load without code ({why}).") from None


# ---- pictures

_PICTURES = frozenset((".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"))


def read_pictures(folder: Path | str, model: nn.Module, *, samples: int = 128, seed: int = 0) -> list[Batch]:
    """Pictures of a folder for a model of timm, prepared as its ``pretrained_cfg`` says: of each a float32 tensor of
    shape (1, channels, height, width).

    Raises:
        ValueError: the model does not say what it takes, or the folder holds no pictures.
    """
    if not getattr(model, "pretrained_cfg", None):
        raise ValueError(
            f"{type(model).__name__} does not say which pictures it takes, as models of timm do, so {folder} cannot be "
            "prepared for it: give batches, tensors of shape (pictures, channels, height, width), a command --data "
            "module:batches."
        )
    from timm.data import create_transform, resolve_data_config

    prepare = create_transform(**resolve_data_config({}, model=model))
    return _pictures(Path(folder), samples, seed, lambda picture: prepare(picture)[None])


def _pictures(folder: Path, samples: int, seed: int, prepare: Callable[[Any], Batch]) -> list[Batch]:
    """So many pictures of a folder and of those in it, prepared; which, follows from the seed."""
    from PIL import Image

    every = sorted(path for path in folder.rglob("*") if path.suffix.lower() in _PICTURES)
    if not every:
        raise ValueError(f"{folder}: holds no pictures ({', '.join(sorted(_PICTURES))}).")
    if len(every) < samples:
        warn(f"{folder} is short: calibrating with {len(every):,} pictures, not {samples:,}.")
    found = []
    order = np.random.default_rng(seed).permutation(len(every))[:samples]
    for path in track([every[at] for at in order], "reading pictures"):
        try:
            with Image.open(path) as picture:
                found.append(prepare(picture.convert("RGB")))
        except Exception as error:  # whatever Pillow and the many processors raise
            why = printable(" ".join(str(error).split()) or type(error).__name__, 150)
            raise ValueError(
                f"{printable(str(path), 300)}: cannot be read as a picture of the model's ({why})."
            ) from None
    return found


def _processor(directory: Path, config: Mapping[str, Any]) -> Callable[[Any], Batch]:
    """What prepares a picture as the directory says it, in the dtype of its weights."""
    dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch."), torch.float32)
    if not any((directory / name).exists() for name in ("preprocessor_config.json", "processor_config.json")):
        raise CheckpointError(
            f"{directory}: has no preprocessor_config.json, which says how the pictures of a folder are prepared; a "
            "text is one file."
        )
    with blaming_config(directory, "what is beside it does not say how pictures are prepared"):
        # of the file itself: as a name of transformers 5.6 it asks for torchvision, which nothing here needs
        from transformers.models.auto.image_processing_auto import AutoImageProcessor

        processors: Any = AutoImageProcessor
        found = processors.from_pretrained(os.fspath(directory), local_files_only=True, trust_remote_code=False)

    def prepare(picture: Any) -> Batch:
        made = {name: value for name, value in found(picture, return_tensors="pt").items() if isinstance(value, Tensor)}
        cast: Batch = mapped(made, lambda each: each.to(dtype) if each.is_floating_point() else each)
        return cast

    return prepare


def _config(directory: Path) -> Mapping[str, Any]:
    path = directory / "config.json"
    return read_json(path) if path.is_file() else {}


def _number(config: Mapping[str, Any], names: Iterable[str]) -> int | None:
    """The first of these that a configuration holds, of the text part where there are several."""
    for part in (config, config.get("text_config"), config.get("decoder")):
        for name in names:
            value = part.get(name) if isinstance(part, Mapping) else None
            if type(value) is int and value > 0:
                return value
    return None


# ---- Example inputs for tracing a model: made from its configuration, or the first rows of a batch.
#
# Law: an example asks for nothing that a model returns beside its results: no cache, and no scores of its routers,
# from which a loss is made. What is returned stays whole.

_ROWS = 2  # of a batch, that are watched to find what leaves together: sizes say nothing of it
_TOKENS = 8  # of a text
_SIDE = 224  # pixels, of what says none
_BESIDE = ("use_cache", "output_router_logits")


def example_of(model: nn.Module, batch: Any, rows: int | None = _ROWS) -> Any:
    """The example inputs that a batch gives, as `run_batch` passes them, where the model is: its first rows, or all of
    them."""
    given = moved(batch_inputs(batch), device_of(model))
    sizes = {each.shape[0] if each.dim() else 0 for each in tensors_in(given)}
    if rows is not None and len(sizes) == 1 and min(sizes) > rows:
        given = mapped(given, lambda tensor: tensor[:rows])
    main = getattr(model, "main_input_name", None)
    if isinstance(given, Tensor) and isinstance(main, str):
        given = {main: given}
    return {**given, **_nothing_beside(model)} if isinstance(given, Mapping) else given


def shorter(example: Any) -> Any:
    """The first tokens of a text: enough for the proof."""
    ids = example.get("input_ids") if isinstance(example, Mapping) else None
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.shape[1] <= _TOKENS:
        return example
    return {
        name: each[:, :_TOKENS] if isinstance(each, Tensor) and each.shape == ids.shape else each
        for name, each in example.items()
    }


def example_for(model: nn.Module) -> dict[str, Any]:
    """Example inputs for a model of transformers, by the names of its arguments."""
    known = inspect.signature(model.forward).parameters
    config: Any = model.config
    name = getattr(model, "main_input_name", None)
    if name == "input_ids":
        tokens = torch.tensor([[7, 6, 5, 4, 1], [1, 2, 3, 5, 4]], dtype=torch.int64, device="cpu")
        # with a mask, no model has to look for padding, which it cannot on meta
        found = {name: tokens, "attention_mask": torch.ones_like(tokens)}
    elif name == "pixel_values":
        seen = getattr(config, "vision_config", config)  # of SigLIP; a ResNet says no size, since it takes any
        size = getattr(seen, "image_size", None) or _SIDE
        height, width = (size, size) if isinstance(size, int) else size
        found = {
            name: torch.zeros(2, getattr(seen, "num_channels", 3), height, width, dtype=torch.float32, device="cpu")
        }
    else:
        raise ValueError(f"give example_inputs: {type(model).__name__} takes {name}, of which no example is known.")
    if config.is_encoder_decoder and "decoder_input_ids" in known:
        found.setdefault("decoder_input_ids", found["input_ids"])
    return {**{key: value for key, value in found.items() if key in known}, **_nothing_beside(model)}


def without_cache(model: nn.Module, example: Any) -> Any:
    """What a model is called with, by which it returns no cache and no scores of routers unless that says so."""
    return {**_nothing_beside(model), **example} if isinstance(example, Mapping) else example


def _nothing_beside(model: nn.Module) -> dict[str, bool]:
    known = inspect.signature(model.forward).parameters
    return {key: False for key in _BESIDE if key in known}


# ---- Errors of a model on a batch are re-raised with the number and the shapes of the batch.
#
# Law: what this library found itself says so already, and passes; whatever the model or torch raises becomes one
# line.


def with_batch_in_errors(batches: Sequence[Any], forward: Forward | None) -> Forward:
    """The function that runs a batch; where that fails, the error names the batch.

    A custom ``forward`` raises its own error, with a note.

    >>> run = with_batch_in_errors([torch.ones(1, 3), torch.ones(1, 4)], None)
    >>> run(nn.Linear(3, 2), torch.ones(1, 4))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
      ...
    ValueError: the model does not run on a batch of shape (1, 4), float32 (RuntimeError: ...mat1 and mat2 shapes cannot be multiplied (1x4 and 3x2)); pass batches that it takes, or forward=(model, batch) -> outputs.
    """  # noqa: E501

    def run(model: nn.Module, batch: Any) -> Any:
        with naming_batch(batches, batch, forward):
            return run_batch(model, batch, forward)

    return run


@contextlib.contextmanager
def naming_batch(
    batches: Sequence[Any], batch: Any, forward: Forward | None = None, who: str = "the model"
) -> Iterator[None]:
    """A context in which a batch is run: where that fails, the error names the batch, as in `with_batch_in_errors`.

    Args:
        batches: all batches.
        batch: the one that is run, as it is in ``batches``.
        forward: the custom function that runs it, if there is one.
        who: the model, in words.
    """
    try:
        yield
    except Exception as error:
        if passes(error):
            raise
        if forward is not None:
            error.add_note(f"This was {which(batches, batch)}.")
            raise
        said = printable(" ".join(str(error).split()), 400)
        raise ValueError(
            f"{who} does not run on {which(batches, batch)} ({type(error).__name__}: {said}); pass batches "
            "that it takes, or forward=(model, batch) -> outputs."
        ) from error


def which(batches: Sequence[Any], batch: Any) -> str:
    """A batch in words.

    >>> batches = [{"input_ids": torch.ones(1, 4).long()}, (torch.ones(2, 3), torch.ones(2))]
    >>> which(batches, batches[0]); which(batches, batches[1])
    'batch 0 of 2 (input_ids of shape (1, 4), int64)'
    'batch 1 of 2 (shape (2, 3), float32 and shape (2,), float32)'
    """
    shapes = " and ".join(shapes_in_words(batch)) or f"a {type(batch).__name__}"
    number = next((at for at, each in enumerate(batches) if each is batch), None)
    return f"a batch of {shapes}" if number is None else f"batch {number} of {len(batches)} ({shapes})"


def refuse_empty(batches: Sequence[Any], batch: Any) -> None:
    """Raises ValueError for a batch without a sample, of which no loss can be taken.

    >>> refuse_empty([torch.ones(1, 2)], torch.ones(1, 2))
    """
    if is_empty(batch):
        raise ValueError(f"{which(batches, batch)} holds no token and no sample, or all is padding; leave it out.")


def passes(error: Exception) -> bool:
    """Whether an error passes unchanged: it is this library's own, or memory ran out."""
    known = (CheckpointError, LostOutputError, OSError, MemoryError, torch.OutOfMemoryError)
    return isinstance(error, known) or is_our_own(error)


def check_finite(model: nn.Module) -> None:
    """Raises ValueError if a weight of the model that is there, inside blocks or outside, holds NaN or infinity."""
    for name, parameter in model.named_parameters():
        own = local(parameter).detach()
        if own.numel() and not own.is_meta and not bool(own.isfinite().all()):
            raise ValueError(
                f"{name}: the weight of shape {tuple(parameter.shape)} has entries that are NaN or infinite."
            )
