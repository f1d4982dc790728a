"""No room while a checkpoint is written: a clear end, nothing lost, and on again when there is."""

from __future__ import annotations

import pytest
from fault_tools import last_step, leftovers, mark_of

LONG = pytest.mark.long
OPTIONS = "--checkpoint.every 2 --log.every 1 --checkpoint.keep-last 3 --train.steps 10".split()
SHARDS = ("limit_file_size", 60_000)
"""Bytes that a file may have: more than any but a shard. A real failure of write(2)."""
WAIT, BACKGROUND = "--checkpoint.saving wait", "--checkpoint.saving background"
FULL = "--scale.sharding full"


@pytest.mark.parametrize(
    ("size", "options", "hook", "cause", "step"),
    [
        (1, WAIT, ("no_space_for", ".writing-000000008", 0), "No space left", 8),
        (1, WAIT, ("no_space_for_line", 7), "metrics.jsonl", None),
        *(
            pytest.param(*case, marks=LONG)
            for case in (
                (1, BACKGROUND, SHARDS, "File too large", 2),
                (2, f"{FULL} {WAIT}", SHARDS, "File too large", 2),
                (2, BACKGROUND, ("no_space_for", ".writing-000000008", 1), "No space left", 8),
                (2, BACKGROUND, ("no_space_for_line", 7), "metrics.jsonl", None),
                (1, WAIT, ("no_space_for", ".manifest.json.writing", 0), "No space left", 2),
            )
        ),
    ],
)
def test_no_space_left(lab, size, options, hook, cause, step):
    """In one process or in one of two."""
    lab.plan(*OPTIONS, *options.split(), size=size)
    lab.truth()  # which also prepares the text
    name, *values = hook
    said = lab.ends(1, lab.start(f"fault_hooks.{name}", *values))
    assert said.count("error: ") == 1, said
    assert cause in said
    assert leftovers(lab.run) == []
    assert mark_of(lab.run)["state"] == "running"
    if step is not None:
        assert f"checkpoint of step {step} could not be written" in said
        assert step == 2 or f"the latest intact one is step-{step - 2:09d}" in said
        assert last_step(lab.run) == step - 2
    lab.finish()
