"""The options of all commands, each declared once; and how a command is made of a verb and of those that it takes.

Law: an option of one name means the same in every command and says the same. What it is if left out is what the verb's
own signature says, which is read without importing the verb: help needs no torch.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from secateur.cli.terminal import Asked, answering


@dataclass(frozen=True)
class Option:
    """What an option is: its help, the placeholder of its value, the type of that; nothing of a flag.

    ``names`` are others than its own; ``default`` is that of what no verb has, such as how a text is read.
    """

    help: str
    metavar: str = ""
    type: type = str
    names: tuple[str, ...] = ()
    default: Any = None
    many: bool = False
    least: int | None = None

    def parameter(self, name: str, default: Any, *, required: bool) -> inspect.Parameter:
        """As typer reads it in a signature."""
        kind: Any = bool
        if self.metavar:
            kind, default = (list[self.type], None) if self.many else (self.type, default)  # type: ignore[name-defined]
            kind = kind if required or default is not None else kind | None
        else:
            default = bool(default)
        declared = typer.Option(
            *(self.names or (f"--{name.replace('_', '-')}",)),
            metavar=self.metavar or None,
            help=self.help,
            min=self.least,
            show_default=bool(self.metavar) and default is not None,
        )
        given = inspect.Parameter.empty if required else default
        how = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(name, how, default=given, annotation=Annotated[kind, declared])


ARGUMENTS = {
    "directory": (Path, "DIR", "A directory with .safetensors files, such as Hugging Face's; none of its code is run."),
    "path": (Path, "PATH", "A .safetensors file, a .safetensors.index.json, or a directory with one."),
    "model": (
        str,
        "DIR_OR_FACTORY",
        "A Hugging Face directory, of which no code is run; or module:factory, what makes the model, called without "
        "arguments: the module is imported, and its code is run.",
    ),
    "detector": (
        str,
        "BEST.pt",
        "A .pt of Ultralytics. It is a pickle: it is read as classes of torch and Ultralytics alone, and none "
        "is loaded from elsewhere.",
    ),
}

OPTIONS = {
    # ---- what is read and written
    "out": Option("What to write; must not exist.", "OUT", Path),
    "emit": Option("Write the files to this folder; must not exist.", "FOLDER", Path),
    "example": Option(
        "What the model is called with: a tensor, a tuple of arguments or a dict of keyword arguments, or a function "
        "that makes one. Its module is imported and run, too. A directory needs none.",
        "MODULE:INPUTS",
    ),
    "weights": Option("Load these into what the factory made: a file, an index, a directory with one.", "PATH", Path),
    "source": Option("What it was pruned from: then all else has to be unchanged.", "DIR", Path),
    "dry_run": Option("Say what would leave, and write nothing."),
    "zstd": Option("Compress by zstd, too: smaller, and slower to load. Needs zstandard."),
    "method": Option("Prune by this method; repeatable, or several with commas. list shows all.", "NAME", many=True),
    # ---- what is removed
    "sparsity": Option(
        "Fraction that is removed, in [0, 1); an n:m pattern has its own.", "FRACTION", float, ("--sparsity", "-s")
    ),
    "sparsities": Option(
        "Fraction removed, in [0, 1). Repeatable; 0.5, 0.8 and 0.9 if left out.",
        "FRACTION",
        float,
        ("--sparsity", "-s"),
        many=True,
    ),
    "pattern": Option(
        "unstructured, rows, 2:4 or any n:m, 16x1 or any block, columns:64, channels. If left out, unstructured; rows "
        "for what compares within a row, as wanda and dsnot do.",
        "PATTERN",
        names=("--pattern", "-p"),
    ),
    "patterns": Option(
        "What to try, each as in secateur prune. Repeatable; unstructured, 16x1 and columns:64 if left out.",
        "PATTERN",
        names=("--pattern", "-p"),
        many=True,
    ),
    "criterion": Option("What ranks weights, or units: magnitude, lamp, ln_norm or random.", "NAME"),
    "choose": Option(
        "gates: learn which units, experts, blocks or weights leave, by the loss of the whole model on the text; it is "
        "in memory as a whole then. swaps: units that left come back for others where that loses less.",
        "NAME",
    ),
    "allocate": Option(
        "How the sparsity is shared out: everywhere, by one threshold; uniform, the same share of each; erk, by shape; "
        "owl, by outliers; or progression, more with depth.",
        "NAME",
    ),
    "solver": Option(
        "What chooses the weights, and mends the others: admm, alps or sparsegpt. dsnot, wanda, ria and magnitude only "
        "choose.",
        "NAME",
    ),
    "include": Option("Only what has tensors of these names, and nothing else. Repeatable.", "GLOB", many=True),
    "exclude": Option("Leave alone what has these, whatever else is said. Repeatable.", "GLOB", many=True),
    "target": Option(
        "What is to be little: params, macs (multiply-adds), bytes or latency (measured time); active_params, what a "
        "token passes through of a mixture; kv_bytes, what a cache keeps of a token; also units of shrink.",
        "NAME",
    ),
    "runtime": Option(
        "Where a latency is measured: torch, onnxruntime, onnxruntime:int8, onnxruntime:int4 (weights in 4 bits), "
        "openvino or openvino:int8, of deploy also onnxruntime:mixed (bits of each group are chosen), llamacpp:int8 "
        "and llamacpp:int4; torch if left out, of deploy onnxruntime:int8. Or by board.csv, a table of another machine "
        "(secateur cost).",
        "NAME",
    ),
    "round_to": Option(
        "Keep multiples of this many units; 16 of 64 or more if left out, or fewer where that is coarse.",
        "N",
        int,
        least=1,
    ),
    "uniform": Option("Keep what the model's config can say, so that from_pretrained loads it. Directories: always."),
    "rotate": Option(
        "With data: rotate dimensions inside heads before some of them leave, so that those left hold more."
    ),
    "values": Option("int8: round what is kept to 8 bits, and say what that changes.", "WORD"),
    "no_verify": Option("Do not prove that nothing else changed: faster, in less memory."),
    "no_repair": Option("With data: leave what stays as it is."),
    "without_data": Option("Choose by the weights alone, also where a text chooses far better, as of repeated blocks."),
    # ---- how it is timed
    "batch": Option("How many texts or images at once.", "N", int, least=1),
    "tokens": Option("Of a directory: how many tokens in each text.", "N", int, default=64, least=1),
    "threads": Option("How many torch computes with; its own setting if left out.", "N", int, least=1),
    "inputs": Option("int8: also try forms that round their inputs as they come.", "WORD"),
    "at_least": Option("How many times faster than the best dense form a layer has to be.", "TIMES", float),
    # ---- text
    "data": Option(
        "Text, .txt or .jsonl; code=a.txt,maths:2=b.txt for several, by weights; or random, for tokens without sense. "
        "Of a model of pictures a folder of them. Or module:batches, what holds or makes batches: its code is run.",
        "FILE",
    ),
    "texts": Option(
        "Text, .txt or .jsonl, a sample of what will be read; or code=a.txt,maths=b.txt, by names. Repeatable.",
        "FILE",
        names=("--data",),
        many=True,
    ),
    "samples": Option("How many sequences of the text, or pictures.", "N", int, default=128, least=1),
    "pictures": Option("Pictures without labels: a folder, a file, a video.", "FOLDER", names=("--data",)),
    "classes": Option("The classes that stay, by name or number; the others leave.", "NAME,..."),
    "imgsz": Option("The side of a picture in pixels; what the model was trained at if left out.", "N", int, least=32),
    "sequence_length": Option(
        "Tokens in each; at most 2048 if left out, less if the model takes less.", "N", int, least=1
    ),
    "seed": Option("For the choice of sequences, and for what is random.", "N", int, default=0),
    "activations": Option("Keep what blocks pass on in files here, and not in memory.", "FOLDER", Path),
    "device": Option("Where blocks are computed, such as cuda. The processor if left out.", "NAME"),
    # ---- what leaves, beside weights
    "leave": Option(
        "What leaves before units: experts:25%, branches:3 or, of a directory, blocks:10%. Branches are those that "
        "change their stream least on the example; blocks and experts, those that the text needs least. "
        "outputs:person,car names the labels that stay, by name or number. In Python also heads by their numbers, and "
        "outputs of a module: shrink(leave=Heads(...) or Outputs(...)). Repeatable.",
        "KIND:AMOUNT",
        many=True,
    ),
    "profile": Option("Write what the text says of each expert here, and what the model loses.", "FILE.json", Path),
    "plan": Option("Choose experts by a file of --profile, in place of --data: nothing is run.", "FILE.json", Path),
    "rank": Option("Which token leaves next: count, the rarest; or distance, the one that is missed least.", "NAME"),
    "keep": Option("Keep this many tokens, those that the text has most often.", "N", int, least=1),
    "cover": Option("Keep this share of the text's tokens, such as 0.9999: the rarest leave.", "SHARE", float),
    "script": Option("Tokens with letters of other scripts leave, such as Latin. Repeatable.", "NAME", many=True),
    "exact": Option("Keep only the text's own tokens, and none that other text of its kind needs."),
    # ---- what it may cost
    "over": Option(
        "What may leave: shrink, units of groups, which is meant if left out; or oneshot, entries of layers. "
        "Repeatable.",
        "VERB",
        many=True,
    ),
    "shares": Option(
        "A level: how much of a group leaves, in (0, 1). Repeatable.", "FRACTION", float, ("--share",), many=True
    ),
    "score": Option(
        "What the model loses: kl, of its logits; cosine, of its embeddings; change, of its outputs. If left out, what "
        "fits the model.",
        "NAME",
    ),
    "store": Option(
        "Keep levels and scores here: a run that was stopped goes on, and finished parts are not made again.",
        "FOLDER",
        Path,
    ),
    "levels": Option("Begin with the levels and scores that sensitivity --store wrote: none are made.", "FOLDER", Path),
    "budget": Option(
        "What may be spent: params, active_params, macs, bytes, kv_bytes or latency, of deploy latency or bytes; up to "
        "1 a share of what the model costs, above that the amount, of latency in milliseconds on this machine. "
        "Repeatable: all of them hold.",
        "COST=LIMIT",
        many=True,
    ),
    "keep_share": Option(
        "In place of a budget: the share of the dense model's outputs that has to stay, as --score compares them; and "
        "as little as that allows of --target. code=0.99,maths=0.9 of texts that --data names: of each its own share.",
        "SHARE",
        names=("--keep",),
    ),
    "finals": Option("How many choices are finished on a copy, before the best of them is taken.", "N", int, least=1),
    # ---- how it is trained
    "teacher": Option("The directory that it came from.", "DIR", Path),
    "steps": Option("Steps of training by the teacher's outputs, each over one batch; 0: none.", "N", int, least=0),
    "local": Option("Epochs of training for each half of a block, in order; 0: none.", "N", int, least=0),
    "adapters": Option("Training by the outputs moves low-rank updates under the masks alone.", "RANK", int, least=1),
    "rate": Option("The highest learning rate of training by the outputs.", "RATE", float),
    "autocast": Option(
        "bfloat16: training by the outputs multiplies matrices in it, which is faster where the processor can. "
        "Weights, losses and the optimizer stay in float32.",
        "DTYPE",
    ),
    "teacher_on_disk": Option(
        "Training by the outputs, too, holds one block of the teacher in memory: slower, as a step reads all of them."
    ),
}

TEXT = ("data", "samples", "sequence_length", "seed")

SHARED = {  # of every command, and said once: before the command's name or behind it
    "as_json": Option("Print JSON instead of lines and tables.", names=("--json",)),
    "report": Option("Write what was asked and what came of it to one HTML page, too, with plots.", "PAGE.html", Path),
    "verbose": Option("Print all that the page has, also what differs only in numbers.", names=("--verbose", "-v")),
}

Body = Callable[[Asked], Iterator[Any]]
COMMANDS: dict[str, tuple[Callable[..., None], str]] = {}  # by name, with a line of help


def command(
    name: str, short: str, subject: str, *options: str, verb: str = "", required: tuple[str, ...] = (), **defaults: Any
) -> Callable[[Body], Body]:
    """Makes a command of a function that gets what was asked and yields results, which are printed.

    Args:
        name: of the command; ``short`` its line in the list of all.
        subject: the argument that says of what, from `ARGUMENTS`; none where empty.
        options: from `OPTIONS`; each command takes those of `SHARED`, too.
        verb: ``"package/file.py:function"``, whose defaults the options have.
        required: options without which it does not run.
        defaults: that differ from the verb's.
    """

    def made(body: Body) -> Body:
        own = {**_defaults(verb), **defaults}
        how = inspect.Parameter.KEYWORD_ONLY
        parameters = [inspect.Parameter("context", how, annotation=typer.Context)]
        if subject:
            kind, metavar, text = ARGUMENTS[subject]
            given: Any = Annotated[kind, typer.Argument(metavar=metavar, help=text)]
            parameters.append(inspect.Parameter(subject, how, annotation=given))
        for each in options:
            option = OPTIONS[each]
            parameters.append(option.parameter(each, own.get(each, option.default), required=each in required))

        @functools.wraps(body)
        def run(context: typer.Context, **values: Any) -> None:
            answering(body, Asked(name, subject, {**values, **context.obj}))

        COMMANDS[name] = (taking(parameters, run), short)
        return body

    return made


def taking(parameters: list[inspect.Parameter], run: Callable[..., None]) -> Callable[..., None]:
    """The function, which typer sees with these parameters."""
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


class Shared(typer.core.TyperCommand):
    """A command that takes the options of `SHARED`, which ``secateur`` itself has, behind its own name, too."""

    def get_params(self, ctx: Any) -> list[Any]:
        given: list[Any] = super().get_params(ctx)
        *own, say_help = given
        for each in own:
            if each.param_type_name == "argument":  # of which click 8.5 forgets what an older typer was told
                each.help = ARGUMENTS[each.name][2]
        return [*own, *(each for each in ctx.find_root().command.params if each.name in SHARED), say_help]

    def invoke(self, ctx: Any) -> Any:
        ctx.obj = {name: ctx.params.pop(name) or ctx.find_root().params[name] for name in SHARED}
        return super().invoke(ctx)


def _defaults(verb: str) -> dict[str, Any]:
    """``{parameter: default}`` of a function, as its file says it: a number, a word, or a function by its name.

    >>> _defaults("models/sparsification.py:sparsify")["criterion"]
    'magnitude'
    """
    if not verb:
        return {}
    file, _, name = verb.partition(":")
    tree = ast.parse((Path(__file__).parents[1] / file).read_text(encoding="utf-8"))
    found = next(each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == name)
    both = found.args.args + found.args.kwonlyargs
    values = found.args.defaults + found.args.kw_defaults
    said = {}
    for argument, value in zip(both[len(both) - len(values) :], values, strict=True):
        if isinstance(value, ast.Constant):
            said[argument.arg] = value.value
        elif isinstance(value, ast.Name) and value.id.islower():
            said[argument.arg] = value.id
    return said
