"""The class and the configuration that a directory's ``config.json`` names, and the model of them without weights.

Law: only a model of transformers' own is built, of no more than the files could hold; whatever goes wrong on the way
names ``config.json``.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import re
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from secateur.checkpoints.reading import Checkpoint, CheckpointError
from secateur.support import printable

_LAYERS = re.compile(r"(^|[._])n?_?layers?$")


class UnknownModelError(CheckpointError):
    """``config.json`` names no model of transformers' own."""


def family_of(checkpoint: Checkpoint) -> tuple[Any, Any]:
    """The class that ``config.json`` names under ``architectures``, of transformers' own models, and the configuration.

    No code from the directory is run, and none is fetched; the name is looked up, but only a model's class is taken.

    Raises:
        CheckpointError: no ``config.json``, no such class, a configuration of another family or that transformers
            refuses; or transformers is missing.
    """
    root = checkpoint.root
    where = root / "config.json"
    try:
        with _uncollected():
            import transformers
    except ImportError:
        raise CheckpointError(
            "a directory is pruned block by block through transformers: pip install 'secateur[transformers]', or load "
            "the model yourself and pass it."
        ) from None
    if (run := _RUN.get()) is not None:
        run()
    if not checkpoint.config:
        raise UnknownModelError(f"{root}: has no config.json, which says what model this is.")
    names = checkpoint.config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise UnknownModelError(f"{where}: names no architectures; load the model yourself and pass it.")
    name = printable(names[0])
    check_layers(checkpoint)
    for place, value in _fields(checkpoint.config):
        if "_implementation" in place and isinstance(value, str) and "/" in value:
            raise CheckpointError(f"{where}: {printable(place)} is code from elsewhere, which is not fetched.")
    try:
        with _uncollected():
            kind: Any = getattr(transformers, names[0], None)
    except Exception:  # a module of transformers' that cannot be imported here
        kind = None
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        raise UnknownModelError(
            f"{where}: names the architecture {name}, and transformers {transformers.__version__} has no model of that "
            "name; load the model yourself and pass it."
        )
    with blaming_config(root), _withheld() as logged:
        config = transformers.AutoConfig.from_pretrained(root, local_files_only=True, trust_remote_code=False)
        logged.clear()  # who loads the model hears it
    wanted: Any = getattr(kind, "config_class", None)
    if not isinstance(wanted, type) or not isinstance(config, wanted):
        raise CheckpointError(
            f"{where}: names the architecture {name}, and is a {type(config).__name__}, which is another family's."
        )
    return kind, config


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Within, no garbage is looked for: modules that are imported leave hardly any, and a class of transformers' brings
    so many that to look through them again and again was a fifth of the time."""
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()


def meta_model_of(checkpoint: Checkpoint) -> nn.Module:
    """The model of a Hugging Face directory on the meta device, with the dtypes of its files; no weight is read."""
    if not checkpoint.config:
        raise UnknownModelError(
            f"{checkpoint.root}: has no config.json, which says what model this is; add it, or in Python give "
            "the model, built on the meta device."
        )
    kind, config = family_of(checkpoint)
    with blaming_config(checkpoint.root), torch.device("meta"), parameters_counted(checkpoint):
        model: nn.Module = kind(config)
    return model.eval()


@contextlib.contextmanager
def blaming_config(root: Path, what: str = "no model can be made of it") -> Iterator[None]:
    """A context in which errors of transformers become one line that names ``config.json``."""
    try:
        with _withheld(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Initializing zero-element tensors")  # torch, of sizes that are none
            yield
    except CheckpointError:
        raise
    except Exception as error:
        said = printable(" ".join(str(error).split()), 400)
        raise CheckpointError(f"{root / 'config.json'}: {what} ({type(error).__name__}: {said}).") from error


_RUN = ContextVar[Callable[[], object] | None]("run", default=None)


@contextlib.contextmanager
def logged_in_the_end() -> Iterator[None]:
    """What transformers logs once `family_of` has imported it is shown in the end, and not at all beside an error."""
    with contextlib.ExitStack() as stack:
        # a handler is there once transformers is
        before = _RUN.set(functools.cache(lambda: stack.enter_context(_withheld())))
        try:
            yield
        finally:
            _RUN.reset(before)


@contextlib.contextmanager
def _withheld() -> Iterator[list[tuple[logging.Handler, logging.LogRecord]]]:
    """What transformers logs in this thread is shown in the end, and not at all where an error says what is wrong."""
    here, held = threading.get_ident(), list[tuple[logging.Handler, logging.LogRecord]]()

    def holding(handler: logging.Handler) -> Callable[[logging.LogRecord], bool]:
        def passes(record: logging.LogRecord) -> bool:
            if record.thread == here:
                held.append((handler, record))
            return record.thread != here

        return passes

    filters = [(handler, holding(handler)) for handler in logging.getLogger("transformers").handlers]
    for handler, each in filters:
        handler.filters.insert(0, each)  # what is within another is asked first
    try:
        yield held
    finally:
        for handler, each in filters:
            handler.removeFilter(each)
    for handler, record in held:
        handler.handle(record)


def most_parameters(names: Collection[str]) -> int:
    """How many parameters a model may have whose files hold tensors of these names: some are tied, or made of others.

    >>> most_parameters(["fc.weight"])
    10004
    """
    return 10_000 + 4 * len(names)


def check_layers(checkpoint: Checkpoint) -> None:
    """`CheckpointError` for a configuration with more layers than the files could hold: to build them takes hours."""
    for place, value in _fields(checkpoint.config):
        if _LAYERS.search(place) and type(value) is int and value > most_parameters(checkpoint):
            raise CheckpointError(
                f"{checkpoint.root / 'config.json'}: {printable(place)} is {printable(str(value), 40)}, and the files "
                f"hold {len(checkpoint):,} tensors; it is damaged, or another model's."
            )


@contextlib.contextmanager
def parameters_counted(checkpoint: Checkpoint) -> Iterator[None]:
    """A context in which a model that is built cannot have more parameters than the files could hold."""
    most, count, here = most_parameters(checkpoint), 0, threading.get_ident()

    def counted(*_: object) -> None:
        nonlocal count
        count += threading.get_ident() == here  # the hook is the process's
        if count > most:
            raise CheckpointError(
                f"{checkpoint.root}: config.json asks for more than {most:,} parameters, and the files hold "
                f"{len(checkpoint):,} tensors; it is damaged, or another model's."
            )

    hook = register_module_parameter_registration_hook(counted)
    try:
        yield
    finally:
        hook.remove()


def _fields(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """``(place, value)`` of all fields, also those of configurations inside, such as ``text_config.num_layers``."""
    left: list[tuple[str, Any]] = list(config.items())
    while left:
        place, value = left.pop()
        yield place, value
        if isinstance(value, Mapping):
            left.extend((f"{place}.{key}", inner) for key, inner in value.items())
