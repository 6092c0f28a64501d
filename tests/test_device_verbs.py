"""Each verb, and each thing that may leave, on a device that is not the CPU: a table of where it runs, or why not.

Law: results are the CPU's, but for what `TOLERANCE` says; nothing is drawn from the device's generator.
"""

import contextlib
import copy
import inspect
import io
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
import typer
from torch import nn

import secateur
from secateur import (
    attach,
    deploy,
    detach,
    env,
    kinds,
    load_compressed,
    make_masks,
    pack,
    reached,
    recover,
    sensitivity,
    shrink,
    shrink_vocabulary,
    sparsify,
    sparsity_of,
)
from secateur.cli import commands, measuring
from secateur.evidence import collect
from secateur.kinds import Blocks, Experts, Heads, Outputs
from secateur.shrinking import gates
from secateur.support import alternating, moved
from secateur.targets import find_targets
from support import mixtures
from support.commands import run
from support.device import DEVICES, TOLERANCE, distance, let_go, on_device
from support.families import batches as texts
from support.families import make
from support.tokenizers_of_words import WORDS, write_tokenizer
from support.vocabularies import TEXT, model_of, wrapped

each_device = pytest.mark.parametrize("device", DEVICES)
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module", autouse=True)
def _no_longer():
    yield
    let_go()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


def stack(device):
    return nn.Sequential(*(Block() for _ in range(3))).to(device).eval()


def numbers(scores):
    return {name: torch.tensor(each) for name, each in scores.items()}


CASES = {}


def case(name):
    return lambda body: CASES.setdefault(name, body)


# ------------------------------------------------------------------------------------------------------- in memory


@case("attach")
def _(device):
    model = env._convolutions(device)
    attach(model, make_masks(find_targets(model), 0.5))
    out, share = model(torch.randn(4, 3, 12, 12).to(device)), torch.tensor(sparsity_of(model))
    detach(model)
    return model.state_dict() | {"out": out, "share": share}


@case("collect")
def _(device):
    words = ["input_norm", "grad_sq", "grad", "flow", "hessian_grad"]
    found = collect(env._convolutions(device), env._images(2), words, loss=loss)
    return {f"{name} {word}": each for name, evidence in found.items() for word, each in evidence.items()}


def loss(outputs, labels):
    return nn.functional.cross_entropy(outputs, labels.to(outputs.device))


@case("shrink, branches")
def _(device):
    model = stack(device)
    shrink(model, leave="branches:1", sparsity=0.3, batches=env._vectors())
    return model.state_dict()


@case("shrink, branches without data")
def _(device):
    model = stack(device)
    shrink(model, env._vectors()[0].to(device), leave="branches:1")
    return model.state_dict()


@case("shrink, experts")
def _(device):
    model = mixtures.mixtral().to(device)
    shrink(model, leave="experts:25%", batches=mixtures.batches(2))
    return model.state_dict()


@case("shrink, outputs")
def _(device):
    model = env._convolutions(device).eval()
    shrink(model, torch.randn(2, 3, 12, 12).to(device), leave=Outputs("8", keep=[0, 2, 5]))
    return model.state_dict()


@case("shrink, heads by number")
def _(device):
    model = make("bert").to(device).eval()
    shrink(model, moved(texts("bert")[0], device), leave=Heads({0: [1]}))
    return model.state_dict()


@case("shrink, gates")
def _(device):
    model = stack(device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gates, "STEPS", 8)
        shrink(model, sparsity=0.3, batches=env._vectors(), choose="gates")
    return model.state_dict()


@case("shrink_vocabulary")
def _(device):
    tokenizer = wrapped("byte level")
    model = model_of("tied", len(tokenizer)).to(device)
    done = shrink_vocabulary(model, tokenizer, [TEXT[:200]], keep=300, rank="distance")
    return model.state_dict() | {"order": torch.as_tensor(done.order)}


@case("reached")
def _(device):
    images = [batch for batch, _ in env._images(2)]
    found = reached(env._convolutions(device), {"one": images[:1], "both": images})
    return {"as it is told": torch.tensor(list(str(found).encode()))}


@case("recover, by the outputs")
def _(device):
    teacher = stack(device)
    model = copy.deepcopy(teacher)
    sparsify(model, 0.5)
    recover(model, teacher, env._vectors(), steps=3, local=0)
    return model.state_dict()


@case("pack, with kernels and int8")
def _(device):
    found = {}
    for values in (None, "int8"):
        model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64)).to(device).eval()
        x = torch.randn(4, 128).to(device)
        sparsify(model, 0.75, pattern="columns:64")
        pack(model, x, at_least=1e-6, values=values)
        found[f"out {values}"] = model(x)
    return found


@case("deploy")
def _(device):
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32)).to(device).eval()
    batches = [torch.randn(16, 64) for _ in range(2)]
    with tempfile.TemporaryDirectory() as folder:
        deploy(model, batches, budget={"bytes": 0.6}, out=Path(folder) / "out", shares=(0.5,), finals=1)
    assert {each.device.type for each in model.parameters()} == {device.type}
    return model.state_dict()


# --------------------------------------------------------------------------------------------------- of a directory


def of_directory(name, family="llama"):
    def given(verb):
        def body(device):
            with tempfile.TemporaryDirectory() as folder:
                dense, out = Path(folder) / "dense", Path(folder) / "out"
                make(family).save_pretrained(dense)
                found = verb(dense, texts(family, count=4), out=out, device=device)
                return found if isinstance(found, dict) else dict(load_compressed(out))

        CASES[name] = body

    return given


of_directory("shrink, blocks, a directory")(
    lambda dense, batches, **how: shrink(dense, leave=Blocks(1), batches=batches, **how)
)
of_directory("shrink, experts by a profile, a directory", "mixtral")(
    lambda dense, batches, out, **how: shrink(
        dense, leave=Experts(0.25, profile=out.with_name("profile")), batches=batches, out=out, **how
    )
)


@of_directory("shrink, gates, a directory")
def _(dense, batches, **how):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gates, "STEPS", 4)
        shrink(dense, sparsity=0.3, choose="gates", batches=batches, **how)


@of_directory("sensitivity, a directory")
def _(dense, batches, out, device):
    return numbers(sensitivity(dense, batches, shares=(0.5,), device=device).scores)


@of_directory("reached, a directory", "mixtral")
def _(dense, batches, out, device):
    found = reached(dense, {"all": batches, "one": batches[:1]}, device=device)
    return {"as it is told": torch.tensor(list(str(found).encode()))}


def command(name, *words):
    """Of a verb with ``--device``: what it writes, and the lines that it prints."""

    def body(device):
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            make("llama").save_pretrained(root / "dense")
            write_tokenizer(root / "dense")
            (root / "text.txt").write_text(" ".join(WORDS[(7 * n + n // 5) % len(WORDS)] for n in range(300)))
            sparsify(root / "dense", 0.5, out=root / "sparse")
            said = [root / each[1:] if str(each).startswith("@") else each for each in words]
            more = ["--data", root / "text.txt", "--samples", 4, "--sequence-length", 16, "--device", device]
            ended = run(name, *said, *more, "--out", root / "out")
            assert ended.exit_code == 0, ended.output
            return dict(load_compressed(root / "out"))

    CASES[f"secateur {name}"] = body


command("oneshot", "@dense", "--sparsity", 0.5)
command("shrink", "@dense", "--sparsity", 0.3)
command("recover", "@sparse", "--teacher", "@dense", "--steps", 2, "--local", 1)


def gives_what_the_cpu_gives(device, name):
    warnings.simplefilter("ignore")
    with contextlib.redirect_stderr(io.StringIO()):
        found = distance(device, CASES[name])
    assert found <= (TOLERANCE.get(name, (0.0,))[0] if device.type == "standin" else env.ALIKE), (name, found)


@each_device
@pytest.mark.parametrize("name", CASES)
def test_it_gives_what_it_gives_on_the_cpu(device, name):
    on_device(device, gives_what_the_cpu_gives, name)


# ------------------------------------------------------------------------------------- of a model that is on the device


def timed_by_commands(device):
    with contextlib.ExitStack() as held:
        patch = held.enter_context(pytest.MonkeyPatch.context())
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        patch.setattr(measuring, "ROUNDS", 1)
        patch.setattr(measuring, "SECONDS_A_TURN", 0.0)
        patch.syspath_prepend(folder)
        (folder / "of_device.py").write_text(MODULE.format(device=device))
        example = ("of_device:build", "--example", "of_device:inputs")  # which is on the CPU
        for name, *more in (
            ("bench", "-s", 0.9, "-p", "columns:16"),
            ("pack", "--at-least", 1e-6, "--out", folder / "packed"),
            ("cost", "--emit", folder / "probes"),
            ("shrink", "--sparsity", 0.5, "--out", folder / "small"),
        ):
            ended = run(name, *example, *more)
            assert ended.exit_code == 0, (name, ended.output, ended.exception)
            if name == "bench":
                assert f"No int8: torch has it for the CPU, and the model is on {device}" in ended.output


MODULE = """
import torch
def build():
    torch.manual_seed(0)
    layers = torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)
    layers[0].weight.data[:, torch.arange(64) % 4 > 0] = 0
    return torch.nn.Sequential(*layers).to("{device}").eval()
def inputs():
    return torch.randn(4, 64)
"""


@each_device
def test_commands_run_a_model_of_the_users_where_it_is(device):
    on_device(device, timed_by_commands)


def waits(device):
    x, copies = torch.ones(4, device=device), []
    alternating({"copy": lambda: copies.append(x.to("cpu", non_blocking=True))}, 2)
    assert all(each.tolist() == [1.0] * 4 for each in copies), "a call counts once it is done"


@each_device
def test_times_are_of_what_is_done(device):
    on_device(device, waits)


# ----------------------------------------------------------------------------------------------------------- the table

# of each: what runs it in memory, what runs it of a directory with a device; or, as docs/start/install.md says, why not
MODULES = "of modules alone"
DIRECTORIES = "of directories alone"
HOST = "of a directory on the host, a tensor at a time"
RUNTIME = "of a directory for a runtime of the processor"
TABLE = {
    "apply_": ("sparsify, wanda", MODULES),
    "attach": ("attach", MODULES),
    "deploy": ("deploy", RUNTIME),
    "detach": ("attach", MODULES),
    "fit": ("fit", "fit, a directory"),
    "load_compressed": ("save_compressed", HOST),
    "load_shrunken": ("shrink, channels", MODULES),
    "make_masks": ("make_masks, patterns", MODULES),
    "oneshot": ("oneshot", "oneshot, a directory"),
    "pack": ("pack, with kernels and int8", MODULES),
    "reached": ("reached", "reached, a directory"),
    "read_calibration": (DIRECTORIES, HOST),
    "recover": ("recover", "recover, a directory"),
    "save_compressed": ("save_compressed", HOST),
    "save_shrunken": ("shrink, channels", MODULES),
    "sensitivity": ("sensitivity", "sensitivity, a directory"),
    "shrink": ("shrink, channels", "shrink, a directory"),
    "shrink leave=Blocks": (DIRECTORIES, "shrink, blocks, a directory"),
    "shrink leave=Branches": ("shrink, branches", MODULES),
    "shrink leave=Experts": ("shrink, experts", "shrink, experts by a profile, a directory"),
    "shrink leave=Heads": ("shrink, heads by number", MODULES),
    "shrink leave=Outputs": ("shrink, outputs", HOST),
    "shrink choose=gates": ("shrink, gates", "shrink, gates, a directory"),
    "shrink_vocabulary": ("shrink_vocabulary", HOST),
    "sparsify": ("sparsify, wanda", HOST),
    "sparsity_of": ("attach", MODULES),
    "verify_checkpoint": (DIRECTORIES, HOST),
    "verify_shrunken": (DIRECTORIES, HOST),
}


def test_the_table_is_whole():
    verbs = {name: getattr(secateur, name) for name in secateur.__all__}
    verbs = {name: each for name, each in verbs.items() if inspect.isfunction(each)}
    kinds_of_leaving = {f"shrink leave={name}" for name in kinds.__all__ if isinstance(getattr(kinds, name), type)}
    assert {name for name in TABLE if "choose" not in name} == {*verbs} | kinds_of_leaving
    text = " ".join((ROOT / "docs/start/install.md").read_text().split())
    for name, cells in TABLE.items():
        for cell in cells:
            assert cell in {*CASES, *env._CHECKS} or cell in text, name
        if name in verbs and "device" in inspect.signature(verbs[name]).parameters:
            assert cells[1] in {*CASES, *env._CHECKS}, name
    of_commands = typer.main.get_command(commands.app).commands.items()
    with_device = {name for name, each in of_commands if "device" in {option.name for option in each.params}}
    assert {f"secateur {name}" for name in with_device} == {name for name in CASES if name.startswith("secateur ")}
