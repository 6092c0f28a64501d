"""The zoo of the tests, for benchmarks: this file alone knows where it lies."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
import zoo

__all__ = ["zoo"]
