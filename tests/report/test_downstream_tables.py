"""Table 4's layout: what is bold, what has a sign or a star, and names that mean something else."""

from __future__ import annotations

import re
from typing import Any

import pytest

from bellmask.report.downstream_notes import notes
from bellmask.report.downstream_tables import (
    best_models,
    escape,
    full_rows,
    latex,
    main_rows,
    markdown,
    other_rows,
    show,
    signed,
)

SEEDS = [0, 1, 2]


def score(mean: float, gap: float | None = None, *, sure: bool = False) -> dict[str, Any]:
    found: dict[str, Any] = {"mean": mean, "deviation": 0.5, "error": 1.5}
    if gap is not None:
        found["difference"] = {"mean": gap, "error": 0.75, "is_sure": sure}
    return found


def make_numbers(*names: str, means: tuple[float, ...] = (40.0, 45.5)) -> dict[str, Any]:
    """Models and a baseline on PIQA and LAMBADA."""
    facts = {"step": 4, "prompts": "plain", "ending": "none", "tokenizer": "bytes"}
    facts |= {"framework": "mdm", "block_length": 64}
    models = [{"name": name, "is_model": True, **facts} for name in names]
    models.append({**models[0], "name": "random", "is_model": False, "step": None})
    values = dict(zip(names, means, strict=True)) | {"random": 99.0}
    results: dict[str, Any] = {"piqa": {}, "lambada": {}}
    fits = {"num_cut": 0, "num_shortened": 0}
    for place, (name, mean) in enumerate(values.items()):
        gap = None if place == 0 else mean - means[0]
        scores = {how: score(mean, gap, sure=place == 1) for how in ("per_token", "raw")}
        share = None if name == "random" else 0.25
        results["piqa"][name] = {"scores": scores, "exact_share": share, **fits}
        words = {"word": score(0.0, gap and 0.0), "word_own": score(7.0, gap and -0.001)}
        results["lambada"][name] = {"scores": words, "exact_share": None, **fits}
    shared = {"num_questions": 1234, "origin": "a file"}
    return {
        "models": models,
        "seeds": SEEDS,
        "estimator": "auto",
        "draws": 16,
        "longest_exact": 6,
        "missing": {},
        "tasks": [
            {
                **shared,
                "name": "piqa",
                "title": "PIQA",
                "main": "per_token",
                "note": "PIQA: two ways",
                "gives_length": False,
                "results": results["piqa"],
            },
            {
                **shared,
                "name": "lambada",
                "title": "LAMBADA",
                "main": "word",
                "note": "LAMBADA: last words",
                "gives_length": True,
                "results": results["lambada"],
            },
        ],
    }


def plain_rows(numbers: dict[str, Any]) -> list[list[str]]:
    return main_rows(numbers, lambda text: f"<{text}>", signed)[1]


def test_the_main_table() -> None:
    numbers = make_numbers("base", "bell")
    columns, rows = main_rows(numbers, lambda text: f"<{text}>", signed)
    assert columns == ["model", "PIQA (%)", "LAMBADA (%)†"]
    assert rows == [
        ["base, step 4", "40.00 ± 0.50", "0.00 ± 0.50"],
        ["bell, step 4", "<45.50 ± 0.50> (+5.50*)", "0.00 ± 0.50 (+0.00)"],
        ["random", "99.00 ± 0.50", "0.00 ± 0.50"],
    ]


@pytest.mark.parametrize(
    ("means", "best"),
    [
        ((40.0, 45.5, 1.0), "b"),
        ((45.5, 40.0, 45.5), "ac"),
        ((45.501, 45.499, 0.0), "ab"),
        ((0.0, 0.0, 0.0), ""),
        ((0.004, 0.001, 0.0), ""),
    ],
)
def test_the_best_models_are_bold(means: tuple[float, ...], best: str) -> None:
    """As printed: baselines never, ties all, nobody where nobody scored."""
    numbers = make_numbers("a", "b", "c", means=means)
    assert best_models(numbers, numbers["tasks"][0], "per_token") == set(best)
    bold = {row[0][0] for row in plain_rows(numbers) if row[1].startswith("<")}
    assert bold == set(best)


def test_a_single_model_is_not_bold_nor_compared() -> None:
    numbers = make_numbers("a", means=(45.5,))
    assert plain_rows(numbers)[0][1] == "45.50 ± 0.50"
    text = "\n".join(notes(numbers))
    assert "In brackets" not in text


@pytest.mark.parametrize(
    ("gap", "is_sure", "shown"),
    [(1.234, False, "+1.23"), (-1.234, True, "-1.23*"), (-0.001, False, "+0.00")],
)
def test_changes_have_a_sign(gap: float, is_sure: bool, shown: str) -> None:
    assert signed(gap, is_sure) == shown


def test_every_score() -> None:
    numbers = make_numbers("base", "bell")
    columns, rows = full_rows(numbers)
    assert {len(row) for row in rows} == {len(columns)}
    assert len(rows) == 4 * 3
    assert rows[1] == [
        "PIQA",
        "accuracy, per token",
        "bell",
        "45.50",
        "0.50",
        "1.50",
        "+5.50 ± 0.75 *",
    ]
    assert rows[0][-1] == "-"
    assert rows[-2][1:3] == ["word, length not given", "bell"]
    assert rows[-2][-1] == "+0.00 ± 0.75"
    numbers["tasks"][0]["results"]["base"]["scores"]["per_token"]["deviation"] = None
    assert full_rows(numbers)[1][0][4] == "-"
    assert plain_rows(numbers)[0][1] == "40.00"


def test_other_scores_are_side_by_side() -> None:
    columns, rows = other_rows(make_numbers("base", "bell"))
    assert columns == ["score", "base", "bell", "random"]
    assert rows == [
        ["PIQA: accuracy, sum", "40.00 ± 0.50", "45.50 ± 0.50", "99.00 ± 0.50"],
        ["LAMBADA: word, length not given", *["7.00 ± 0.50"] * 3],
    ]


def test_notes_say_what_was_measured() -> None:
    numbers = make_numbers("base", "bell")
    numbers["missing"] = {"triviaqa": "no network"}
    numbers["tasks"][1]["results"]["bell"]["num_cut"] = 3
    numbers["models"][1].update(prompts="tuned", ending="eos")
    text = "\n".join(notes(numbers))
    for words in (
        "over 3 evaluation seeds",
        "the change to base, with *",
        "† The model is told",
        "PIQA: two ways; 1,234 questions, a file.",
        "all masks up to 6 tokens, else 16",
        "25 % of base's, 25 % of bell's",
        "Prompts of base: lm-eval's.",
        "Prompts of bell: those of fine-tuning, EOS scored behind choices.",
        "bell: 3 gold answers of LAMBADA are longer than half of its block",
        "random: guesses",
        "Left out, no data: triviaqa.",
    ):
        assert words in text
    assert "unigram" not in text
    assert "\nbase: " not in text
    assert "Tokenizers differ" not in text
    assert "ARM" not in text
    numbers["tasks"][0]["results"]["bell"]["num_shortened"] = 1001
    numbers["models"][1].update(tokenizer="bpe", framework="arm")
    text = "\n".join(notes(numbers))
    assert "bell: questions that did not fit into rows of 64 tokens" in text
    assert "PIQA 1,001." in text
    assert "Tokenizers differ, and scores per token with them: compare per byte." in text
    assert "Log-probabilities of an ARM are exact" in text
    numbers["seeds"], numbers["estimator"] = [0], "bernoulli"
    text = "\n".join(notes(numbers))
    assert "One evaluation seed" in text
    assert "choices: bernoulli, 16 masks" in text
    numbers["tasks"] = numbers["tasks"][1:]
    assert "Log-probabilities of choices" not in "\n".join(notes(numbers))


# --- names that mean something elsewhere -----------------------------------------------------

ODD = ("base_run_1", "100%", "[red]x", "a|b", r"c:\d{e}", "*~^<>&#$")


def test_latex_is_well_formed() -> None:
    numbers = make_numbers(*ODD, means=(1.0, 2.0, 0.5, 3.0, 1.0, 1.0))
    text = latex(numbers)
    lines = [line for line in text.splitlines() if not line.startswith("%")]
    head, *_, end = lines
    assert head == r"\begin{tabular}{lcc}"
    assert end == r"\end{tabular}"
    body = "\n".join(lines)
    bare = re.sub(r"\\[&%$#_{}]", "", body)
    depth = 0
    for letter in bare:
        depth += (letter == "{") - (letter == "}")
        assert depth >= 0
    assert depth == 0
    assert bare.count("$") % 2 == 0
    assert "±" not in body
    assert "†" not in body
    rows = [line for line in lines if line.endswith(r"\\")]
    assert len(rows) == 1 + len(ODD) + 1
    for row in rows:
        assert re.sub(r"\\&", "", row).count("&") == 2
        assert not re.search(r"(?<!\\)[%#]", row)
        assert not row.startswith(("[", "*")), "an option of the row before"
    assert rows[1].startswith(r"base\_run\_1, step 4 & 1.00 $\pm$ 0.50 &")
    assert rows[2].startswith(r"100\%, step 4 &")
    assert rows[3].startswith("{[}red]x, step 4 &")
    assert r"\textcolor{BrickRed}{$-0.50$}" in rows[3]
    assert r"\textbf{3.00 $\pm$ 0.50} (\textcolor{ForestGreen}{$+2.00$})" in rows[4]
    assert r"\textcolor{ForestGreen}{$+1.00^*$}" in rows[2]
    assert "($+0.00$)" in rows[5], "no colour"
    assert lines.index(r"\midrule", 4) == lines.index(rows[-1]) - 1, "before the baselines"
    assert all(line.startswith("%") for line in text.split(end + "\n")[1].splitlines())


def test_latex_escapes() -> None:
    assert escape("a_b & 5% {x} #1 $") == r"a\_b \& 5\% \{x\} \#1 \$"
    assert escape("\\~^<>|[*") == (
        r"\textbackslash{}\textasciitilde{}\textasciicircum{}\textless{}\textgreater{}"
        r"\textbar{}{[}{*}"
    )


def test_markdown_keeps_its_cells() -> None:
    numbers = make_numbers("base", "a|b")
    text = markdown(numbers)
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert len(tables) == 2 + 3 + 2 + 12
    widths = [len(re.split(r"(?<!\\)\|", line)) - 2 for line in tables]
    assert widths == [3] * 5 + [7] * 14
    assert tables[3] == r"| a\|b, step 4 | **45.50 ± 0.50** (+5.50*) | 0.00 ± 0.50 (+0.00) |"
    assert "\n- † The model is told" in text


def test_the_screen_shows_names_as_they_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    show(make_numbers("[red]x", "[/bold]y"))
    out = capsys.readouterr().out
    assert out.count("[red]x, step 4") == 1
    assert out.count("[/bold]y, step 4") == 1
    assert re.search(r"score +┃ +\[red\]x ┃ +\[/bold\]y ┃", out)
    assert "[bold]" not in out
    assert "45.50 ± 0.50 (+5.50*)" in out
