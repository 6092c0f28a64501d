"""Commands that read and write files, and run no model: inspect, prune, verify, vocabulary, compress, expand."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer

from secateur.cli.options import command
from secateur.cli.terminal import Answer, Asked


@command("inspect", "Show the tensors of a checkpoint: sizes, zeros, patterns.", "path")
def inspect(asked: Asked) -> Iterator[Any]:
    """Show each tensor's shape, dtype, size and zeros, and the n:m and block patterns that hold.

    Tensors are read in pieces: a file of any size takes little memory.
    """
    from secateur.checkpoints import inspect_checkpoint

    yield inspect_checkpoint(asked.path)


@command(
    "prune", "Write a pruned copy of a checkpoint directory.", "directory",
    "out", "sparsity", "pattern", "allocate", "criterion", "seed", "include", "exclude",
    verb="models/sparsification.py:sparsify", required=("out",),
)  # fmt: skip
def prune(asked: Asked) -> Iterator[Any]:
    """Write a pruned copy of a checkpoint directory, without its model code.

    Weights compete over the whole model, unless the criterion or --allocate says otherwise. Embeddings, normalizations,
    output heads and routers are left alone unless you --include them. Everything but the removed weights is kept byte
    for byte. OUT appears complete or not at all.
    """
    from secateur import allocation
    from secateur.models import sparsify
    from secateur.patterns import word_of

    without_evidence(asked.criterion, "files of weights don't show", "secateur oneshot, which runs the model")
    scores, chosen, shared = allocation.settled(asked.criterion, asked.pattern, asked.allocate)
    if chosen.density is not None and asked.allocate is not None:
        raise ValueError(f"{asked.pattern} keeps the same share of every tensor; leave --allocate out.")
    if asked.allocate is None and chosen.density is None:
        asked["allocate"] = getattr(shared, "__name__", None)
    asked["pattern"] = asked.pattern or word_of(chosen)
    with asked.recorded():
        done = sparsify(
            asked.directory,
            pattern=chosen,
            criterion=scores,
            allocate=shared,
            **asked.only("sparsity", "include", "exclude", "seed", "out"),
        )
    yield Answer(done, title=", pruned")


def without_evidence(criterion: str, why: str, instead: str) -> None:
    """``ValueError`` for a criterion that asks for what data says: ``why`` there is none, what to take ``instead``."""
    from secateur import criteria
    from secateur.evidence import needs

    if asked := needs(criteria.parse(criterion)):
        raise ValueError(
            f"{criterion} asks for {', '.join(asked)}, which {why}; take magnitude, lamp, ln_norm or random, or "
            f"{instead}."
        )


@command("verify", "Prove what a pruned directory claims of itself.", "directory", "source")
def verify(asked: Asked) -> Iterator[Any]:
    """Count on the stored bytes what DIR's secateur.json says: sparsity, pattern, and what was left alone.

    Of a directory that shrink wrote: whether each tensor is what its plan leaves of the source's, and has the bytes
    that were written, also where zeros were made in it later, as fit does; where blocks or experts left, whether each
    is the source's that its blocks.json or experts.json names, byte for byte. Of one that vocabulary wrote: whether
    each has the rows of the tokens that stayed, and texts of these are read as by the source.

    Exit code 0: all that was checked holds. 1: something does not, and is named. 2: there is nothing to check.
    """
    from secateur.checkpoints import verify_checkpoint

    found = verify_checkpoint(asked.directory, asked.source)
    yield Answer(found, title=", verified")
    if not found.ok:
        raise typer.Exit(1)


@command(
    "vocabulary", "Take tokens out of a model and its tokenizer.", "directory",
    "out", "texts", "keep", "cover", "script", "rank", "exact", "dry_run",
    verb="vocabulary/module.py:shrink_vocabulary",
)  # fmt: skip
def vocabulary(asked: Asked) -> Iterator[Any]:
    """Take the tokens that a text does not need out of a model and its tokenizer.

    Their rows leave the embedding, the head and what else counts tokens; tokenizer, configurations and special tokens
    follow, and from_pretrained loads all of OUT. A text whose tokens all stay is read as before, under new numbers, and
    its hidden states are the same bit for bit: that is proved on the text and on random Unicode, in each run.

    A text is a sample: beside its tokens as many of the tokenizer's own order stay as the last tenth of the text says
    are needed for 99.5 % of unseen tokens to stay. --exact keeps the text's own alone; --keep and --cover say it
    otherwise. `secateur trim` is another name of this command.

    Added and special tokens, those of chat templates, bytes and single letters stay. Without a text the tokenizer's own
    order says what is rare. At least one of --data, --keep and --script says what may leave.
    """
    from secateur.support import documents
    from secateur.vocabulary import shrink_vocabulary

    if asked.out is None and not asked.dry_run:
        raise ValueError("give --out OUT, the directory to write; or --dry-run, to see what would leave.")
    files = _by_name(asked.texts or ())
    for path in itertools.chain(*files.values()):
        documents.checked_kind(path)
    texts = {name: _documents(its) for name, its in files.items()}
    with asked.recorded():
        done = shrink_vocabulary(
            asked.directory,
            None,
            texts.get("", texts) if texts else None,
            out=None if asked.dry_run else asked.out,
            **asked.only("keep", "cover", "script", "rank", "exact"),
        )
    yield Answer(done, title=", its vocabulary")


def _by_name(given: Iterable[str]) -> dict[str, list[Path]]:
    """The files of each text; of one that has no name under none.

    >>> {name: [str(path) for path in its] for name, its in _by_name(["code=a.txt,maths=b.txt", "code=c.txt"]).items()}
    {'code': ['a.txt', 'c.txt'], 'maths': ['b.txt']}
    """
    from secateur.models import named_sources

    found: dict[str, list[Path]] = {}
    for each in given:
        for name, (weight, path) in (named_sources(each) or {"": (1.0, each)}).items():
            if weight != 1:
                raise ValueError(f"{each!r}: all of a text is counted, so it has no weight; write {name}=FILE.")
            found.setdefault(name, []).append(Path(path))
    if "" in found and len(found) > 1:
        raise ValueError(f"{found[''][0]} has no name, other texts have: write NAME=FILE for each, or for none.")
    return found


def _documents(paths: Iterable[Path]) -> Iterator[str]:
    from secateur.support import documents

    for path in paths:
        yield from documents.read_documents(path, "text")


@command(
    "compress",
    "Write a copy of a checkpoint in which zeros take little room.",
    "path",
    "out",
    "zstd",
    required=("out",),
)
def compress(asked: Asked) -> Iterator[Any]:
    """Write a copy of a checkpoint in which zeros take almost no room. secateur expand gives it back, byte for byte.

    Each tensor is stored in the smallest of several ways; shards and all other files stay as they are. Only
    load_compressed reads the copy: the weight files are named *.compressed.safetensors so that nothing takes them for
    dense ones. OUT appears complete or not at all.
    """
    from secateur.storage import save_compressed

    yield Answer(save_compressed(asked.path, asked.out, zstd=asked.zstd), title=", compressed")


@command("expand", "Write the dense checkpoint that a compressed one was made of.", "path", "out", required=("out",))
def expand(asked: Asked) -> Iterator[Any]:
    """Write the dense checkpoint that a compressed one was made of, byte for byte.

    OUT appears complete or not at all.
    """
    from secateur.storage import expand_checkpoint

    yield Answer(expand_checkpoint(asked.path, asked.out), title=", expanded")
