"""The words that chat templates put around messages, whose tokens stay. The files of a directory that name token
numbers, and their contents after tokens have left.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from secateur.checkpoints import Checkpoint, CheckpointError, read_json
from secateur.support import open_regular, printable
from secateur.vocabulary.axes import Axes, numbers_in, parts_in, renumbered
from secateur.vocabulary.tokens import Ids, Tokens, reading

# ---- The words that chat templates put around messages, whose tokens stay.
#
# Law: no template is run; what it could write of its own is read from its text.

ROLES = ("system", "user", "assistant", "tool", "function", "developer", "model")
_OPENS = re.compile(r"\{[%{#]")
_CLOSES = {"{%": "%}", "{{": "}}", "{#": "#}"}
_QUOTES = re.compile("['\"]")
_QUOTED = {quote: re.compile(rf"(?:[^{quote}\\]|\\.)*", re.DOTALL) for quote in "'\""}
_ESCAPED = {r"\n": "\n", r"\t": "\t", r"\'": "'", r"\"": '"', r"\\": "\\", r"\r": "\r"}


def templates_in(directory: Path, configured: Mapping[str, Any]) -> Iterator[str]:
    """The templates of a directory: in files of their own, and in ``tokenizer_config.json``."""
    for path in sorted([*directory.glob("chat_template*.jinja"), *directory.glob("additional_chat_templates/*.jinja")]):
        try:
            with open_regular(path) as file:
                yield file.read().decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{path}: a chat template that is not UTF-8 text.") from None
    yield from templates_of(configured.get("chat_template"))


def templates_of(value: Any) -> Iterator[str]:
    """One, a list of named ones, or an object of them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (each for each in value.values() if isinstance(each, str))
    elif isinstance(value, list):
        yield from (each for part in value if isinstance(part, Mapping) for each in templates_of(part.get("template")))


def words_of(templates: Iterable[str]) -> list[str]:
    r"""What templates may write: what is between their code, what is quoted in it, and roles with what follows them.

    >>> words_of(["{{ '<s>' + role + '\\n' }}Hi!"])[:3]
    ['Hi!', '<s>', '\n']
    """
    found: dict[str, None] = {}
    for template in templates:
        around, codes = _parts(template)
        found |= dict.fromkeys(around)
        for quoted in (each for code in codes for each in _quoted(code)):
            found[re.sub(r"\\.", lambda match: _ESCAPED.get(match[0], match[0]), quoted)] = None
    texts = [each for each in found if each]
    if not texts:
        return []
    around = [text for text in texts if not text.strip() or len(printable(text)) < 40]
    return [*texts, *(role + after for role in ROLES for after in ("", "\n", *around))]


def _parts(template: str) -> tuple[list[str], list[str]]:
    """What is around the code of a template, and the code; each character is looked at once, whatever is left open."""
    around, codes = [], []
    begin = at = 0
    endless: set[str] = set()
    while opened := _OPENS.search(template, at):
        kind = opened[0]
        end = -1 if kind in endless else template.find(_CLOSES[kind], opened.end())
        if end < 0:
            endless.add(kind)
            at = opened.start() + 1
            continue
        around.append(template[begin : opened.start()])
        codes.append(template[opened.start() : end + 2])
        begin = at = end + 2
    return [*around, template[begin:]], codes


def _quoted(code: str) -> Iterator[str]:
    """What is between quotes, escapes as they are written."""
    at = 0
    endless: set[str] = set()
    while opened := _QUOTES.search(code, at):
        at, quote = opened.end(), opened[0]
        if quote in endless:
            continue
        inside = _QUOTED[quote].match(code, at)
        assert inside is not None  # of nothing, too
        if code.startswith(quote, inside.end()):
            yield inside[0]
            at = inside.end() + 1
        else:
            endless.add(quote)


# ---- The files of a directory that name token numbers, and their contents after tokens have left.
#
# Law: each file that is known to number tokens says the new numbers, one that cannot is left out by name, all others
# stay what they are; the same tokens that stay give the same bytes.

TOKENIZER = "tokenizer.json"
_CONFIGURED = ("generation_config.json", "processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
_SPELLED = (".model", ".spm", ".tiktoken")  # tokenizers in forms that are not written here
_NAMED = ("tekken.json", "plan.json")
_BY_NUMBER = ("WordEmbeddings", "BoW", "WordWeights", "SpladePooling", "SparseStaticEmbedding")
STATIC = "StaticEmbedding"


def model_folder(root: Path) -> Path:
    """Where the model lies: in the directory itself, or where sentence-transformers' ``modules.json`` says.

    Raises:
        CheckpointError: a module of it numbers tokens in a way of its own.
    """
    return _first_module(root)[0]


def is_static(root: Path) -> bool:
    """Whether sentence-transformers' ``modules.json`` says that the model is a table of tokens alone."""
    return _first_module(root)[1] == STATIC


def _first_module(root: Path) -> tuple[Path, str]:
    """The folder of the module that tokens enter, and its kind."""
    path = root / "modules.json"
    if not path.is_file():
        return root, ""
    try:
        modules = json.loads(path.read_text("utf-8"))
        found = [(str(each["type"]).rsplit(".", 1)[-1], str(each["path"])) for each in modules]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise CheckpointError(f"{path}: damaged: not a list of modules, each with a type and a path.") from None
    entered = [each for each in found if each[0].endswith("Transformer") or each[0] == STATIC]
    for kind, _ in found:
        if kind in _BY_NUMBER or (kind == STATIC and len(entered) > 1):
            raise CheckpointError(f"{path}: {printable(kind)} numbers tokens in a way that is not known here.")
    for kind, place in entered:
        folder = (root / place).resolve()
        if not folder.is_relative_to(root.resolve()) or not folder.is_dir():
            raise CheckpointError(f"{path}: {printable(place)} is no folder in it.")
        return root / place, kind
    return root, ""


def read_tokens(folder: Path) -> Tokens:
    """The tokens of the tokenizer in a directory.

    Raises:
        CheckpointError: there is none in a form that can be rewritten.
    """
    path = folder / TOKENIZER
    try:
        if path.is_file():
            return Tokens.of(read_json(path), str(path))
        if (folder / "vocab.txt").is_file() or (folder / "vocab.json").is_file():
            backend = getattr(by_transformers(folder), "backend_tokenizer", None)
            if backend is not None:
                return Tokens.of(json.loads(backend.to_str()), f"{folder}: its tokenizer")
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    raise CheckpointError(
        f"{folder}: has no {TOKENIZER}, and no vocabulary of which transformers makes one. Where it can, "
        f"AutoTokenizer.from_pretrained(...).save_pretrained(...) writes it; put it here first."
    )


def by_transformers(folder: Path) -> Any:
    """The tokenizer as transformers loads it, without code of the directory.

    Raises:
        CheckpointError: it cannot.
    """
    from transformers import AutoTokenizer

    return by_class(AutoTokenizer, folder)


def by_class(kind: Any, folder: Path) -> Any:
    """The tokenizer as a class of transformers loads it; raises what `by_transformers` does."""
    try:
        return kind.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # what its many kinds of tokenizers raise, and panics of what is written in Rust
        why = printable(" ".join(str(error).split()) or type(error).__name__, 150)
        raise CheckpointError(f"{folder}: no tokenizer that transformers loads without code ({why}).") from None


def needed_in(folder: Path, tokens: Tokens, config: Any, axes: Axes) -> set[int]:
    """The numbers of tokens that configurations and chat templates name."""
    found: set[int] = set()
    for values in _effective(config, axes).values():
        found |= numbers_in(values)
    configured = {name: read_json(folder / name) for name in _CONFIGURED if (folder / name).is_file()}
    for name in _CONFIGURED[:-1]:
        found |= numbers_in(configured.get(name, {}))
    found = {number for number in found if 0 <= number < axes.rows}
    every = {**tokens.model, **tokens.added}
    told = configured.get("tokenizer_config.json", {})
    named = folder / "special_tokens_map.json"
    for values in (told, read_json(named) if named.is_file() else {}):
        found |= {every[each] for each in _special(values) if each in every}
    for words in words_of(templates_in(folder, told)):
        with reading():
            found.update(tokens.backend.encode(words, add_special_tokens=False).ids)
    return found


def _special(values: Mapping[str, Any]) -> Iterator[str]:
    """The tokens that a tokenizer's configuration names as special."""
    for key, value in values.items():
        if key.endswith(("_token", "special_tokens")):
            yield from _tokens_in(value)


def _tokens_in(value: Any) -> Iterator[str]:
    """One, as a string or an object; several of them, in a list or by names."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        inner = [value["content"]] if "content" in value else value.values()
        yield from (each for several in inner for each in _tokens_in(several))
    elif isinstance(value, list):
        yield from (each for several in value for each in _tokens_in(several))


def _effective(config: Any, axes: Axes) -> dict[tuple[str, ...], dict[str, Any]]:
    """What a configuration holds, with what its class adds, of the parts in which tokens have the tokenizer's numbers:
    those that say how many there are, and those around them."""
    around = {place[:at] for place in axes.places for at in range(len(place))}
    inside = {place for place, _ in parts_in(config)}
    found = {}
    for place, part in parts_in(config):
        if place in around:
            values = part.to_dict()
            found[place] = {key: value for key, value in values.items() if (*place, key) not in inside}
    return found


def changed_config(values: Mapping[str, Any], config: Any, axes: Axes, new: Mapping[int, int], size: int) -> Any:
    """``config.json`` with the new numbers, also of fields that it leaves to its class, and how many there are."""
    found = copy.deepcopy(dict(values))
    for place, effective in _effective(config, axes).items():
        part = found
        for key in place:
            part = part.setdefault(key, {})
        inside = {each[len(place)] for each, _ in parts_in(config) if each[: len(place)] == place != each}
        part.update(renumbered({key: value for key, value in part.items() if key not in inside}, new))
        for key, value in effective.items():
            if key not in part and renumbered({key: value}, new) != {key: value}:
                part[key] = renumbered({key: value}, new)[key]
        if part.get("vocab_size") == axes.rows:
            part["vocab_size"] = size
    for place in axes.places:
        part = found
        for key in place[:-1]:
            part = part.setdefault(key, {})
        part[place[-1]] = size
    return found


def rewritten(checkpoint: Checkpoint, tokens: Tokens, order: Ids, config: Any, axes: Axes) -> dict[Path, str | None]:
    """What files say once tokens have left, by their relative paths from the model's folder; None of one that is left
    out, as it says the old numbers in a form that is not written here."""
    new = {int(old): at for at, old in enumerate(order)}
    size = int((order < axes.rows).sum())
    changed = _text(changed_config(checkpoint.config, config, axes, new, size))
    return {Path("config.json"): changed, **of_tokenizer(checkpoint.root, tokens, order)}


def of_tokenizer(folder: Path, tokens: Tokens, order: Ids) -> dict[Path, str | None]:
    """The same of the files beside ``config.json``."""
    new = {int(old): at for at, old in enumerate(order)}
    found: dict[Path, str | None] = {}
    if (folder / TOKENIZER).is_file():
        found[Path(TOKENIZER)] = _as_before(tokens.pruned(order), folder / TOKENIZER)
    for name in _CONFIGURED:
        if (folder / name).is_file():
            values = read_json(folder / name)
            changed = renumbered(values, new)
            if changed != values:
                found[Path(name)] = _text(changed)
    if (folder / "added_tokens.json").is_file():
        values = read_json(folder / "added_tokens.json")
        if not all(type(number) is int for number in values.values()):
            raise CheckpointError(f"{folder / 'added_tokens.json'}: damaged: not a number for each token.")
        found[Path("added_tokens.json")] = _text({token: new.get(number, number) for token, number in values.items()})
    left = {token: new[number] for token, number in tokens.model.items() if number in new}
    for name, change in (("vocab.txt", _lines), ("vocab.json", _table), ("merges.txt", _pairs)):
        if (folder / name).is_file():
            found[Path(name)] = change(folder / name, tokens, left)
    for path in folder.iterdir():
        if path.suffix in _SPELLED or path.name in _NAMED:
            found[Path(path.name)] = None
    return found


def _text(values: Any) -> str:
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def _as_before(values: Any, path: Path) -> str:
    """As JSON, in lines if it was."""
    with open(path, "rb") as file:
        in_lines = b"\n" in file.read(100).strip()
    if in_lines:
        return json.dumps(values, indent=2, ensure_ascii=False)
    return json.dumps(values, ensure_ascii=False, separators=(",", ":"))


def _lines(path: Path, tokens: Tokens, left: Mapping[str, int]) -> str | None:
    """``vocab.txt``: the token of each number on a line."""
    lines = [line.removesuffix("\r") for line in _read(path).split("\n")]
    if any(number >= len(lines) or lines[number] != token for token, number in tokens.model.items()):
        return None
    return "".join(f"{token}\n" for token in sorted(left, key=left.__getitem__))


def _table(path: Path, tokens: Tokens, left: Mapping[str, int]) -> str | None:
    """``vocab.json``: ``{token: number}``."""
    values = read_json(path)
    every = {**tokens.model, **tokens.added}
    if any(every.get(token) != number for token, number in values.items()):
        return None
    return json.dumps({token: left[token] for token in values if token in left}, ensure_ascii=False)


def _pairs(path: Path, tokens: Tokens, left: Mapping[str, int]) -> str | None:
    """``merges.txt``: two tokens a line."""
    lines = _read(path).split("\n")
    head = [line for line in lines[:1] if line.startswith("#version")]
    pairs = [tuple(line.removesuffix("\r").split(" ")) for line in lines[len(head) :] if line.strip()]
    if tokens.kind != "BPE" or pairs != list(tokens.merges.pairs):
        return None
    return "".join(f"{line}\n" for line in [*head, *(" ".join(pair) for pair in tokens.merges.left(left))])


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        raise CheckpointError(f"{path}: not UTF-8 text.") from None
