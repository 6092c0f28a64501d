"""``python -m secateur.env``: what a bug report needs, and nothing that names a person or a machine.

Law: it prints whatever can be found out; a package that is missing or broken is a line, not an error.
"""

import importlib.metadata

import torch

from secateur.native import describe
from secateur.report import environment

__all__ = ["described"]

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
        return "none that torch sees"
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return f"{', '.join(names)} (CUDA {torch.version.cuda}, ROCm {torch.version.hip})"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    width = max(map(len, described()))
    for what, which in described().items():
        print(f"{what.ljust(width)}  {which}")
