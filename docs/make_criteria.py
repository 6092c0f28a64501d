"""Write docs/guides/criteria.md from the docstrings of `secateur.criteria`: ``python docs/make_criteria.py``.

Law: the page says nothing that a docstring does not, and a test holds it to what this would write.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from secateur import criteria
from secateur.evidence import VOCABULARY, needs

PAGE = Path(__file__).with_name("guides") / "criteria.md"
HEAD = """# Criteria

A criterion says how important each weight is. Give its name, and batches where it needs data:

```python
import torch
from secateur import sparsify

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
sparsify(model, 0.5, criterion="wanda", batches=[torch.randn(16, 64)])
```

It is a function `(weight, *, <evidence>) -> scores` of the weight's shape, higher = keep. [Your own](your-own.md) is a
function of the same form. Each of these is one paper's formula. Pattern, allocation and schedule are chosen beside it;
"published with" says what the paper chose.

"Compares over" says which scores may be ranked against each other. It is the default of `sparsify`, `make_masks`,
`Pruner` and the command:

| compares over | the default |
|---|---|
| a *row* (an output) | `Rows` and `uniform` |
| a *layer* | `uniform` |
| the *model* | `everywhere` |

A wider competition that you ask for is carried out, with a warning. `python benchmarks/criteria/run.py` measures all
three on trained networks ([RESULTS](../../benchmarks/criteria/RESULTS.md#criteria-and-over-what-they-compare)).

<!-- Made from the docstrings of src/secateur/criteria.py: python docs/make_criteria.py -->
"""


def page() -> str:
    """The whole page."""
    cards = [Card(criterion) for criterion in listed()]
    lines = [HEAD, "| criterion | formula | evidence | compares over | paper | published with |", f"|{'---|' * 6}"]
    lines += [card.row() for card in cards]
    lines += ["", "## Evidence", "", "What is asked for by naming it, as keyword parameters without a default:", ""]
    words = sorted({word for card in cards for word in card.evidence})
    lines += [f"- `{word}`: {VOCABULARY[word]}." for word in words]
    for card in cards:
        lines += ["", f"## {card.name}", "", *card.body()]
    return "\n".join(_wrapped(lines)) + "\n"


def listed() -> list[Callable[..., Any]]:
    """The criteria, in the order of the source."""
    found = [getattr(criteria, name) for name in criteria.__all__ if hasattr(getattr(criteria, name), "compares")]
    return sorted(found, key=lambda criterion: inspect.getsourcelines(criterion)[1])


class Card:
    """A docstring: ``formula``: title (paper). Then paragraphs, "Published with:", arguments and examples."""

    def __init__(self, criterion: Callable[..., Any]) -> None:
        self.name = criterion.__name__
        self.signature = f"{self.name}{inspect.signature(criterion)}".replace("'", "")
        self.evidence = needs(criterion)
        self.scope = {"row": "a row", "layer": "a layer", "model": "the model"}[criteria.scope_of(criterion)]
        self.paragraphs = (inspect.getdoc(criterion) or "").split("\n\n")
        first = re.fullmatch(r"(``.+?``[^:]*): (.+) \((.+)\)\.", " ".join(self.paragraphs[0].split()))
        published = [text for text in self.paragraphs if text.startswith("Published with: ")]
        if first is None or len(published) != 1:
            raise ValueError(f"{self.name}: a card begins ``formula``: title (paper). and has one 'Published with:'.")
        self.formula, self.title, self.paper = (_markdown(part) for part in first.groups())
        self.published = _markdown(" ".join(published[0].removeprefix("Published with: ").split())).rstrip(".")

    def row(self) -> str:
        evidence = ", ".join(f"`{word}`" for word in self.evidence) or "none"
        cells = [
            f"[`{self.name}`](#{self.name})",
            self.formula,
            evidence,
            self.scope,
            f"{self.title} ({self.paper})",
            self.published,
        ]
        return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"

    def body(self) -> Iterator[str]:
        yield from ["```text", self.signature, "```", ""]
        for text in self.paragraphs:
            if text.startswith("Published with: "):
                yield from [f"Compares over: {self.scope}.", "", _markdown(text), ""]
            elif text.startswith(">>>"):
                yield from ["```pycon", text, "```"]
            elif text.startswith("Args:"):
                yield from _arguments(text)
                yield ""
            else:
                yield from [_markdown(text), ""]


def _arguments(text: str) -> Iterator[str]:
    for line in inspect.cleandoc(text.removeprefix("Args:")).splitlines():
        name = re.match(r"(\w+): ", line)
        yield f"- `{name[1]}`: {_markdown(line[name.end() :])}" if name else f"  {_markdown(line.strip())}"


def _wrapped(lines: list[str]) -> Iterator[str]:
    """The same, with no line of prose over 120 characters."""
    for line in "\n".join(lines).split("\n"):
        if len(line) <= 120 or line.startswith("|"):
            yield line
        else:
            indent = "  " if line.startswith(("- ", "  ")) else ""
            yield from textwrap.wrap(
                line, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            )


def _markdown(text: str) -> str:
    text = text.replace("``", "`")
    return re.sub(r"arXiv:(\d{4}\.\d{5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
