"""Made-up questions of all eight tasks, five of each."""

from __future__ import annotations

import shutil
from pathlib import Path

from bellmask.evaluate.paper_tasks import TaskRecords, open_task

NOUNS = ("cat", "dog", "tree", "moon", "sun")
"""One per question."""
TASKS = (
    "lambada", "openbookqa", "winogrande", "piqa", "social_iqa", "infilling", "triviaqa",
    "hellaswag",
)  # fmt: skip
FILES = Path(__file__).parents[1] / "frozen" / "zoo" / "tasks"


def write_records(folder: Path) -> Path:
    """As files for ``--data-dir``: one CSV, the rest JSONL."""
    return Path(shutil.copytree(FILES, folder, dirs_exist_ok=True))


def loaded(*tasks: str) -> dict[str, TaskRecords]:
    """As the suite takes them."""
    return {task: open_task(task, str(FILES), Path()) for task in tasks or TASKS}
