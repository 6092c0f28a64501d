"""Gives every verb inputs that nobody meant: damaged directories, journals, levels, profiles, texts, arguments.

    python -m benchmarks.storage.hostile files|arguments|disk|full|rights|faults|killed|together [--verb oneshot]

Each try is of one of the attacks of `attacks`: a call, and what is damaged of what it reads. The call returns, or ends
in an error that the command says in one line; what it was to write is not there then, and nothing else has changed. A
run that goes on from damaged files ends in the bytes of the run that was not, or is refused. One whose journal says
something else and has the sum of that can't know it: what it writes may be of that journal, and `verify` with the
source finds no fault in it. Anything else is a crash: it is printed, and the exit status says so.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import functools
import io
import json
import math
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.storage.fuzz import damaged
from secateur.checkpoints import run as runs
from secateur.support import alternating

HOSTILE = [  # values of fields and of arguments
    *(None, True, False, "x", "", "__class__", "\0", "a\nb", "é" * 300, [], [1], [None], {}, {"a": 1}),
    *(-1, 0, 1, 2, 3, 10**9, 2**63, -(2**70), 0.5, 1.5, math.nan, math.inf, -1e300, 1e-300),
]
OUT = "out"
PROBE = re.compile(r"/\d{4}-\w+\.onnx$")
OUT_FILE = f"{OUT}-"  # files are called so that are written in place of a folder, or beside it
REFUSED = (ValueError, OSError, ImportError)  # what the command says in one line


# ---- damage ---------------------------------------------------------------------------------------------------------


def damaged_json(text: bytes, dice: random.Random) -> bytes:
    """A field of any depth has another value, left or came."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):  # it was damaged before
        return damaged_bytes(text, dice)
    inner: Any = values
    while isinstance(inner, dict | list) and inner:
        key: Any = dice.choice(sorted(inner)) if isinstance(inner, dict) else dice.randrange(len(inner))
        if not isinstance(inner[key], dict | list) or not inner[key] or dice.random() < 0.3:
            match dice.randrange(8):
                case 0:
                    del inner[key]
                case 1 if isinstance(inner, dict):
                    inner[dice.choice(["more", "", "1", *inner])] = dice.choice(HOSTILE)
                case _:
                    near = inner[key] if type(inner[key]) is int else 0
                    inner[key] = dice.choice([*HOSTILE, near + 1, near - 1, near * 2])
            break
        inner = inner[key]
    return json.dumps(values).encode()


def damaged_csv(text: bytes, dice: random.Random) -> bytes:
    """A cell has another value, or a row left, came twice, or lost a cell."""
    lines = text.decode("utf-8", "replace").replace("\0", "").splitlines()
    rows = [line.split(",") if '"' not in line else next(csv.reader([line])) for line in lines] or [[]]
    row = rows[at := dice.randrange(len(rows))]
    match dice.randrange(8):
        case 0:
            del rows[at]
        case 1:
            rows.append(row)
        case 2 if row:
            del row[dice.randrange(len(row))]
        case 3:
            row.append(str(dice.choice(HOSTILE)))
        case _ if row:
            words = [
                "2x6 12x6 12",
                "scalar",
                "0x0",
                "-1",
                "2x",
                "x",
                "1e999",
                "-0.0",
                "nan",
                "1,5",
                "9" * 5000,
                "9" * 400,
            ]
            row[dice.randrange(len(row))] = str(dice.choice([*HOSTILE, *words, *words]))
    made = io.StringIO()
    csv.writer(made, delimiter=dice.choice(",,,;")).writerows(rows)
    return made.getvalue().encode()


def damaged_bytes(text: bytes, dice: random.Random) -> bytes:
    """Bytes that are others, that left, that came twice, or that are no text."""
    at, size = dice.randrange(len(text) + 1), dice.randrange(1, 20)
    match dice.randrange(9):
        case 0:
            return b""
        case 1:
            return text[:at]
        case 2:
            return text[:at] + text[at + size :]
        case 3:
            return text[:at] + bytes(dice.choices(range(256), k=size)) + text[at:]
        case 4:
            return text[:at] + bytes(dice.choices(b'0123456789"{}[],:ae-', k=size)) + text[at + size :]
        case 5:
            return text[:at] + bytes([text[at] ^ 1 << dice.randrange(8)]) + text[at + 1 :] if text[at:] else text * 2
        case 6:
            return dice.choice([b"null", b"[]", b"{}", b'"', b"\xef\xbb\xbf", b"\xff\xfe\0", b"[" * 100_000, b"1e999"])
        case 7:
            return text.decode("utf-8", "replace").encode(dice.choice(["utf-16", "utf-32", "utf-8-sig"]))
        case _:
            return text.replace(b"\n", dice.choice([b"\0", b"\r", b"", b"\n\n", b"\xe2\x80\xa8"]))


def resealed(text: bytes, dice: random.Random) -> bytes:
    """A journal with a field changed, whose sum is right."""
    try:
        values = json.loads(damaged_json(text, dice))
        values["sha256"] = runs._digest(values)
        return json.dumps(values).encode()
    except (ValueError, TypeError, AttributeError, RecursionError):  # it was damaged before, and is no object
        return damaged_bytes(text, dice)


def damage(path: Path, dice: random.Random) -> None:
    """Changes one file."""
    if dice.random() < 0.02:
        path.unlink()
        return
    text = path.read_bytes()
    if path.suffix == ".safetensors":
        how: Any = damaged if len(text) > 8 else damaged_bytes
    elif path.suffix == ".csv" and dice.random() < 0.7:
        how = damaged_csv
    elif path.name == runs.JOURNAL and dice.random() < 0.7:
        how = resealed
    else:
        how = damaged_json if path.suffix == ".json" and dice.random() < 0.7 else damaged_bytes
    path.write_bytes(how(text, dice))


# ---- attacks --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Attack:
    """A call on the files of a folder, and those of them that are damaged.

    Attributes:
        left: what a stopped run left beside OUT, where it goes on.
        whole: what OUT has to hold in the end then.
        source: the folder that OUT is made from then; of a model in memory none.
        keeps: what a refused call may leave beside the unfinished copy, by how its name begins.
    """

    verb: str
    name: str
    call: Callable[[Path], Any]
    files: Sequence[str]
    left: Mapping[str, bytes] = field(default_factory=dict)
    whole: Mapping[str, bytes] | None = None
    source: str = ""
    keeps: str = f"{OUT}.unfinished/"

    @property
    def writes(self) -> bool:
        """It writes OUT, and begins anew."""
        return self.verb not in ("inspect", "verify", "load", "text", "prices", "sensitivity") and self.whole is None


def small(kind: str = "llama") -> nn.Module:
    """A model of two blocks and 64 tokens, of which the tokenizer has some."""
    import transformers

    sizes = {
        "vocab_size": 64, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2,
    }  # fmt: skip
    torch.manual_seed(0)
    if kind == "mixtral":
        made: Any = transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2)
        )
    elif kind == "gpt2":
        made = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=64, n_positions=32, n_embd=8, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2
            )
        )
    else:
        made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    with torch.no_grad():
        for each in made.parameters():
            if each.dim() > 1:
                each.copy_(torch.randn_like(each) * each.shape[-1] ** -0.5)
    return made.eval()


WORDS = "the secateur is a small shear a gardener prunes roses with and the hedge is cut by another tool".split()  # noqa: SIM905


def tokenizer() -> Any:
    """One token a word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = {word: at for at, word in enumerate(["<unk>", "<s>", "</s>", *dict.fromkeys(WORDS)])}
    made = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def tokens(count: int = 4) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(3, 64, (2, 8), generator=draw)} for _ in range(count)]


def tree(folder: Path) -> dict[str, bytes]:
    found = {}
    for path in folder.rglob("*"):
        if path.is_file() and path.name != runs.LOCK:
            found[path.relative_to(folder).as_posix()] = path.read_bytes()
    return found


def put(folder: Path, files: Mapping[str, bytes]) -> None:
    """The folder holds these files and nothing else."""
    there = tree(folder)
    for lock in folder.rglob(runs.LOCK):
        lock.unlink()
    for name in there.keys() - files.keys():
        (folder / name).unlink()
    for name, text in files.items():
        if there.get(name) != text:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(text)
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()


@contextlib.contextmanager
def stopped_after(count: int | None) -> Iterator[None]:
    """A run is stopped when it has noted so many blocks and facts; None: before it is published."""
    write, publish = runs.Run._write, runs.Run.publish

    def noted(run: runs.Run) -> None:
        write(run)
        if count is not None and len(run.blocks) + len(run.facts) >= count:
            raise KeyboardInterrupt

    def published(*_: object) -> None:
        raise KeyboardInterrupt

    runs.Run._write = noted  # type: ignore[method-assign]
    runs.Run.publish = publish if count is not None else published  # type: ignore[method-assign]
    try:
        yield
    finally:
        runs.Run._write, runs.Run.publish = write, publish  # type: ignore[method-assign]


VERBS = (
    "inspect", "prune", "verify", "compress", "expand", "load", "text", "oneshot", "shrink", "vocabulary",
    "sensitivity", "fit", "recover", "deploy", "prices", "reached", "bench",
)  # fmt: skip


def by_size() -> Any:
    """ONNX Runtime, in which a pass takes as many seconds as there are bytes to load."""
    from secateur.runtimes import OnnxRuntime

    @dataclass(frozen=True)
    class BySize(OnnxRuntime):
        now: list[float] = field(default_factory=lambda: [0.0], compare=False, repr=False)

        def __call__(self, model: nn.Module, *_: Any, **__: Any) -> Callable[[], object]:
            size = sum(each.numel() for each in model.parameters())
            return lambda: self._waited(self.bits / 8 * size)

        def load(self, folder: Path) -> Any:
            found, size = super().load(folder), (folder / "model.onnx").stat().st_size
            return replace(found, run=lambda feeds: (self._waited(size), found.run(feeds))[1])

        def _waited(self, size: int) -> None:
            self.now[0] += size

        @property
        def clock(self) -> Callable[[], float]:
            return lambda: self.now[0]

    return BySize(8)


def deployed(root: Path) -> None:
    """What `deploy` writes, less what has a date in it, and the digest of that."""
    from secateur import deploy

    vectors = [torch.randn(8, 16, generator=torch.Generator().manual_seed(at)) for at in range(4)]
    deploy(residual(16, 64), vectors, budget={"latency": 0.75}, runtime=by_size(), finals=1, out=root / OUT)
    for name in ("check.npz", "secateur.json"):
        (root / OUT / name).unlink()


def attacks(root: Path, wanted: set[str], *, begun: bool) -> tuple[list[Attack], dict[str, bytes]]:
    """Those on some of `VERBS`, and the files that they read, which are made in the folder."""
    from benchmarks.storage.hindered import told
    from secateur import (
        fit,
        oneshot,
        reached,
        read_calibration,
        recover,
        sensitivity,
        shrink,
        shrink_vocabulary,
        sparsify,
    )
    from secateur.checkpoints import inspect_checkpoint, verify_checkpoint
    from secateur.kinds import Blocks, Experts
    from secateur.storage import expand_checkpoint, load_compressed, save_compressed

    dense, mixed = root / "dense", root / "mixed"
    small().save_pretrained(dense)
    small("mixtral").save_pretrained(mixed)
    tokenizer().save_pretrained(dense)
    (root / "text.txt").write_text(" ".join(WORDS * 40) + "\n")
    (root / "text.json").write_text(json.dumps([" ".join(WORDS)] * 40))
    (root / "text.jsonl").write_text("".join(json.dumps({"text": " ".join(WORDS)}) + "\n" for _ in range(40)))
    draw_pictures(root)
    data, texts = tokens(), [" ".join(WORDS)] * 4
    calls: dict[tuple[str, str], tuple[Callable[[Path], Any], tuple[str, ...]]] = {}

    def attack(verb: str, name: str, call: Callable[[Path], Any], *reads: str) -> None:
        calls[verb, name] = call, reads

    def lengths(r: Path) -> dict[str, Any]:
        return {"tokenizer_directory": r / "dense", "samples": 4, "sequence_length": 8}

    calling: dict[str, Callable[[Path], Any]] = {
        "prune": lambda r: sparsify(r / "dense", 0.5, out=r / OUT),
        "oneshot": lambda r: oneshot(r / "dense", data, 0.5, solver="magnitude", out=r / OUT),
        "oneshot of experts": lambda r: oneshot(r / "mixed", data, 0.5, solver="sparsegpt", out=r / OUT),
        "units": lambda r: shrink(r / "dense", sparsity=0.4, verify=False, out=r / OUT),
        "units by data": lambda r: shrink(r / "dense", sparsity=0.4, batches=data, verify=False, out=r / OUT),
        "blocks": lambda r: shrink(r / "dense", leave=Blocks(1), batches=data, out=r / OUT),
        "experts": lambda r: shrink(r / "mixed", leave=Experts(1), batches=data, verify=False, out=r / OUT),
        "profile": lambda r: shrink(
            r / "mixed", leave=Experts(1, profile=r / "profile.json"), batches=data, verify=False, out=r / OUT
        ),
        "plan": lambda r: shrink(
            r / "mixed", leave=Experts(1, plan=r / "profile.json"), verify=False, out=r / OUT
        ),
        "vocabulary": lambda r: shrink_vocabulary(r / "dense", texts=texts, exact=True, out=r / OUT),
        "fit": lambda r: fit(
            r / "dense", data, budget={"params": 0.9}, shares=[0.5], finals=1, out=r / OUT
        ),
        "fit over both": lambda r: fit(
            r / "dense", data, budget={"params": 0.7}, over=["shrink", "oneshot"], shares=[0.5], finals=1,
            solver="magnitude", out=r / OUT,
        ),
        "sensitivity": lambda r: sensitivity(r / "dense", data, shares=[0.5], store=r / "levels"),
        "levels": lambda r: fit(
            r / "dense", data, budget={"params": 0.9}, levels=r / "levels", finals=1, out=r / OUT
        ),
        "local": lambda r: recover(r / "pruned", r / "dense", data, steps=0, local=1, out=r / OUT),
        "steps": lambda r: recover(r / "pruned", r / "dense", data, steps=2, local=1, out=r / OUT),
        "deploy": deployed,
        "compress": lambda r: save_compressed(r / "dense", r / OUT),
        "expand": lambda r: expand_checkpoint(r / "compressed", r / OUT),
    }  # fmt: skip
    for to, name, verbs in (
        ("pruned", "prune", ["recover", "verify"]), ("compressed", "compress", ["expand", "load"]),
        ("shrunk", "units", ["verify"]), ("fewer", "vocabulary", ["verify"]), ("short", "blocks", ["verify"]),
        ("mixed-less", "profile", ["verify", "shrink"]), ("fitted", "fit over both", ["verify"]),
    ):  # fmt: skip
        if wanted & {*verbs}:
            calling[name](root)
            (root / OUT).rename(root / to)
    if wanted & {"fit", "sensitivity"}:
        calling["sensitivity"](root)
    attack("inspect", "", lambda r: inspect_checkpoint(r / "dense"), "dense/")
    for name, verb in {
        "prune": "prune", "oneshot": "oneshot", "oneshot of experts": "oneshot", "units": "shrink",
        "units by data": "shrink", "blocks": "shrink", "experts": "shrink", "vocabulary": "vocabulary", "fit": "fit",
        "local": "recover", "steps": "recover", "compress": "compress", "expand": "expand",
    }.items():  # fmt: skip
        its = {"recover": ["pruned/", "dense/"], "expand": ["compressed/"]}.get(verb, ["dense/"])
        attack(verb, name, calling[name], *(["mixed/"] if "experts" in name else its))
    for pruned in ("pruned", "shrunk", "fewer", "mixed-less", "short", "fitted"):
        source = "mixed" if "mixed" in pruned else "dense"
        attack(
            "verify", pruned, lambda r, p=pruned, s=source: verify_checkpoint(r / p, r / s), f"{pruned}/", f"{source}/"
        )
    attack("shrink", "plan", calling["plan"], "profile.json")
    attack("fit", "levels", calling["levels"], "levels/")
    attack("sensitivity", "store", calling["sensitivity"], "levels/")
    attack("sensitivity", "directory", lambda r: sensitivity(r / "dense", data, shares=[0.5]), "dense/")
    attack("load", "compressed", lambda r: [*load_compressed(r / "compressed").values()], "compressed/")
    for text in ("text.txt", "text.jsonl", "text.json"):
        attack("text", text, lambda r, t=text: read_calibration(r / t, **lengths(r)), text)
        attack(
            "text",
            f"several, {text}",
            lambda r, t=text: read_calibration({"a:2": r / t, "b": r / t}, **lengths(r)),
            text,
        )
    attack(
        "text",
        "pictures",
        lambda r: read_calibration(r / "pictures", tokenizer_directory=r / "sees", samples=4),
        "pictures/",
        "sees/",
    )
    attack("text", "tokenizer", lambda r: read_calibration(r / "text.txt", **lengths(r)), "dense/tokenizer")
    attack("reached", "directory", lambda r: reached(r / "dense", {"a": data[:2], "b": data[2:]}), "dense/")
    if "prices" in wanted:
        model = residual()
        (root / "board.csv").write_text(board_of(model))
        attack("prices", "board.csv", lambda r: priced(r / "board.csv", model), "board.csv")
    if "bench" in wanted:
        words = ["-s", 0.9, "-p", "unstructured", "--tokens", 8, "--threads", 1]
        attack("bench", "directory", lambda r: told("bench", r / "dense", *words), "dense/")
    if "load" in wanted:
        for name, call, reads in of_modules(root):
            attack("load", name, call, reads)
    files = tree(root)
    found = [
        Attack(verb, name, call, [each for each in files if each.startswith(reads)])
        for (verb, name), (call, reads) in calls.items()
        if verb in wanted
    ]
    for name, verb, after in (
        ("oneshot", "oneshot", 2), ("oneshot", "oneshot", 3), ("oneshot of experts", "oneshot", 3),
        ("units by data", "shrink", 2), ("units by data", "shrink", 4), ("blocks", "shrink", 2),
        ("experts", "shrink", 1), ("experts", "shrink", 3), ("fit", "fit", None), ("fit over both", "fit", None),
        ("local", "recover", 1), ("steps", "recover", 2), ("deploy", "deploy", None),
    ):  # fmt: skip
        if begun and verb in wanted:
            found.append(going_on(root, files, verb, name, calling[name], after))
    return found, files


def board_of(model: nn.Module) -> str:
    """A table of times of a model and of smaller ones, as a board writes it."""
    from secateur.operations import COLUMNS, shapes_text
    from secateur.search.latency import probed

    text = io.StringIO()
    rows = csv.writer(text)
    rows.writerow(COLUMNS)
    for each in sorted({each.spelled for each in probed(model, torch.zeros(2, 6))}):
        ms = sum(math.prod(shape) for shape in each[1]) / 1e3
        rows.writerow((each[0], shapes_text(each[1]), " ".join(map(str, each[2])), ms))
    return text.getvalue()


def priced(path: Path, model: nn.Module) -> None:
    """The table is read back, and asked."""
    from secateur.operations import PriceTable, step_in

    table = PriceTable.read(path)
    step_in(table.rows)
    if not 0 <= table.total(model, torch.zeros(2, 6)) < math.inf:
        raise AssertionError("no milliseconds")


def draw_pictures(root: Path) -> None:
    """A folder of pictures, and what prepares them, as the directory of a model says it."""
    from PIL import Image

    for folder in ("pictures", "sees"):
        (root / folder).mkdir()
    for number, name in enumerate(("a.png", "b.jpg", "c.bmp", "d.webp")):
        Image.new("RGB", (9, 7), (60 * number, 90, 255)).save(root / "pictures" / name)
    said = {"image_processor_type": "ViTImageProcessor", "do_resize": True, "size": {"height": 8, "width": 8}}
    said |= {"do_normalize": True, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.2, 0.2, 0.2], "resample": 2}
    (root / "sees" / "preprocessor_config.json").write_text(json.dumps(said))
    (root / "sees" / "config.json").write_text(json.dumps({"model_type": "vit", "dtype": "float32"}))


def of_modules(root: Path) -> Iterator[tuple[str, Callable[[Path], Any], str]]:
    """What is loaded into a model in memory, which stays as it was where that is refused."""
    from secateur import load_shrunken, save_shrunken, shrink, sparsify
    from secateur.inference import SparseLinear, load_packed, save_packed
    from secateur.pipeline.masks import load, save

    def plain() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4))

    def held(load: Callable[[nn.Module], Any]) -> Any:
        model = plain()
        before = [(each, each.clone()) for each in model.parameters()]
        try:
            return load(model)
        except REFUSED:
            now = [*model.parameters()]
            if len(now) != len(before) or any(
                a is not b or not torch.equal(a, c) for a, (b, c) in zip(now, before, strict=True)
            ):
                raise Changed("the model in memory") from None
            raise

    smaller = plain()
    shrink(smaller, torch.zeros(1, 6), 0.5)
    save_shrunken(smaller, root / "small")
    yield "a shrunken model", lambda r: held(lambda model: load_shrunken(model, r / "small")), "small/"
    packed = plain()
    masks = sparsify(packed, 0.9)
    save(masks, root / "masks.safetensors")
    yield "masks", lambda r: load(r / "masks.safetensors"), "masks.safetensors"
    packed[0] = SparseLinear.from_dense(packed[0].weight.detach(), packed[0].bias)
    save_packed(packed, root / "packed.safetensors")
    yield "a packed model", lambda r: held(lambda model: load_packed(model, r / "packed.safetensors")), "packed.saf"


def going_on(
    root: Path, files: Mapping[str, bytes], verb: str, name: str, call: Callable[[Path], Any], after: int | None
) -> Attack:
    """The attack on what a run leaves that was stopped as `stopped_after` does."""
    call(root)
    whole = written(root)
    put(root, files)
    with contextlib.suppress(KeyboardInterrupt), stopped_after(after):
        call(root)
    left = {each: text for each, text in tree(root).items() if each.startswith(f"{OUT}.unfinished/")}
    put(root, files)
    if not left:
        raise AssertionError(f"{name} was not stopped after {after}")
    source = {"recover": "pruned", "deploy": ""}.get(verb, "mixed" if "experts" in name else "dense")
    return Attack(verb, f"{name}, gone on with", call, [*left], left, whole, source)


class Changed(Exception):
    """A call that was refused has changed something."""


# ---- arguments ------------------------------------------------------------------------------------------------------


def residual(width: int = 6, hidden: int = 12) -> nn.Module:
    """Two blocks and a head."""
    torch.manual_seed(0)
    return nn.Sequential(Block(width, hidden), Block(width, hidden), nn.Linear(width, 4)).eval()


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


def odd_model(dice: random.Random) -> Any:
    """A model that nobody prunes."""
    made: Any = residual()
    match dice.randrange(12):
        case 0:
            return nn.Identity()
        case 1:
            made[0].up.weight.data[0, 0] = math.nan
        case 2:
            made[1].down.bias.data[0] = math.inf
        case 3:
            return made.to("meta")
        case 4:
            return made.to(dice.choice([torch.float16, torch.bfloat16, torch.float64]))
        case 5:
            for each in made.parameters():
                each.data.zero_()
        case 6:
            made[2] = nn.LazyLinear(4)
        case 7:
            made[0].up = nn.Linear(6, 0)
            made[0].down = nn.Linear(0, 6)
        case 8:
            made[1].up.weight = made[0].up.weight
        case 9:
            made.requires_grad_(False)
        case 10:
            made[2].weight = nn.Parameter(torch.ones(4, 6, dtype=torch.int64), requires_grad=False)
        case 11:
            made[0].up = nn.utils.parametrizations.weight_norm(made[0].up)
    return made


def odd_data(dice: random.Random) -> Any:
    """Batches or inputs that nobody gives."""
    values = [
        torch.zeros(0, 6), torch.zeros(2, 6), torch.full((2, 6), math.nan), torch.full((2, 6), 1e38), torch.zeros(2, 5),
        torch.zeros(6), torch.zeros(()), torch.zeros(2, 6, dtype=torch.int64), torch.zeros(2, 6, device="meta"),
        torch.zeros(2, 6, dtype=torch.bfloat16), torch.zeros(2, 6, dtype=torch.complex64), torch.randn(1, 6),
    ]  # fmt: skip
    one = dice.choice([*values, None, "x", (), {}, 5, {"x": values[1]}, (values[1], None), [values[1]]])
    return dice.choice([one, [one], [one] * 3, [values[1], one], iter([one]), []])


def called() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Each verb in memory, and arguments with which it runs."""
    from secateur import (
        Pruner,
        apply_,
        attach,
        deploy,
        fit,
        make_masks,
        oneshot,
        pack,
        prune,
        recover,
        sensitivity,
        shrink,
        shrink_vocabulary,
        sparsify,
    )  # fmt: skip
    from secateur.storage import save_compressed
    from secateur.targets import find_targets

    data = [torch.randn(8, 6, generator=torch.Generator().manual_seed(at)) for at in range(4)]

    def fewer(model: Any, **given: Any) -> None:
        shrink_vocabulary(model, tokenizer(), **given)

    def into(write: Callable[[Any, Path, dict[str, Any]], object], model: Any, **given: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            try:
                write(model, Path(folder, OUT), given)
            except REFUSED as error:
                if Path(folder, OUT).exists():
                    raise Changed(f"{OUT} is there, by {error}") from error
                raise

    deployed = functools.partial(into, lambda model, out, given: deploy(model, out=out, **given))
    compressed = functools.partial(into, lambda model, out, given: save_compressed(model, out, **given))

    def trained(model: Any, **given: Any) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        Pruner(model, optimizer, given.pop("sparsity"), **{"total_steps": 3, "verbose": False, **given})
        first = [each.detach().clone() for each in model.parameters()]
        for _ in range(3):
            if (loss := model(data[0]).square().mean()).requires_grad:
                loss.backward()
            found = [each.detach().clone() if each.grad is None else each.detach().add(each.grad, alpha=-0.1)
                     for each in model.parameters()]  # fmt: skip
            try:
                optimizer.step()
            except REFUSED as error:  # a model in training is left as the optimizer left it
                with torch.no_grad():
                    for each, alone, old in zip(model.parameters(), found, first, strict=True):
                        if not torch.equal(each.nan_to_num(), alone.nan_to_num()):
                            raise Changed(f"what the optimizer left, by {error}") from error
                        each.copy_(old)
                raise

    def masked(model: Any, **given: Any) -> Any:
        return make_masks(find_targets(model), **given)

    def dropped(model: Any, amount: Any) -> None:
        prune.l1_unstructured(model[0].up, "weight", amount=amount)

    return {
        "sparsify": (sparsify, {"sparsity": 0.5, "pattern": None, "criterion": "magnitude", "allocate": None,
            "include": None, "exclude": None, "batches": None, "rounds": 1, "seed": 0, "within": None}),
        "oneshot": (oneshot, {"batches": data, "sparsity": 0.5, "solver": "magnitude", "pattern": None,
            "allocate": "uniform", "values": None, "aim": None, "include": None, "exclude": None, "device": None}),
        "shrink": (shrink, {"example_inputs": data[0], "sparsity": 0.4, "leave": None, "target": "params",
            "batches": None, "include": None, "exclude": None, "criterion": "magnitude", "allocate": None,
            "round_to": None, "uniform": False, "repair": True, "more_inputs": (), "verify": False}),
        "fit": (fit, {"batches": data, "budget": {"params": 0.8}, "keep": None, "score": None, "over": "shrink",
            "target": "params", "shares": (0.5,), "include": None, "exclude": None, "solver": "magnitude",
            "round_to": None, "finals": 1, "seed": 0, "verify": False}),
        "sensitivity": (sensitivity, {"batches": data, "score": None, "over": "shrink", "shares": (0.5,),
            "include": None, "exclude": None, "solver": "magnitude", "pattern": None, "round_to": None}),
        "recover": (recover, {"teacher": residual(), "batches": data, "steps": 1, "local": 1, "loss": None,
            "adapters": None, "rate": 1e-4, "share": 1.0, "include": None, "exclude": None, "seed": 0,
            "autocast": None}),
        "pack": (pack, {"example_inputs": data[0], "at_least": 1.1, "values": None, "inputs": None, "include": None,
            "exclude": None}),
        "Pruner": (trained, {"sparsity": 0.5, "pattern": None, "criterion": "magnitude", "total_steps": 3,
            "include": None, "exclude": None}),
        "make_masks": (masked, {"sparsity": 0.5, "pattern": None, "criterion": "magnitude", "allocate": None}),
        "attach": (attach, {"masks": {"0.up.weight": torch.ones(12, 6, dtype=torch.bool)}}),
        "apply_": (apply_, {"masks": {"0.up.weight": torch.ones(12, 6, dtype=torch.bool)}}),
        "vocabulary": (fewer, {"texts": [" ".join(WORDS[:9])], "keep": None, "cover": None, "script": None,
            "multiple": None, "rank": None, "exact": True}),
        "deploy": (deployed, {"batches": data, "budget": {"latency": 1.0}, "runtime": "onnxruntime:int8", "score": None,
            "include": None, "exclude": None, "shares": (0.5,), "round_to": None, "example_inputs": None, "finals": 1,
            "seed": 0}),
        "compress": (compressed, {"masks": {}, "zstd": False}),
        "prune": (dropped, {"amount": 0.5}),
    }  # fmt: skip


def argued(verb: str, call: Callable[..., Any], given: Mapping[str, Any], dice: random.Random) -> str:
    """What became of one call with odd arguments."""
    model = odd_model(dice) if dice.random() < 0.2 else small("gpt2") if verb == "vocabulary" else residual()
    return judged(functools.partial(call, model, **odd_of(given, dice)), model)


def odd_of(given: Mapping[str, Any], dice: random.Random) -> dict[str, Any]:
    """The arguments, of which one or two are others."""
    words = [
        "params", "macs", "latency", "2:4", "16x1", "rows", "wanda", "magnitude", "erk", "owl", "sparsegpt", "kl",
        "branches:1", "experts:1", "*", "0.*", "3:2", "0x0", "channels", "bfloat16", "cuda", "meta", "int8",
    ]  # fmt: skip
    said = dict(given)
    for name in dice.sample([*said], min(len(said), dice.choice((1, 1, 2)))):
        data = name in ("batches", "example_inputs", "more_inputs", "teacher") and dice.random() < 0.8
        one: Any = odd_data(dice) if data else dice.choice([*HOSTILE, *words])
        if name in ("budget", "masks") or (name == "within" and dice.random() < 0.7):
            one = {dice.choice(["params", "bytes", "macs", "0.up.weight", "x"]): dice.choice([one, *HOSTILE])}
        long = name in ("rounds", "steps", "local", "finals", "total_steps") and type(one) is int and one > 3
        said[name] = 3 if long else one  # what was asked for would be done
    return said


def judged(call: Callable[[], Any], *models: Any) -> str:
    """What became of a call; raises what is a crash, and `Changed` where it was refused and has changed a model."""
    states = [(model, state) for model in models if (state := held_state(model)) is not None]

    def as_it_was() -> bool:
        return all(is_as_it_was(model, state) for model, state in states)

    try:
        call()
    except (*REFUSED, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, KeyError | AttributeError) and not is_ours(error):
            raise
        if not as_it_was():
            raise Changed(f"the model, by {type(error).__name__}: {error}") from error
        return "refused" if is_ours(error) else "refused by another"
    except Exception as error:
        own = any(each.name == "forward" for each in traceback.extract_tb(error.__traceback__))
        if not own or not states or not as_it_was():
            raise
        return "an error of the model"
    return "done"


def held_state(model: Any) -> Any:
    if not isinstance(model, nn.Module):
        return None
    return {name: (each, each.detach().clone()) for name, each in model.state_dict(keep_vars=True).items()
            if not nn.parameter.is_lazy(each)}  # fmt: skip


def is_as_it_was(model: nn.Module, state: Mapping[str, tuple[Tensor, Tensor]]) -> bool:
    now = {name: each for name, each in model.state_dict(keep_vars=True).items() if not nn.parameter.is_lazy(each)}
    return now.keys() == state.keys() and all(
        now[name] is each and (each.is_meta or torch.equal(each.nan_to_num(), old.nan_to_num()))
        for name, (each, old) in state.items()
    )


# ---- the disk, and other processes ----------------------------------------------------------------------------------


def written(root: Path) -> dict[str, bytes]:
    """What OUT holds, or what it is; of a page, in which there are times, that it is whole; of tensors what is
    said of it in order, which safetensors writes in any."""
    found = {
        each.removeprefix(OUT): b"" if PROBE.search(each) else text  # in which the exporter writes names anew
        for each, text in tree(root).items()
        if each.startswith((f"{OUT}/", OUT_FILE))
    }
    return {each: text[-8:] if each.endswith(".html") else in_order(text) if each.endswith(".safetensors") else text
            for each, text in found.items()}  # fmt: skip


def in_order(text: bytes) -> bytes:
    """A file of tensors whose header has its keys in order."""
    end = 8 + int.from_bytes(text[:8], "little")
    try:
        return json.dumps(json.loads(text[8:end]), sort_keys=True).encode() + text[end:]
    except ValueError:
        return text


@functools.cache
def whole_of(attack: Attack, root: Path) -> Mapping[str, bytes]:
    """What OUT holds in the end, where nothing is in the way."""
    attack.call(root)
    return written(root)


def check_whole(attack: Attack, root: Path, whole: Mapping[str, bytes]) -> None:
    """`Changed` where OUT is not what it is where nothing is in the way."""
    if (found := written(root)) != whole:
        names = [name for name in found.keys() | whole.keys() if found.get(name) != whole.get(name)]
        raise Changed(f"{', '.join(names[:3])} of what {attack.verb} wrote in the end")


def check_left(attack: Attack, root: Path, files: Mapping[str, bytes], error: BaseException | None = None) -> None:
    """`Changed` where a refused call has left more than it may."""
    left = {name: text for name, text in tree(root).items() if not name.startswith(attack.keeps)}
    more = {name for name in left.keys() | files.keys() if left.get(name) != files.get(name)}
    more |= {each.name for each in root.iterdir() if each.is_dir() and not each.name.startswith(attack.keeps[:-1])} - {
        name.split("/")[0] for name in files
    }
    if more:
        raise Changed(f"{sorted(more)[:3]}, by {error}") from error


def limited(attack: Attack, root: Path, files: Mapping[str, bytes], dice: random.Random) -> str:
    """What became of a call for which files may not be as long as they are, and of the same call afterwards."""
    from benchmarks.storage.hindered import hindered

    put(root, files)
    whole = whole_of(attack, root)
    put(root, files)
    return hindered(attack, root, files, whole, no_longer_than(int(2 ** dice.uniform(0, 17))))


@contextlib.contextmanager
def no_longer_than(nbytes: int) -> Iterator[None]:
    """A context in which no file grows longer."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def killed(attack: Attack, root: Path, files: Mapping[str, bytes], dice: random.Random) -> str:
    """What became of a call that goes on where another one was killed, and one of its files damaged."""
    put(root, files)
    start = time.monotonic()
    whole = whole_of(attack, root)
    put(root, files)
    child = in_a_fork(attack, root)
    time.sleep(dice.uniform(0, min(2 * (time.monotonic() - start), 2.0)))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    left = [name for name in tree(root) if name.startswith(f"{OUT}.unfinished/")]
    if left and dice.random() < 0.5:
        damage(root / dice.choice(left), dice)
    if not (root / OUT).exists():
        try:
            attack.call(root)
        except REFUSED as error:
            return "refused" if is_ours(error) else "refused by another"
    check_whole(attack, root, whole)
    return "done"


def together(attack: Attack, root: Path, files: Mapping[str, bytes], dice: random.Random) -> str:
    """What became of three calls at once: OUT is whole, nothing else is left, and who was late says so."""
    put(root, files)
    whole = whole_of(attack, root)
    put(root, files)
    children = [in_a_fork(attack, root, dice.random() / 20) for _ in range(3)]
    codes = sorted(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)
    if codes[0] != 0 or codes[-1] > 1:
        raise Changed(f"three at once ended with {codes}")
    check_whole(attack, root, whole)
    names = {name.split("/")[0] for name in tree(root)} - {name.split("/")[0] for name in files} - {OUT}
    if names or any(root.glob(f"{OUT}.*")):
        raise Changed(f"{sorted(names)} is left")
    return f"{codes.count(0)} done"


def in_a_fork(attack: Attack, root: Path, delay: float = 0.0) -> int:
    """A process that makes the call; its exit code is 0, 1 where that is refused, 2 where it crashes."""
    if child := os.fork():
        return child
    try:
        time.sleep(delay)
        attack.call(root)
        os._exit(0)
    except REFUSED:
        os._exit(1)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(2)


# ---- tries ----------------------------------------------------------------------------------------------------------


def tried(attack: Attack, root: Path, files: Mapping[str, bytes], dice: random.Random) -> str:
    """What became of one try; raises what is a crash."""
    put(root, {**files, **attack.left})
    for _ in range(dice.choice((1, 1, 1, 2))):
        path = root / dice.choice(attack.files)
        if path.exists():
            damage(path, dice)
    before = tree(root)
    try:
        attack.call(root)
    except REFUSED as error:
        now = tree(root)
        both = [{k: v for k, v in each.items() if not k.startswith(attack.keeps)} for each in (now, before)]
        if both[0] != both[1]:
            names = [name for name in now.keys() | before.keys() if now.get(name) != before.get(name)]
            raise Changed(f"{', '.join(names[:3])}, by {type(error).__name__}: {error}") from error
        return "refused" if is_ours(error) else "refused by another"
    if attack.whole is None:
        return "done"
    journals = [name for name in attack.left if Path(name).name == runs.JOURNAL]  # a run may have begun another
    if written(root) != attack.whole and any(is_another(before.get(each), attack.left[each]) for each in journals):
        check_claims(attack, root)
        return "done, of another journal"
    check_whole(attack, root, attack.whole)
    return "done"


def is_another(journal: bytes | None, left: bytes) -> bool:
    """Whether a journal says something else than the one that was left, and has the sum of what it says."""
    try:
        values = json.loads(journal or b"")
        return bool(values != json.loads(left) and values["sha256"] == runs._digest(values))
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return False


def check_claims(attack: Attack, root: Path) -> None:
    """`Changed` where OUT is not what its record says, beside what it was made from."""
    from secateur.checkpoints import verify_checkpoint

    if attack.source and (problems := verify_checkpoint(root / OUT, root / attack.source).problems):
        raise Changed(f"by another journal, what {attack.verb} wrote in the end: {problems[0]}")


def is_ours(error: BaseException) -> bool:
    """Whether this library says it, or the system."""
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, OSError) or "/secateur/" in frames[-1].filename or type(error).__name__ == "Said"


def place_of(error: BaseException) -> str:
    """What was raised, and the lines of this library that it passed last."""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if "/secateur/" in each.filename]
    return " ".join([type(error).__name__, *(f"{Path(each.filename).name}:{each.lineno}" for each in frames[-3:])])


Once = Callable[[random.Random], str]
KINDS = {"files": tried, "disk": limited, "killed": killed, "together": together}
HINDERED = ("full", "rights", "faults")


def tries(root: Path, kind: str, verbs: Collection[str]) -> Iterator[tuple[str, str, Once]]:
    """A function for each attack, which tries it once."""
    from benchmarks.storage import hindered, odd

    if kind == "arguments":
        for verb, (call, given) in called().items():
            if not verbs or verb in verbs:
                yield verb, "arguments", functools.partial(argued, verb, call, given)
        for verb, each in odd.odd_calls(root).items():
            if not verbs or verb in verbs:
                yield verb, "arguments", each
        return
    if kind in HINDERED:
        (root / "inside").mkdir()  # a disk of its own
        root /= "inside"
    every, files = attacks(root, {*(verbs or VERBS)}, begun=kind == "files")
    if kind != "files":
        more, files = hindered.writers(root, files)
        every += [each for each in more if not verbs or each.verb in verbs]
    how = getattr(hindered, kind) if kind in HINDERED else KINDS[kind]
    for attack in every:
        if kind == "files" or attack.writes:
            yield attack.verb, attack.name, functools.partial(how, attack, root, files)


def counted(
    root: Path,
    kind: str,
    verbs: Collection[str],
    numbers: Sequence[int],
    seed: int = 0,
    seconds: float = math.inf,
    of: Collection[str] = (),
) -> Iterator[dict[str, Any]]:
    """What became of the tries of these numbers, of each attack in turn; a crash that is new is printed."""
    known: set[str] = set()
    for verb, name, once in tries(root, kind, verbs):
        if of and not any(each in name for each in of):
            continue
        found: Counter[str] = Counter()
        start = time.process_time()
        for number in numbers:
            if time.process_time() - start > seconds:
                break
            try:
                what = once(random.Random(f"{seed} {verb} {name} {number}"))
            except Exception as error:
                what = "crashed"
                if (key := f"{verb}, {name}: {place_of(error)}") not in known:
                    print(f"{key}, number {number}: {' '.join(str(error).split())[:400]}", file=sys.stderr, flush=True)
                    known.add(key)
            found[what] += 1
        yield {"verb": verb, "of": name, **found, "seconds": round(time.process_time() - start, 1)}


def haste() -> None:
    """What a try would do anew for nothing: torch reads the list of ONNX's operators at each export, typer builds the
    commands at each call; and what is timed here, whose times nobody reads, runs once instead of in rounds."""
    import typer.testing
    from torch.onnx._internal.exporter import _registration

    from secateur.cli import measuring
    from secateur.inference import packing

    registry: Any = _registration.ONNXRegistry
    registry.from_torchlib = staticmethod(functools.cache(registry.from_torchlib))
    typer.testing._get_command = functools.cache(typer.testing._get_command)
    for module in (measuring, packing):
        module.alternating = once_each  # type: ignore[attr-defined]


def once_each(calls: Mapping[Any, Callable[[], object]], *_: Any, **__: Any) -> dict[Any, list[float]]:
    """As `alternating`, in one round of one call."""
    return alternating(calls, 1)


def main() -> int:
    from benchmarks.storage.hindered import DISKS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["arguments", *KINDS, *HINDERED])
    parser.add_argument("--verb", action="append", default=[], help="only of this one; repeatable")
    parser.add_argument("--of", action="append", default=[], help="only attacks whose name has this; repeatable")
    parser.add_argument("--count", type=int, default=1000, help="how many of each attack")
    parser.add_argument("--first", type=int, default=0, help="the number of the first")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of the processor, for each attack at most")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    from transformers.utils import logging

    logging.set_verbosity(60)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)
    haste()
    numbers, crashes = range(arguments.first, arguments.first + arguments.count), 0
    how = {"seed": arguments.seed, "seconds": arguments.seconds, "of": arguments.of}
    with tempfile.TemporaryDirectory() as folder, DISKS:
        for found in counted(Path(folder), arguments.kind, arguments.verb, numbers, **how):
            print(json.dumps(found), flush=True)
            crashes += found.get("crashed", 0)
    return bool(crashes)


if __name__ == "__main__":
    sys.exit(main())
