"""Every command that the README and the site show runs, from top to bottom of its page, on small stand-ins.

Law: the words of a command are those of the page. What is added only makes it short; what is not run here is named,
with where it is.
"""

import functools
import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from support.commands import run
from support.vocabularies import TEXT, wrapped

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
BESIDE = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "examples/README.md"]  # on the site, too
PAGES = [*(ROOT / name for name in BESIDE), *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if page.parent.name != "zh-TW"]  # its code is that of the English pages: a test says so

# What makes a command short, so that a page takes seconds: put after its words, or in the place of some.
SHORT = {
    "bench": ["--sparsity", "0.8", "--pattern", "columns:64"],
    "deploy": ["--finals", "1", "--share", "0.6", "--samples", "8"],
    "fit": ["--finals", "1", "--share", "0.6"],
    "oneshot": ["--samples", "8"],
    "pack": ["--at-least", "0.01"],
    "recover": ["--local", "1", "--steps", "2", "--samples", "8"],
    "sensitivity": ["--samples", "8"],
    "trim": ["--exact"],  # of a stand-in's short text the sample's rule keeps all tokens
}
ELSEWHERE = {
    "make": "CI runs them",
    "pip": "make demo, make test and make wheel install",
    "torchrun": "tests/models runs several processes",
    "secateur demo": "tests/cli/test_demo.py",
    "secateur detector": "tests/wild/detectors.py",
    "python": "tests/test_env.py, benchmarks, and tests/test_docs.py itself",
}
# A stand-in has no 12 000 tokens, and its time is that of the calls between layers.
INSTEAD = {"12000": "300", "latency=0.6": "params=0.9"}
INSTEAD |= dict.fromkeys(("latency=0.25", "latency=0.3", "latency=0.5"), "latency=1000")

MODELS = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


def gpt():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(50, 32), *(Block() for _ in range(2)), nn.Linear(32, 50))


tokens = torch.arange(8).unsqueeze(0)


def build():
    return nn.Sequential(*(Block() for _ in range(2)))


inputs = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))


def cnn():
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1))


image = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
batches = [image] * 4
"""


def commands(page):
    """The commands of a page, without their comments."""
    lines = [line for block in BLOCK.findall(page.read_text(encoding="utf-8")) for line in block.splitlines()]
    return [shlex.split(line[2:], comments=True) for line in lines if line.startswith("$ ")]


def begins(words, start):
    return words[: len(start.split())] == start.split()


def here(words):
    return not any(begins(words, start) for start in ELSEWHERE)


SHOWN = [page for page in PAGES if any(here(words) for words in commands(page))]


def sizes(**more):
    return {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4} | more


@functools.cache
def tokenizer():
    return wrapped("byte level")


def encoder():
    from transformers import BertConfig, BertModel

    return BertModel(
        BertConfig(vocab_size=len(tokenizer()), max_position_embeddings=512, **sizes(intermediate_size=512))
    )


def decoder():
    from transformers import LlamaConfig, LlamaForCausalLM

    ends = {"bos_token_id": 0, "eos_token_id": 0}
    wide = sizes(intermediate_size=256)
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer()), max_position_embeddings=512, **wide, **ends))


def mixture():
    from transformers import MixtralConfig, MixtralForCausalLM

    few = sizes(num_local_experts=4, num_key_value_heads=2)
    return MixtralForCausalLM(MixtralConfig(vocab_size=len(tokenizer()), max_position_embeddings=512, **few))


NAMES = {  # what pages call their directories
    **dict.fromkeys(["minilm", "MiniLM"], encoder),
    **dict.fromkeys(["llama", "smollm", "smollm2", "mt5", "model", "MODEL", "DIR"], decoder),
    "mixture": mixture,
}
PRUNED = {"minilm-2of4": "minilm", "minilm-90": "minilm", "pruned-model": "model"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a directory of each kind."""
    folder = tmp_path_factory.mktemp("kinds")
    for kind in (encoder, decoder, mixture):
        torch.manual_seed(0)
        kind().save_pretrained(folder / kind.__name__)
        tokenizer().save_pretrained(folder / kind.__name__)
    return folder


@pytest.fixture
def desk(made, tmp_path, monkeypatch):
    """What pages take to be there, in the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("text.txt", "a.txt", "b.txt"):
        Path(name).write_text(TEXT[:150] * 30, encoding="utf-8")
    for name, text in (("text.jsonl", TEXT[:150]), ("more.jsonl", TEXT[150:300])):
        Path(name).write_text((json.dumps({"text": text}) + "\n") * 40, encoding="utf-8")
    Path("models.py").write_text(MODELS)
    weights = {f"{layer}.weight": torch.zeros(16, inputs, 3, 3) for layer, inputs in ((0, 3), (2, 16))}
    for weight in weights.values():
        weight[:, 0, 1, 1] = 1
    save_file(weights | {f"{layer}.bias": torch.ones(16) for layer in (0, 2)}, "cnn-95.safetensors")
    yield made
    sys.modules.pop("models", None)


def lay_out(words, page, made):
    """The directories that a command reads, where no command before it wrote them."""
    written = {words[at + 1] for at, word in enumerate(words[:-1]) if word == "--out"}
    for word in {word.removeprefix("./").rstrip("/") for word in words} - written:
        if Path(word).exists():
            continue
        if word in PRUNED:
            lay_out([PRUNED[word]], page, made)
            # columns are packed without kernels, too
            pattern = ["columns:32", "--sparsity", "0.9"] if word == "minilm-90" else ["2:4"]
            assert run("prune", PRUNED[word], "--out", word, "--pattern", *pattern).exit_code == 0
        elif word in NAMES:
            kind = mixture if page.name == "experts.md" else NAMES[word]
            shutil.copytree(made / kind.__name__, word)


@pytest.mark.examples
@pytest.mark.parametrize("page", SHOWN, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_of_a_page_run(page, desk):
    for words in commands(page):
        if not here(words):
            continue
        assert words[0] == "secateur", f"{words[0]} is neither run here nor named in ELSEWHERE"
        lay_out(words, page, desk)
        written = words[words.index("--out") + 1] if "--out" in words else None
        if written and Path(written).is_dir():  # the page shows another way to write it
            shutil.rmtree(written)
        ended = run(*(INSTEAD.get(word, word) for word in words[1:]), *SHORT.get(words[1], []))
        assert ended.exit_code == 0, f"{' '.join(words)}\n{ended.output}"


def test_what_is_elsewhere_is_shown():
    shown = [words for page in PAGES for words in commands(page)]
    for start in ELSEWHERE:
        assert any(begins(words, start) for words in shown), f"no page shows {start}: leave it out of ELSEWHERE"
