"""Draw five pictures: ``python docs/make_readme_figure.py``.

The README's two: MiniLM after every verb, its cosine against measured milliseconds; and what a YOLO finds as
multiply-adds leave. A CNN in every form, how many images it reads right against milliseconds; SmolLM2's perplexity as
parameters leave, for the guide of `shrink`; what `deploy` measured of three models, for its guide.

Law: every number is read from the tables of benchmarks/inference, shrinking, detectors and search; none stands here.
"""

import re
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

FILE = Path(__file__).with_name("perplexity.svg")
RESULTS = Path(__file__).parent.parent / "benchmarks/shrinking/RESULTS.md"
VERBS_FILE = Path(__file__).with_name("verbs.svg")
VERBS_RESULTS = Path(__file__).parent.parent / "benchmarks/inference/RESULTS.md"
DOTS = {  # where the word beside it stands, in points
    "dense": (-38, -16),
    "int8, torch": (8, -5),
    "int8, ONNX Runtime": (8, -5),
}
LINES = {  # color, dashes, which end its name stands at, and where, in points
    "`shrink`": ("#d55e00", "solid", 0, (-4, 10)),
    "`shrink`, `recover`": ("#d55e00", (0, (3, 1)), 1, (-6, 9)),
    "`fit`": ("#cc79a7", "solid", 0, (7, 4)),
    "`shrink`, int8, ONNX Runtime": ("#009e73", "solid", -1, (9, -6)),
    "`oneshot`, `pack`": ("#0072b2", "solid", -1, (9, -5)),
    "`oneshot` 16×1, `pack`": ("#0072b2", (0, (3, 1)), -1, (8, -4)),
    "`sparsify`, `pack`": ("#7f7f7f", "solid", -1, (9, -4)),
}
ZEROS_FILE = Path(__file__).with_name("zeros.svg")
ZEROS_DOTS = {  # color, mark, and what the key says: engines of one precision together
    "dense, ONNX Runtime": ("#222222", "o", "dense float32"),
    "dense, OpenVINO": ("#222222", "o", ""),
    "dense bfloat16, OpenVINO": ("#7f7f7f", "s", "dense bfloat16"),
    "dense int8, ONNX Runtime": ("#009e73", "D", "dense int8"),
    "dense int8, OpenVINO": ("#009e73", "D", ""),
}
ZEROS_LINES = {  # color, and how far above each point what was asked stands, in points; None: as on the line before
    "`Pruner`, `pack`": ("#0072b2", -14),
    "`Pruner`, `pack` in int8": ("#7a5195", None),
    "`shrink`, ONNX Runtime": ("#d55e00", 8),
    "`shrink`, int8, ONNX Runtime": ("#009e73", -15),
}
DETECTORS_FILE = Path(__file__).with_name("detectors.svg")
DETECTORS_RESULTS = Path(__file__).parent.parent / "benchmarks/detectors/RESULTS.md"
DETECTORS = {  # method and column of the table: color, dashes, and what the key says
    ("shrink", "after 20"): ("#d55e00", "solid", "shrink, 20 epochs of training"),
    ("shrink", "after 5"): ("#d55e00", (0, (5, 1)), "5 epochs"),
    ("shrink", "after 1"): ("#d55e00", (0, (2, 1)), "1 epoch"),
    ("shrink", "at once"): ("#d55e00", (0, (1, 1.5)), "no training"),
    ("narrower", "after 20"): ("#0072b2", "solid", "narrower from the start, trained as long in all"),
}
DEPLOYED_FILE = Path(__file__).with_name("deployed.svg")
DEPLOYED_RESULTS = Path(__file__).parent.parent / "benchmarks/search/RESULTS.md"
DEPLOYED = ("all-MiniLM-L6-v2", "EfficientNet-Lite0", "SmolLM2")  # as the sentence before its table calls each
FORMS = {"float32": "#d55e00", "int8": "#009e73", "int4": "#7a5195"}
METHODS = {
    "Wanda by columns": "#7f7f7f",
    "FLAP, each layer alike": "#0072b2",
    "FASP": "#e69f00",
    "**`shrink` with data**": "#d55e00",
}


def perplexities(text: str) -> dict[str, dict[float, float]]:
    """``{method: {percent of the parameters that left: perplexity}}`` of the first table of real models."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    found: dict[str, dict[float, float]] = {method: {} for method in METHODS}
    for row in rows:
        left = re.fullmatch(r"[\d.]+ M \((\d\.\d+)\)", row[2]) if len(row) == 10 else None
        if left and re.fullmatch(r"−\d+%", row[1]) and row[0] in found:
            found[row[0]][100 * (1 - float(left[1]))] = float(row[4])
        elif left and row[0] == "dense" and "whole" not in found and re.fullmatch(r"[\d.]+", row[4]):
            found.setdefault("dense", {0.0: float(row[4])})
    return found


def milliseconds(text: str) -> dict[str, tuple[float, float]]:
    """``{what left: milliseconds of the next token}``, one at a time, in eager torch and in ONNX Runtime."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    rows = [row for row in rows if len(row) == 11 and re.match(r"whole|−\d+ %", row[0])]
    return {row[0]: (float(row[5].split(" ")[0]), float(row[6].split(" ")[0])) for row in rows}


def described(text: str) -> str:
    """What is drawn, as the picture says of itself."""
    lines = []
    for method, found in perplexities(text).items():
        points = ", ".join(f"{place:.1f} %: {value}" for place, value in sorted(found.items()))
        lines.append(f"{method.strip('*')}: {points}")
    times = ", ".join(f"{which}: {eager} and {runtime}" for which, (eager, runtime) in milliseconds(text).items())
    return "; ".join([*lines, f"ms in torch and in ONNX Runtime: {times}"]).replace("`", "")


def verbs(text: str) -> dict[str, list[tuple[str, float, float]]]:
    """``{verbs: [(what was asked, milliseconds, cosine)]}`` of the table of every verb."""
    return _points(text, "Every verb on MiniLM", 4)


def _points(text: str, heading: str, column: int) -> dict[str, list[tuple[str, float, float]]]:
    """``{first cell: [(second, milliseconds, what this column has)]}`` of the table under a heading."""
    section = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("|")]
    found: dict[str, list[tuple[str, float, float]]] = {}
    for row in rows[2:]:
        found.setdefault(row[0], []).append((row[1], float(row[2]), float(row[column])))
    return found


def told(text: str) -> str:
    """What the picture of every verb shows, as it says of itself."""
    return _listed(verbs(text), "")


def _listed(found: dict[str, list[tuple[str, float, float]]], unit: str) -> str:
    lines = []
    for name, points in found.items():
        values = ", ".join(f"{asked} {spent} ms {kept}{unit}".strip() for asked, spent, kept in points)
        lines.append(f"{name}: {values}".replace("`", ""))
    return "; ".join(lines)


def draw_verbs(target: Path) -> None:
    text = VERBS_RESULTS.read_text(encoding="utf-8")
    found = verbs(text)
    with mpl.rc_context({"svg.hashsalt": "secateur", "svg.fonttype": "path", "font.size": 11}):
        figure = Figure(figsize=(9.6, 4.4), layout="constrained", facecolor="white")
        axes = figure.subplots()
        for name, (color, dashes, end, offset) in LINES.items():
            _asked, spent, cosines = zip(*found[name], strict=True)
            ours = name.startswith("`shrink`")
            axes.plot(
                spent, cosines, color=color, marker="o", markersize=5, linewidth=2.6 if ours else 1.8, linestyle=dashes
            )
            axes.annotate(
                name.replace("`", "").replace(", ", " + "), (spent[end], cosines[end]), textcoords="offset points",
                xytext=offset, color=color, ha="left" if offset[0] > 0 else "right",
                weight="bold" if ours else "normal",
            )  # fmt: skip
        for name, offset in DOTS.items():
            [(_, spent, cosine)] = found[name]
            color = "#222222" if name == "dense" else "#009e73"
            axes.plot([spent], [cosine], color=color, marker="o", markersize=8, zorder=3)
            axes.annotate(
                name, (spent, cosine), textcoords="offset points", xytext=offset, color=color, weight="bold",
            )  # fmt: skip
        axes.set_xlabel("milliseconds for one sentence of 32 tokens, one thread, measured")
        axes.set_ylabel("cosine to the dense embeddings")
        near = 0.03  # the scale of what is lost is logarithmic, but for the last of it
        axes.set_yscale("function", functions=(lambda y: -np.log(1 + near - y), lambda y: 1 + near - np.exp(-y)))
        axes.set_ylim(0.3, 1.005)
        axes.set_yticks([0.4, 0.6, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.985, 1.0])
        axes.yaxis.set_major_formatter("{x:.3g}")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
        figure.savefig(target, format="svg", metadata={"Date": None, "Description": told(text)})


def zeros(text: str) -> dict[str, list[tuple[str, float, float]]]:
    """``{what: [(what was asked, milliseconds, right in %)]}`` of the table of one trained network."""
    found = _points(text, "A CNN in every form", 5)
    return {what: points for what, points in found.items() if what in {*ZEROS_DOTS, *ZEROS_LINES}}


def error_of_zeros(text: str) -> float:
    """Percent: how far the share of right answers of the dense network may be off, for as many images."""
    [count] = re.findall(r"; (\d+) unseen\s+images", text.split("## A CNN in every form\n")[1].split("\n## ")[0])
    right = zeros(text)["dense, OpenVINO"][0][2] / 100
    return float(100 * np.sqrt(right * (1 - right) / int(count)))


def told_of_zeros(text: str) -> str:
    """What the picture of the CNN shows, as it says of itself."""
    return _listed(zeros(text), " %")


def draw_zeros(target: Path) -> None:
    text = VERBS_RESULTS.read_text(encoding="utf-8")
    found = zeros(text)
    with mpl.rc_context({"svg.hashsalt": "secateur", "svg.fonttype": "path", "font.size": 11}):
        figure = Figure(figsize=(6.4, 4.4), layout="constrained", facecolor="white")
        axes = figure.subplots()
        for name, (color, above) in ZEROS_LINES.items():
            asked, spent, right = zip(*found[name], strict=True)
            ours = "pack" in name
            axes.plot(
                spent, right, color=color, marker="o", markersize=5, linewidth=2.6 if ours else 1.6,
                label=name.replace("`", "").replace(", ONNX Runtime", ""),
            )  # fmt: skip
            for word, *place in zip(asked, spent, right, strict=True) if above is not None else ():
                is_crowded = place[0] == max(spent) and not ours  # dense int8 stands above
                side = "left" if ours else "right" if is_crowded else "center"
                offset = (5 if ours else 0, -15 if is_crowded else above)
                axes.annotate(
                    word.replace("% zeros", " %"), place, textcoords="offset points", xytext=offset, color=color,
                    fontsize=9.5, zorder=5, ha=side, weight="bold" if ours else "normal",
                )  # fmt: skip
        for name, (color, mark, label) in ZEROS_DOTS.items():
            [(_, spent, right)] = found[name]
            axes.plot(
                [spent],
                [right],
                color=color,
                marker=mark,
                markersize=8,
                linestyle="none",
                label=label or None,
                zorder=3,
            )
        dense, error = found["dense, OpenVINO"][0][2], error_of_zeros(text)
        axes.axhspan(dense - error, dense + error, color="#222222", alpha=0.08, linewidth=0, label="± standard error")
        axes.set_xscale("log")
        axes.set_xticks([0.1, 0.2, 0.5, 1, 2, 5, 10])
        axes.set_xticks([], minor=True)
        points = [point for points in found.values() for point in points]
        axes.set_xlim(min(spent for _, spent, _ in points) / 1.3, 1.3 * max(spent for _, spent, _ in points))
        low, high = (limit(right for *_, right in points) for limit in (min, max))
        axes.set_ylim(min(low, dense) - 1.5 * error, max(high, dense) + 1.5 * error)  # what is noise is to look like it
        axes.set_xlabel("milliseconds for one image, one thread, measured")
        axes.set_ylabel("right, % of unseen images")
        axes.xaxis.set_major_formatter("{x:.3g}")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
        figure.legend(loc="outside lower center", ncols=2, frameon=False)
        figure.savefig(target, format="svg", metadata={"Date": None, "Description": told_of_zeros(text)})


def draw(target: Path) -> None:
    text = RESULTS.read_text(encoding="utf-8")
    found, times = perplexities(text), milliseconds(text)
    [(_, dense)] = found["dense"].items()
    with mpl.rc_context({"svg.hashsalt": "secateur", "svg.fonttype": "path", "font.size": 11}):
        figure = Figure(figsize=(9.6, 3.5), layout="constrained", facecolor="white")
        left, right = figure.subplots(1, 2, width_ratios=(5, 4), sharey=True)
        for method, color in METHODS.items():
            places, values = zip(*sorted(({0.0: dense} | found[method]).items()), strict=True)
            ours = method.startswith("**")
            left.plot(places, values, color=color, marker="o", markersize=5, linewidth=2.6 if ours else 1.5)
            left.annotate(
                method.strip("*").replace("`", "").replace(", each layer alike", ""), (places[-1], values[-1]),
                textcoords="offset points", xytext=(8, -4), color=color, weight="bold" if ours else "normal",
            )  # fmt: skip
        left.plot([0], [dense], color="#222222", marker="o", markersize=7, zorder=3)
        left.set_xlim(-2, 43)
        left.set_xticks([0, 10, 20, 30], ["dense", "10 %", "20 %", "30 %"])
        left.set_xlabel("parameters that left, without training")
        left.set_ylabel("perplexity, unseen text")
        ours = {f"−{round(place, -1):g} %": value for place, value in found["**`shrink` with data**"].items()}
        values = {"whole": dense} | {which: ours[which] for which in times if which in ours}
        color = METHODS["**`shrink` with data**"]
        for at, (runtime, dashes) in enumerate((("torch", "solid"), ("ONNX Runtime", (0, (3, 1))))):
            spent = [times[which][at] for which in values]
            right.plot(spent, values.values(), color=color, marker="o", markersize=5, linewidth=2.6, linestyle=dashes)
            right.plot(spent[:1], [dense], color="#222222", marker="o", markersize=7, zorder=3)
            right.annotate(
                runtime, (spent[0], dense), textcoords="offset points", xytext=(0, -17), color=color, ha="center",
                weight="bold",
            )  # fmt: skip
            for which, place in zip(values, spent, strict=True):
                label, side = ("dense", (8, 5)) if which == "whole" else (which, (8, 2))
                right.annotate(label, (place, values[which]), textcoords="offset points", xytext=side, fontsize=9.5)
        right.text(0.5, 0.9, "shrink with data", transform=right.transAxes, color=color, weight="bold", ha="center")
        right.set_xlim(15, 73)
        right.set_ylim(8, None)
        right.set_xlabel("milliseconds for the next token, measured")
        for axes in (left, right):
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(axis="y", alpha=0.3)
        figure.savefig(target, format="svg", metadata={"Date": None, "Description": described(text)})


def detectors(text: str, subject: str = "YOLO11n") -> dict[tuple[str, str], list[tuple[float, float]]]:
    """``{(method, column): [(share of the multiply-adds that is left, mAP50-95)]}`` of a detector's table."""
    section = text.split(f"\n{subject}, mAP50-95 of boxes;")[1]
    lines = [line for line in section.split("\n\n")[1].splitlines() if line.startswith("|")]
    head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in rows:
        for column, cell in zip(head[3:], row[3:], strict=True):
            if cell:
                method = row[0].rpartition(", ")[2]
                found.setdefault((method, column), []).append((float(row[1]), float(cell.split(" ")[0])))
    return found


def told_of_detectors(text: str) -> str:
    """What the picture of the detector shows, as it says of itself."""
    found = {key: points for key, points in detectors(text).items() if key in DETECTORS or key == ("dense", "at once")}
    lines = (f"{', '.join(key)}: {', '.join(f'{left} {kept}' for left, kept in found[key])}" for key in found)
    return "; ".join(lines)


def draw_detectors(target: Path) -> None:
    text = DETECTORS_RESULTS.read_text(encoding="utf-8")
    found = detectors(text)
    [(_, dense)] = found["dense", "at once"]
    with mpl.rc_context({"svg.hashsalt": "secateur", "svg.fonttype": "path", "font.size": 11}):
        figure = Figure(figsize=(6.8, 4.2), layout="constrained", facecolor="white")
        axes = figure.subplots()
        for key, (color, dashes, label) in DETECTORS.items():
            if key in found:
                points = sorted([*found[key], *([(1.0, dense)] if key == ("shrink", "at once") else [])], reverse=True)
                left, kept = zip(*points, strict=True)
                axes.plot(
                    [100 * (1 - each) for each in left], kept, color=color, linestyle=dashes, marker="o", markersize=5,
                    label=label,
                )  # fmt: skip
        axes.plot([0], [dense], color="#222222", marker="o", markersize=8, zorder=3)
        axes.annotate("dense", (0, dense), textcoords="offset points", xytext=(8, 6), weight="bold")
        axes.set_ylim(0, 1.1 * max(kept for points in found.values() for _, kept in points))
        axes.set_xlabel("multiply-adds that left, %")
        axes.set_ylabel("mAP50-95 on unseen scenes")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, loc="lower left")
        figure.savefig(target, format="svg", metadata={"Date": None, "Description": told_of_detectors(text)})


def deployed(text: str) -> dict[str, tuple[str, list[tuple[str, float, float]]]]:
    """``{model: (what is lost, [(candidate, milliseconds, loss)])}`` of the first table of each in "In a runtime"."""
    section = text.split("\n## In a runtime\n")[1].split("\n## ")[0]
    found: dict[str, tuple[str, list[tuple[str, float, float]]]] = {}
    before = ""
    for part in section.split("\n\n"):
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in part.splitlines() if line.startswith("|")]
        name = next((each for each in DEPLOYED if each in before), None)
        if rows and rows[0][:3] == ["", "ms", "of float32"] and name is not None and name not in found:
            found[name] = rows[0][3], [(row[0], float(row[1]), float(row[3])) for row in rows[2:]]
        before = part
    return found


def told_of_deployed(text: str) -> str:
    """What the picture of `deploy` shows, as it says of itself."""
    return "; ".join(f"{name}: {_listed({lost: points}, '')}" for name, (lost, points) in deployed(text).items())


def draw_deployed(target: Path) -> None:
    text = DEPLOYED_RESULTS.read_text(encoding="utf-8")
    found = deployed(text)
    with mpl.rc_context({"svg.hashsalt": "secateur", "svg.fonttype": "path", "font.size": 11}):
        figure = Figure(figsize=(9.6, 3.8), layout="constrained", facecolor="white")
        panels = figure.subplots(1, len(found), squeeze=False)[0]
        keys: dict[str, object] = {}
        for axes, (name, (lost, points)) in zip(panels, found.items(), strict=True):
            for what, spent, loss in points:
                form = next((each for each in FORMS if each in what), "float32")
                dense = what.startswith("dense")
                marks = axes.plot(
                    spent, loss, color=FORMS[form], marker="o" if dense else "s", markersize=7, linestyle="none",
                    markerfacecolor=FORMS[form] if dense else "none", markeredgewidth=1.8,
                )  # fmt: skip
                keys.setdefault(f"{'dense' if dense else 'pruned'}, {form}", marks[0])
                if "delivered" in what:
                    axes.annotate(
                        "delivered", (spent, loss), textcoords="offset points", xytext=(7, 7), weight="bold",
                        color=FORMS[form],
                    )  # fmt: skip
            axes.set_title(name, fontsize=11)
            axes.set_xlim(0, 1.08 * max(spent for _, spent, _ in points))
            axes.margins(y=0.15)
            axes.set_xlabel("milliseconds, one thread")
            axes.set_ylabel(lost)
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.3)
        figure.legend(keys.values(), keys, loc="outside lower center", ncols=len(keys), frameon=False)
        figure.savefig(target, format="svg", metadata={"Date": None, "Description": told_of_deployed(text)})


if __name__ == "__main__":
    draw_deployed(DEPLOYED_FILE)
    draw(FILE)
    draw_detectors(DETECTORS_FILE)
    draw_verbs(VERBS_FILE)
    draw_zeros(ZEROS_FILE)
