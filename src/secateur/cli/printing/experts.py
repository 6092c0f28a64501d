"""What experts says: what its result says of itself, where it is, and sheets for a page.

Law: what is drawn is what is printed, of every mixture.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from secateur import shrinking
from secateur.report import Cells, Chart, Sheet
from secateur.shrinking import Profile, ShrunkExperts, proof_words
from secateur.support import Part, percent, printable

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
    """A row an expert, with what data says of it; a row a mixture, with what it loses; and what the model does."""
    if done.profile is None:
        return []
    mixtures = {name: at for at, name in enumerate(done.profile.routed)}
    names, numbers, tokens, reap, stays = [], [], [], [], []
    for name, routed in done.profile.routed.items():
        scores = routed.scores("reap")
        kept = done.kept.get(name)
        for at in range(len(scores)):
            names.append(name)
            numbers.append(at)
            tokens.append(int(routed.tokens[at]))
            reap.append(float(scores[at]))
            stays.append("yes" if kept is None or at in kept else "no")
    cells = [
        Cells("router", [printable(name, 1000) for name in names]),
        Cells("expert", numbers),
        Cells("tokens", tokens, [f"{each:,}" for each in tokens]),
        Cells("weight x norm", reap, [f"{each:.4g}" for each in reap]),
        Cells("stays", stays),
    ]
    told = (
        "The mean over an expert's tokens of the norm of its outputs times the weight that the router gives them: each "
        "mixture is a column of points, a point an expert."
    )
    chart = Chart(
        "What experts add",
        told,
        [f"{name}: {at}" for name, at in zip(names, numbers, strict=True)],
        reap,
        "weight x norm",
        series=["stays" if each == "yes" else "leaves" for each in stays],
        places=[mixtures[name] for name in names],
        along="the mixtures, first to last",
        joined=False,
    )
    sheets = [Sheet("Expert by expert", cells, [chart])]
    return [*sheets, *_lost_sheets(done.profile)]


def _lost_sheets(profile: Profile) -> Iterator[Sheet]:
    """What mixtures lose without experts, and what the model does."""
    if profile.curves:
        told = "The relative error of outputs on held-out tokens without so many of the experts, all else as it was."
        errors = {name: curve.errors() for name, curve in profile.curves.items()}
        yield _by_mixture("What mixtures lose alone", told, errors, lambda count: f"-{count}")
    if not profile.beyond:
        return
    told = "The relative error of the stream behind each mixture's block, when all lose a share of their experts."
    names = [name for name in profile.routed if all(name in each.streams for each in profile.beyond.values())]
    streams = {name: {share: each.error(name) for share, each in profile.beyond.items()} for name in names}
    yield _by_mixture("What streams lose", told, streams, lambda share: f"-{percent(share)}")
    shares = list(profile.beyond)
    lost = [each.lost / max(1, each.tokens) for each in profile.beyond.values()]
    cells = [
        Cells("experts gone", shares, [percent(share) for share in shares]),
        Cells("model output", lost, [f"{each:.3g}" for each in lost]),
    ]
    told = "The divergence of the model's outputs from the dense ones, a token of held-out text, against what leaves."
    gone = [100 * share for share in shares]
    chart = Chart("What the model loses", told, [percent(each) for each in shares], lost, "divergence",
                  series=["all mixtures"] * len(lost), places=gone, along="experts gone (%)")  # fmt: skip
    yield Sheet("What the model loses", cells, [chart])


def _by_mixture(title: str, told: str, errors: Mapping[str, Mapping[Any, float]], shown: Callable[[Any], str]) -> Sheet:
    """A row a mixture, a column a number of experts; drawn along the model, a line for each number."""
    keys = sorted({key for each in errors.values() for key in each})
    columns = {key: [each.get(key) for each in errors.values()] for key in keys}
    cells = [Cells("router", [printable(name, 1000) for name in errors])]
    cells += [
        Cells(shown(key), its, ["" if each is None else f"{each:.1%}" for each in its]) for key, its in columns.items()
    ]
    chart = Chart(
        title,
        told,
        [f"{name} {shown(key)}" for key in keys for name in errors],
        [each for its in columns.values() for each in its],
        "relative error",
        share=max((each for its in columns.values() for each in its if each is not None), default=0) <= 1,
        series=[shown(key) for key in keys for _ in errors],
        places=[at for _ in keys for at in range(len(errors))],
        along="the mixtures, first to last",
    )
    return Sheet(title, cells, [chart])
