"""Code that travels with an export, kept in a test's own folder while transformers runs it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


def keep_modules(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """transformers copies the code of a folder before it imports it: here, not into its cache."""
    place = str(folder / "modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", place)
    others = [p for p in sys.path if not (Path(p) / "transformers_modules").is_dir()]
    monkeypatch.setattr(sys, "path", others)
    for name in [m for m in sys.modules if m.startswith("transformers_modules")]:
        monkeypatch.delitem(sys.modules, name)
