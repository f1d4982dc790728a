"""Tables of the paper suite: what is bold, starred, shown at all, escaped."""

from __future__ import annotations

import pytest

from bellmask.evaluate import paper_suite as downstream_tables
from bellmask.evaluate.paper_suite import best_models, full_rows, notes
from bellmask.utils.table import Bold

# --- the paper suite (Table 4) ---------------------------------------------------------------


def score(mean, gap=None, *, sure=False):
    found = {"mean": mean, "deviation": 0.5, "error": 1.5}
    return found | (
        {} if gap is None else {"difference": {"mean": gap, "error": 0.75, "is_sure": sure}}
    )


def suite(*names, means=(40.0, 45.5)):
    """Models and a baseline on PIQA and LAMBADA."""
    facts = {"step": 4, "prompts": "plain", "ending": "none", "tokenizer": "bytes"}
    facts |= {"framework": "mdm", "block_length": 64}
    models = [{"name": name, "is_model": True, **facts} for name in names]
    models.append({**models[0], "name": "random", "is_model": False, "step": None})
    piqa, lambada = {}, {}
    for place, (name, mean) in enumerate(zip([*names, "random"], [*means, 99.0], strict=True)):
        gap = None if place == 0 else mean - means[0]
        found = {"num_cut": 0, "num_shortened": 0, "exact_share": 0.25 if name in names else None}
        scores = {how: score(mean, gap, sure=place == 1) for how in ("per_token", "raw")}
        piqa[name] = {**found, "scores": scores}
        words = {"word": score(0.0, gap and 0.0), "word_own": score(7.0, gap and -0.001)}
        lambada[name] = {**found, "scores": words}
    tasks = [
        {"name": name.lower(), "title": name, "main": main, "note": f"{name}: a note",
         "gives_length": main == "word", "results": results, "num_questions": 1234,
         "origin": "a file"}
        for name, main, results in (("PIQA", "per_token", piqa), ("LAMBADA", "word", lambada))
    ]  # fmt: skip
    found = {"models": models, "seeds": [0, 1, 2], "tasks": tasks, "missing": {}}
    return found | {"estimator": "auto", "draws": 16, "longest_exact": 6}


def main_table(numbers):
    table = downstream_tables.main_table(numbers)
    return table.columns, [
        [f"<{c}>" if isinstance(c, Bold) else c for c in row] for row in table.rows
    ]


def test_main_and_full_table():
    numbers = suite("base", "bell")
    columns, rows = main_table(numbers)
    assert columns == ["model", "PIQA (%)", "LAMBADA (%)†"]
    assert rows == [
        ["base, step 4", "40.00 ± 0.50", "0.00 ± 0.50"],
        ["bell, step 4", "<45.50 ± 0.50 (+5.50*)>", "0.00 ± 0.50 (+0.00)"],
        ["random", "99.00 ± 0.50", "0.00 ± 0.50"],
    ]
    columns, rows = full_rows(numbers)
    assert {len(row) for row in rows} == {len(columns)}
    assert [row[-1] for row in rows[:2]] == ["-", "+5.50 ± 0.75 *"]
    assert rows[1][3:6] == ["45.50", "0.50", "1.50"]
    _, rows = downstream_tables.other_rows(numbers)
    assert [row[1] for row in rows] == ["40.00 ± 0.50", "7.00 ± 0.50"]
    numbers["tasks"][0]["results"]["base"]["scores"]["per_token"]["deviation"] = None
    assert full_rows(numbers)[1][0][4] == "-"
    assert main_table(numbers)[1][0][1] == "40.00"


@pytest.mark.parametrize(
    ("means", "best"),
    [
        ((40.0, 45.5, 1.0), "b"),
        ((45.501, 45.499, 45.5), "abc"),
        ((0.004, 0.001, 0.0), ""),
        ((45.5,), ""),
    ],
)
def test_the_best_models_are_bold(means, best):
    """As printed: baselines never, ties all, nobody where nobody scored or nobody competes."""
    numbers = suite(*"abc"[: len(means)], means=means)
    bold = {row[0][0] for row in main_table(numbers)[1] if row[1].startswith("<")}
    assert bold == set(best)
    if len(means) > 1:
        assert best_models(numbers, numbers["tasks"][0]) == set(best)


def test_notes_say_what_differs():
    numbers = suite("base", "bell")
    before = "\n".join(notes(numbers))
    for words in ("3 evaluation seeds", "1,234 questions", "up to 6 tokens, else 16", "25 % of b"):
        assert words in before
    numbers["missing"] = {"triviaqa": "no network"}
    numbers["models"][1].update(prompts="tuned", tokenizer="bpe", framework="arm")
    numbers["tasks"][1]["results"]["bell"].update(num_cut=3, num_shortened=1001)
    after = "\n".join(notes(numbers))
    for words in ("Left out, no data: triviaqa", "Prompts of bell", "Tokenizers differ", "an ARM",
                  "3 gold answers of LAMBADA", "LAMBADA 1,001"):  # fmt: skip
        assert words in after
        assert words not in before
    numbers["seeds"] = [0]
    assert "One evaluation seed" in "\n".join(notes(numbers))


def test_the_screen_keeps_names_as_they_are(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    downstream_tables.show(suite("[red]x", "[/bold]y"))
    out = capsys.readouterr().out
    assert out.count("[red]x, step 4") == out.count("[/bold]y, step 4") == 1
    assert "[bold]" not in out
