"""What experts says: what its result says of itself, where it is, and sheets for a page.

Law: what is drawn is what is printed, of every mixture.
"""

from collections.abc import Iterator
from pathlib import Path

from secateur import shrinking
from secateur.report import Cells, Chart, Sheet
from secateur.shrinking import ShrunkExperts, proof_words
from secateur.support import Part, printable

__all__ = ["experts_parts", "experts_sheets"]


def experts_parts(done: ShrunkExperts, profile: Path | None) -> Iterator[Part]:
    """What left, on what it was proved, and where it is."""
    yield from shrinking.experts_parts(done)
    yield f"{proof_words(done)}."
    if done.left_out:
        files = ", ".join(printable(str(path)) for path in done.left_out[:4])
        yield f"Left out, as they hold the weights in other forms: {files}."
    if profile is not None:
        yield f"The profile is in {printable(str(profile))}."
    if done.out is None:
        yield f"No model was written ({done.seconds:.1f} s)."
    else:
        yield f"Wrote {printable(str(done.out))}; from_pretrained loads it ({done.seconds:.1f} s)."


def experts_sheets(done: ShrunkExperts) -> list[Sheet]:
    """A row an expert, with what data says of it; and what mixtures lose without some."""
    if done.profile is None:
        return []
    names, numbers, tokens, reap, stays = [], [], [], [], []
    for name, routed in done.profile.routed.items():
        scores = routed.scores("reap")
        kept = done.kept.get(name)
        for at in range(len(scores)):
            names.append(printable(name, 1000))
            numbers.append(at)
            tokens.append(int(routed.tokens[at]))
            reap.append(float(scores[at]))
            stays.append("yes" if kept is None or at in kept else "no")
    cells = [
        Cells("router", names),
        Cells("expert", numbers),
        Cells("tokens", tokens, [f"{each:,}" for each in tokens]),
        Cells("weight x norm", reap, [f"{each:.4g}" for each in reap]),
        Cells("stays", stays),
    ]
    labels = [f"{name}: {at}" for name, at in zip(names, numbers, strict=True)]
    told = "The mean over an expert's tokens of the norm of its outputs times the weight that the router gives them."
    sheets = [Sheet("Expert by expert", cells, [Chart("What experts add", told, labels, reap, "")])]
    for name, curve in done.profile.curves.items():
        errors = curve.errors()
        counts, lost = list(errors), list(errors.values())
        cells = [Cells("experts gone", counts), Cells("relative error", lost, [f"{each:.2%}" for each in lost])]
        told = "On held-out tokens, with all else as it was."
        title = f"What {printable(name, 200)} loses"
        sheets.append(Sheet(title, cells, [Chart(title, told, [f"-{count}" for count in counts], lost, "")]))
    return sheets
