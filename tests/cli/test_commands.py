"""The command as a person or a script meets it: output, exit codes, one line for what is wrong."""

import importlib
import json
import pathlib
import re
import resource
import signal
import subprocess
import sys
import threading

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import secateur.demo
from secateur.checkpoints import pruning as checkpoint_sparsification
from secateur.cli import commands as cli
from secateur.cli import terminal
from secateur.native import describe
from secateur.shrinking import branches as depth
from secateur.shrinking import subject, tables
from secateur.version import __version__


def run(*arguments, env=None):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments], env=env, prog_name="secateur")


def fails(result, message):
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert re.fullmatch(rf"secateur: .*{message}.*\n", result.stderr), result.stderr


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "dense"
    folder.mkdir()
    torch.manual_seed(0)
    tensors = {f"model.layers.{n}.mlp.up_proj.weight": torch.randn(16, 16, dtype=torch.float16) for n in range(11)}
    tensors["model.embed_tokens.weight"] = torch.randn(32, 16)
    tensors["model.norm.weight"] = torch.ones(16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text("{}")
    return folder


def test_help_and_version():
    assert run("--version").stdout == f"secateur {__version__}\n{describe()}\n"
    text = run("--help").stdout
    for word in ("inspect", "prune", "shrink", "demo"):
        assert re.search(rf"^  {word} .*\.$", text, re.MULTILINE)  # a whole sentence on one line
    for command in [command.name or command.callback.__name__ for command in cli.app.registered_commands]:
        assert run(command, "-h").exit_code == 0
    assert run().exit_code == 2


@pytest.mark.parametrize("command", ["shrink", "bench"])
def test_help_says_that_code_is_run(command):
    text = " ".join(re.sub("[^a-z:. ]", " ", run(command, "--help").stdout).split())
    assert "the module is imported and its code is run" in text
    assert "name only what you trust" in text


def test_python_m_secateur():
    done = subprocess.run([sys.executable, "-m", "secateur", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"secateur {__version__}\n{describe()}\n"


# ---- inspect -----------------------------------------------------------------------------------------------------


def test_inspect_is_one_line_a_tensor(model):
    result = run("inspect", model)
    assert result.exit_code == 0
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["Tensor", "Shape", "Dtype", "Size", "Zeros", "Patterns"]
    assert lines[1].split() == ["model.embed_tokens.weight", "32x16", "F32", "2.05", "kB", "0%"]
    assert lines[4].split()[0] == "model.layers.2.mlp.up_proj.weight"
    assert lines[12].split()[0] == "model.layers.10.mlp.up_proj.weight"
    assert re.search(r"^all +13 +3,344 +7\.74 kB +0%$", result.stdout, re.MULTILINE)
    assert all(line == line.rstrip() for line in lines)


def test_inspect_groups_layers(model):
    result = run("inspect", "--group", model)
    assert re.search(r"model\.layers\.\*\.mlp\.up_proj\.weight \(x11\) +16x16 +F16 +5\.63 kB +0%", result.stdout)


def test_inspect_json(model, tmp_path):
    run("prune", model, "--out", tmp_path / "out", "--pattern", "2:4")
    result = run("inspect", "--json", tmp_path / "out")
    assert result.stderr == ""
    found = json.loads(result.stdout)
    assert found["total"]["tensors"] == 13
    assert found["files"] == ["model.safetensors"]
    assert found["metadata"] == {"model.safetensors": {"format": "pt"}}
    by_name = {tensor["name"]: tensor for tensor in found["tensors"]}
    assert by_name["model.layers.3.mlp.up_proj.weight"] == {
        "name": "model.layers.3.mlp.up_proj.weight",
        "file": "model.safetensors",
        "dtype": "F16",
        "shape": [16, 16],
        "inputs_first": False,
        "parameters": 256,
        "bytes": 512,
        "zeros": 128,
        "sparsity": 0.5,
        "n_m": "2:4",
        "block": None,
        "channels": None,
    }


def test_inspect_shows_names_and_not_what_they_do(tmp_path):
    save_file({"evil\x1b[2J\n[bold]x": torch.zeros(2, 2)}, tmp_path / "x.safetensors")
    result = run("inspect", tmp_path / "x.safetensors")
    assert "\x1b" not in result.stdout
    assert r"evil\x1b[2J\n[bold]x" in result.stdout
    assert "all zero" in result.stdout


def test_inspect_folds_long_names_on_a_terminal(tmp_path, monkeypatch):
    name = ".".join(["layer"] * 30)
    save_file({name: torch.ones(2)}, tmp_path / "x.safetensors")
    monkeypatch.setattr(
        terminal, "console", lambda: Console(width=80, force_terminal=True, color_system=None, markup=False)
    )
    result = run("inspect", tmp_path / "x.safetensors")
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert result.stdout.count("layer") == 30
    assert result.stdout.splitlines()[2].startswith("  layer.")


def test_the_reader_of_a_pipe_may_leave(model):
    command = f"'{sys.executable}' -m secateur inspect '{model}' | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("Tensor")
    assert done.stderr == ""


# ---- prune -------------------------------------------------------------------------------------------------------


def test_prune_says_what_it_did(model, tmp_path):
    (model / "pytorch_model.bin").write_bytes(b"dense")
    result = run("prune", model, "--out", tmp_path / "out", "--sparsity", "0.75", "--allocate", "uniform")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert re.search(r"^pruned +11 +2,816 +75\.0%$", result.stdout, re.MULTILINE)
    assert re.search(r"^whole model +13 +3,344 +63\.2%$", result.stdout, re.MULTILINE)
    assert re.search(r"^embeddings +1 +512 +model\.embed_tokens\.weight$", result.stdout, re.MULTILINE)
    assert re.search(r"^vectors and scalars +1 +16 +model\.norm\.weight$", result.stdout, re.MULTILINE)
    assert "not pruned: pytorch_model.bin" in result.stdout
    assert "make the files no smaller" in result.stdout
    record = json.loads((tmp_path / "out/secateur.json").read_text())
    assert record["arguments"]["sparsity"] == 0.75
    assert record["arguments"]["command"].startswith(f"secateur prune {model} --out")
    assert (tmp_path / "out/model.safetensors").stat().st_size == (model / "model.safetensors").stat().st_size


def test_prune_passes_every_option_on(model, tmp_path):
    result = run(
        *("prune", model, "--out", tmp_path / "out", "-s", "0.5", "-p", "4x4", "--allocate", "erk", "--criterion"),
        *("random", "--seed", "3", "--include", "*.1.*", "--include", "*.2.*", "--exclude", "*.2.mlp*"),
    )
    assert result.exit_code == 0, result.output
    sparse = {name for name, tensor in load_file(tmp_path / "out/model.safetensors").items() if (tensor == 0).any()}
    assert sparse == {"model.layers.1.mlp.up_proj.weight"}
    arguments = json.loads((tmp_path / "out/secateur.json").read_text())["arguments"]
    assert (arguments["criterion"], arguments["seed"], arguments["include"]) == ("random", 3, ["*.1.*", "*.2.*"])
    assert run("prune", model, "--out", tmp_path / "b", "-s", "0.5", "--criterion", "lamp").exit_code == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sparsity", "nan"], "got nan"),
        (["--sparsity", "90"], r"For 90 percent write 0\.9"),
        (["--sparsity", "1"], "every weight"),
        (["--sparsity", "-0.5"], "got -0.5"),
        ([], "needs a sparsity"),
        (["--pattern", "2:4", "--sparsity", "0.7"], r"2:4 removes 0\.5"),
        (["--pattern", "2:4", "--allocate", "erk"], "leave --allocate out"),
        (["--pattern", "stripes", "-s", "0.5"], "no pattern is called 'stripes'"),
        (["--pattern", "3:2"], "n:m keeps n of every m"),
        (["-s", "0.5", "--include", "*.up_prj.weight"], r"Close names: model\.layers\.\d+\.mlp\.up_proj\.weight"),
        (["-s", "0.5", "--exclude", "*"], "nothing to prune"),
    ],
)
def test_wrong_usage_is_one_line(model, tmp_path, options, message):
    fails(run("prune", model, "--out", tmp_path / "out", *options), message)
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_wrong_options_exit_with_2(model, tmp_path):
    for options in (["--sparsity", "much"], ["--allocate", "somewhere"], ["--nonsense"]):
        assert run("prune", model, "--out", tmp_path / "out", *options).exit_code == 2
    assert run("prune", model).exit_code == 2


def test_wrong_files_are_one_line(model, tmp_path):
    fails(run("inspect", tmp_path / "gone"), "no such file")
    (tmp_path / "x.safetensors").write_bytes(b"PK\x03\x04 not a tensor file")
    fails(run("inspect", tmp_path / "x.safetensors"), "not a safetensors file")
    fails(run("prune", model, "--out", model, "-s", "0.5"), "replace the input")
    fails(run("prune", tmp_path / "gone", "--out", tmp_path / "out", "-s", "0.5"), "no such directory")
    with open(model / "model.safetensors", "r+b") as file:
        file.truncate(3000)
    fails(run("inspect", model), "truncated")
    fails(run("prune", model, "--out", tmp_path / "out", "-s", "0.5"), "truncated")
    assert not (tmp_path / "out").exists()
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to("gone")
    fails(run("inspect", model), "No such file or directory")


def test_debug_shows_the_traceback(tmp_path):
    result = run("inspect", tmp_path / "gone", env={"SECATEUR_DEBUG": "1"})
    assert isinstance(result.exception, ValueError)


def test_a_full_disk_is_one_line(model, tmp_path):
    """A limit on file sizes stands in for the full disk: the copy fails in the middle."""

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))

    command = [sys.executable, "-m", "secateur", "prune", model, "--out", tmp_path / "out", "-s", "0.5"]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit, check=False)
    assert done.returncode == 2
    assert re.fullmatch(r"secateur: .*out\.unfinished-.*File too large\.\n", done.stderr), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


@pytest.mark.parametrize(
    ("failure", "code", "message"),
    [
        (OSError(28, "No space left on device", "/disk/out"), 2, r"/disk/out: No space left on device\."),
        (PermissionError(13, "Permission denied", "/disk"), 2, r"/disk: Permission denied\."),
        (OSError(30, "Read-only file system", "/disk"), 2, r"Read-only file system\."),
        (MemoryError(), 2, "not enough memory"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
            2,
            "not enough memory",
        ),
        (KeyboardInterrupt(), 130, r"interrupted; nothing was written\."),
    ],
)
def test_failures_are_one_line_and_leave_nothing(model, tmp_path, monkeypatch, failure, code, message):
    def fail(*_):
        raise failure

    monkeypatch.setattr(checkpoint_sparsification, "write_tensor", fail)
    result = run("prune", model, "--out", tmp_path / "out", "-s", "0.5")
    assert result.exit_code == code
    assert re.fullmatch(rf"secateur: .*{message}\n", result.stderr) or message in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_a_fault_of_our_own_is_not_hidden(model, tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr(checkpoint_sparsification, "write_tensor", fail)
    assert isinstance(run("prune", model, "--out", tmp_path / "out", "-s", "0.5").exception, RuntimeError)
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


STALLED = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what runs in the background
from secateur.checkpoints import pruning as checkpoint_sparsification
def wait(*_):
    print("writing", flush=True)
    time.sleep(60)
checkpoint_sparsification.write_tensor = wait
from secateur.cli import main
main(["prune", sys.argv[1], "--out", sys.argv[2], "-s", "0.5"])
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_signals(model, tmp_path, number, code):
    command = [sys.executable, "-c", STALLED, model, tmp_path / "out"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "writing\n"
        process.send_signal(number)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == code
    assert "Traceback" not in stderr
    left = sorted(path.name for path in tmp_path.iterdir())
    if number == signal.SIGKILL:  # nobody can tidy up: the name says what it is
        assert re.fullmatch(r"out\.unfinished-[0-9a-f]{8}", left[1])
        left.pop(1)
    assert left == ["dense"]


# ---- shrink ------------------------------------------------------------------------------------------------------


ZOO = """
import torch
from torch import nn


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(11))
        self.head = nn.Linear(8, 30, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens, scale=1.0):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return scale * self.head(x)


def build():
    torch.manual_seed(0)
    return Tied()


def unfit():
    return Tied().blocks


class Nested:
    build = staticmethod(build)


built = build()
tokens = torch.arange(30).reshape(2, 15)
number = 3


def as_dict():
    return {"tokens": tokens, "scale": 2.0}


def as_tuple():
    return tokens, 2.0


def fails():
    raise RuntimeError("there is no such thing.")
"""


@pytest.fixture
def zoo(tmp_path, monkeypatch):
    """The name of a module in the current directory, a new one for each test."""
    name = f"zoo_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(ZOO)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield name
    sys.modules.pop(name, None)


def shrunk(zoo, *more, factory="build", example="tokens", sparsity=0.5):
    return run("shrink", f"{zoo}:{factory}", "--example", f"{zoo}:{example}", "--sparsity", sparsity, *more)


def test_shrink_writes_what_load_shrunken_reads(zoo, tmp_path):
    result = shrunk(zoo, "--out", "out")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["model.safetensors", "plan.json"]
    lines = [line.strip() for line in result.stdout.splitlines()[-3:]]
    assert lines[1:] == [f"from {zoo} import build", "model = load_shrunken(build(), 'out')"]
    said = {}
    exec("\n".join(lines), said)
    model = said["model"]
    assert model(torch.arange(30)).shape == (30, 30)
    left = sum(parameter.numel() for parameter in model.parameters())
    dense = sum(parameter.numel() for parameter in said["build"]().parameters())
    assert re.search(rf"^parameters +{dense:,} +{left:,} +{left / dense:.1%}$", result.stdout, re.MULTILINE)
    assert 0.4 < left / dense <= 0.5


def test_shrink_says_what_leaves_together_and_what_stays(zoo):
    result = shrunk(zoo, "--dry-run")
    text = result.stdout
    assert re.search(
        r"^blocks\.\*\.0\.weight \(x11\) +16 -> \d+  blocks\.\*\.0\.bias\[0\], blocks\.\*\.2\.weight\[1\]$",
        text,
        re.MULTILINE,
    )
    assert re.search(
        r"^blocks\.0\.2\.weight +8 -> \d  embed\.weight\[1\], blocks\.\*\.0\.weight\[1\], 2 more$", text, re.MULTILINE
    )
    assert re.search(r"^.*an output of the model.* +1  embed\.weight\[0\]$", text, re.MULTILINE)
    assert "Proved on random weights that nothing else changed" in text
    assert text.endswith("Nothing was written.\n")
    assert all(line == line.rstrip() for line in text.splitlines())


def test_shrink_names_the_branches_that_leave(zoo, tmp_path):
    result = shrunk(zoo, "--branches", "0.4", "--out", "out", sparsity=0)
    assert result.exit_code == 0, result.output
    assert len(re.findall(r"^blocks\.\d+ +280$", result.stdout, re.MULTILINE)) == 5  # 4.4 of 11, rounded up
    assert "5 of 11 residual branches leave." in result.stdout
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert len(plan["plans"][0]["modules"]) == 5
    assert "stays" not in shrunk(zoo, "--branches", "0.1", "--exclude", "blocks.0", "--dry-run").stdout


def test_shrink_says_which_branches_the_proof_kept(zoo, monkeypatch):
    asked = []

    def wrong(_model, _coupling, branches, _inputs):
        asked.append(branches)
        found = {branches[0]: "output 0 differs"} if len(asked) == 1 else {}
        return {each: each for each in branches if each not in found}, found

    monkeypatch.setattr(depth, "right_branches", wrong)
    text = shrunk(zoo, "--branches", "0.2", "--dry-run").stdout
    assert f"{asked[0][0].name} stays: the model without it: output 0 differs." in text
    assert "3 of 11 residual branches leave." in text


def test_shrink_says_what_the_proof_froze(zoo, monkeypatch):
    asked = []

    def wrong(_model, _coupling, groups, *_):
        asked.append(groups)
        return groups[1:2] if len(asked) == 1 else []

    monkeypatch.setattr(subject, "wrong_groups", wrong)
    text = shrunk(zoo, "--dry-run", sparsity=0.2).stdout
    assert "the smaller model computed something else" in text


def test_shrink_shows_everything_when_asked(zoo):
    text = shrunk(zoo, "--dry-run", "--verbose", "--no-verify").stdout
    assert re.search(
        r"^blocks\.10\.0\.weight +16 -> \d+  blocks\.10\.0\.bias\[0\], blocks\.10\.2\.weight\[1\]$", text, re.MULTILINE
    )
    assert re.search(r"^blocks\.0\.2\.weight .*, blocks\.10\.2\.bias\[0\]$", text, re.MULTILINE)
    assert re.search(r"^embed\.weight\[0\] .*an output of the model", text, re.MULTILINE)
    assert "Not proved, as asked" in text


def test_shrink_stops_listing_reasons(zoo, monkeypatch):
    monkeypatch.setattr(tables, "_SHOWN", 0)
    assert "and for 1 more reason: --verbose shows all." in shrunk(zoo, "--dry-run").stdout


@pytest.mark.parametrize("example", ["tokens", "as_dict", "as_tuple"])
@pytest.mark.parametrize("factory", ["build", "built", "Nested.build"])
def test_shrink_takes_values_and_functions(zoo, tmp_path, factory, example):
    result = shrunk(zoo, "--out", "out", "--no-verify", factory=factory, example=example)
    assert result.exit_code == 0, result.output
    call = {"build": "build()", "built": "built", "Nested.build": "Nested.build()"}[factory]
    assert f"from {zoo} import {factory.partition('.')[0]}\n" in result.stdout
    assert result.stdout.endswith(f"load_shrunken({call}, 'out')\n")


def test_shrink_passes_its_options_on(zoo):
    def units(*more):
        text = shrunk(zoo, "--dry-run", *more).stdout
        return [line.split("  ")[0].split()[0] + " " + " ".join(re.findall(r"\d+ -> \d+", line))
                for line in text.splitlines() if re.search(r"blocks.* \d", line)][:2]  # fmt: skip

    assert units("--target", "units") == ["blocks.0.2.weight 8 -> 4", "blocks.*.0.weight 16 -> 8"]
    assert units("--target", "units", "--round-to", "3", "-s", "0.4") == [
        "blocks.0.2.weight 8 -> 6",
        "blocks.*.0.weight 16 -> 9",
    ]
    assert units("--exclude", "embed.*") == ["blocks.0.2.weight ", "blocks.*.0.weight 16 -> 7"]
    assert units("--include", "*.2.bias", "--target", "units") == ["blocks.0.2.weight 8 -> 4", "blocks.*.0.weight "]


def test_shrink_ranks_the_weights_that_it_is_given(zoo, tmp_path):
    sys.path.insert(0, str(tmp_path))
    model = importlib.import_module(zoo).build()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(0.01)
            if name.endswith("0.weight"):
                parameter[5:9] = 1.0
    state = model.state_dict()
    state.pop("head.weight")  # it is embed.weight
    save_file(state, tmp_path / "trained.safetensors")
    arguments = ("--weights", "trained.safetensors", "--include", "*.0.bias", "--target", "units", "--out", "out")
    assert shrunk(zoo, *arguments, sparsity=0.75).exit_code == 0
    assert torch.equal(load_file("out/model.safetensors")["blocks.3.0.weight"], torch.ones(4, 8))


def test_shrink_refuses_weights_that_do_not_fit(zoo, tmp_path):
    def refused(message, **tensors):
        save_file({**state, **tensors}, "wrong.safetensors")
        fails(shrunk(zoo, "--dry-run", "--weights", "wrong.safetensors"), message)

    sys.path.insert(0, str(tmp_path))
    state = importlib.import_module(zoo).build().state_dict()
    state.pop("head.weight")
    refused(r"wrong.safetensors does not fit the model: it holds what the model does not have: x\.", x=torch.ones(1))
    refused(r"embed.weight has shape \(8, 30\), in the model \(30, 8\)", **{"embed.weight": torch.ones(8, 30)})
    state.pop("blocks.0.0.bias")
    refused(r"it lacks blocks.0.0.bias\.")
    state.clear()
    refused(r"it lacks embed.weight, blocks.0.0.weight, blocks.0.0.bias and 43 more\.", x=torch.ones(1))
    fails(shrunk(zoo, "--dry-run", "--weights", "nowhere"), "nowhere: no such file or directory")


@pytest.mark.parametrize(
    ("factory", "example", "message"),
    [
        ("missing_module:build", "{}:tokens", "there is no module missing_module, neither in this directory"),
        ("{}", "{}:tokens", "names nothing in a module; write it module.path:name, as in models.vision:build"),
        ("{}:other", "{}:tokens", "has no other"),
        ("{}:number", "{}:tokens", "number is of type int; give a function that makes a torch.nn.Module"),
        ("{}:as_dict", "{}:tokens", r"as_dict\(\) gave a value of type dict, not a torch.nn.Module"),
        ("{}:fails", "{}:tokens", r"fails\(\) raised RuntimeError: there is no such thing\. SECATEUR_DEBUG=1 shows"),
        ("{}:build", "{}:number", "number gave a value of type int; give a tensor, a tuple of arguments or a dict"),
        ("{}:build", "{}:fails", r"fails\(\) raised RuntimeError"),
        ("{}:unfit", "{}:tokens", "unfit, run on zoo_.*:tokens, raised NotImplementedError"),
    ],
)  # fmt: skip
def test_shrink_says_whose_code_is_at_fault(zoo, tmp_path, factory, example, message):
    result = run("shrink", factory.format(zoo), "--example", example.format(zoo), "-s", "0.5", "--out", "out")
    fails(result, message)
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".py"] in ([], ["__pycache__"])


def test_shrink_tells_a_missing_module_from_one_that_does_not_import(zoo, tmp_path):
    (tmp_path / f"{zoo}.py").write_text("import not_installed_anywhere")
    fails(shrunk(zoo, "--dry-run"), f"importing {zoo} raised ModuleNotFoundError: .*not_installed_anywhere")


def test_shrink_refuses_what_it_cannot_do(zoo, tmp_path):
    fails(shrunk(zoo), "give --out DIR, the directory to write, or --dry-run")
    fails(shrunk(zoo, "--out", "."), "already exists; nothing is overwritten")
    fails(shrunk(zoo, "--out", "no/where"), "no: no such directory; create it first")
    fails(shrunk(zoo, "--out", "out", sparsity=1.5), "sparsity is the fraction that is removed")
    fails(shrunk(zoo, "--out", "out", "--include", "nothing"), "'nothing' matches no tensor of the model")
    fails(shrunk(zoo, "--out", "out", "--exclude", "*"), "nothing of the model can leave")
    assert not list(tmp_path.glob("out*"))


def test_shrink_leaves_nothing_of_what_it_could_not_write(zoo, tmp_path, monkeypatch):
    def full(model, folder):
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device", str(folder))

    monkeypatch.setattr("secateur.shrinking.save_shrunken", full)
    result = shrunk(zoo, "--out", "out", "--no-verify")
    fails(result, "No space left on device")
    assert not list(tmp_path.glob("out*"))


def test_shrink_says_what_the_wait_is_for(zoo, monkeypatch, capsys):
    monkeypatch.setattr("secateur.support.PATIENCE", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with terminal.waiting("Thinking"):
        threading.Event().wait(0.2)
    assert "Thinking" in capsys.readouterr().err
    monkeypatch.setattr("secateur.support.PATIENCE", 60.0)
    with terminal.waiting("Thinking"):
        pass
    assert "Thinking" not in capsys.readouterr().err
    monkeypatch.setenv("SECATEUR_PROGRESS", "0")
    monkeypatch.setattr("secateur.support.PATIENCE", 0.0)
    with terminal.waiting("Thinking"):
        threading.Event().wait(0.1)
    assert capsys.readouterr().err == ""


# ---- demo -----------------------------------------------------------------------------------------------------------


def test_demo_is_passed_on(tmp_path, monkeypatch):
    called = []
    monkeypatch.setattr(secateur.demo, "run_demo", lambda out, **settings: called.append((out, settings)))
    assert run("demo").exit_code == 0
    assert run("demo", "--out", tmp_path / "page").exit_code == 0
    assert run("demo", "--method", "lamp,erk", "--method", "2:4", "--train").exit_code == 0
    assert called == [
        (None, {"methods": None, "training": False}),
        (tmp_path / "page", {"methods": None, "training": False}),
        (None, {"methods": ["lamp,erk", "2:4"], "training": True}),
    ]


def test_demo_lists_its_methods(monkeypatch):
    monkeypatch.setattr(secateur.demo, "run_demo", None)  # nothing runs
    result = run("demo", "--method", "list")
    assert result.exit_code == 0
    assert result.stderr == ""
    *lines, empty, legend = result.stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(secateur.demo.METHODS)
    starred = [line.split()[0] for line in lines if line[11] == "*"]
    assert starred == list(secateur.demo.DEFAULT_METHODS)
    assert (empty, legend) == ("", "* without --method")
    assert all(len(line) <= 100 for line in lines)
    assert run("demo", "--method", "lamp,list").stdout == result.stdout


def test_demo_refuses_an_unknown_method(tmp_path):
    fails(
        run("demo", "--method", "lamp,lam", "--out", tmp_path / "page"), "no method 'lam'; there are magnitude, erk, "
    )
    assert not list(tmp_path.iterdir())


def test_demo_without_its_extras(monkeypatch):
    def fail(_, **settings):
        raise ModuleNotFoundError("No module named 'sklearn'; pip install 'secateur[demo]'.")

    monkeypatch.setattr(secateur.demo, "run_demo", fail)
    fails(run("demo"), r"secateur\[demo\]")


# ---- the documentation -------------------------------------------------------------------------------------------


def test_every_option_is_documented():
    text = (pathlib.Path(__file__).parents[2] / "docs/command.md").read_text()
    for command in [command.name or command.callback.__name__ for command in cli.app.registered_commands]:
        for option in re.findall(r"--[a-z]+", run(command, "--help").stdout):
            assert option in text or option == "--help", option
