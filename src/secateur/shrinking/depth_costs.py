"""How far the outputs of a directory's model move without some of its blocks, on real inputs; which blocks to remove.

Law: of the weights one block is in memory, and a pass reads each once, whatever the number of blocks that are tried:
what is behind a block is run for it and once more without it. Blocks leave one by one, each the one without which the
outputs move least, the others being gone, as branches in `secateur.shrinking.output_costs`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from secateur.blockwise import DirectoryWalk, LostOutputError, Tokens, divergence
from secateur.shrinking.depth import passed_on
from secateur.shrinking.output_costs import few_batches
from secateur.support import moved, track

__all__ = ["DepthCosts", "least"]

_AT_ONCE = 4  # blocks that are tried in one pass, when not all are

Costs = Callable[[Collection[str], Collection[str]], Mapping[str | None, float]]


class DepthCosts:
    """Divergences from the outputs of the whole model; see `secateur.blockwise.divergence`.

    Args:
        place: the model whose weights lie in files.
        batches: of which the first are used, as many as make a thousand rows of outputs.
    """

    def __init__(self, place: DirectoryWalk, batches: Sequence[Any]) -> None:
        self.place = place
        self.held: Sequence[Any] = few_batches(batches)
        self.dense: list[Any] = []
        self(())  # the whole model's outputs

    def __call__(
        self, gone: Collection[str], more: Collection[str] = (), *, written: bool = False
    ) -> dict[str | None, float]:
        """The divergence without the blocks that are ``gone``, under None, and without each of ``more`` as well.

        Args:
            written: the weights are those of the copy that is written.
        """
        try:
            return self._run(gone, more, written=written, keep_all=False)
        except LostOutputError:  # a block is given what one long before it gave
            return self._run(gone, more, written=written, keep_all=True)

    def _run(
        self, gone: Collection[str], more: Collection[str], *, written: bool, keep_all: bool
    ) -> dict[str | None, float]:
        count, last = len(self.held), list[Any]()
        held = [moved(each, self.place.device) for each in self.held]
        first: dict[str | None, int] = {None: 0}  # the numbers of the runs without a block begin there

        def kept(model: Any, batch: Any) -> Any:
            last[:] = [forward(model, batch)]
            return last[0]

        with self.place.replaying(dense=False) as replay:
            forward = self.place.forward
            replay.how, replay.keep_all = kept, keep_all
            files = self.place.files
            for _ in track(range(len(self.place.blocks)), "running without blocks"):
                name = replay.run(0, held[0], lambda *_: None)
                if name is None:
                    break
                files.load(name, finished=written)

                def store(
                    name: str,
                    args: Any,
                    kwargs: Any,
                    call: Callable[[], Any],
                ) -> None:
                    output = call()
                    less = passed_on(args, kwargs, output) if name in gone or name in more else None
                    replay.keep(name, less if name in gone else output)
                    if name in more and replay.at < count:
                        replay.fork(name, first[name] + replay.at, less)

                known = list(first.values())
                if name in more:
                    first[name] = count * len(first)
                for start in known:
                    for number, batch in enumerate(held):
                        replay.run(start + number, batch, store)
                        replay.drop_unneeded(name, start + number, batch)
                replay.done.append(name)
                if name in more:
                    for number, batch in enumerate(held):
                        replay.drop_unneeded(name, first[name] + number, batch)
                files.unload(name)
            found: dict[str | None, float] = {}
            for which, start in first.items():
                total, rows = 0.0, 0
                for number, batch in enumerate(held):
                    replay.run(start + number, batch, lambda *_: None)
                    if len(self.dense) < count:
                        self.dense.append(last[0])
                    lost, counted = divergence(self.dense[number], last[0], Tokens.of(batch).own)
                    total, rows = total + lost, rows + counted
                found[which] = total / rows if rows and math.isfinite(total) else math.inf
        return found


def least(
    costs: Costs, candidates: Sequence[str], target: int, stacks: Mapping[str, Collection[str]]
) -> tuple[list[str], float]:
    """A set of ``target`` candidates whose removal moves the outputs little, fewer where there are no more; and the
        divergence. One block of each stack stays.

    A cost that was measured with fewer blocks gone counts as a lower bound, so that few are measured again.

    >>> price = {"a": 3.0, "b": 1.0, "c": 2.0}
    >>> def costs(gone, more):
    ...     base = sum(price[each] for each in gone)
    ...     return {None: base} | {each: base + price[each] for each in more}
    >>> least(costs, list(price), 2, {"h": "abc"})
    (['b', 'c'], 3.0)
    """
    gone: list[str] = []
    lost, known = 0.0, dict.fromkeys(candidates, -math.inf)
    fresh: dict[str, int] = {}
    for _ in track(range(target), "choosing blocks"):
        last = {each for its in stacks.values() if len({*its} - {*gone}) == 1 for each in its}
        left = [each for each in candidates if each not in gone and each not in last]
        if not left:
            break
        while fresh.get(best := min(left, key=lambda each: known[each])) != len(gone):
            stale = sorted((each for each in left if fresh.get(each) != len(gone)), key=lambda each: known[each])
            found = costs(gone, stale[:_AT_ONCE] if gone else stale)
            lost = found[None]
            for each in stale:
                if each in found:
                    known[each], fresh[each] = found[each] - lost, len(gone)
        gone.append(best)
        lost += known[best]
    return gone, lost
