"""The tools that judge a rebuilding can fail."""

from __future__ import annotations

import ast
import math

import mutations
import same_numbers

SOURCE = '''
def mask(rate, floor=0.5):
    """One line."""
    if rate < floor and not rate == 0:
        raise ValueError(f"{rate - 1}")
    é = "ü"; total = 3 - rate
    return max(total, -1)
'''


def test_every_difference_is_reported(capsys):
    old = {"a": {"same": math.nan, "changed": 1.0, "gone": 2}, "b": {"failed": "no"}}
    new = {"a": {"same": math.nan, "changed": 1.0 + 1e-16 * 4, "new": 3}, "b": {"failed": "no"}}
    lines = list(same_numbers.differences(old["a"], new["a"]))
    assert [line.split(":")[0] for line in lines] == ["changed", "gone", "new"]
    assert not same_numbers.report(old, new)
    assert "failed: no" in capsys.readouterr().out
    assert same_numbers.report({"a": old["a"]}, {"a": old["a"]})
    assert not same_numbers.report({"a": {}}, {"a": {}})
    assert not same_numbers.report({"a": {"x": 1}}, {"a": {"x": 1}, "b": {"x": 1}})


def test_mutations_change_one_expression_each(tmp_path):
    for name in mutations.FOLDERS:
        folder = tmp_path / "bellmask" / name
        folder.mkdir(parents=True)
        (folder / "masks.py").write_text(SOURCE, encoding="utf-8")
    found = list(mutations.mutations_of(tmp_path, "bellmask/diffusion/masks.py"))
    changes = {(m.before, m.after) for m in found}
    assert ("rate < floor", "((rate) <= (floor))") in changes
    assert ("3 - rate", "((3) + (rate))") in changes
    assert ("max(total, -1)", "min(total, -1)") in changes
    assert not any("rate - 1" in before or before == "0.5" for before, _ in changes)
    for mutation in found:
        text = SOURCE[: mutation.start] + mutation.after + SOURCE[mutation.end :]
        assert ast.dump(ast.parse(text)) != ast.dump(ast.parse(SOURCE))
        assert text.splitlines()[: mutation.line - 1] == SOURCE.splitlines()[: mutation.line - 1]
    assert mutations.draw(tmp_path, 1, 12) == mutations.draw(tmp_path, 1, 12)
    assert len(mutations.draw(tmp_path, 1, 12)) == 12
