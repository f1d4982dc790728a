"""Tables of a judgement: the file's numbers, and all that a reader must know beside them."""

from __future__ import annotations

from typing import Any

import pytest

from bellmask.report.judge_tables import headlines, markdown, notes, outcomes, part, percent, show


def rate(mean: float | None, deviation: float | None = None, error: float | None = None) -> Any:
    return {"mean": mean, "deviation": deviation, "error": error, "count": 1}


def result(**changes: Any) -> dict[str, Any]:
    counts = {"wins": 3, "losses": 1, "ties": 2, "unreadable": 0, **changes.pop("counts", {})}
    controlled = {"value": 0.7, "error": 0.1, "note": changes.pop("note", None)}
    return {
        "counts": counts,
        "length_controlled": controlled,
        "mean_length_a": 12.4,
        "mean_length_b": 100.6,
        **changes,
    }


def numbers(**changes: Any) -> dict[str, Any]:
    counts = {"wins": 4, "losses": 2, "ties": 1, "unreadable": 0}
    one = {**counts, "win_rate": rate(0.25), "non_tie": rate(None)}
    found: dict[str, Any] = {
        "a": {"name": "bell"},
        "b": {"name": "base"},
        "benchmark": {"name": "mt-bench"},
        "num_tasks": 80,
        "judge": {"label": "gpt-4o, plain prompts", "is_local": False, "first_share": 0.625},
        "seeds": [0, 1],
        "over_seeds": {
            "win_rate": rate(0.7827, 0.0137, 0.05),
            "non_tie": rate(0.5, 0.0, None),
            "length_controlled": rate(None),
            "by_category": {"all": one},
            "by_turn": {"1": one, "2": {**one, "wins": 9, "win_rate": rate(0.5, 0.125)}},
        },
        "results": [result(), result()],
        "cautions": ["bell was never fine-tuned."],
    }
    return found | changes


def test_percent() -> None:
    assert percent(0.7827, 0.0137) == "78.27 ± 1.37"
    assert percent(0.5, 0.0) == "50.00 ± 0.00", "seeds that agree are not one seed"
    assert percent(0.5) == "50.00"
    assert percent(None, 0.1) == percent(None) == "-"


def test_headlines() -> None:
    columns, rows = headlines(numbers())
    assert columns == ["%", "mean ± deviation of 2 seeds", "standard error over tasks"]
    assert rows == [
        ["win rate (a tie is half a win)", "78.27 ± 1.37", "5.00"],
        ["non-tie win rate", "50.00 ± 0.00", "-"],
        ["length-controlled, two terms", "-", "-"],
    ]


def test_the_full_models_spread_is_not_shown_as_an_error() -> None:
    found = numbers(over_seeds={"published_length_controlled": rate(0.058, None, 0.3)})
    name = "length-controlled, AlpacaEval's full model"
    assert headlines(found)[1] == [[name, "5.80", "-"]]


def test_a_rate_that_rests_on_no_data_is_not_shown() -> None:
    one = rate(1.0, 0.0, 0.0)
    for is_usable, cells in ((True, ["100.00 ± 0.00", "0.00"]), (False, ["-", "-"])):
        found = numbers(over_seeds={"length_controlled": {**one, "is_usable": is_usable}})
        assert headlines(found)[1] == [["length-controlled, two terms", *cells]]


def test_outcomes_and_parts() -> None:
    found = numbers(results=[result(), result(counts={"wins": 5, "unreadable": 2})])
    assert outcomes(found)[1] == [
        ["0", "3", "1", "2", "0", "12", "101"],
        ["1", "5", "1", "2", "2", "12", "101"],
    ]
    assert part(found, "by_category")[1] == [], "one category is all of it"
    columns, rows = part(found, "by_turn")
    assert columns[0] == "turn"
    assert rows == [
        ["1", "4", "2", "1", "0", "25.00", "-"],
        ["2", "9", "2", "1", "0", "50.00 ± 12.50", "-"],
    ]


def test_notes_say_what_a_reader_must_know() -> None:
    text = "\n".join(notes(numbers()))
    assert "mt-bench, 80 tasks" in text
    assert "62.50 % were for the answer shown first" in text
    assert "bell was never fine-tuned." in text
    for absent in ("readable", "likelihood", "One seed", "requests"):
        assert absent not in text
    judge = {"label": "likelihood of x, not a judgement of quality", "is_local": True}
    odd = numbers(
        judge={**judge, "num_requests": 1200, "tokens_in": 34567, "tokens_out": 89, "usd": 0.0169},
        seeds=[0],
        results=[
            result(counts={"unreadable": 3}, note="all short")
            | {"published_length_controlled": {"note": "gamed.csv is reconstructed"}}
        ],
    )
    text = "\n".join(notes(odd))
    assert "3 pairs without a readable verdict are in no rate." in text
    assert "no opinion" in text
    assert "One seed: no deviation." in text
    assert "1,200 requests: 34,567 tokens in, 89 out, $0.0169 in all." in text
    assert "two terms: all short." in text
    assert "Length-controlled, AlpacaEval's full model: gamed.csv is reconstructed." in text
    twice = numbers(results=[result(note="same"), result(note="same")])
    assert sum("same" in line for line in notes(twice)) == 1


def test_page_and_screen_hold_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    page = markdown(numbers())
    show(numbers())
    screen = capsys.readouterr().out
    assert page.startswith("# bell against base, by gpt-4o, plain prompts\n\n| % |")
    for text in ("bell against base, by gpt-4o", "78.27 ± 1.37", "50.00 ± 12.50", "by turn"):
        assert text.lower() in page.lower()
        assert text in screen
    for text in (page, screen):
        assert "by category" not in text.lower()
        assert all(line in text for line in notes(numbers()))
    tables = [line for line in page.splitlines() if line.startswith("|")]
    widths = {line.count("|") for line in tables[:5]}
    assert len(widths) == 1


def test_names_are_text_not_markup(capsys: pytest.CaptureFixture[str]) -> None:
    """Categories and names come from the user's files."""
    found = numbers(a={"name": "[red]x"}, b={"name": "y[/b]"}, benchmark={"name": "[/i].jsonl"})
    found["judge"]["label"] = "[bold]judge[/]"
    one = found["over_seeds"]["by_category"]["all"]
    found["over_seeds"]["by_category"] = {"[/b]": one, "[dim]c": one}
    show(found)
    screen = capsys.readouterr().out
    for text in ("[red]x against y[/b], by [bold]judge[/]", "[/i].jsonl", " [/b] ", " [dim]c "):
        assert text in screen
