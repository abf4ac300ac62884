"""Measurements, each a module: `python -m benchmarks.NAME` in the checkout, with the helpers of the tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))
