"""Results with hostile names in every place, and a page taken apart."""

from html.parser import HTMLParser

from secateur.report import Results, Run

HOSTILE = "<script>alert(1)</script>"


HOSTILE_TOO = """"'></td></table><img src=x onerror=alert(1)>$\\frac{1}{0}$ & ]]> --> </script>"""


def make_results(**changes: object) -> Results:
    runs = [Run("dense", 0.0, 99.3 + 0.1 * seed, 99.4, seed, 158_000, 144_000, 1.1, 0.0, 900_000) for seed in range(3)]
    for number, method in enumerate(("magnitude, global", "LAMP", "magnitude, 2:4", HOSTILE, HOSTILE_TOO, "gradual")):
        for place, sparsity in enumerate((0.5, 0.8, 0.9, 0.95, 0.98) if number != 2 else (0.498,)):
            for seed in range(3):
                before = (97 - number, 60.0, 20.0, 12.0, 10.0)[place] + seed if method != "gradual" else None
                after = (99.4, 99.1, 98.5, 97.0, 75.0)[place] - number / 10 - seed / 5
                size = int(144_000 * (1 - sparsity) * 1.1)
                work = int(900_000 * (1 - sparsity) * (1 + number / 5))
                latency = 1.1 if seed == 0 else None
                runs.append(Run(method, sparsity, before, after, seed, 158_000, size, latency, sparsity * 0.98, work))
    runs.append(Run("channels", 0.52, 90.0, 98.7, 0, 79_000, None, 1.0, 0.5, 440_000))
    given: dict[str, object] = {
        "title": f"Pruning {HOSTILE}",
        "runs": runs,
        "text": [HOSTILE_TOO],
        "notes": [HOSTILE],
        "command": f"secateur demo {HOSTILE_TOO}",
        "examples": 719,
    }
    return Results(**{**given, **changes})  # type: ignore[arg-type]


class Page(HTMLParser):
    """The tags of a page, its scripts, and its texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.text += data
