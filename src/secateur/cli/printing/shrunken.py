"""What shrink says: what its result says of itself, how to load what was written, and sheets for a page.

Law: what leaves and what stays is named as the library names it.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from secateur.cli.terminal import printing
from secateur.report import Cells, Chart, Sheet
from secateur.shrinking import (
    CheckpointShrinking,
    Shrunk,
    ShrunkDepth,
    checkpoint_parts,
    depth_parts,
    proof_words,
    shrunk_parts,
)
from secateur.support import Part, percent, printable

__all__ = [
    "blocks_parts",
    "blocks_sheets",
    "directory_parts",
    "directory_sheets",
    "model_parts",
    "model_sheets",
    "print_loading",
]


def model_parts(done: Shrunk, out: Path | None, seconds: float, *, verbose: bool = False) -> Iterator[Part]:
    """What left a model, whether that was proved, and where it is."""
    yield from shrunk_parts(done, verbose=verbose)
    yield ""
    proof = "Proved on random weights that nothing else changed" if done.asked.verify else "Not proved, as asked"
    yield f"{proof} ({seconds:.1f} s)."
    if out is None:
        yield "Nothing was written."
    else:
        yield f"Wrote plan.json and model.safetensors to {printable(str(out))}."


def print_loading(out: Path, factory: str, expression: str) -> None:
    """The lines of Python that load it, each on one line, to be copied."""
    module, _, name = factory.partition(":")
    with printing() as console:
        console.print("To load it:\n")
        for line in (
            "from secateur import load_shrunken",
            f"from {module} import {name.partition('.')[0]}",
            f"model = load_shrunken({expression}, {str(out)!r})",
        ):
            console.print(f"    {printable(line, 1000)}", soft_wrap=True)


def model_sheets(done: Shrunk) -> list[Sheet]:
    """A row a group; then a row for each dimension that stays whole."""
    counts = {
        group.name: (group.size, int(done.kept[group.axis].sum()) if group.axis in done.kept else group.size)
        for group in done.coupling.groups
    }
    members = [", ".join(f"{name}[{at}]" for name, at in group.members) for group in done.coupling.groups]
    return [_groups(counts, members), *_whole(done.coupling.frozen)]


def directory_parts(done: CheckpointShrinking, *, verbose: bool = False) -> Iterator[Part]:
    """What left a directory, on what that was proved, and where it is."""
    yield from checkpoint_parts(done, verbose=verbose)
    yield ""
    yield f"{proof_words(done)} ({done.seconds:.1f} s)."
    if done.left_out:
        files = ", ".join(printable(str(path)) for path in done.left_out[:4])
        yield f"Left out, as they hold the weights in other forms: {files}."
    yield "Nothing was written." if done.out is None else f"Wrote {printable(str(done.out))}; from_pretrained loads it."


def blocks_parts(done: ShrunkDepth) -> Iterator[Part]:
    """Which blocks left a directory, on what that was proved, and where it is."""
    yield from depth_parts(done)
    if done.left_out:
        files = ", ".join(printable(str(path)) for path in done.left_out[:4])
        yield f"Left out, as they hold the weights in other forms: {files}."
    if done.out is None:
        yield f"Nothing was written ({done.seconds:.1f} s)."
    else:
        yield f"Wrote {printable(str(done.out))}; from_pretrained loads it ({done.seconds:.1f} s)."


def blocks_sheets(done: ShrunkDepth) -> list[Sheet]:
    """A row for each block that left, in the order in which they were chosen; then for each weight that took over."""
    gone = [printable(name, 1000) for name in done.gone]
    sheets = [Sheet("Block by block", [Cells("left", list(range(1, len(gone) + 1))), Cells("block", gone)])]
    if done.patched:
        names, shares = [printable(name, 1000) for name in done.patched], list(done.patched.values())
        cells = [Cells("tensor", names), Cells("makes up for", shares, [percent(share) for share in shares], shares)]
        sheets.append(Sheet("What took over", cells))
    return sheets


def directory_sheets(done: CheckpointShrinking) -> list[Sheet]:
    """A row for each group that lost units; then a row for each dimension that stays whole."""
    return [*([_groups(done.counts)] if done.counts else []), *_whole(done.frozen)]


def _groups(counts: Mapping[str, tuple[int, int]], members: list[str] | None = None) -> Sheet:
    names = [printable(name, 1000) for name in counts]
    shares = [kept / size if size else None for size, kept in counts.values()]
    cells = [
        Cells("group", names),
        Cells("units", [size for size, _ in counts.values()], [f"{size:,}" for size, _ in counts.values()]),
        Cells("left", [kept for _, kept in counts.values()], [f"{kept:,}" for _, kept in counts.values()]),
        Cells("share left", shares, [percent(share) for share in shares], shares),
        *([Cells("its members", [printable(each, 10_000) for each in members])] if members else []),
    ]
    told = "The share of its units that each group keeps; a line joins groups that differ in numbers alone."
    return Sheet(
        "Group by group", cells, [Chart("What is left of each group", told, names, shares, "left", share=True)]
    )


def _whole(frozen: Mapping[tuple[str, int], str]) -> list[Sheet]:
    if not frozen:
        return []
    cells = [
        Cells("dimension", [printable(f"{name}[{at}]", 1000) for name, at in frozen]),
        Cells("stays whole, because", [printable(why, 1000) for why in frozen.values()]),
    ]
    return [Sheet("What stays whole", cells)]
