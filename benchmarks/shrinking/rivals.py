"""What others publish about units that leave a transformer at once, written from their papers, in plain functions.

Law: a rival takes so many units of each MLP, and so many heads of each attention, as it is told, and changes the model
in place; only how units are chosen, and what is done to what stays, is its own.

Blocks are those of Llama and BERT, as transformers writes them. Nothing here uses the library's own coupling, evidence
or solvers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batches = Sequence[dict[str, Tensor]]


@dataclass(frozen=True)
class Group:
    """Units of a block: each is so many rows of all producers, and as many columns of the consumer as that makes."""

    kind: str  # "units" of an MLP, or "heads": those of keys and values, with their queries
    producers: tuple[nn.Linear, ...]
    consumer: nn.Linear
    count: int

    @property
    def weights(self) -> int:
        """Entries of the matrices that one unit holds."""
        matrices = (*self.producers, self.consumer)
        return sum(each.weight.numel() for each in matrices) // self.count


@dataclass(frozen=True)
class Keep:
    """How many units stay of each group, by kind, the same in all blocks."""

    units: int
    heads: int

    def of(self, group: Group) -> int:
        return self.units if group.kind == "units" else self.heads


def stack_of(model: nn.Module) -> nn.ModuleList:
    """The model's blocks, in order.

    Raises:
        TypeError: they are neither those of Llama nor of BERT.
    """
    for path in ("model.layers", "encoder.layer"):
        try:
            found = model.get_submodule(path)
        except AttributeError:
            continue
        if isinstance(found, nn.ModuleList):
            return found
    raise TypeError(f"{type(model).__name__} has neither model.layers nor encoder.layer; give a Llama or a BERT.")


def groups_of(block: nn.Module, config: Any) -> tuple[Group, Group]:
    """Heads, and units of the MLP."""
    if hasattr(block, "self_attn"):
        attention, mlp = block.self_attn, block.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        return (
            Group("heads", projections, attention.o_proj, config.num_key_value_heads),
            Group("units", (mlp.gate_proj, mlp.up_proj), mlp.down_proj, mlp.down_proj.in_features),
        )
    attention, narrow = block.attention, block.output.dense
    projections = (attention.self.query, attention.self.key, attention.self.value)
    return (
        Group("heads", projections, attention.output.dense, config.num_attention_heads),
        Group("units", (block.intermediate.dense,), narrow, narrow.in_features),
    )


def all_groups(model: nn.Module) -> list[Group]:
    return [group for block in stack_of(model) for group in groups_of(block, model.config)]


def rows_of(linear: nn.Linear, kept: Tensor, count: int) -> Tensor:
    """Of a producer: the rows that the kept ones of so many units have."""
    return torch.arange(linear.out_features).view(count, -1)[kept].flatten()


def columns_of(group: Group, kept: Tensor) -> Tensor:
    return torch.arange(group.consumer.in_features).view(group.count, -1)[kept].flatten()


def take(group: Group, kept: Tensor) -> None:
    """The other units leave, in place."""
    columns = columns_of(group, kept)
    for producer in group.producers:
        rows = rows_of(producer, kept, group.count)
        producer.weight = nn.Parameter(producer.weight.detach()[rows].clone())
        if producer.bias is not None:
            producer.bias = nn.Parameter(producer.bias.detach()[rows].clone())
        producer.out_features = len(rows)
    group.consumer.weight = nn.Parameter(group.consumer.weight.detach()[:, columns].clone())
    group.consumer.in_features = len(columns)


def best(scores: Tensor, count: int) -> Tensor:
    """Indices of the highest, ascending."""
    return scores.topk(count).indices.sort().values


def per_unit(group: Group, columns: Tensor) -> Tensor:
    """Scores of the consumer's columns summed over each unit."""
    return columns.view(group.count, -1).sum(1)


# --------------------------------------------------------------------------------------------------------------------
# One walk over the blocks: what reaches the consumers, block by block.
# --------------------------------------------------------------------------------------------------------------------


class _Reached(Exception):
    pass


@torch.no_grad()
def walk(
    model: nn.Module,
    batches: Batches,
    visit: Callable[[Group, Tensor], None],
    *,
    again: bool,
) -> None:
    """``visit(group, inputs)`` for each group of each block, with the inputs of its consumer, ``[tokens, columns]``.

    Args:
        again: A block is run a second time after its visits, so that the next one sees what was changed; else all see
            the dense model's.
    """
    blocks = stack_of(model)
    calls = _calls(model, blocks[0], batches)
    hidden = [arguments[0] for arguments, _ in calls]
    real = [None if "attention_mask" not in batch else batch["attention_mask"].bool() for batch in batches]
    for block in blocks:
        groups = groups_of(block, model.config)
        seen: dict[str, list[Tensor]] = {group.kind: [] for group in groups}
        handles = [group.consumer.register_forward_pre_hook(_noting(seen[group.kind])) for group in groups]
        after = _run(block, hidden, calls)
        for handle in handles:
            handle.remove()
        for group in groups:
            inputs = [
                each.flatten(0, -2) if mask is None else each[mask]
                for each, mask in zip(seen.pop(group.kind), real, strict=True)
            ]
            visit(group, torch.cat(inputs))
        hidden = _run(block, hidden, calls) if again else after


def _noting(inputs: list[Tensor]) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    return lambda _, given: inputs.append(given[0])


def _calls(model: nn.Module, first: nn.Module, batches: Batches) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """What the first block is called with for each batch."""
    found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def catch(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        found.append((arguments, keywords))
        raise _Reached

    handle = first.register_forward_pre_hook(catch, with_kwargs=True)
    for batch in batches:
        try:
            model(**batch, **({"use_cache": False} if hasattr(model, "lm_head") else {}))
        except _Reached:
            continue
    handle.remove()
    return found


def _run(block: nn.Module, hidden: Sequence[Tensor], calls: Sequence[Any]) -> list[Tensor]:
    return [block(each, *arguments[1:], **keywords) for each, (arguments, keywords) in zip(hidden, calls, strict=True)]


# --------------------------------------------------------------------------------------------------------------------
# The methods: each changes the model in place.
# --------------------------------------------------------------------------------------------------------------------


def told(model: nn.Module, keep: Keep) -> None:
    """The configuration says what stays, as far as it can: how many units of the MLPs."""
    model.config.intermediate_size = keep.units


def magnitude(model: nn.Module, _: Batches, keep: Keep) -> None:
    """A unit's score is the sum of the absolute values of its rows and columns."""
    for group in all_groups(model):
        rows = sum(each.weight.detach().abs().view(group.count, -1).sum(1) for each in group.producers)
        take(group, best(rows + per_unit(group, group.consumer.weight.detach().abs().sum(0)), keep.of(group)))
    told(model, keep)


def wanda(model: nn.Module, batches: Batches, keep: Keep) -> None:
    """Wanda (2306.11695) by columns, as FLAP's authors compare with (Wanda-sp): ``|W_ij|·‖X_j‖`` summed over the unit.

    As there, a block is pruned on what the pruned blocks before it give.
    """

    def visit(group: Group, inputs: Tensor) -> None:
        columns = group.consumer.weight.abs().sum(0) * inputs.norm(dim=0)
        take(group, best(per_unit(group, columns), keep.of(group)))

    walk(model, batches, visit, again=True)
    told(model, keep)


def fluctuation(group: Group, inputs: Tensor) -> Tensor:
    """FLAP's metric of columns: the variance of the input times the square of the column's norm."""
    return inputs.var(0) * group.consumer.weight.square().sum(0)


def _compensate(group: Group, kept: Tensor, mean: Tensor) -> None:
    """FLAP: what the units that leave add on average goes into the bias. The model's class has to allow one."""
    gone = torch.ones_like(mean)
    gone[columns_of(group, kept)] = 0
    constant = group.consumer.weight.detach() @ (mean * gone)
    before = group.consumer.bias
    take(group, kept)
    group.consumer.bias = nn.Parameter(constant if before is None else before.detach() + constant)
    for producer in group.producers:  # where a configuration can say it at all, it gives all of an MLP a bias
        if producer.bias is None:
            producer.bias = nn.Parameter(torch.zeros(producer.out_features))


def flap(model: nn.Module, batches: Batches, keep: Keep) -> None:
    """FLAP (2312.11983), the same share in each layer ("UL-UM"): fluctuation, and its bias. All on the dense stream."""
    chosen: list[tuple[Group, Tensor, Tensor]] = []

    def visit(group: Group, inputs: Tensor) -> None:
        columns = fluctuation(group, inputs)
        if group.kind == "heads":
            columns = columns.square()  # as its code has it
        chosen.append((group, best(per_unit(group, columns), keep.of(group)), inputs.mean(0)))

    walk(model, batches, visit, again=False)
    for group, kept, mean in chosen:
        if len(kept) < group.count:
            _compensate(group, kept, mean)
    told(model, keep)
    if hasattr(model.config, "mlp_bias"):
        model.config.mlp_bias = True


def flap_adaptive(model: nn.Module, batches: Batches, keep: Keep) -> None:
    """FLAP as it comes ("AL-AM"): metrics are standardized in each layer, and compete over the whole model.

    As many weights leave as `keep` says; one unit of each group stays. Its layers differ in shape, so that no
    configuration says them.
    """
    found: list[tuple[Group, Tensor, Tensor]] = []

    def visit(group: Group, inputs: Tensor) -> None:
        columns = fluctuation(group, inputs)
        if group.kind == "heads":
            columns = columns.square()
        columns = (columns - columns.mean()) / columns.std()
        found.append((group, columns.view(group.count, -1).mean(1), inputs.mean(0)))

    walk(model, batches, visit, again=False)
    to_leave = sum((group.count - keep.of(group)) * group.weights for group, _, _ in found)
    order = sorted(
        (float(score), place, unit)
        for place, (_, scores, _) in enumerate(found)
        for unit, score in enumerate(scores.tolist())
        if unit != int(scores.argmax())
    )
    gone: list[set[int]] = [set() for _ in found]
    for _, place, unit in order:
        if to_leave < found[place][0].weights / 2:
            break
        gone[place].add(unit)
        to_leave -= found[place][0].weights
    for (group, _, mean), without in zip(found, gone, strict=True):
        if without:
            kept = torch.tensor([unit for unit in range(group.count) if unit not in without])
            _compensate(group, kept, mean)


def fasp(model: nn.Module, batches: Batches, keep: Keep, damping: float = 1e-4) -> None:
    """FASP (2501.09412): Wanda's score summed over the column, then least squares for the columns that stay.

    ``W_kept = W X X_keptᵀ (X_kept X_keptᵀ + δ I)⁻¹``, block after block; δ in the diagonal's mean, which a few units of
    huge activations make: at a hundredth, held-out errors of some blocks are twice what they are here. Heads leave by
    the same score where they have to; the paper takes columns within them, which no configuration says.
    """

    def visit(group: Group, inputs: Tensor) -> None:
        weight = group.consumer.weight.detach().double()
        columns = weight.abs().sum(0) * inputs.norm(dim=0)
        kept = best(per_unit(group, columns), keep.of(group))
        if len(kept) == group.count:
            return
        gram = (inputs.T @ inputs).double()
        of_kept = columns_of(group, kept)
        inner = gram[of_kept][:, of_kept]
        inner += damping * inner.diagonal().mean() * torch.eye(len(inner), dtype=torch.float64)
        repaired = torch.linalg.solve(inner, gram[of_kept] @ weight.T).T
        take(group, kept)
        group.consumer.weight = nn.Parameter(repaired.to(group.consumer.weight.dtype))

    walk(model, batches, visit, again=True)
    told(model, keep)


# --------------------------------------------------------------------------------------------------------------------
# SliceGPT
# --------------------------------------------------------------------------------------------------------------------


class _Sliced(nn.Module):
    """A Llama's block on a stream of fewer entries: normalizations are in the matrices, seams turn the stream."""

    def __init__(self, block: nn.Module, width: int) -> None:
        super().__init__()
        self.attention, self.mlp = block.self_attn, block.mlp
        self.width = width  # of the whole stream, whose mean square the normalization takes
        self.epsilon = block.input_layernorm.variance_epsilon
        self.first_seam = self.second_seam = nn.Parameter(torch.empty(0, 0))

    def normalized(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) / self.width + self.epsilon)

    def attended(self, x: Tensor, **keywords: Any) -> Tensor:
        y: Tensor = self.attention(hidden_states=self.normalized(x), **keywords)[0]
        return y

    def forward(self, x: Tensor, **keywords: Any) -> Tensor:
        x = x @ self.first_seam + self.attended(x, **keywords)
        y: Tensor = x @ self.second_seam + self.mlp(self.normalized(x))
        return y


class _Turned(nn.Module):
    """The embedding, whose rows are turned and sliced when they are read: tied to the head, it stays whole."""

    def __init__(self, embedding: nn.Module, turn: Tensor) -> None:
        super().__init__()
        self.embedding, self.turn = embedding, nn.Parameter(turn)

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.embedding(tokens) @ self.turn
        return y


def _directions(streams: Sequence[Tensor], width: int) -> Tensor:
    """The first principal directions of a stream, not centred, damped as in the authors' code."""
    gram = sum((each.flatten(0, -2).double().T @ each.flatten(0, -2).double() for each in streams), torch.zeros(()))
    gram = gram + 0.01 * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
    return torch.linalg.eigh(gram).eigenvectors.flip(1)[:, :width].to(streams[0].dtype)


def _into(linears: Sequence[nn.Linear], scale: Tensor, turn: Tensor) -> None:
    """The normalization's scale and the turned stream go into the matrices that read it."""
    for linear in linears:
        linear.weight = nn.Parameter((linear.weight.detach() * scale) @ turn)
        linear.in_features = turn.shape[1]


def _out_of(linear: nn.Linear, turn: Tensor) -> None:
    linear.weight = nn.Parameter(turn.T @ linear.weight.detach())
    linear.out_features = turn.shape[1]


def sliced_parameters(model: nn.Module, width: int) -> int:
    """How many a Llama with tied embeddings holds after `slicegpt`."""
    whole, blocks = model.config.hidden_size, len(stack_of(model))
    matrices = sum(each.weight.numel() for group in all_groups(model) for each in (*group.producers, group.consumer))
    last = stack_of(model)[-1].mlp.down_proj.weight.numel()
    seams = (2 * blocks - 1) * width * width + width * whole
    kept_whole = model.model.embed_tokens.weight.numel() + whole  # the last normalization
    return (matrices - last) * width // whole + last + seams + whole * width + kept_whole


@torch.no_grad()
def slicegpt(model: nn.Module, batches: Batches, width: int) -> None:
    """SliceGPT (2401.15024): the stream is turned to its principal directions at each seam, and the last of them leave.

    With the head not sliced, which is its default. The embedding is tied to the head in the models here; untied and
    sliced, as in the authors' code, it would be held twice, which is 28 of 135 million parameters. It stays whole,
    and is turned when it is read. What comes out is no configuration's model.
    """
    blocks, whole = stack_of(model), model.config.hidden_size
    calls = _calls(model, blocks[0], batches)
    streams = [arguments[0] for arguments, _ in calls]
    turn = _directions(streams, width)
    model.model.embed_tokens = _Turned(model.model.embed_tokens, turn)
    streams = [stream @ turn for stream in streams]
    for place, block in enumerate(blocks):
        new = _Sliced(block, whole)
        _into(groups_of(block, model.config)[0].producers, block.input_layernorm.weight.detach(), turn)
        streams = [
            stream @ turn.T + new.attended(stream, **keywords)
            for stream, (_, keywords) in zip(streams, calls, strict=True)
        ]
        second = _directions(streams, width)
        new.first_seam = nn.Parameter(turn.T @ second)
        _out_of(block.self_attn.o_proj, second)
        streams = [stream @ second for stream in streams]
        _into((block.mlp.gate_proj, block.mlp.up_proj), block.post_attention_layernorm.weight.detach(), second)
        streams = [stream @ second.T + new.mlp(new.normalized(stream)) for stream in streams]
        turn = _directions(streams, width) if place + 1 < len(blocks) else torch.eye(whole)
        new.second_seam = nn.Parameter(second.T @ turn)
        _out_of(block.mlp.down_proj, turn)
        streams = [stream @ turn for stream in streams]
        blocks[place] = new
