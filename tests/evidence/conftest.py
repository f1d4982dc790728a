"""Tests of the studies in ``evidence/``, which are scripts: their folder is where they import."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "evidence"))
