"""Text to train on that the teacher writes itself, where none is given: `Sampled`. What a run by the outputs goes on
from, in one file: the parameters, what the optimizer remembers, the losses so far. Training of the whole model on
the teacher's outputs: a step over a batch follows from its number alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from secateur.checkpoints import CheckpointError
from secateur.models import Tokens, digest, longest_sequence, naming_batch, refuse_empty, same_rows
from secateur.recovery.descent import Descent, order_of
from secateur.recovery.losses import (
    NO_TEXT,
    OutputLoss,
    chosen_for,
    count_rows,
    features_of,
    loss_between,
    score_loss,
    text_loss,
)
from secateur.recovery.result import Judged
from secateur.support import (
    Between,
    Fields,
    Forward,
    all_gather,
    device_of,
    in_mode,
    mapped,
    moved,
    on_rank_zero,
    part_of,
    plain,
    rank_and_world,
    reshard,
    restoring_generators,
    run_batch,
    seed_torch,
    summed,
    track,
    widened,
)

# ---- Text to train on that the teacher writes itself, where none is given: `Sampled`.
#
# Law: what is written follows from the teacher, the request and the seed; the generators of the process stay as they
# are.
#
# As LLM-QAT (Liu et al. 2023, arXiv:2305.17888) trains on, but drawn at temperature 1 from the first token on: what
# the teacher finds likely, as often as it does. An end of a text is a token like others, and the next text follows
# it.

LENGTH = 512  # tokens of a sequence, or fewer where the model takes fewer
TOGETHER = 32  # sequences are drawn at a time, by a seed of their own: a run that was stopped goes on after them


@dataclass(frozen=True)
class Sampled:
    """Requests training text that is sampled from the teacher, in place of batches.

    Args:
        samples: how many sequences.
        length: tokens in each; None: 512, or fewer where the model takes fewer.
        size: sequences in a batch.
    """

    samples: int = 512
    length: int | None = None
    size: int = 8

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if (value is not None or name != "length") and (type(value) is not int or value < 1 + (name == "length")):
                raise ValueError(f"{name} is a whole number, {1 + (name == 'length')} or more; got {value!r}.")

    def of(self, teacher: nn.Module) -> Sampled:
        """With the length that this teacher's sequences have.

        Raises:
            ValueError: it writes no text, or none so long.
        """
        config: Any = getattr(teacher, "config", None)
        if not writes_text(teacher):
            raise ValueError(
                f"no text is given, and a {type(teacher).__name__} writes none of its own, from which this could be "
                "learned: pass batches=, of a directory --data FILE."
            )
        most = longest_sequence(config.to_dict())
        length = min(LENGTH, most or LENGTH) if self.length is None else self.length
        if most is not None and length > most:
            raise ValueError(f"length={length}, but a {type(teacher).__name__} takes {most} tokens at most.")
        return Sampled(self.samples, length, self.size)

    def batches(self, rows: Tensor) -> list[dict[str, Tensor]]:
        """The rows as token batches."""
        return [{"input_ids": rows[at : at + self.size]} for at in range(0, len(rows), self.size)]


def writes_text(model: nn.Module) -> bool:
    """Whether it is a causal language model of transformers, whose logits are of the next token.

    >>> writes_text(nn.Linear(2, 2))
    False
    """
    config: Any = getattr(model, "config", None)
    can = getattr(model, "can_generate", None)
    return config is not None and can is not None and bool(can()) and not getattr(config, "is_encoder_decoder", False)


def check_text(model: nn.Module, batches: Any, share: float) -> None:
    """`ValueError` where a share of the loss is to be the text's own, and there is none: known before anything runs of
    a list of batches."""
    first = batches[0] if isinstance(batches, Sequence) and len(batches) else None
    labelled = isinstance(first, Mapping) and "labels" in first
    if share < 1 and first is not None and not labelled and not writes_text(model):
        raise ValueError(NO_TEXT)


def sampled(
    teacher: Any,
    asked: Sampled,
    seed: int,
    start: Tensor | None = None,
    after: Callable[[Tensor], None] = lambda _rows: None,
) -> Tensor:
    """(samples, length) of int64.

    Args:
        teacher: a causal language model of transformers.
        asked: `Sampled.of` it.
        seed: of what is drawn.
        start: the first rows, drawn already.
        after: called with all rows so far when some more are there.
    """
    rows = torch.empty(0, asked.length or LENGTH, dtype=torch.int64, device="cpu") if start is None else start
    parts = [rows]
    for at in track(range(len(rows), asked.samples, TOGETHER), "sampling from the teacher"):
        parts.append(_drawn(teacher, min(TOGETHER, asked.samples - at), asked.length or LENGTH, seed + at))
        after(torch.cat(parts))
    return torch.cat(parts)


@torch.no_grad()
def _drawn(teacher: Any, count: int, length: int, seed: int) -> Tensor:
    from transformers import GenerationConfig

    device = device_of(teacher) or torch.device("cpu")
    own = teacher.generation_config
    with restoring_generators(), in_mode(teacher, training=False):
        seed_torch(seed % (1 << 63))
        first = _first(teacher, count).to(device)
        # what a directory says of chats, such as a lower temperature or words that are never said, is left out
        kind: Any = GenerationConfig
        teacher.generation_config = kind(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=length - 1)
        try:
            found: Tensor = teacher.generate(first, attention_mask=torch.ones_like(first))
        finally:
            teacher.generation_config = own
    return found.cpu()


def _first(teacher: Any, count: int) -> Tensor:
    """The token that a text begins with; where the model knows none, each begins with one of all."""
    for name in ("bos_token_id", "eos_token_id"):
        for config in (teacher.generation_config, teacher.config):
            token = getattr(config, name, None)
            token = token[0] if isinstance(token, list) and token else token
            if isinstance(token, int):
                return torch.full((count, 1), token, dtype=torch.int64, device="cpu")
    return torch.randint(int(teacher.config.vocab_size), (count, 1), device="cpu")


# ---- in a file, for a run that goes on ------------------------------------------------------------------------------
#
# Law: what was saved is what is read, to the bit, or it is an error of one line; nothing in the file is run.


def _save(path: Path, tensors: Mapping[str, Tensor], said: Mapping[str, Any]) -> None:
    from safetensors.torch import save_file

    whole = {name: value.contiguous().cpu() for name, value in tensors.items()}
    text = json.dumps(said, sort_keys=True, allow_nan=False)
    save_file(whole, path, metadata={"said": text, "sha256": digest_of(whole, text)})


@contextlib.contextmanager
def _saved(path: Path, what: str, hint: str) -> Iterator[tuple[dict[str, Tensor], Any]]:
    """What `_save` wrote; what is found wrong of it within is one error, too."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            found: Mapping[str, str] = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no mapping
        text = found.get("said", "")
        if found.get("sha256") != digest_of(tensors, text):
            raise ValueError("its SHA-256 is not that of what it holds")
        yield tensors, json.loads(text)
    except CheckpointError:
        raise
    except (SafetensorError, ValueError, OSError, RuntimeError) as error:
        raise CheckpointError(f"{path}: the {what} of a run that was stopped, and damaged ({error}).{hint}") from None


def digest_of(tensors: Mapping[str, Tensor], text: str) -> str:
    """The SHA-256 of what is said and of the tensors."""
    total = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        value = tensors[name].contiguous()
        total.update(f"{name}{value.dtype}{tuple(value.shape)}".encode())
        total.update(value.reshape(-1).view(torch.uint8).numpy().data if value.numel() else b"")
    return total.hexdigest()


def save_text(path: Path, rows: Tensor, said: dict[str, Any]) -> None:
    """Writes what is drawn so far."""
    _save(path, {"tokens": rows}, said)


def load_text(path: Path, asked: Sampled, said: dict[str, Any], vocabulary: int, hint: str = "") -> Tensor:
    """What an earlier run drew.

    Raises:
        CheckpointError: the file is damaged, or of another run.
    """
    with _saved(path, "text", hint) as (tensors, found):
        if found != said:
            raise ValueError("it is of another request")
        rows = tensors.get("tokens", torch.empty(0, dtype=torch.float32, device="cpu"))
        if rows.dtype != torch.int64 or rows.dim() != 2 or rows.shape[1] != asked.length or len(rows) > asked.samples:
            raise ValueError(f"it holds {tuple(rows.shape)} of {rows.dtype}")
        if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < vocabulary:
            raise ValueError("it holds tokens that the teacher has not")
    whole = len(rows) == asked.samples
    return rows if whole else rows[: len(rows) // TOGETHER * TOGETHER]


# ---- Training of the whole model on the teacher's outputs: a step over a batch follows from its number alone.
#
# Law: the teacher is only run; the batches of a list come in an order that follows from the seed and the round, so
# that a run that was stopped after any step goes on as if it had not been. Numbers are narrow within the two runs
# alone.

OnStep = Callable[[int, float], None]
NO_BATCHES = "there are no batches: recovery is learned from running both models."
ROUTERS_FIRST = 0.2  # of the steps, where experts have left: the routers alone move
LOCAL_BATCHES = 128  # that each half of a block sees, spread over all of a list
JUDGED = 8  # batches at most, before the first step and after the last one
STEPS_EACH = 32  # for each of them beyond the first: they take a thirtieth of the time


def batches_from(batches: Iterable[Any], seed: int, start: int) -> Iterator[Any]:
    """The batches of steps from ``start`` on, without end: of a sequence each round in an order of its own, else as
    they come."""
    while not isinstance(batches, Sequence):
        count = 0
        for batch in batches:
            count += 1
            yield batch
        if not count:
            raise ValueError(NO_BATCHES)
    if not len(batches):
        raise ValueError(NO_BATCHES)
    round_, at = divmod(start, len(batches))
    while True:
        for number in order_of(seed, round_, len(batches))[at:]:
            yield batches[number]
        round_, at = round_ + 1, 0


def spread_over(batches: Iterable[Any], count: int) -> list[Any]:
    """So many of the batches: of a sequence from its beginning to its end, since it may be in the order of lengths;
    else the first.

    >>> spread_over(range(10), 4), spread_over(iter(range(10)), 4), spread_over(range(3), 4)
    ([0, 2, 5, 7], [0, 1, 2, 3], [0, 1, 2])
    """
    if not isinstance(batches, Sequence) or len(batches) <= count:
        return list(itertools.islice(batches, count))
    return [batches[at * len(batches) // count] for at in range(count)]


def narrower_routers(model: nn.Module, teacher: nn.Module, routers: Iterable[str]) -> list[str]:
    """Of these weights those that choose among fewer experts than the teacher's of the same name."""
    ours, theirs = (dict(each.named_parameters()) for each in (model, teacher))
    return [name for name in routers if name in theirs and theirs[name].shape[0] > ours[name].shape[0]]


def casting(device: torch.device | None, narrow: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    """Autocast to this dtype, or to none, whatever the caller has around it.

    It keeps no cache: a caller's autocast would let it outlive this, and then it holds weights of an earlier step.

    >>> with torch.autocast("cpu", torch.bfloat16), casting(None, None):
    ...     (torch.ones(1, 1) @ torch.ones(1, 1)).dtype
    torch.float32
    """
    kind = "cpu" if device is None else device.type
    if narrow is None and not torch.amp.is_autocast_available(kind):
        return contextlib.nullcontext()
    return torch.autocast(kind, dtype=narrow, enabled=narrow is not None, cache_enabled=False)


class Steps:
    """The steps by the outputs.

    Args:
        model, teacher: in evaluation mode; the model's trained parameters ask for gradients.
        descent: what moves.
        loss: a word, a function, or None: chosen by the teacher's first outputs.
        forward: how a batch is run.
        first: parameters that alone move in the first steps.
        share: of the loss, that is the teacher's; the rest is the text's own. 0: the teacher is not run.
        narrow: in which both multiply matrices; None: in what their weights are.
    """

    def __init__(
        self,
        model: nn.Module,
        teacher: nn.Module,
        descent: Descent,
        loss: str | OutputLoss | None,
        *,
        forward: Forward | None = None,
        first: Sequence[Tensor] = (),
        share: float = 1.0,
        narrow: torch.dtype | None = None,
    ) -> None:
        self.narrow = narrow
        self.share, self.writes = share, share < 1 and writes_text(model)
        self.model, self.teacher, self.descent, self.loss, self.forward = model, teacher, descent, loss, forward
        self.first = {id(each) for each in first}
        self.alone = round(ROUTERS_FIRST * descent.steps) if self.first else 0
        self.losses: list[float] = []
        self.rows = 0
        self.judging: Sequence[Any] = ()
        self.every: Sequence[Any] = ()  # batches, by whose place a batch is named that does not run
        self.before = math.nan
        self.verdict: Judged | None = None
        self.selects = False  # a top-k, so that what is selected from has a part in the loss

    @property
    def word(self) -> str:
        """What the loss is called."""
        if not self.share:
            return "the text's own"
        word = f"{self.of_outputs} + what selects" if self.selects else self.of_outputs
        if self.share == 1:
            return word
        word = f"({word})" if self.selects else word
        return f"{self.share:g} {word} + {1 - self.share:g} the text's own"

    @property
    def of_outputs(self) -> str:
        """What the loss between the outputs is called."""
        return self.loss if isinstance(self.loss, str) else getattr(self.loss, "__name__", "loss")

    def begin(self, batches: Iterable[Any]) -> None:
        """Chooses what is judged on, and sees how the model does there before the first step."""
        self.judging = spread_over(batches, min(JUDGED, 1 + self.descent.steps // STEPS_EACH))
        if not self.judging:
            raise ValueError(NO_BATCHES)
        said = digest(self.judging) if rank_and_world()[1] > 1 else ""
        if len(set(all_gather(said))) > 1:
            raise ValueError("the processes have other batches: give all of them the same, each takes its part of one.")
        self.every = batches if isinstance(batches, Sequence) else ()
        self.before = self._mean_loss()
        reshard(self.model)  # what a run goes on from is written into the shards

    def train(
        self,
        batches: Iterable[Any],
        seed: int,
        after: OnStep | None = None,
        resume: Callable[[], object] = lambda: None,
    ) -> Judged:
        """Takes the steps, after `resume` those that are left, and says whether they made it better; with a warning
        where they did not."""
        self.begin(batches)
        resume()
        self.run(batches, seed, after)
        self.verdict = Judged(len(self.judging), self.before, self._mean_loss(), self.word)
        self.verdict.warn(self.descent.rate)
        return self.verdict

    @torch.no_grad()
    def _mean_loss(self) -> float:
        return sum(float(summed(self._lost(batch)[0])) for batch in self.judging) / len(self.judging)

    def run(self, batches: Iterable[Any], seed: int, after: OnStep | None = None) -> None:
        """Takes the steps that are left; ``after`` is called with the number and the loss of each."""
        left = range(self.descent.done, self.descent.steps)
        self.every = batches if isinstance(batches, Sequence) else ()
        source = batches_from(batches, seed, self.descent.done)
        trained = [each for each in self.model.parameters() if each.requires_grad]
        with torch.enable_grad():
            for number in track(left, "recovering"):
                for each in trained if self.alone else ():
                    each.requires_grad_(number >= self.alone or id(each) in self.first)
                found, rows = self._lost(next(source))
                self.losses.append(self.descent.step(found))
                del found  # and with it what the model's run has left
                self.rows += int(summed(torch.tensor(rows, dtype=torch.int64, device=self.descent.device)))
                if after is not None:
                    after(self.descent.done, self.losses[-1])

    def _lost(self, batch: Any) -> tuple[Tensor, int]:
        """The loss of one of the batches, and of how many rows: this process's part of both."""
        refuse_empty(self.every, batch)
        whole, (batch, counts) = batch, part_of(batch) if rank_and_world()[1] > 1 else (batch, None)
        wanted: Any = None
        rows: dict[Hashable, Tensor] = {}  # that the teacher selects: with others no row has its like
        ours: dict[Hashable, Tensor] = {}  # what each selects from: given these rows, outputs say nothing of it
        theirs: dict[Hashable, Tensor] = {}
        if self.share:
            where = device_of(self.teacher) or device_of(self.model)  # a teacher in files is nowhere yet
            with (
                torch.no_grad(),
                casting(where, self.narrow),
                naming_batch(self.every, whole, self.forward, "the teacher"),
                same_rows(self.teacher, rows, records=True, scores=theirs),
            ):
                wanted = run_batch(self.teacher, moved(batch, where), self.forward)
        device = device_of(self.model)
        here = moved(mapped(batch, widened) if self._is_widened else batch, device)
        same = same_rows(self.model, rows, records=False, scores=ours) if rows else contextlib.nullcontext()
        with casting(device, self.narrow), naming_batch(self.every, whole, self.forward), same:
            outputs = run_batch(self.model, here, self.forward)
        mask = Tokens.of(batch).own
        parts = []
        if self.share:
            if self.loss is None:
                self.loss = on_rank_zero(lambda: chosen_for(wanted))
            lost = loss_between(outputs, wanted, batch, self.loss, mask, counts=counts)
            scores = score_loss(ours, theirs, lost, counts=counts)
            self.selects = self.selects or scores is not None
            parts.append(self.share * (lost if scores is None else lost + scores))
        if self.share < 1:
            own = text_loss(outputs, batch, mask, writes=self.writes, counts=counts)
            parts.append((1 - self.share) * own)
        return torch.stack(parts).sum() if len(parts) > 1 else parts[0], 0 if counts is False else _rows(outputs, mask)

    @property
    def _is_widened(self) -> bool:
        first = next((each for each in self.model.parameters() if each.is_floating_point()), None)
        return first is not None and first.element_size() >= 4


def _rows(outputs: Any, mask: Tensor | None) -> int:
    try:
        return count_rows(features_of(outputs), mask)
    except TypeError:  # what a custom loss understands
        return 0


@dataclass(frozen=True)
class _Progress:
    """Where the steps are, beside what moves and what the optimizer remembers of it."""

    done: Annotated[int, Between(0)]
    losses: tuple[float, ...]
    rows: Annotated[int, Between(0)]
    loss: str


def save_state(path: Path, steps: Steps) -> None:
    """Writes where the steps are."""
    done = _Progress(steps.descent.done, tuple(steps.losses), steps.rows, steps.of_outputs)
    _save(path, steps.descent.state(), {"steps": plain(done)})


def steps_in(path: Path, hint: str = "") -> int:
    """How many steps are done in a state that was written; 0 where there is none.

    Raises:
        CheckpointError: the file is damaged.
    """
    if not path.exists():
        return 0
    with _saved(path, "state", hint) as (_, found):
        return int(found["steps"]["done"])


def load_state(path: Path, steps: Steps, hint: str = "") -> None:
    """Goes on from there.

    Raises:
        CheckpointError: the file is damaged, or of another run.
    """
    with _saved(path, "state", hint) as (tensors, found):
        if not isinstance(found, dict):
            raise ValueError("no fields")
        fields = Fields(found, path, error=CheckpointError, hint=hint)
        said: _Progress = fields.value("steps", _Progress)
        if said.done > steps.descent.steps:
            raise fields.wrong("steps.done", f"is more than {steps.descent.steps}")
        if len(said.losses) != said.done or not all(map(math.isfinite, said.losses)):
            raise fields.wrong("steps.losses", f"is not one for each of {said.done} steps")
        try:
            steps.descent.load(tensors, said.done)
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}; it is of another run.{hint}") from None
    steps.losses, steps.rows = list(said.losses), said.rows
    if steps.loss is None:
        steps.loss = said.loss
