"""The zoo of the tests, and the shapes of published models, for benchmarks: this file alone knows where they lie."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
import zoo
from support.device import register
from support.published import PUBLISHED

__all__ = ["PUBLISHED", "register", "zoo"]
