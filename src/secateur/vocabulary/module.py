"""The verb `shrink_vocabulary`: removes tokens from a model and its tokenizer, in memory or in a directory.

Law: both change or neither does; of a text whose old tokens all stay the hidden states are the same bit for bit.
"""

from __future__ import annotations

import json
import operator
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from secateur.support import Undo, for_directories, is_sharded, refuse, tensors_of, unwrapped
from secateur.vocabulary.axes import Axes, axes_of, builder, embedding_of, numbers_in, parts_in, renumbered, with_field
from secateur.vocabulary.choosing import asked, rows_of_tensor
from secateur.vocabulary.directory import shrink_vocabulary_directory
from secateur.vocabulary.files import by_class, changed_config, needed_in, of_tokenizer
from secateur.vocabulary.planning import Planned, Texts, agree, planned, positions_begin_behind
from secateur.vocabulary.result import ShrunkVocabulary
from secateur.vocabulary.tokens import Ids, Tokens

_TRIED = 500  # texts of each kind that the tokenizers are compared on


def shrink_vocabulary(
    model: nn.Module | Path | str,
    tokenizer: Any = None,
    texts: Texts | None = None,
    *,
    keep: int | None = None,
    cover: float | None = None,
    script: str | Iterable[str] | None = None,
    multiple: int | None = None,
    rank: str | None = None,
    exact: bool = False,
    out: Path | str | None = None,
) -> ShrunkVocabulary:
    """Removes tokens that a text does not contain from a model and its tokenizer, both in place; or of a directory
    writes another one, whose model and tokenizer ``from_pretrained`` loads.

    Of a text whose old tokens all stay the new ones are the old ones renamed, and the hidden states are the same bit
    for bit; the logits of tokens that stay are the same but for the last bits, where a product of fewer rows is summed
    in another order. Embeddings, heads, biases, the configuration's and the generation configuration's numbers follow,
    and all that is tied stays so. Make a new optimizer afterwards: the state of an old one is not sliced.

    In a directory names of tensors, their order and dtypes, ``__metadata__`` and all other files stay;
    ``secateur.json`` and ``vocabulary.json``, the old number of each new one, are added.

    Args:
        model: one of transformers', with its configuration. Or a directory with ``config.json``, safetensors files and
            a tokenizer, sharded or not; or one of sentence-transformers.
        tokenizer: the module's tokenizer, of the `tokenizers` library inside; a directory has its own.
        texts: documents, of which each is read once. They are a sample: beside their tokens the first of the
            tokenizer's own order stay, as many as nine tenths of the text need for 99.5 % of the last tenth's tokens
            to stay. ``{name: documents}`` are several texts; the result says which tokens each never has.
        keep: how many tokens stay at most; with a text and no ``cover`` as many stay. Without a text the tokenizer's
            own order says what is rare.
        cover: the share of the text's tokens that stays, such as 0.9999: the rarest leave as well.
        script: tokens with letters of others leave, such as all but ``"Latin"``; or several.
        multiple: more tokens stay until their number is a multiple of this.
        rank: ``"count"``, the default: of tokens that may leave the rarest is the next. ``"distance"``: the one for
            which its count times its distance is least, which is 1 minus the cosine of its row of the embedding and the
            mean of the rows that are read instead.
        exact: whether only the tokens that the text has stay, beside those that have to.
        out: for a directory, the one to write, which must not exist. None: only say what would leave.

    Raises:
        TypeError: a tokenizer of another kind.
        ValueError: nothing would leave, more has to stay than was asked for, or a text would be read otherwise; nothing
            is changed.
        CheckpointError: a damaged directory, a tokenizer of a form that is not known, or an ``out`` that cannot be.
            After any error nothing is left under it.

    >>> from tokenizers import Tokenizer, models, pre_tokenizers
    >>> from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
    >>> words = {word: number for number, word in enumerate(["<unk>", "</s>", "a", "hedge", "rose", "and"])}
    >>> backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    >>> backend.pre_tokenizer = pre_tokenizers.Whitespace()
    >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")
    >>> config = GPT2Config(vocab_size=6, n_embd=8, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1)
    >>> model = GPT2LMHeadModel(config)
    >>> done = shrink_vocabulary(model, tokenizer, ["a rose and a rose"], exact=True)
    >>> done.rows, model.lm_head.weight.shape, tokenizer("a rose")["input_ids"]
    ((6, 5), torch.Size([5, 8]), [2, 3])

    >>> from transformers import BertConfig, BertModel
    >>> folder = Path(tempfile.mkdtemp())
    >>> words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "rose", "hedge", "##s"]
    >>> sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    >>> BertModel(BertConfig(vocab_size=9, **sizes)).save_pretrained(folder / "whole")
    >>> _ = (folder / "whole/vocab.txt").write_text("\\n".join(words))
    >>> _ = (folder / "whole/tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    >>> shrink_vocabulary(folder / "whole", texts=["a rose", "roses"], exact=True, out=folder / "small").rows
    (9, 8)
    >>> BertModel.from_pretrained(folder / "small").config.vocab_size
    8
    """
    started = time.monotonic()
    wanted = asked(keep, cover, script, multiple, rank, exact=exact, with_text=texts is not None)
    if isinstance(model, Path | str):
        refuse("is for modules: a directory has its own; leave it out, and name a text by texts=.", tokenizer=tokenizer)
        return shrink_vocabulary_directory(model, out, texts, wanted)
    for_directories(out=out)
    inside: Any = unwrapped(model, resized=True)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise TypeError(
            f"{type(tokenizer).__name__} is no tokenizer of transformers with one of the tokenizers library inside, of "
            "which tokens can leave."
        )
    axes = axes_of(inside, builder(type(inside)))
    where = type(tokenizer).__name__
    tokens = Tokens.of(json.loads(backend.to_str()), where)
    mine = tensors_of(inside)
    for name in axes.tensors:
        if name in mine and is_sharded(mine[name]):
            raise ValueError(f"{name} is sharded over processes; shrink the vocabulary before, or its checkpoint.")
    with tempfile.TemporaryDirectory() as saved:
        folder = Path(saved)
        tokenizer.save_pretrained(folder)
        needed = needed_in(folder, tokens, inside.config, axes)
        needed |= {int(number) for number in tokenizer.all_special_ids if number is not None}
        generation = getattr(inside, "generation_config", None)
        if generation is not None:
            needed |= {number for number in numbers_in(generation.to_dict()) if 0 <= number < axes.rows}
        padding = getattr(inside.config, "pad_token_id", None)
        needed |= positions_begin_behind(inside, axes, padding)
        plan = planned(tokens, texts, wanted, needed, axes.rows, where, lambda: rows_of_tensor(embedding_of(inside)))
        for path, text in of_tokenizer(folder, tokens, plan.order).items():
            if text is None:
                (folder / path).unlink()
            else:
                (folder / path).write_text(text, "utf-8")
        smaller = by_class(type(tokenizer), folder)
    proof = f"{plan.proof}; {_same(tokenizer, smaller, plan, where)}"
    before = _sizes(inside.parameters())
    with Undo() as undo:
        fields = _change(inside, axes, plan, undo)
        undo.contents(vars(tokenizer))
        name_or_path = getattr(tokenizer, "name_or_path", "")
        vars(tokenizer).clear()
        vars(tokenizer).update(vars(smaller))
        tokenizer.name_or_path = name_or_path
        after = _sizes(inside.parameters())
    return ShrunkVocabulary(
        plan.order,
        tokens.kind,
        (axes.rows, int((plan.order < axes.rows).sum())),
        (before[0], after[0]),
        (before[1], after[1]),
        fields,
        dict(axes.tensors),
        None if plan.counted is None else plan.counted.words,
        None if plan.counted is None or plan.after is None else (plan.counted.tokens, plan.after),
        plan.seen,
        plan.unseen,
        proof,
        time.monotonic() - started,
        plan.counting,
        plan.gone,
        sample=plan.sample,
        reach=plan.reach(axes.rows),
    )


def _sizes(tensors: Iterable[Tensor]) -> tuple[int, int]:
    every = list({id(tensor): tensor for tensor in tensors}.values())
    return sum(each.numel() for each in every), sum(each.nbytes for each in every)


def _same(tokenizer: Any, smaller: Any, plan: Planned, where: str) -> str:
    texts = [*([] if plan.counted is None else plan.counted.passages[:_TRIED]), *plan.random[:_TRIED]]

    def of(some: Any) -> Any:
        def encode(texts: Any) -> list[Ids]:
            return [np.array(each, dtype=np.int64) for each in some(list(texts), verbose=False)["input_ids"]]

        return encode

    right, _ = agree(texts, of(tokenizer)(texts), of(smaller), plan.new, f"{where}: the tokens")
    return f"on {right:,} of {len(texts):,} as {where} reads them"


def _change(model: Any, axes: Axes, plan: Planned, undo: Undo) -> dict[str, tuple[Any, Any]]:
    rows = torch.from_numpy(plan.order[plan.order < axes.rows])
    new = {int(old): at for at, old in enumerate(plan.order)}
    size = len(rows)
    every = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])
    done: set[int] = set()
    for name, at in axes.tensors.items():
        tensor = every[name]
        if id(tensor) in done:
            continue
        done.add(id(tensor))
        undo.attributes(tensor, "data")
        if tensor.grad is not None:
            undo.attributes(tensor, "grad")
        kept = None if tensor.grad is None else tensor.grad.index_select(at, rows.to(tensor.device))
        tensor.grad = None
        tensor.data = tensor.data.index_select(at, rows.to(tensor.device))
        tensor.grad = kept
    modules = dict(model.named_modules())
    for path, key in axes.attributes:
        undo.attributes(modules[path], key)
        setattr(modules[path], key, size)
    padding = getattr(model.config, "pad_token_id", None)
    for module in modules.values():
        if padding in new and vars(module).get("padding_idx") == padding:
            undo.attributes(module, "padding_idx")
            module.padding_idx = new[padding]
    return dict(_configure(model, axes, new, size, undo))


def _configure(
    model: Any, axes: Axes, new: dict[int, int], size: int, undo: Undo
) -> Iterator[tuple[str, tuple[Any, Any]]]:
    config = model.config
    before = config.to_dict()
    wanted = changed_config(before, config, axes, new, size)
    for place, part in parts_in(config):
        values, old = _at(wanted, place), _at(before, place)
        inside = {each[len(place)] for each, _ in parts_in(config) if each[: len(place)] == place != each}
        for key, value in values.items():
            if key not in inside and old.get(key) != value:
                undo.attributes(part, key)
                with_field(part, (key,), value)
                yield ".".join((*place, key)), (old.get(key), value)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        values = generation.to_dict()
        for key, value in renumbered(values, new).items():
            if values[key] != value:
                undo.attributes(generation, key)
                setattr(generation, key, value)


def _at(values: Any, place: tuple[str, ...]) -> Any:
    for key in place:
        values = operator.getitem(values, key)
    return values
