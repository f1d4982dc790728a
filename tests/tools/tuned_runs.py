"""Runs of the zoo that say they were fine-tuned, so that they answer, without any training."""

from __future__ import annotations

import json
import shutil


def tuned(run, folder, has_turns=False, *, block_length=96):
    """A copy with longer rows, "fine-tuned" on conversations or on single prompts (None: neither).

    Responses have 8 tokens by default.
    """
    shutil.copytree(run, folder)
    config, about = (
        json.loads((folder / name).read_text()) for name in ("config.json", "run.json")
    )
    config["data"]["block_length"] = block_length
    if has_turns is not None:
        config["sft"]["train"] = "examples.jsonl"
        about |= {"has_turns": has_turns, "response_tokens": 8}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "run.json").write_text(json.dumps(about))
    return folder
