"""The zoo of tests/zoo: every model runs, in both precisions, and is built the same every time.

Law: two builds of a name are bitwise equal, and building draws nothing from the generator of the caller.
"""

from pathlib import Path

import pytest
import torch

import zoo


def tensors(value):
    """All tensors of nested tuples, lists, dicts and the outputs of transformers, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if hasattr(value, "items"):
        return [tensor for _, entry in value.items() for tensor in tensors(entry)]
    if isinstance(value, (tuple, list)):
        return [tensor for entry in value for tensor in tensors(entry)]
    return []


def to_double(value):
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: to_double(entry) for key, entry in value.items()}
    return tuple(to_double(entry) for entry in value) if isinstance(value, tuple) else value


def run(model, inputs):
    with torch.no_grad():
        if isinstance(inputs, dict):
            return tensors(model(**inputs))
        return tensors(model(*inputs) if isinstance(inputs, tuple) else model(inputs))


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", list(zoo.ZOO))
def test_a_model(name):
    state = torch.get_rng_state()
    model, inputs = zoo.ZOO[name]()
    assert torch.equal(torch.get_rng_state(), state), "building drew from the caller's generator"
    torch.manual_seed(len(name))
    again, inputs_again = zoo.ZOO[name]()
    assert same(model.state_dict().values(), again.state_dict().values())
    assert same(tensors(inputs), tensors(inputs_again))
    assert not any(module.training for module in model.modules())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert sum(p.numel() for p in model.parameters()) < 1_000_000
    assert all(tensor.shape[0] == 2 for tensor in tensors(inputs))

    outputs = run(model, inputs)
    assert same(outputs, run(again, inputs_again))
    doubles = run(model.double(), to_double(inputs))
    assert any(tensor.is_floating_point() and tensor.dim() > 0 for tensor in doubles)
    for single, double in zip(outputs, doubles, strict=True):
        if double.is_floating_point():
            assert double.isfinite().all()
            torch.testing.assert_close(single.double(), double.double(), rtol=1e-3, atol=1e-3)


def test_kinds():
    assert [*zoo.names("hand"), *zoo.names("transformers")] == list(zoo.ZOO)
    with pytest.raises(ValueError, match='kind is "hand" or "transformers", not \'all\''):
        zoo.names("all")
    with pytest.raises(ValueError, match="the zoo has two models named 'mlp'"):
        zoo.hand(zoo.vector(3), name="mlp")(torch.nn.Identity)


def test_every_file_is_a_family():
    """A file that nobody lists would hold models that nobody checks."""
    files = {path.stem for path in Path(zoo.__file__).parent.glob("*.py")}
    assert files - {"__init__", "registry"} == set(zoo.FAMILIES)
