"""Odd arguments for what takes more than a model and words: models with adapters or masks, a second model, texts by
name, prices, and what is typed behind a command. Each is part of `hostile.py arguments`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.storage.hindered import Said, told
from benchmarks.storage.hostile import HOSTILE, OUT, Changed, judged, odd_data, odd_model, odd_of, residual, tree

Once = Callable[[random.Random], str]


def odd_calls(root: Path) -> dict[str, Once]:
    """By verb."""
    return {
        "merge_keeping_zeros": merging,
        "detach": detaching,
        "verify_shrunken": verifying,
        "reached": reaching,
        "write_probes": functools.partial(probing, root),
        "prices": pricing,
        "bench": functools.partial(typing_of, root, "bench"),
        "cost": functools.partial(typing_of, root, "cost"),
    }


def merging(dice: random.Random) -> str:
    """`merge_keeping_zeros` of a model whose adapters, or what is below them, are damaged."""
    import peft

    from secateur import attach, sparsify
    from secateur.recovery import merge_keeping_zeros

    if dice.random() < 0.05:
        one = dice.choice([*HOSTILE, residual(), odd_model(dice)])
        return judged(lambda: merge_keeping_zeros(one), one)
    base = odd_model(dice) if dice.random() < 0.4 else residual()
    kind = dice.choice([peft.LoraConfig, peft.LoraConfig, peft.LoHaConfig, peft.IA3Config, peft.VeraConfig])
    targets = dice.choice([["up", "down"], ["0.up"], ["0.up", "1.up"], ["down"]])
    given: dict[str, Any] = {"target_modules": targets}
    if kind is peft.IA3Config:
        given["feedforward_modules"] = []
    else:
        given["r"] = dice.choice((1, 2, 64))
    if kind is peft.LoraConfig:
        given |= {"use_dora": dice.random() < 0.2, "init_lora_weights": dice.random() < 0.3,
                  "use_rslora": dice.random() < 0.2, "lora_bias": dice.random() < 0.1,
                  "modules_to_save": dice.choice([None, None, ["2"]]),
                  "fan_in_fan_out": dice.random() < 0.1}  # fmt: skip
    try:
        if dice.random() < 0.7:
            sparsify(base, 0.5)
        masks = {"0.up.weight": torch.rand(12, 6, generator=torch.Generator().manual_seed(0)) < 0.5}
        if dice.random() < 0.1:
            attach(base, masks)
        config = kind(**given)
        if dice.random() < 0.3:
            adapted: Any = peft.inject_adapter_in_model(config, base)
        else:
            adapted = peft.get_peft_model(base, config)
            if dice.random() < 0.2:
                adapted.add_adapter("second", kind(**given))
                if dice.random() < 0.5:
                    adapted.base_model.set_adapter(["default", "second"])
    except Exception:  # peft's own, or of an odd model
        return "no adapters"
    for _ in range(dice.choice((0, 1, 1, 2))):
        damage_of_modules(adapted, dice)
    if dice.random() < 0.05:
        adapted = nn.DataParallel(adapted)
    return judged(lambda: merge_keeping_zeros(adapted), adapted)


def damage_of_modules(model: Any, dice: random.Random) -> None:
    """One tensor, flag or module of a model is another."""
    parameters = [(module, name) for module in model.modules() for name, each in module._parameters.items()
                  if each is not None and not nn.parameter.is_lazy(each)]  # fmt: skip
    buffers = [(module, name) for module in model.modules() for name in module._buffers]
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleDict | nn.ParameterDict) and len(each)]
    module, name = dice.choice(parameters) if parameters else (model, "weight")
    old = getattr(module, name, None)
    if old is None:
        return
    match dice.randrange(14):
        case 0 | 1:
            with torch.no_grad():
                if not old.is_meta and old.is_floating_point():
                    old.reshape(-1)[:1].fill_(dice.choice([math.nan, math.inf, -1e38, 3e38]))
        case 2:
            shape = [*old.shape]
            if shape:
                at = dice.randrange(len(shape))
                shape[at] = max(shape[at] + dice.choice((-1, 1)), 0)
            module._parameters[name] = nn.Parameter(torch.zeros(shape, dtype=old.dtype), requires_grad=False)
        case 3:
            module._parameters[name] = nn.Parameter(old.detach().to("meta"), requires_grad=False)
        case 4:
            kind = dice.choice([torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64])
            module._parameters[name] = nn.Parameter(old.detach().to(kind), requires_grad=False)
        case 5:
            module._parameters[name] = None
        case 6:
            del module._parameters[name]
        case 7 if lists:
            each = dice.choice(lists)
            del each[dice.choice([*each.keys()])]
        case 8:
            flags = [each for each in model.modules() if hasattr(each, "merged_adapters")]
            if flags:
                each = dice.choice(flags)
                match dice.randrange(4):
                    case 0:
                        with contextlib.suppress(Exception):  # what was damaged before
                            each.merge()
                    case 1:
                        each.merged_adapters = dice.choice([[], ["default"], ["x"], None, 5])
                    case 2:
                        each._disable_adapters = True
                    case 3:
                        each._active_adapter = dice.choice([[], ["x"], "default", None])
        case 9:
            other, its = dice.choice(parameters)
            module._parameters[name] = other._parameters[its]  # two are one
        case 10 if buffers:
            holder, its = dice.choice(buffers)
            match dice.randrange(4):
                case 0:
                    del holder._buffers[its]
                case 1:
                    holder._buffers[its] = None
                case 2 if holder._buffers[its] is not None:
                    holder._buffers[its] = torch.full_like(holder._buffers[its], dice.choice([0, 1, 5]))
                case _:
                    holder._buffers[its] = torch.ones(dice.choice([(3,), (2, 3), ()]))
        case 11:
            children = [(parent, its) for parent in model.modules() for its in parent._modules]
            parent, its = dice.choice(children)
            parent._modules[its] = dice.choice([None, nn.Identity(), nn.Linear(3, 3)])
        case 12:
            hooked = [each for each in model.modules() if each._forward_pre_hooks]
            if hooked:
                dice.choice(hooked)._forward_pre_hooks.clear()
        case _:
            old.requires_grad_(False) if not old.requires_grad else None


def detaching(dice: random.Random) -> str:
    """`detach` of a model whose masks, parameters or hooks are damaged."""
    from secateur import attach, detach, prune

    if dice.random() < 0.05:
        one = dice.choice([*HOSTILE, nn.Identity()])
        return judged(lambda: detach(one), one)
    model = odd_model(dice) if dice.random() < 0.4 else residual()
    try:
        for _ in range(dice.choice((1, 1, 2))):
            which = dice.choice(["0.up", "0.down", "1.up", "2"])
            layer = model.get_submodule(which)
            match dice.randrange(4):
                case 0:
                    attach(model, {f"{which}.weight": torch.rand(layer.weight.shape) < 0.5})
                case 1:
                    prune.l1_unstructured(layer, dice.choice(["weight", "bias"]), amount=0.5)
                case 2:
                    nn.utils.prune.l1_unstructured(layer, dice.choice(["weight", "bias"]), amount=0.5)
                case 3:
                    prune.ln_structured(layer, "weight", amount=1, n=2, dim=0)
    except Exception:  # of an odd model
        return "no masks"
    for _ in range(dice.choice((0, 1, 1, 2))):
        damage_of_modules(model, dice)
    how = {name: dice.choice([*HOSTILE, "*", "0.*", "0.up.weight", ["1.*"]])
           for name in ("include", "exclude") if dice.random() < 0.3}  # fmt: skip
    return judged(lambda: detach(model, **how), model)


def verifying(dice: random.Random) -> str:
    """`verify_shrunken` of models of which one, or what was written down of it, is damaged."""
    from secateur import shrink, verify_shrunken
    from secateur.shrinking import plans_of

    original = odd_model(dice) if dice.random() < 0.2 else residual()
    smaller = copy.deepcopy(residual())
    shrink(smaller, torch.zeros(2, 6), 0.4, verify=False, leave=dice.choice([None, None, "branches:1"]))
    example: Any = odd_data(dice) if dice.random() < 0.4 else torch.zeros(2, 6)
    for _ in range(dice.choice((0, 1, 1, 2))):
        if not isinstance(original, nn.Module) or not isinstance(smaller, nn.Module):
            break
        match dice.randrange(5):
            case 0:
                damage_of_modules(smaller, dice)
            case 1:
                damage_of_modules(original, dice)
            case 2:
                for plan in plans_of(smaller):
                    its: Any = plan.cuts[dice.randrange(len(plan.cuts))] if getattr(plan, "cuts", None) else plan
                    names = [each for each in vars(its) if not each.startswith("_")]
                    if names:
                        object.__setattr__(its, dice.choice(names), dice.choice(HOSTILE))
            case 3:
                original, smaller = dice.choice([(smaller, original), (original, original), (smaller, smaller)])
            case 4:
                one: Any = dice.choice([*HOSTILE, residual(), nn.Identity()])
                original, smaller = dice.choice([(one, smaller), (original, one)])
    return judged(lambda: verify_shrunken(original, smaller, example), original, smaller)


def reaching(dice: random.Random) -> str:
    """`reached` of odd texts."""
    from secateur import reached

    model = odd_model(dice) if dice.random() < 0.2 else residual()
    data = [torch.randn(4, 6, generator=torch.Generator().manual_seed(at)) for at in range(2)]
    texts: Any = {"left": data[:1], "right": data[1:]}
    if dice.random() < 0.7:
        one = odd_data(dice) if dice.random() < 0.8 else dice.choice(HOSTILE)
        name = dice.choice(["left", "", "\0", 5, None, ("a",)])
        texts = dice.choice([{name: one}, {**texts, name: one}, {name: one}, one, [one], {}, {"left": []}])
    how: dict[str, Any] = odd_of({"forward": None, "activations": None, "device": None}, dice)
    if dice.random() < 0.6:
        how = {}
    how.pop("activations", None)  # of a directory
    return judged(lambda: reached(model, texts, **how), model)


def probing(root: Path, dice: random.Random) -> str:
    """`write_probes` of odd models, examples, folders and runtimes."""
    from secateur.search import write_probes

    model = odd_model(dice) if dice.random() < 0.4 else residual()
    said: dict[str, Any] = {"example_inputs": torch.zeros(2, 6), "folder": root / OUT, "runtime": "onnxruntime"}
    for name in dice.sample(["example_inputs", "folder", "runtime"], dice.choice((1, 1, 2))):
        match name:
            case "example_inputs":
                said[name] = odd_data(dice)
            case "folder":
                known = [root, root / "no" / OUT, "", "\0", 5, None, root / ("x" * 300), root / "a\nb" / "c"]
                said[name] = dice.choice(known)
            case _:
                words = ["onnxruntime:int8", "torch", "llamacpp:int8", "openvino", "board.csv", root / "x.csv", len]
                said[name] = dice.choice([*HOSTILE, *words])
    before = tree(root)
    try:
        found = judged(lambda: write_probes(model, **said), model)
    finally:
        after = {name: text for name, text in tree(root).items() if not name.startswith(f"{OUT}/")}
        if after != before:
            raise Changed(f"{sorted(after.keys() ^ before.keys())[:3]} beside the folder")
    if found != "done" and (root / OUT).exists():
        raise Changed(f"{OUT} is there")
    shutil.rmtree(root / OUT, ignore_errors=True)
    return found


def pricing(dice: random.Random) -> str:
    """Prices by a function that says odd things, and by tables of other models, of what a model takes, and by `fit`."""
    from secateur import fit, shrink
    from secateur.operations import Priced, PriceTable

    model, data = residual(), [torch.randn(2, 6) for _ in range(3)]
    odd_price = dice.choice([*HOSTILE, "1.5", torch.tensor(1.5), 10**400])

    def cost(_: str, shapes: Any) -> Any:
        if dice.random() < 0.05:
            return odd_price
        return 1.0 + sum(shapes[-1])

    elsewhere: Any = Priced(dice.choice([cost, cost, cost, lambda: 1.0, len, 5, None]))
    match dice.randrange(4):
        case 0:
            sizes = {(2, 6, 12, 6, 12): dice.choice([1.0, 0.0, 1e300, 5e-324]), (2, 6, 1, 6, 1): 0.5}
            rows = {("linear(float32, =float32, =float32)", (2, 2, 1, 0)): sizes}
            elsewhere = PriceTable(Path("board.csv"), "0" * 64, rows)
        case 1:
            elsewhere = dice.choice(HOSTILE)
    match dice.randrange(3):
        case 0 if hasattr(elsewhere, "total"):
            return judged(lambda: elsewhere.total(model, data[0]), model)
        case 1:
            how: dict[str, Any] = {"target": "latency", "runtime": elsewhere, "verify": False}
            return judged(lambda: shrink(model, data[0], 0.4, **how), model)
        case _:
            how = {"budget": {"latency": 0.7}, "runtime": elsewhere, "shares": [0.5], "finals": 1, "verify": False}
            return judged(lambda: fit(model, data, **how), model)


def typing_of(root: Path, verb: str, dice: random.Random) -> str:
    """What is typed behind `bench` and `cost`: odd words, and models and examples that are none."""
    here = "benchmarks.storage.hindered"
    words: dict[str, Any] = {"--example": f"{here}:example", "--batch": None, "--tokens": None}
    if verb == "bench":
        words |= {"-s": 0.9, "-p": "16x1", "--threads": 1}
    else:
        words |= {"--emit": root / OUT, "--runtime": None}
    subject: Any = f"{here}:model"
    models = ["Lazy", "Unseen", "Broken", "Frozen", "model", "nothing", "told", "NOBODY", "MODES", ""]
    examples = ["WIDE", "NOTHING", "UNSEEN", "SEVERAL", "NAMED", "WORDS", "FRACTION", "example", "NOBODY", "told"]
    others = [f":{here}", "json:loads", "os:getcwd", root, root / "none", "torch:zeros", "builtins:dict"]
    pools: dict[str, list[Any]] = {
        "subject": [*(f"{here}:{each}" for each in models), *others],
        "--example": [*(f"{here}:{each}" for each in examples), *others],
        "--batch": [0, 1, 3, -1, 1.5], "--tokens": [0, 1, 3, -1, "64x"], "--threads": [0, 1, 2, -1],
        "-s": [0, 0.5, 0.999, 1, -0.1, "nan", "inf", "90%"],
        "-p": ["2:4", "unstructured", "columns:0", "columns:64", "0x0", "1000x1", "rows", "channels", "3:2", "16x1"],
        "--runtime": ["onnxruntime:int8", "onnxruntime:int4", "torch", "board.csv", "openvino", "llamacpp:int4"],
        "--emit": [root, root / "no" / "out", f"{root}/{'x' * 300}", "", root / "a file"],
    }  # fmt: skip
    for name in dice.sample(["subject", *words], dice.choice((1, 1, 2))):
        word = str(dice.choice(pools[name] if dice.random() < 0.8 else HOSTILE)).replace("\0", "")
        if name == "subject":
            subject = word
        elif name != "--threads" or not word.isdigit() or int(word) < 8:
            words[name] = word
    if subject.startswith("-") and dice.random() < 0.5:
        subject = "./" + subject
    before = tree(root)
    try:
        with contextlib.chdir(root):
            told(verb, subject, *[each for pair in words.items() if pair[1] is not None for each in pair])
    except Said:
        if tree(root) != before or (root / OUT).exists():
            raise Changed(f"{OUT} is there") from None
        return "refused"
    for each in root.iterdir():
        if each.is_dir() and (each / "probes.csv").exists():
            shutil.rmtree(each)
    if tree(root) != before:
        raise Changed("something beside the folder")
    return "done"
