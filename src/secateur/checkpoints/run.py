"""A directory that is being made, by a process that may be killed at any moment and started again.

Law: what the journal says is done is on the disk; it grows by one block at a time; under the final name there is all or
nothing; a run with other arguments, data or source files does not go on with what is there; a folder that no run has
begun is not touched.

Beside the final name is ``<out>.unfinished`` with the journal, the lock, and the copy, ``result``, in which nothing is
written but what shall be in the end; ``remade``, where the result is made from the copy when all blocks are done; and
``state.safetensors``, the state from which a training of the whole model continues; ``sampled.safetensors``, the text
that it was trained on and that the teacher wrote.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from secateur.checkpoints.reading import Checkpoint, CheckpointError, open_checkpoint
from secateur.checkpoints.record import check_new, library_versions
from secateur.checkpoints.slicing import sha256_of
from secateur.checkpoints.writing import copy_tree, digests_of_files, files_below, restore_file
from secateur.support import (
    FULL,
    Fields,
    broadcast,
    described,
    everywhere,
    naming,
    on_rank_zero,
    plain,
    printable,
    rank_and_world,
    track,
    write_whole,
)

FORMAT = 3
RESULT = "result"
REMADE = "remade"
JOURNAL = "journal.json"
LOCK = ".secateur.lock"
ADDED = "added"
STATE = "state.safetensors"
SAMPLED = "sampled.safetensors"
_STATES = re.compile(r"state\.\d+\.safetensors")  # of further processes
_TEMPORARY = re.compile(r"added|state(\.\d+)?\.new|\.(journal\.json|added)\..*\.tmp")  # what a killed run was writing
T = TypeVar("T")
B = TypeVar("B")
_STATUS = ("size", "mtime_ns", "ctime_ns", "inode")


class Run:
    """A directory that is being written: the copy, and the journal of finished blocks.

    ``folder`` is the copy. `stage` computes what is computed once, such as the sparsity of each weight, and `note` says
    that a block is done; where an earlier run did either, `stage` and `done` give what it noted. In several processes
    the first one writes, and all hold the same.
    """

    def __init__(self, out: Path, request: Mapping[str, Any], source: Path | None) -> None:
        self.out, self.source = out, Path() if source is None else source
        self.in_memory = source is None  # then there are no files that might change
        self.place = unfinished_folder(out)
        self.folder = unfinished_copy(out)
        self.hint = f" Remove {self.place} to start over."
        self.request = plain(request)
        self.files: dict[str, dict[str, Any]] = {}  # of the source, as they were copied
        self.blocks: list[Any] = []  # as JSON, like the facts
        self.facts: dict[str, Any] = {}
        self.written: dict[str, str] = {}  # the SHA-256 of each tensor that was, as far as the journal is written
        self.copied = False
        self.goes_on = False
        self.kept: Path | None = None  # a folder of folders, of which one that holds anything took long
        self.writes = not rank_and_world()[0]

    def stage(
        self, name: str, kind: Any, compute: Callable[[], T], wrong: Callable[[T], str | None] | None = None
    ) -> T:
        """What an earlier run noted under this name; or what is computed now, by all processes, of which the first
        one's value is noted, and returned by all.

        Args:
            name: in the journal's facts.
            kind: the type of the value, with the bounds of its numbers; see `secateur.support.Fields.value`.
            compute: called where nothing was noted.
            wrong: says of a value that does not fit this model why, in words that follow its name.

        Raises:
            CheckpointError: what was noted is of another type, or wrong.
        """
        if name not in self.facts:
            self.facts[name] = broadcast(plain(compute()), (), 0)
            on_rank_zero(self._write)
        facts = self._journal.inner("facts")
        found: T = facts.value(name, kind)
        if wrong is not None and (why := wrong(found)) is not None:
            raise facts.wrong(name, why)
        return found

    def has(self, name: str) -> bool:
        """Whether a stage of this name is done."""
        return name in self.facts

    def note(self, block: Any) -> None:
        """A block is done: its weights are on the disk already.

        Args:
            block: a dataclass, whose ``name`` is the block's.

        Raises:
            CheckpointError: the source that it was made from changed meanwhile; it does not count as done then.
        """

        def write() -> None:
            self._check_source()
            self.blocks.append(plain(block))
            self._write()

        on_rank_zero(write)

    def done(self, kind: type[B], names: Collection[str]) -> list[B]:
        """What was noted of each block that is done, which are some of these, and each once."""
        found: list[B] = self._journal.value("blocks", list[kind])  # type: ignore[valid-type]
        every: list[str] = [block.name for block in found]  # type: ignore[attr-defined]
        for at, name in enumerate(every):
            if name not in names or name in every[:at]:
                what = f"is {printable(name)}, which is no block of the model, or is there twice"
                raise self.wrong(f"blocks[{at}].name", what)
        return found

    def wrong(self, field: str, what: str) -> ValueError:
        """The error to raise about a field of the journal."""
        return self._journal.wrong(field, what)

    @property
    def _journal(self) -> Fields:
        both = {"blocks": self.blocks, "facts": self.facts}
        return Fields(both, self.place / JOURNAL, error=CheckpointError, hint=self.hint)

    def read(self) -> None:
        """What an earlier run left, if it was of the same request.

        Raises:
            CheckpointError: it was of another, and the message names the differences; or the journal is damaged.
        """
        path = self.place / JOURNAL
        if not os.path.lexists(path):
            return
        journal = Fields.read(path, error=CheckpointError, hint=self.hint)
        if journal.values.get("format") != FORMAT:
            raise journal.wrong("format", f"is not {FORMAT}: no journal of this version")
        journal.only("format", "sha256", "request", "source", "copied", "written", "blocks", "facts")
        request = journal.take("request", dict)
        sources = journal.inner("source")
        files = {
            name: {key: one.take(key, int, least=0) for key in _STATUS} | {"sha256": one.take("sha256", str)}
            for name, one in zip(sources.values, map(sources.inner, sources.values), strict=True)
        }
        blocks, facts, copied = journal.each("blocks", dict), journal.take("facts", dict), journal.take("copied", bool)
        written = journal.each_named("written", str)
        if journal.take("sha256", str) != _digest(journal.values):
            raise journal.wrong("sha256", "is not that of the rest")
        if differences := list(_differences(request, self.request)):
            raise CheckpointError(
                f"{self.place}: was begun with {'; '.join(differences)}. Run the same command again to finish it, or "
                "remove it to start over."
            )
        if copied and self.folder.is_dir():  # it has been published otherwise, and was taken away since
            self.files, self.blocks, self.facts, self.written = files, blocks, facts, written
            self.copied = self.goes_on = True

    def begin(self) -> None:
        """Starts the run, or continues an earlier one; refuses a source that changed."""
        if self.copied:
            self._check_source()
        else:
            self._write()

    def copy(self) -> None:
        """Copies the source, from the beginning if an earlier copy was broken off; of a whole one, what is no longer as
        it was copied is copied again.

        Raises:
            CheckpointError: what was written has changed since, and is nowhere else.
        """
        if self.copied:
            for path in files_below(self.source):
                if path.suffix != ".safetensors" and not self._is_copied(path):
                    (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(self.source / path, self.folder / path)
            checkpoint = open_checkpoint(self.source)
            written = [checkpoint.entries[name] for name in self.written if name in checkpoint]
            for path in track(checkpoint.files, "looking at the copy"):
                kept = sorted((each.start, each.stop) for each in written if each.path == path)
                restore_file(path, self.folder / path.relative_to(self.source), kept)
            for name in self.damaged():
                raise self.changed(name)
            return
        self.empty()
        before = self._statuses()
        for path in track(copy_tree(self.source, self.folder), "copying"):
            with open(self.folder / path, "rb") as file:
                os.fsync(file.fileno())  # some file systems say only now that the disk is full
                self.files[_key(path)] = {"sha256": hashlib.file_digest(file, "sha256").hexdigest()}
        for path, status in self._statuses().items():
            if before.get(path) != status or _key(path) not in self.files:
                raise CheckpointError(f"{self.source / path}: changed while it was copied; run the same command again.")
            self.files[_key(path)].update(status)
        self.copied = True
        self._write()

    def _is_copied(self, path: Path) -> bool:
        copied = self.folder / path
        return (
            copied.is_file()
            and digests_of_files(self.folder, [path])[path.as_posix()] == self.files[_key(path)]["sha256"]
        )

    def damaged(self) -> list[str]:
        """The tensors whose bytes are not those that an earlier run wrote."""
        if not self.goes_on:
            return []
        copy = open_checkpoint(self.folder)
        names = track([name for name in self.written if name in copy.entries], "looking at what is done")
        return [name for name in names if sha256_of(copy, name) != self.written[name]]

    def check_said(self, changed: Collection[str], before: Mapping[str, str] | None = None) -> None:
        """Whether an earlier run wrote what the journal's blocks and facts say, and changed nothing else.

        Args:
            changed: the tensors of which they say that they changed.
            before: the SHA-256 that each had; None: that of the source's.

        Raises:
            CheckpointError: one of them was not written, or another changed.
        """
        if not self.goes_on:
            return
        source = open_checkpoint(self.source)
        for name in sorted(self.written.keys() | {*changed}):
            found, same = self.written.get(name), None
            if name not in changed:
                same = sha256_of(source, name) if before is None and name in source else (before or {}).get(name)
            if found is None or (name not in changed and found != same):
                raise self.wrong("written", f"is not what blocks and facts say of {printable(name)}")

    def changed(self, name: str) -> CheckpointError:
        """The error where a tensor is damaged that can't be made again."""
        return CheckpointError(f"{self.folder}: {printable(name)} is not what was written there.{self.hint}")

    def fill(self) -> None:
        """In place of `copy`: a folder, for what the caller writes there."""
        if not self.copied:
            self.empty()
            digests = {} if self.in_memory else digests_of_files(self.source)
            self.files = {
                _key(path): {"sha256": digests[path.as_posix()], **status} for path, status in self._statuses().items()
            }
            self.copied = True
            self._write()

    def empty(self) -> None:
        """The folder of the copy, with nothing in it."""
        if self.folder.exists():
            shutil.rmtree(self.folder)
        self.folder.mkdir()

    def check_room(self, nbytes: int) -> None:
        """`CheckpointError` where the disk has not so many bytes left."""
        if (free := shutil.disk_usage(self.place).free) < nbytes:
            raise CheckpointError(
                f"{self.out.parent}: {free / 1e9:.3g} GB are free, and the result takes {nbytes / 1e9:.3g} GB."
            )

    def add(self, name: str, text: str) -> None:
        """A file in the copy that is not of the source; a kill leaves none of it there."""
        os.replace(write_whole(self.place / ADDED, text), self.folder / name)

    @property
    def state(self) -> Path:
        """Where what a training goes on from is kept, if it is; of several processes each has its own."""
        return self.place / (STATE if self.writes else f"state.{rank_and_world()[0]}.safetensors")

    @property
    def sampled(self) -> Path:
        """Where the text that a run has drawn is kept, if it has."""
        return self.place / SAMPLED

    def keep_state(self, write: Callable[[Path], object]) -> None:
        """A new state in the place of the old one: whole, or not at all; what is there is on the disk."""
        self._keep(self.state, write)

    def keep_sampled(self, write: Callable[[Path], object]) -> None:
        """The text that is drawn so far, likewise."""
        self._keep(self.sampled, write)

    def _keep(self, path: Path, write: Callable[[Path], object]) -> None:
        new = self.place / ("state.new" if self.writes else f"state.{rank_and_world()[0]}.new")

        def keep() -> None:
            with naming(new), _as_os_error():
                write(new)
            with open(new, "rb") as file:
                os.fsync(file.fileno())

        everywhere(keep)
        os.replace(new, path)

    def remade(self) -> Path:
        """An empty folder for what is made from the copy in the end; a continued run makes it again."""
        folder = self.place / REMADE
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir()
        return folder

    def publish(self, folder: Path | None = None) -> None:
        """Gives the copy, or what was `remade` of it, its final name: the last thing that the first process does."""
        folder = self.folder if folder is None else folder
        self._check_source()
        for directory, _, files in os.walk(folder):
            for name in files:
                with open(Path(directory) / name, "rb") as file:
                    os.fsync(file.fileno())
        publish(folder, self.out)
        self.remove()

    @property
    def is_new(self) -> bool:
        """Whether nothing is there that took longer than a copy."""
        kept = () if self.kept is None else (path for path in self.kept.iterdir() if path.is_dir())
        noted = self.blocks or self.facts or self.state.exists() or self.sampled.exists()
        return not noted and not any(any(path.iterdir()) for path in kept)

    def remove(self) -> None:
        """The whole place, the lock last, so that at any moment it is known whose it is, and nobody else is in it."""
        for folder in (self.folder, self.place / REMADE):
            if folder.exists():
                shutil.rmtree(folder)
        self.sweep()
        for name in os.listdir(self.place):
            if name in (STATE, SAMPLED) or _STATES.fullmatch(name):
                (self.place / name).unlink(missing_ok=True)
        (self.place / JOURNAL).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # Windows keeps what is open; the next run may be here already
            (self.place / LOCK).unlink()
            self.place.rmdir()

    def check_place(self) -> None:
        """Whether what is there was put there by a run, from its names alone.

        Raises:
            CheckpointError: it is a link or a file, or holds what no run has put there.
        """
        if not os.path.lexists(self.place):
            return
        if self.place.is_symlink() or not self.place.is_dir():
            raise CheckpointError(
                f"{self.place}: no folder of an unfinished run, and in the way of one; move it, or choose another name "
                "for the result."
            )
        names = set(os.listdir(self.place))
        ours = {LOCK, JOURNAL, RESULT, REMADE, STATE, SAMPLED} if JOURNAL in names else {LOCK}
        for name in sorted(names):
            path = self.place / name
            kind = stat.S_ISDIR if name in (RESULT, REMADE) else stat.S_ISREG
            known = name in ours or _TEMPORARY.fullmatch(name) or (JOURNAL in names and _STATES.fullmatch(name))
            if not known or not kind(os.lstat(path).st_mode):
                raise CheckpointError(
                    f"{self.place}: holds {printable(name)}, which no unfinished run has put there; move it, or choose "
                    "another name for the result."
                )

    def sweep(self) -> None:
        """Half of a file that a killed run was writing."""
        for name in os.listdir(self.place):
            if _TEMPORARY.fullmatch(name):
                (self.place / name).unlink()

    def _statuses(self) -> dict[Path, dict[str, int]]:
        found = {}
        for path in () if self.in_memory else files_below(self.source):
            status = os.stat(self.source / path)
            numbers = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
            found[path] = dict(zip(_STATUS, numbers, strict=True))
        return found

    def _check_source(self) -> None:
        """The files are those that were copied: of what looks as it did, nothing is read."""
        now, changed = self._statuses(), False
        for name in self.files.keys() - {_key(path) for path in now}:
            raise self._of_another(name, "is gone")
        for path, status in now.items():
            before = self.files.get(_key(path))
            if before is None:
                raise self._of_another(_key(path), "is new")
            if status == {key: before[key] for key in _STATUS}:
                continue
            changed = True
            with open(self.source / path, "rb") as file:
                same = status["size"] == before["size"]
                if not same or hashlib.file_digest(file, "sha256").hexdigest() != before["sha256"]:
                    raise self._of_another(_key(path), "changed")
            before.update(status)
        if changed:
            self._write()

    def _of_another(self, name: str, what: str) -> CheckpointError:
        return CheckpointError(
            f"{printable(str(self.source / name))}: {what} since {self.place} was begun; put it back as it was to go "
            f"on, or remove {self.place} to start over."
        )

    def _write(self) -> None:
        if not self.writes:
            return
        found = {
            "format": FORMAT,
            "request": self.request,
            "source": self.files if self.copied else {},
            "copied": self.copied,
            "written": self.written,
            "blocks": self.blocks,
            "facts": self.facts,
        }
        found["sha256"] = _digest(found)
        write_whole(self.place / JOURNAL, json.dumps(found, ensure_ascii=False, allow_nan=False))


def request_of(verb: str, asked: Any, **more: Any) -> dict[str, Any]:
    """What the bytes of a directory depend on beside the source: the fields of what was asked, a dataclass, that are
    compared, with words for functions and patterns; what else there is; how many processes there are, and libraries."""
    said = {each.name: _in_words(getattr(asked, each.name)) for each in dataclasses.fields(asked) if each.compare}
    return {"verb": verb, **said, **more, "processes": rank_and_world()[1], "versions": library_versions()}


def _in_words(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_in_words, value))
    return described(value) if callable(value) or dataclasses.is_dataclass(value) else value


def unfinished_folder(out: Path) -> Path:
    """The path of the unfinished folder beside a directory that is being written.

    >>> unfinished_folder(Path("models/sparse")).name
    'sparse.unfinished'
    """
    return out.with_name(f"{out.name}.unfinished")


def unfinished_copy(out: Path) -> Path:
    """The path, in the unfinished folder, of the copy that becomes the directory."""
    return unfinished_folder(out) / RESULT


@contextlib.contextmanager
def begun(out: Path, request: Mapping[str, Any], source: Checkpoint | None, *, copied: bool = True) -> Iterator[Run]:
    """A context with the directory that is being written beside ``out``, new or found; it stays where it is if the body
    fails after a block, and a ValueError then says how to continue or to start over.

    Args:
        out: must not exist; the directory above it must.
        request: what the bytes of the result depend on beside the source, as JSON.
        source: fails before the copy where the disk has no room for it. Its files are known again by size, times and
            inode; one of which these differ is read, and must have the bytes that were copied.
            None: a model in memory, which the request identifies; the caller fills the folder.
        copied: whether the folder is a copy of the source; else the caller fills it.

    Raises:
        CheckpointError: ``out`` exists, another process is at work on it, an earlier run was of another request or
            source, its journal is damaged, what is there is nobody's unfinished run, or the disk is full.
    """
    copied = copied and source is not None
    run = Run(out, request, None if source is None else source.root)
    with contextlib.ExitStack() as stack:

        def begin() -> tuple[list[Any], dict[str, Any]]:
            stack.enter_context(_working(run, source.nbytes if source is not None and copied else 0, copied=copied))
            (run.copy if copied else run.fill)()
            return run.blocks, run.facts

        run.blocks, run.facts = on_rank_zero(begin)
        yield run


@contextlib.contextmanager
def _working(run: Run, room: int, *, copied: bool) -> Iterator[None]:
    check_new(run.out)
    run.check_place()
    run.place.mkdir(exist_ok=True)
    with locked(run.place):
        run.check_place()  # another run may have ended since
        run.read()
        run.sweep()
        try:
            check_new(run.out)
            if not run.copied:
                run.check_room(room)
            run.begin()
            yield
        except ValueError as error:
            if run.is_new:  # what was asked for can't be: the next request finds no trace of it
                run.remove()
            elif type(error) is ValueError:
                raise ValueError(f"{error}{run.hint}").with_traceback(error.__traceback__) from None
            raise
        except OSError as error:
            if error.errno not in FULL:
                raise
            full = error.errno == errno.ENOSPC
            what = "the disk is full; free space" if full else f"{error.strerror}, a limit or a quota; raise it"
            raise CheckpointError(
                f"{error.filename2 or error.filename or run.place}: {what} and run the same command again, the "
                f"{len(run.blocks)} finished blocks are kept."
            ) from None
        finally:
            if run.place.exists() and (run.is_new if not copied else not run.copied):
                run.remove()


def publish(folder: Path, out: Path) -> None:
    """Gives a directory that is complete its final name.

    Raises:
        CheckpointError: the name was taken meanwhile.
    """
    if os.path.lexists(out):
        raise CheckpointError(
            f"{out}: was created by somebody else in the meantime; move it, and run the same command again."
        )
    folder.rename(out)


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    """What safetensors says of a disk that is full, as what Python says of one."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        found = re.search(r"os error (\d+)", str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1]))) from None


@contextlib.contextmanager
def locked(place: Path) -> Iterator[None]:
    """A context that locks an unfinished folder for one process. The lock ends with the process, also if that is
    killed.

    Raises:
        CheckpointError: another one is.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, locked(Path(folder)):
    ...     (Path(folder) / LOCK).exists()
    True
    """
    import filelock

    lock = filelock.FileLock(place / LOCK, timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise CheckpointError(f"{place}: another process is at work here; wait for it.") from None
    try:
        yield
    finally:
        lock.release()


def _digest(journal: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in journal.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _key(path: Path) -> str:
    """A relative path as text that any file can hold, also where a name is no UTF-8."""
    return os.fsencode(path.as_posix()).decode("utf-8", "backslashreplace")


def _differences(before: Any, now: Any, path: str = "") -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in dict.fromkeys((*before, *now)):
            yield from _differences(before.get(key), now.get(key), f"{path}.{key}" if path else str(key))
    elif before != now:
        yield f"{printable(path)} {printable(json.dumps(before), 60)}, not {printable(json.dumps(now), 60)}"
