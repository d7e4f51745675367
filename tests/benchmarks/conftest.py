from __future__ import annotations

import sys
from pathlib import Path

# The benchmarks are scripts, and import each other as scripts do.
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
