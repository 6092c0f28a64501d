"""``python -m secateur.env``: what a bug report needs, and nothing that names a person or a machine; with ``--check``
each verb for a second or two on a device, and how far that is from what the processor gives.

Law: it prints whatever can be found out; a package that is missing or broken, or a verb that fails, is a line, not an
error.
"""

import argparse
import copy
import functools
import gc
import importlib.metadata
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateur.native import describe
from secateur.report import environment
from secateur.support import Column, Table, accelerator, seeded, usable

__all__ = ["Checked", "checked", "described"]

# what the extras bring, by the name of the distribution
_OTHERS = (
    "safetensors", "transformers", "tokenizers", "accelerate", "peft", "lightning", "onnx", "onnxruntime", "onnxscript",
    "scikit-learn", "matplotlib", "jinja2", "zstandard",
)  # fmt: skip


def described() -> dict[str, str]:
    """``{what: which}``: versions of this library and of what it works with, the processor and its instructions.

    >>> list(described())[:3]
    ['secateur', 'torch', 'numpy']
    """
    found = environment()
    found["kernels"] = describe().removeprefix("kernels: ")
    found["torch's instructions"] = torch.backends.cpu.get_cpu_capability()
    found["accelerator"] = _accelerator()
    return found | {name: _version(name) for name in _OTHERS}


def _accelerator() -> str:
    if not torch.cuda.is_available():
        found = accelerator()
        return "none that torch sees" if found == "none" else found
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return f"{', '.join(names)} (CUDA {torch.version.cuda}, ROCm {torch.version.hip})"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


# ---- Each verb on a device, and on the processor.

# Sums are in another order there, so that values differ by roundings; where one is near a threshold, by an entry that
# is kept in its place, and what is repaired after it. More than this, relative to all values, is another result.
ALIKE = 0.05


@dataclass(frozen=True)
class Checked:
    """What came of a verb on a device.

    Attributes:
        verb: which, and how it was called.
        says: "the same", bit for bit; "alike", up to 5 %; "DIFFERS"; "FAILS: " and the error; "left out: " and why.
        distance: ``‖there - here‖ / ‖here‖`` over all tensors of the result; None without one.
        seconds: on the device, with what happens at the first call alone.
        on_processor: seconds on the processor.
        memory: the most bytes of the device that it took; None where torch does not say.
    """

    verb: str
    says: str
    distance: float | None = None
    seconds: float | None = None
    on_processor: float | None = None
    memory: int | None = None

    @property
    def holds(self) -> bool:
        """Whether it ran, and gave what the processor gives."""
        return self.says in {"the same", "alike"} or self.says.startswith("left out: ")


def checked(device: torch.device | str, *, on_error: Callable[[], object] = lambda: None) -> Iterator[Checked]:
    """Each verb, run on the device and on the processor, on models of a few thousand random weights.

    Args:
        device: any that torch knows here; on "cpu" it says whether a verb runs, and gives the same twice.
        on_error: called where a verb fails, while its exception is handled.

    Raises:
        ValueError: there is no such device.

    >>> first = next(checked("cpu"))
    >>> first.verb, first.says, first.distance
    ('sparsify, wanda', 'the same', 0.0)
    """
    there = usable(device)
    for verb, check in _CHECKS.items():
        if why := _left_out(verb, there):
            yield Checked(verb, f"left out: {why}")
            continue
        try:
            with warnings.catch_warnings(), seeded():
                warnings.simplefilter("ignore")
                wanted, on_processor, _ = _run(check, torch.device("cpu"))
                found, seconds, memory = _run(check, there)
            distance = _distance(found, wanted)
        except Exception as error:
            on_error()
            line = (str(error).splitlines() or [""])[0]
            yield Checked(verb, f"FAILS: {type(error).__name__}: {line}")
        else:
            says = "the same" if distance == 0 else "alike" if distance <= ALIKE else "DIFFERS"
            yield Checked(verb, says, distance, seconds, on_processor, memory)


def _run(check: Callable[[torch.device], Mapping[str, Tensor]], device: torch.device) -> tuple[Any, float, int | None]:
    of_device = getattr(torch, device.type)
    counts = hasattr(of_device, "max_memory_allocated")
    if counts:
        gc.collect()
        of_device.reset_peak_memory_stats(device)
        before = int(of_device.memory_allocated(device))
    torch.manual_seed(0)
    started = time.perf_counter()
    found = {name: tensor.detach().cpu() for name, tensor in check(device).items()}  # waits for the device
    seconds = time.perf_counter() - started
    return found, seconds, int(of_device.max_memory_allocated(device)) - before if counts else None


def _distance(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Infinite where names, shapes, dtypes or whole numbers differ."""
    if [(name, each.shape, each.dtype) for name, each in found.items()] != [
        (name, each.shape, each.dtype) for name, each in wanted.items()
    ]:
        return float("inf")
    squared, whole = 0.0, 0.0
    for name, each in wanted.items():
        if not each.is_floating_point():
            if not torch.equal(found[name], each):
                return float("inf")
            continue
        squared += float((found[name].double() - each.double()).square().sum())
        whole += float(each.double().square().sum())
    return float((squared / whole) ** 0.5) if squared else 0.0


def _left_out(verb: str, device: torch.device) -> str:
    if "directory" in verb and _version("transformers") == "not installed":
        return "it needs transformers"
    if "sparse tensor cores" in verb:
        from secateur.inference.linear import why_no_semi_structured_device

        return why_no_semi_structured_device(device)
    return ""


def _convolutions(device: torch.device) -> nn.Sequential:
    first = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()
    second = nn.Conv2d(16, 32, 3, stride=2), nn.BatchNorm2d(32), nn.ReLU()
    model = nn.Sequential(*first, *second, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10))
    return model.to(device)


def _transformer(device: torch.device) -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(device).eval()


def _images(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    """As a DataLoader gives them, which is on the processor."""
    return [(torch.randn(16, 3, 12, 12), torch.randint(10, (16,))) for _ in range(count)]


def _vectors(count: int = 4) -> list[Tensor]:
    return [torch.randn(8, 16, 32) for _ in range(count)]


def _tokens(count: int = 4) -> list[dict[str, Tensor]]:
    return [{"input_ids": torch.randint(64, (4, 16))} for _ in range(count)]


def _sparsify(device: torch.device) -> Mapping[str, Tensor]:
    from secateur import sparsify

    model = _convolutions(device)
    sparsify(model, 0.7, criterion="wanda", batches=_images())
    return model.state_dict()


def _patterns(device: torch.device) -> Mapping[str, Tensor]:
    from secateur import make_masks
    from secateur.targets import find_targets

    weights = find_targets(_convolutions(device), exclude="0.*")
    words = ("2:4", "4x1", "rows", "columns:8")
    return {
        f"{word} {name}": mask
        for word in words
        for name, mask in make_masks(weights, None if ":4" in word else 0.5, pattern=word).items()
    }


def _drop_in(device: torch.device) -> Mapping[str, Tensor]:
    from secateur import prune

    model = _convolutions(device)
    prune.global_unstructured([(model[at], "weight") for at in (0, 3, 8)], prune.L1Unstructured, amount=0.6)
    prune.ln_structured(model[3], "weight", 0.25, n=2, dim=0)
    before = {f"before {name}": each.clone() for name, each in model.state_dict().items()}
    for at in (0, 3, 8):
        prune.remove(model[at], "weight")
    return before | model.state_dict() | {"outputs": model.eval()(_images(1)[0][0].to(device))}


def _pruner(device: torch.device, *, kind: type[torch.optim.Optimizer], **how: Any) -> Mapping[str, Tensor]:
    from secateur import Pruner

    model = _convolutions(device)
    optimizer = kind(model.parameters(), lr=1e-3, **how)  # type: ignore[call-arg]
    pruner = Pruner(model, optimizer, 0.8, total_steps=12, verbose=False)
    for images, labels in _images(12):
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(model(images.to(device)), labels.to(device)))
        optimizer.step()
    state = copy.deepcopy(pruner.state_dict())
    pruner.load_state_dict(state)
    zeros = {f"zeros of {name}": (each == 0).sum() for name, each in model.named_parameters()}
    return model.state_dict() | zeros


def _oneshot(device: torch.device) -> Mapping[str, Tensor]:
    from secateur import oneshot

    model = _transformer(device)
    oneshot(model, _vectors(), 0.5)
    return model.state_dict()


def _shrink(device: torch.device) -> Mapping[str, Tensor]:
    from secateur import load_shrunken, save_shrunken, shrink

    model, batches = _convolutions(device).eval(), _images()
    shrink(model, sparsity=0.4, batches=batches)
    return model.state_dict() | _saved_and_loaded(model, _convolutions(device), save_shrunken, load_shrunken)


def _heads(device: torch.device) -> Mapping[str, Tensor]:
    from secateur import shrink

    model = _transformer(device)
    shrink(model, sparsity=0.4, batches=_vectors(), optimizer=torch.optim.AdamW(model.parameters()))
    return model.state_dict()


def _recover(device: torch.device) -> Mapping[str, Tensor]:
    from secateur import recover, sparsify

    teacher = _transformer(device)
    model = copy.deepcopy(teacher)
    sparsify(model, 0.5)
    recover(model, teacher, _vectors(), steps=6, local=1)
    return model.state_dict()


def _fit(device: torch.device) -> Mapping[str, Tensor]:
    from secateur import fit

    model = _transformer(device)
    fit(model, _vectors(), budget={"params": 0.75}, shares=(0.25, 0.5, 0.75), finals=1)
    return model.state_dict()


def _sensitivity(device: torch.device) -> Mapping[str, Tensor]:
    from secateur import sensitivity

    found = sensitivity(_transformer(device), _vectors(), shares=(0.5,), over=("shrink", "oneshot"))
    return {name: torch.tensor(each) for name, each in found.scores.items()}


def _pack(device: torch.device) -> Mapping[str, Tensor]:
    from secateur import pack, sparsify
    from secateur.inference import load_packed, save_packed

    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 64)).to(device).eval()

    model, x = network(), torch.randn(4, 256).to(device)
    sparsify(model, 0.75, pattern="columns:64")
    pack(model, x, at_least=1e-6, kernels_too=False)
    loaded = _saved_and_loaded(model, network(), save_packed, load_packed)
    return {"outputs": model(x), **loaded}


def _sparse_tensor_cores(device: torch.device) -> Mapping[str, Tensor]:
    from secateur import pack, sparsify

    model, x = nn.Sequential(nn.Linear(512, 512)).to(device, torch.float16), torch.randn(64, 512).to(device).half()
    sparsify(model, pattern="2:4")
    if device.type == "cuda":
        pack(model, x, at_least=1e-6, semi_structured=True, kernels_too=False)
    return {"outputs": model(x)}


def _compressed(device: torch.device) -> Mapping[str, Tensor]:
    from secateur import load_compressed, save_compressed, sparsify

    model = _convolutions(device)
    sparsify(model, 0.8)
    return _saved_and_loaded(
        model, _convolutions(device), save_compressed, lambda other, file: load_compressed(file, other)
    )


def _saved_and_loaded(
    model: nn.Module, other: nn.Module, save: Callable[..., object], load: Callable[..., object]
) -> dict[str, Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        save(model, file)
        load(other, file)
    return {f"loaded {name}": each for name, each in other.state_dict().items()}


def _directory(device: torch.device, *, verb: Callable[[Path, Path, torch.device], object]) -> Mapping[str, Tensor]:
    """What a verb makes of a directory of a small Llama."""
    import transformers

    from secateur import load_compressed

    of: Any = transformers
    of.utils.logging.disable_progress_bar()

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    with tempfile.TemporaryDirectory() as folder:
        dense, out = Path(folder) / "dense", Path(folder) / "out"
        of.LlamaForCausalLM(of.LlamaConfig(vocab_size=64, **sizes)).save_pretrained(dense)
        verb(dense, out, device)
        return dict(load_compressed(out))


def _oneshot_directory(dense: Path, out: Path, device: torch.device) -> None:
    from secateur import oneshot, verify_checkpoint

    oneshot(dense, _tokens(), 0.5, out=out, device=device)
    verify_checkpoint(out, dense)


def _shrink_directory(dense: Path, out: Path, device: torch.device) -> None:
    from secateur import shrink, verify_checkpoint

    shrink(dense, sparsity=0.3, batches=_tokens(), out=out, device=device)
    verify_checkpoint(out, dense)


def _recover_directory(dense: Path, out: Path, device: torch.device) -> None:
    from secateur import recover, sparsify

    sparse = out.with_name("sparse")
    sparsify(dense, 0.5, out=sparse)
    recover(sparse, dense, _tokens(), steps=6, local=1, out=out, device=device)


def _fit_directory(dense: Path, out: Path, device: torch.device) -> None:
    from secateur import fit

    fit(dense, _tokens(), budget={"params": 0.8}, shares=(0.25, 0.5), finals=1, out=out, device=device)


_CHECKS: dict[str, Callable[[torch.device], Mapping[str, Tensor]]] = {
    "sparsify, wanda": _sparsify,
    "make_masks, patterns": _patterns,
    "prune, the drop-in": _drop_in,
    "Pruner, SGD for each": functools.partial(_pruner, kind=torch.optim.SGD, foreach=True, momentum=0.9),
    "Pruner, Adam fused": functools.partial(_pruner, kind=torch.optim.Adam, fused=True),
    "oneshot": _oneshot,
    "shrink, channels": _shrink,
    "shrink, heads": _heads,
    "recover": _recover,
    "fit": _fit,
    "sensitivity": _sensitivity,
    "pack": _pack,
    "pack, 2:4 on sparse tensor cores": _sparse_tensor_cores,
    "save_compressed": _compressed,
    "oneshot, a directory": functools.partial(_directory, verb=_oneshot_directory),
    "shrink, a directory": functools.partial(_directory, verb=_shrink_directory),
    "recover, a directory": functools.partial(_directory, verb=_recover_directory),
    "fit, a directory": functools.partial(_directory, verb=_fit_directory),
}


def _main() -> int:
    parser = argparse.ArgumentParser("python -m secateur.env", description="What a bug report needs.")
    parser.add_argument("--check", action="store_true", help="run each verb for a second or two on a device, too")
    there = accelerator()
    default = "cuda" if torch.cuda.is_available() else "cpu" if there == "none" else there
    parser.add_argument("--device", default=default, help="default: %(default)s")
    asked = parser.parse_args()
    found = described()
    width = max(map(len, found))
    for what, which in found.items():
        print(f"{what.ljust(width)}  {which}")
    if not asked.check:
        return 0
    try:
        rows = []
        for row in checked(asked.device, on_error=traceback.print_exc):
            rows.append(row)
            # at once: it may hang, or the process die
            print(f"{row.verb}: {row.says} ({row.seconds or 0:.1f} s)", file=sys.stderr, flush=True)
    except ValueError as error:
        parser.error(str(error))
    columns = (
        Column("Verb", lambda row: row.verb),
        Column.figure("Distance", lambda row: row.distance, ".1e"),
        Column.figure("Seconds", lambda row: row.seconds, ".2f"),
        Column.figure("On the CPU", lambda row: row.on_processor, ".2f"),
        Column.bytes("Memory", lambda row: row.memory),
        Column(f"On {asked.device}, beside the CPU", lambda row: row.says),
    )
    print(f"\n{Table.of('verbs', rows, *columns).filled()}")
    failed = sum(not row.holds for row in rows)
    print(f"\n{len(rows) - failed} of {len(rows)} verbs hold on {asked.device}.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(_main())
