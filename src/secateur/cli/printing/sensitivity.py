"""What sensitivity says, as JSON.

Law: what is named and measured is what the library says; a score that is no number is null.
"""

import json
import math

from secateur.search import Sensitivity

__all__ = [
    "json_of",
]


def json_of(found: Sensitivity) -> str:
    """All of it, as JSON."""
    return json.dumps(
        {
            "score": found.score,
            "dense": found.dense,
            "rows": found.rows,
            "runs": found.passes,
            "groups": [
                {
                    "name": name,
                    "kind": found.levels.kind[name],
                    "units": each[0].of,
                    "levels": [
                        {
                            "share": level.share,
                            "kept": level.kept,
                            "error": level.error,
                            "loss": level.loss,
                            "score": value if math.isfinite(value) else None,
                            "costs": dict(level.costs),
                        }
                        for level, value in zip(each, found.scores[name], strict=True)
                    ],
                }
                for name, each in found.levels.items()
            ],
            "left_alone": dict(found.levels.left_alone),
        },
        indent=1,
    )
