"""lm-eval's own tasks on records that a test gives: its files are included, the data replaced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

STOCK = {
    "hellaswag": "hellaswag/hellaswag.yaml",
    "piqa": "piqa/piqa.yaml",
    "openbookqa": "openbookqa/openbookqa.yaml",
    "winogrande": "winogrande/default.yaml",
    "social_iqa": "siqa/siqa.yaml",
    "triviaqa": "triviaqa/default.yaml",
    "lambada": "lambada/lambada_openai.yaml",
}


def stock_task(task: str, records: list[dict[str, Any]], folder: Path, **changes: Any) -> Any:
    """A stock task on our records; ``changes`` go into its file."""
    lm_eval = pytest.importorskip("lm_eval")
    yaml = pytest.importorskip("yaml")
    from lm_eval.tasks import TaskManager

    data = folder / "records.jsonl"
    data.write_text("\n".join(map(json.dumps, records)))
    split = "test" if task == "lambada" else "validation"
    overlay = {
        "include": str(Path(lm_eval.__file__).parent / "tasks" / STOCK[task]),
        "task": f"{task}_here",
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {split: str(data)}, "cache_dir": str(folder / "cache")},
        "training_split": None,
        "validation_split": None,
        "test_split": None,
        f"{split}_split": split,
        **changes,
    }
    (folder / "here.yaml").write_text(yaml.safe_dump(overlay))
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    return manager.load([f"{task}_here"])["tasks"][f"{task}_here"]
