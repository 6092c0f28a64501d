"""What is in the way of a verb that writes: a disk that is full, rights that are missing, the n-th change that fails.

Each is a kind of `benchmarks.storage.hostile`. A call that is refused has changed nothing but its unfinished copy; the
same call afterwards ends in the bytes of one that nothing was in the way of.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.storage import hostile
from benchmarks.storage.hostile import OUT, REFUSED, Attack, Changed, check_left, check_whole, put, tree, whole_of

NOBODY = 65534
MODES = (0, 0o111, 0o222, 0o333, 0o444, 0o555, 0o666)
ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EIO, errno.EPERM)
CHANGES = ("os.rename", "os.mkdir", "os.chmod", "os.link", "os.symlink", "os.truncate", "shutil.copyfile")


class Said(ValueError):
    """The one line in which a command ended."""


def told(*words: object) -> None:
    """Runs a command; `Said` where it ends in one line and 2, `Changed` where it ends otherwise."""
    from typer.testing import CliRunner

    from secateur.cli.commands import app

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.filterwarnings("ignore", module=r"(?!secateur|torch\.|transformers)")
        ended = CliRunner().invoke(app, [str(each) for each in words])
    if ended.exit_code == 0:
        return
    if ended.exception is not None and not isinstance(ended.exception, SystemExit):
        raise ended.exception
    lines = ended.stderr.splitlines()
    ours = len(lines) == 1 and lines[0].startswith("secateur: ")
    if ended.exit_code != 2 or not (ours or lines[0].startswith("Usage: ")):
        raise Changed(f"exit code {ended.exit_code} and {lines[:3]}")
    raise Said(lines[-1])


def writers(root: Path, files: Mapping[str, bytes]) -> tuple[list[Attack], dict[str, bytes]]:
    """Calls that write, beside those of `hostile.attacks`, and the files of both."""
    from secateur import fit, pack, save_shrunken, sensitivity, shrink, sparsify
    from secateur.inference import save_packed
    from secateur.kinds import Experts
    from secateur.pipeline.masks import save
    from secateur.search import write_probes

    put(root, files)
    data, name = hostile.tokens(), f"{OUT}-file"
    vectors = [torch.randn(8, 16, generator=torch.Generator().manual_seed(at)) for at in range(4)]
    if not (root / "mixed").exists():
        hostile.small("mixtral").save_pretrained(root / "mixed")
    smaller = hostile.residual()
    shrink(smaller, torch.zeros(1, 6), 0.5)
    masks = sparsify(packed := hostile.residual(16, 256), 0.95)
    pack(packed, vectors[0], at_least=1e-9)
    page, example = root / f"{OUT}-page.html", "benchmarks.storage.hindered:example"

    def fitted(r: Path) -> None:  # a model in memory, whose levels are kept
        model = hostile.residual(16, 64)
        fit(model, vectors, budget={"params": 0.9}, shares=[0.5], finals=1, levels=None, verify=False)
        save_shrunken(model, r / OUT)

    calls: dict[tuple[str, str], tuple[Callable[[Path], Any], str]] = {
        ("deploy", "deploy"): (hostile.deployed, f"{OUT}.unfinished/"),
        ("cost", "probes"): (lambda r: write_probes(hostile.residual(16, 64), vectors[0], r / OUT), OUT + "."),
        ("pack", "a packed model"): (lambda r: save_packed(packed, r / f"{name}.safetensors"), OUT + "."),
        ("save", "masks"): (lambda r: save(masks, r / f"{name}.safetensors"), OUT + "."),
        ("save", "a shrunken model"): (lambda r: save_shrunken(smaller, r / OUT), OUT + "."),
        ("save", "a model that was fitted"): (fitted, OUT + "."),
        ("experts", "the profile"): (
            lambda r: shrink(r / "mixed", leave=Experts(1, profile=r / f"{name}.json"), batches=data, out=r / OUT,
                             verify=False),
            OUT,
        ),
        ("store", "levels"): (lambda r: sensitivity(r / "dense", data, shares=[0.5], store=r / OUT), OUT),
        ("page", "prune"): (
            lambda r: told("prune", r / "dense", "-s", 0.5, "--out", r / OUT, "--report", r / page.name), OUT),
        ("page", "inspect"): (
            lambda r: told("inspect", r / "dense", "--report", r / page.name), OUT + "."),
        ("page", "bench"): (
            lambda r: told("bench", "benchmarks.storage.hindered:model", "--example", example, "-s", 0.9, "-p",
                               "unstructured", "--threads", 1, "--report", r / page.name), OUT + "."),
        ("page", "cost"): (
            lambda r: told("cost", "benchmarks.storage.hindered:model", "--example", example, "--emit", r / OUT,
                               "--report", r / page.name), OUT),
    }  # fmt: skip
    return [Attack(verb, what, call, [], keeps=keeps) for (verb, what), (call, keeps) in calls.items()], tree(root)


def model() -> torch.nn.Module:
    return hostile.residual(16, 64)


def example() -> torch.Tensor:
    return torch.zeros(8, 16)


WIDE, NOTHING, UNSEEN = torch.zeros(2, 99), torch.zeros(0, 16), torch.zeros(2, 16, device="meta")
SEVERAL, NAMED, WORDS, FRACTION = (example(), example()), {"x": example()}, ["a", None], torch.full((2, 16), torch.nan)


def Lazy() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.LazyLinear(4))


def Unseen() -> torch.nn.Module:
    return model().to("meta")


def Broken() -> torch.nn.Module:
    made: Any = model()
    made[1].down = torch.nn.Linear(5, 5)
    return made


def Frozen() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.ReLU())


# ---- kinds ----------------------------------------------------------------------------------------------------------


DISKS = contextlib.ExitStack()  # ends those that were mounted


@functools.cache
def a_disk_at(folder: Path) -> None:
    """A file system in memory of 256 MB, until `DISKS` ends; it takes rights that root has."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", folder], check=True)
    DISKS.callback(subprocess.run, ["umount", "-l", str(folder)], check=True)


def again(attack: Attack, root: Path, whole: Mapping[str, bytes], refused: BaseException | str) -> str:
    """What became of the same call, with nothing in the way: OUT is whole then; one that is complete may be there."""
    if not (root / OUT).exists() or attack.verb == "store":
        attack.call(root)
        check_whole(attack, root, whole)
    elif attack.verb != "page" and attack.verb != "experts":
        raise Changed(f"{OUT} is there, by {refused}")
    return "refused, and done later"


def hindered(
    attack: Attack,
    root: Path,
    files: Mapping[str, bytes],
    whole: Mapping[str, bytes],
    hindrance: contextlib.AbstractContextManager[object],
) -> str:
    """What became of a call with something in its way, and of the same call afterwards."""
    try:
        with hindrance:
            attack.call(root)
    except REFUSED as error:
        check_left(attack, root, files, error)
        refused = error
    else:
        check_whole(attack, root, whole)
        return "done"
    return again(attack, root, whole, refused)


def full(attack: Attack, root: Path, files: Mapping[str, bytes], dice: random.Random) -> str:
    """What became of a call on a disk with less room than it takes, and of the same call afterwards."""
    disk = root.parent
    a_disk_at(disk)
    put(root, files)
    whole = whole_of(attack, root)
    put(root, files)
    room = int(1.3 * sum(map(len, whole.values())) * dice.random()) + dice.choice((0, 4096, 20480))
    return hindered(attack, root, files, whole, filled(disk, room))


@contextlib.contextmanager
def filled(disk: Path, room: int) -> Iterator[None]:
    """A context in which no more than that is free on a disk."""
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    filler = disk / "filler"
    with open(filler, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(free - room, 1))
    try:
        yield
    finally:
        filler.unlink()


_FAULT: dict[str, Any] = {"root": "", "left": -1, "seen": 0, "error": 0}


def _watching(event: str, arguments: tuple[Any, ...]) -> None:
    if not _FAULT["root"]:
        return
    if event == "open":
        path, _, flags = arguments
        if not (flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
            return
    elif event in CHANGES:
        path = arguments[0]
    else:
        return
    if isinstance(path, int) or not os.fsdecode(path).startswith(_FAULT["root"]):
        return
    _FAULT["seen"] += 1
    if _FAULT["seen"] == _FAULT["left"]:
        raise OSError(_FAULT["error"], os.strerror(_FAULT["error"]), os.fsdecode(path))


@functools.cache
def _hooked() -> None:
    sys.addaudithook(_watching)


@contextlib.contextmanager
def failing(root: Path, number: int, error: int) -> Iterator[None]:
    """The change of this number, of those under a folder, fails; 0: none, they are counted."""
    _hooked()
    _FAULT.update(root=str(root), left=number, seen=0, error=error)
    try:
        yield
    finally:
        _FAULT["root"] = ""


_COUNTS: dict[tuple[str, str], int] = {}


def faults(attack: Attack, root: Path, files: Mapping[str, bytes], dice: random.Random) -> str:
    """What became of a call whose n-th change of the disk fails, and of the same call afterwards."""
    put(root, files)
    whole = whole_of(attack, root)
    put(root, files)
    key = attack.verb, attack.name
    if key not in _COUNTS:
        with failing(root, 0, 0):
            attack.call(root)
        _COUNTS[key] = _FAULT["seen"]
        put(root, files)
    return hindered(attack, root, files, whole, failing(root, dice.randint(1, _COUNTS[key]), dice.choice(ERRORS)))


def rights(attack: Attack, root: Path, files: Mapping[str, bytes], dice: random.Random) -> str:
    """What became of a call by a user who is not root, who lacks rights of one file or folder, and afterwards."""
    put(root, files)
    whole = whole_of(attack, root)
    put(root, files)
    paths = [root, *root.rglob("*")]
    for path in (root.parent, *paths):
        os.chown(path, NOBODY, NOBODY)
        path.chmod(0o755 if path.is_dir() else 0o644)
    several = dice.sample(paths, min(len(paths), dice.choice((1, 1, 2))))
    if dice.random() < 0.3:
        several = [path for path in paths if path.is_file() or path == dice.choice(paths)]
    mode = dice.choice(MODES)
    for path in several:
        path.chmod(mode)
    code, said = as_nobody(attack, root)
    for path in [root, *root.rglob("*")]:  # as root, who may
        path.chmod(0o755 if path.is_dir() else 0o644)
    if code > 1:
        raise Changed(f"mode {mode:o} of {several[0].relative_to(root)}: {said}")
    if code == 0:
        check_whole(attack, root, whole)
        return "done"
    check_left(attack, root, files, Said(said))
    return again(attack, root, whole, said)


def as_nobody(attack: Attack, root: Path) -> tuple[int, str]:
    """The exit code of a process of a user without rights: 0, 1 where the call is refused, 2 where it crashes; and
    what it said."""
    read, write = os.pipe()
    if child := os.fork():
        os.close(write)
        with open(read) as file:
            said = file.read()
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said
    code, said = 2, ""
    try:
        os.environ["HOME"] = str(root.parent)
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        attack.call(root)
        code = 0
    except REFUSED as error:
        code, said = 1, str(error)
    except BaseException as error:
        said = f"{hostile.place_of(error)}: {error}"
    finally:
        os.write(write, json.dumps(said).encode()[:4000])
        os._exit(code)
