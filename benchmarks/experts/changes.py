"""What becomes of the experts that stay: as they are, merged with those that leave, repaired, or both.

Law: the same mixture, the same text to choose by and to judge by as `quality`, and the same experts leave.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from benchmarks.experts.quality import perplexity, split, texts, trained
from secateur import shrink


def changes(steps: int = 600, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Perplexity on held-out text with experts removed or merged, repaired or not, in float32 and in bfloat16."""
    import torch

    train, choose, judge = split(texts(seed))
    model = trained(train, steps, seed)
    every = [batch for batches in judge.values() for batch in batches]
    batches = [{"input_ids": ids} for ids in choose]
    yield {"method": "dense", "gone": 0.0, "all": perplexity(model, every)}
    for share in (0.25, 0.5):
        for dtype in (torch.float32, torch.bfloat16):
            for how in ("remove", "merge"):
                for repair in (False, True):
                    small = copy.deepcopy(model).to(dtype)
                    made = {"experts": share, "uniform": True, "batches": batches, "how_experts": how, "repair": repair}
                    done = shrink(small, batches[0], **made)
                    said = f"{how}{', repaired' if repair else ''}, {str(dtype).removeprefix('torch.')}"
                    mended = {name: round(each, 3) for name, each in done.mended.items()}
                    yield {"method": said, "gone": share, "all": perplexity(small.float(), every), "mended": mended}
