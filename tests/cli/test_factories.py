"""A model and its inputs, named as ``module:name``: values and functions, and whose code is at fault."""

import importlib
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.commands import fails, run
from support.shrunk import shrunk


@pytest.mark.parametrize("example", ["tokens", "as_dict", "as_tuple"])
@pytest.mark.parametrize("factory", ["build", "built", "Nested.build"])
def test_shrink_takes_values_and_functions(zoo, tmp_path, factory, example):
    result = shrunk(zoo, "--out", "out", "--no-verify", factory=factory, example=example)
    assert result.exit_code == 0, result.output
    call = {"build": "build()", "built": "built", "Nested.build": "Nested.build()"}[factory]
    assert f"from {zoo} import {factory.partition('.')[0]}\n" in result.stdout
    assert result.stdout.endswith(f"load_shrunken({call}, 'out')\n")


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
