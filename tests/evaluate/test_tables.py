"""Tables of the paper suite and of a judgment: what is bold, starred, shown at all, escaped."""

from __future__ import annotations

import pytest

from bellmask.evaluate import judge as judge_tables
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


# --- a judgment ------------------------------------------------------------------------------


def rate(mean, deviation=None, error=None, **more):
    return {"mean": mean, "deviation": deviation, "error": error, "count": 1, **more}


def seed_result(unreadable=0, note=None):
    return {
        "counts": {"wins": 3, "losses": 1, "ties": 2, "unreadable": unreadable},
        "length_controlled": {"value": 0.7, "error": 0.1, "note": note},
        "mean_length_a": 12.4,
        "mean_length_b": 100.6,
    }


def judgment(**changes):
    counts = {"wins": 4, "losses": 2, "ties": 1, "unreadable": 0}
    one = {**counts, "win_rate": rate(0.25), "non_tie": rate(None)}
    return {
        "a": {"name": "[red]x"},
        "b": {"name": "y[/b]"},
        "benchmark": {"name": "[/i].jsonl"},
        "num_tasks": 80,
        "judge": {"label": "[bold]judge[/]", "is_local": False, "first_share": 0.625},
        "seeds": [0, 1],
        "over_seeds": {
            "win_rate": rate(0.7827, 0.0137, 0.05),
            "non_tie": rate(0.5, 0.0, None),
            "length_controlled": rate(1.0, 0.0, 0.0, is_usable=False),
            "published_length_controlled": rate(0.058, None, 0.3),
            "by_category": {"all": one},
            "by_turn": {"[dim]1": one, "2": {**one, "wins": 9, "win_rate": rate(0.5, 0.125)}},
        },
        "results": [seed_result(), seed_result(unreadable=2, note="same")],
        "cautions": ["x was never fine-tuned."],
    } | changes


def test_rates_of_a_judgment():
    """One seed has no deviation; what rests on no data, and the full model's spread, is hidden."""
    _, rows = judge_tables.headlines(judgment())
    assert [row[1:] for row in rows] == [
        ["78.27 ± 1.37", "5.00"],
        ["50.00 ± 0.00", "-"],
        ["-", "-"],
        ["5.80", "-"],
    ]
    assert judge_tables.outcomes(judgment())[1] == [
        ["0", "3", "1", "2", "0", "12", "101"],
        ["1", "3", "1", "2", "2", "12", "101"],
    ]
    assert judge_tables.part(judgment(), "by_category")[1] == [], "one category is all of it"
    assert [row[-2] for row in judge_tables.part(judgment(), "by_turn")[1]] == [
        "25.00", "50.00 ± 12.50"
    ]  # fmt: skip


def test_page_and_screen_of_a_judgment_hold_the_same(capsys, monkeypatch):
    """Names come from the user's files: they are text, not markup."""
    monkeypatch.setenv("COLUMNS", "200")
    found = judgment(results=[seed_result(3, "same"), seed_result(0, "same")])
    judge_tables.show(found)
    screen, page = capsys.readouterr().out, judge_tables.markdown(found)
    for text in ("[red]x against y[/b], by [bold]judge[/]", "[/i].jsonl", "78.27 ± 1.37", "[dim]1",
                 *judge_tables.notes(found)):  # fmt: skip
        assert text in screen
        assert text in page
    for text in ("62.50 %", "x was never fine-tuned.", "3 pairs without a readable verdict"):
        assert text in page
    assert page.count("same") == 1
    spent = {"num_requests": 1200, "tokens_in": 34567, "tokens_out": 89, "usd": 0.0169}
    notes = judge_tables.notes(
        judgment(
            judge={"label": "j", "is_local": True, **spent}, seeds=[0], results=[seed_result()]
        )
    )
    text = "\n".join(notes)
    assert "One seed" in text
    assert "1,200 requests: 34,567 tokens in, 89 out, $0.0169" in text
