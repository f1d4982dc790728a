"""A stored run under other options: other data or another framework without training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from bellmask.run import load_run


def change_run(source: Path, folder: Path, options: dict[str, Any]) -> Path:
    """A copy of a run whose config has other values: ``{"data.documents": "line"}``."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    for name, value in options.items():
        section, option = name.split(".")
        config[section][option] = value
    (folder / "config.json").write_text(json.dumps(config))
    if any(name.startswith("data.") for name in options):
        about = json.loads((folder / "run.json").read_text())
        about["train_fingerprint"] = load_run(folder).blocks()[0].fingerprint
        (folder / "run.json").write_text(json.dumps(about))
    return folder
