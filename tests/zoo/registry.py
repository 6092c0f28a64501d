"""How a model gets into the zoo: built from its name as seed, its constants drawn at random, its statistics settled."""

from __future__ import annotations

import functools
import math
import re
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Inputs = Tensor | tuple[Any, ...] | dict[str, Any]

ZOO: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {}
_KINDS: dict[str, str] = {}


def names(kind: str) -> list[str]:
    """The names of one kind, "hand" or "transformers", in the order of the families."""
    if kind not in ("hand", "transformers"):
        raise ValueError(f'kind is "hand" or "transformers", not {kind!r}')
    return [name for name, its_kind in _KINDS.items() if its_kind == kind]


def _build(name: str, make: Callable[[], nn.Module], example: Callable[[], Inputs]) -> tuple[nn.Module, Inputs]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(name.encode()))
        model = make().eval()
        _randomize(model, _KINDS[name])
        inputs = example()
        _settle(model, inputs)
        return model, inputs


@torch.no_grad()
def _randomize(model: nn.Module, kind: str) -> None:
    """Constant parameters and running statistics become random; the small weights of transformers become ordinary."""
    for parameter in model.parameters():
        if not parameter.is_floating_point() or parameter.numel() == 1:
            continue
        if (parameter == parameter.flatten()[0]).all():
            parameter.add_(0.3 * torch.randn_like(parameter))
        elif kind == "transformers" and parameter.dim() > 1:
            # what keeps the variance through ReLU, so that the first layer is still seen in the output of a deep model
            target = max(0.15, math.sqrt(1.5 * parameter.shape[0] / parameter.numel()))
            if parameter.std() < 0.7 * target:
                parameter.mul_(target / parameter.std())
    for module in model.modules():
        if isinstance(getattr(module, "running_var", None), Tensor):
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 2)


@torch.no_grad()
def _settle(model: nn.Module, inputs: Inputs) -> None:
    """Batch normalizations get the statistics of `inputs`, disturbed; else the signal of a deep model would vanish."""

    def take_statistics(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        var, mean = torch.var_mean(arguments[0].transpose(0, 1).flatten(1), dim=1)
        square = var + mean**2
        var = torch.maximum(var, 0.02 * square + 1e-3 * square.mean())  # two inputs alike are not blown up
        module.running_mean.copy_(mean + 0.3 * var.sqrt() * torch.randn_like(mean))
        module.running_var.copy_(var * (0.5 + 1.5 * torch.rand_like(var)))

    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    hooks = [norm.register_forward_pre_hook(take_statistics) for norm in norms]
    if norms:
        run(model, inputs)
    for hook in hooks:
        hook.remove()


def run(model: nn.Module, inputs: Inputs) -> Any:
    """The model's output for inputs in any of the three forms."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _register(kind: str, name: str, make: Callable[[], nn.Module], example: Callable[[], Inputs]) -> None:
    if name in ZOO:
        raise ValueError(f"the zoo has two models named {name!r}")
    _KINDS[name] = kind
    ZOO[name] = functools.partial(_build, name, make, example)


def hand(example: Callable[[], Inputs], name: str | None = None, **arguments: Any) -> Callable[[Any], Any]:
    """Put a class or a function of `arguments` into the zoo, under its name in snake case unless another is given."""

    def decorate(make: Any) -> Any:
        snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", make.__name__).lower()
        _register("hand", name or snake, functools.partial(make, **arguments), example)
        return make

    return decorate


def image(channels: int = 3, size: int = 16) -> Callable[[], Tensor]:
    return lambda: torch.randn(2, channels, size, size)


def signal(channels: int, length: int = 32) -> Callable[[], Tensor]:
    return lambda: torch.randn(2, channels, length)


def sequence(width: int, length: int = 7) -> Callable[[], Tensor]:
    return lambda: torch.randn(2, length, width)


def vector(width: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(2, width)


def tokens(vocabulary: int = 53, length: int = 7) -> Callable[[], Tensor]:
    return lambda: torch.randint(1, vocabulary, (2, length))


def several(*examples: Callable[[], Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: tuple(example() for example in examples)


def _from_config(model: str, config: dict[str, Any]) -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()  # they speak of kernels that are missing, in forward too
    model_class = getattr(transformers, model)
    return model_class(model_class.config_class(**config))


def transformer(name: str, model: str, example: Callable[[], Inputs], **config: Any) -> None:
    """Put the class `model` of transformers into the zoo, built from its own config class with `config`."""
    _register("transformers", name, functools.partial(_from_config, model, config), example)


def ids(length: int = 7, vocabulary: int = 53, **more: Callable[[], Tensor]) -> Callable[[], dict[str, Tensor]]:
    def example() -> dict[str, Tensor]:
        return {"input_ids": torch.randint(3, vocabulary, (2, length)), **{k: make() for k, make in more.items()}}

    return example


def pixels(size: int = 32, **more: Callable[[], Tensor]) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"pixel_values": torch.randn(2, 3, size, size), **{key: make() for key, make in more.items()}}


def miniature(name: str, model: str, example: Callable[[], Inputs], common: dict[str, Any], **config: Any) -> None:
    """As `transformer`, with those of `common` that the class has fields for; what `config` says comes first."""
    _register("transformers", name, functools.partial(_miniature, model, common, config), example)


def _miniature(model: str, common: dict[str, Any], config: dict[str, Any]) -> nn.Module:
    import transformers

    kind = getattr(transformers, model).config_class
    fields = {field for each in kind.__mro__ for field in getattr(each, "__annotations__", {})}
    fields |= set(getattr(kind, "attribute_map", {}))
    return _from_config(model, {key: value for key, value in common.items() if key in fields} | config)
