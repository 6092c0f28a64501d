"""What a directory holds, changed: a field of a file, or a tensor."""

import json

from safetensors.torch import load_file, save_file

from secateur.checkpoints import run as resumable


def changed(name, **fields):
    """Fields of a JSON file become others."""

    def change(folder):
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(values | fields))

    return change


def resealed(journal, damage):
    """A journal becomes another whose sum is right."""
    found = json.loads(journal.read_text())
    damage(found)
    found["sha256"] = resumable._digest(found)
    journal.write_text(json.dumps(found))


def tensor(name, change):
    """A tensor, or None where there is none, becomes another."""

    def changed(folder):
        tensors = load_file(folder / "model.safetensors")
        tensors[name] = change(tensors.get(name)).contiguous()
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return changed
