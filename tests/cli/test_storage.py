"""``secateur compress`` and ``secateur expand``: there and back, byte for byte, with a line for each encoding."""

from safetensors.torch import load_file, save_file

from support.commands import run


def test_there_and_back(model, tmp_path):
    tensors = load_file(model / "model.safetensors")
    for name in tensors:
        if "mlp" in name:
            tensors[name][:, ::2] = 0
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    before = (model / "model.safetensors").read_bytes()
    result = run("compress", model, "--out", tmp_path / "small")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["Encoding", "Tensors", "Dense", "Stored", "Ratio"]
    assert lines[-1].startswith(f"Wrote {tmp_path / 'small'}: ")
    assert run("expand", tmp_path / "small", "--out", tmp_path / "back").exit_code == 0
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == before
