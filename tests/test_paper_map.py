"""docs/paper-map.md names files, functions, commands and items of the paper that there are."""

from __future__ import annotations

import ast
import functools
import re
import shlex
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from bellmask.cli import COMMANDS
from bellmask.commands.analyze import ANALYSES
from bellmask.commands.evaluate import EvaluateOptions
from bellmask.commands.generate import GenerateOptions
from bellmask.commands.generative import GenerativeOptions
from bellmask.commands.judge_options import PairwiseOptions
from bellmask.commands.options import parse_command, resolve, start_config, take_option
from bellmask.commands.paper_suite import PaperOptions
from bellmask.commands.stages import StagesOptions, is_meant
from bellmask.commands.zero_shot import ZeroShotOptions
from bellmask.compare.suites import SUITES
from bellmask.compare.variants import SUFFIXES, check_shared, parse_variants
from bellmask.errors import UserError
from bellmask.plan.devices import parse_devices
from bellmask.presets import PRESETS

EVALUATIONS: dict[str, Any] = {
    "zero-shot": ZeroShotOptions,
    "generative": GenerativeOptions,
    "paper": PaperOptions,
}
ROOT = Path(__file__).parents[1]
MAP = ROOT / "docs" / "paper-map.md"
PAPER = ROOT.parent / "shared" / "paper.tex"

LABELS = (
    ("fig:intro", "Fig. 1"),
    ("eq:loss_mdlm", "Eq. 1"),
    ("eq:loss_ARM", "Eq. 2"),
    ("eq:loss_aogpt", "Eq. 3"),
    ("eq:loss_shared", "Eq. 4"),
    ("fig:prelim_dim_vs_locality", "Fig. 2"),
    ("prop:entropy", "Prop. 3.1"),
    ("fig:uneven_nlls", "Fig. 3"),
    ("tab:grad_analysis", "Table 1"),
    ("tab:additivity", "Table 2"),
    ("def:bell-shape", "Def. 4.1"),
    ("eq:loss_pi", "Eq. 6"),
    ("prop:equal_optimizer", "Prop. 4.2"),
    ("tab:time_sampling_distributions", "Table 3"),
    ("fig:theory", "Fig. 4"),
    ("prop:bell_shape", "Prop. 4.4"),
    ("fig:nll_curves", "Fig. 5"),
    ("fig:nll_speedup", "Fig. 6"),
    ("tab:downstream", "Table 4"),
    ("tab:cpt_sft_results", "Table 4"),
    ("tab:judge", "Table 5"),
    ("fig:other_alternatives", "Fig. 7"),
    ("lemma:zheng-1", "Lemma A.1"),
    ("lemma:kim-1", "Lemma A.2"),
    ("eq:eq_loss_mdlm_simple", "Eq. 8"),
    ("eq:loss_shared_appendix", "Eq. 9"),
    ("tab:shared_format_objectives", "Table 6"),
    ("eq:context_level_mdm_loss", "Eq. 10"),
    ("eq:shared_loss_time_variant", "Eq. 11"),
    ("eq:p_data_cond", "Eq. 12"),
    ("lemma:kim-2", "Lemma B.1"),
    ("lemma:equal-optimizer", "Lemma B.3"),
    ("eq:prop43-count-decomp", "Eq. 19"),
    ("lem:q-central-monotone", "Lemma B.5"),
    ("eq:q-mono-target", "Eq. 20"),
    ("eq:B-coeff-sign", "Eq. 21"),
    ("eq:K-central-monotone", "Eq. 22"),
    ("eq:prob_mass_w_pi", "Eq. 23"),
    ("eq:w_pi", "Eq. 24"),
    ("eq:prob_mass_with_qLk", "Eq. 25"),
    ("eq:R-bernstein", "Eq. 26"),
    ("eq:prob_mass_R_pi", "Eq. 27"),
    ("lem:R-central-monotone", "Lemma B.6"),
    ("fig:ablation_t_sampling_delta", "Fig. 8"),
    ("fig:ablation_t_sampling_gaussian", "Fig. 9"),
    ("fig:ablation_t_sampling_laplace", "Fig. 10"),
    ("tab:zeroshot-ppl", "Table 7"),
    ("tab:gen_ppl", "Table 8"),
    ("eq:nelbo-general-scheduler", "Eq. 28"),
    ("eq:tn-density", "Eq. 29"),
    ("fig:middle_flat_scheduler", "Fig. 11"),
    ("eq:tn-cdf", "Eq. 30"),
    ("eq:middle-flat-scheduler", "Eq. 31"),
    ("eq:middle-flat-weight-in-t", "Eq. 33"),
    ("fig:email_generation_combined", "Fig. 12"),
    ("fig:qualitative_combined", "Fig. 13"),
    ("tab:asset_licenses", "Table 9"),
)
"""Every label of the paper but those of sections, in its order, and the number it prints."""

UNLABELLED = (
    *(f"Eq. {n}" for n in (5, 7, 13, 14, 15, 16, 17, 18, 32, 34)),
    *(f"Finding {n}" for n in (1, 2, 3)),
    "Def. 4.3",
)

PLACEHOLDERS = {"path: name, name", "RUN", "BASE", "ARM"}
COLUMNS = ["paper item", "what it says", "module", "command", "test"]


@functools.cache
def page() -> str:
    return MAP.read_text(encoding="utf-8")


@functools.cache
def rows() -> list[list[str]]:
    cells = [
        [cell.strip() for cell in line.strip("|\n").split("|")]
        for line in page().splitlines()
        if line.startswith("|")
    ]
    return [row for row in cells if row != COLUMNS and set("".join(row)) != {"-"}]


@functools.cache
def quoted() -> list[str]:
    """What stands in backticks, each once."""
    return list(dict.fromkeys(re.sub(r"\s+", " ", s) for s in re.findall(r"`([^`]+)`", page())))


@functools.cache
def names_in(path: str) -> set[str]:
    """Functions, classes and constants of a file, and what classes define as Class.name."""

    def defined(body: list[ast.stmt], before: str = "") -> set[str]:
        found: set[str] = set()
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(before + node.name)
            if isinstance(node, ast.ClassDef):
                found |= defined(node.body, f"{before}{node.name}.")
            if isinstance(node, ast.Assign):
                found |= {before + t.id for t in node.targets if isinstance(t, ast.Name)}
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(before + node.target.id)
        return found

    return defined(ast.parse((ROOT / path).read_text(encoding="utf-8")).body)


def check_code(text: str) -> None:
    path, _, names = text.partition(": ")
    assert (ROOT / path).is_file(), f"there is no {path}"
    for name in filter(None, names.split(", ")):
        assert name in names_in(path), f"{path} has no {name}"


def check_compare(args: list[str]) -> None:
    if is_meant(args):  # two stages, with options of their own
        parse_command(StagesOptions, args, command="compare --suite cpt_sft")
        return
    suite = take_option(args, "--suite")
    take_option(args, "--seeds")
    preset, *more = args
    at = next((i for i, a in enumerate(more) if a.startswith("--")), len(more))
    texts, options = more[:at], more[at:]
    assert not (suite and texts)
    parse_variants(SUITES[suite[-1]]() if suite else texts)
    check_shared(options)
    resolve([preset, *options], "bellmask compare")


def check_command(text: str) -> None:
    """The command line would be accepted; nothing is run."""
    _, command, *args = shlex.split(text)
    assert command in COMMANDS, f"there is no command {command}"
    if command == "analyze":
        entry = ANALYSES[args[0]]
        analysis = getattr(import_module(f"bellmask.analyze.{entry.module}"), entry.constant)
        parse_command(analysis.options, args[1:], command=f"analyze {args[0]}")
    elif command == "train":
        take_option(args, "--out")
        resolve(args, "bellmask train")
    elif command == "plan":
        parse_devices(take_option(args, "--devices")[-1])
        resolve(args, "bellmask plan")
    elif command == "compare":
        check_compare(args)
    elif command == "config":
        for name in args[1:]:
            start_config(name).check()
    elif command == "evaluate":
        suite = take_option(args, "--suite")
        parse_command(EVALUATIONS[suite[-1]] if suite else EvaluateOptions, args, command=command)
    elif command == "judge":
        assert args[0] == "pairwise"
        parse_command(PairwiseOptions, args[1:], command="judge pairwise")
    elif command == "generate":
        parse_command(GenerateOptions, args, command=command)
    else:
        assert [command, *args] in (["demo"], ["data", "list"])


def check(text: str) -> None:
    if text.startswith("bellmask "):
        check_command(text)
    elif text.startswith("make "):
        targets = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert re.search(rf"^{text.removeprefix('make ')}:", targets, re.MULTILINE), text
    elif text.startswith("--"):
        resolve(["small_base", *shlex.split(text)], "bellmask train")
    elif text.startswith("_"):
        assert all(name + text in PRESETS for name in ("lm1b", "lm1b_unpacked", "owt")), text
    elif text.startswith("+"):
        assert text[1:] in SUFFIXES, text
    elif "/" in text:
        check_code(text)
    else:
        assert text in {*PRESETS, *SUITES, *PLACEHOLDERS}, f"what is {text}?"


def test_everything_it_names_is_there() -> None:
    problems = []
    for text in quoted():
        try:
            check(text)
        except (AssertionError, UserError, KeyError) as error:
            problems.append(f"{text}: {error}")
    assert len(quoted()) > 150
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    "text",
    [
        "bellmask/diffusion/orders.py: Odered",
        "bellmask/diffusion/orders.py: Mdm.gone",
        "bellmask/diffusion/order.py",
        "bellmask analyze order",
        "bellmask analyze schedules --no-such-option 1",
        "bellmask compare small --suite family",
        "bellmask compare small base bel",
        "bellmask train lm2b",
        "bellmask train small --law laplac",
        "bellmask dance",
        "bellmask judge pairwise RUN BASE --juge gpt-4o",
        "bellmask evaluate RUN --suite papers",
        "make nothing",
        "--no-such-option",
        "_gone",
        "+gone",
        "lm2b",
    ],
)
def test_what_is_not_there_is_noticed(text: str) -> None:
    with pytest.raises((AssertionError, UserError, KeyError)):
        check(text)


def test_paths_are_within_the_repository() -> None:
    for text in quoted():
        assert not text.startswith(("/", "~", "..")), text


def test_every_row_has_five_cells() -> None:
    assert len(rows()) > 70
    for row in rows():
        assert len(row) == len(COLUMNS), row
        assert all(row), row


def test_every_item_of_the_paper_has_one_row() -> None:
    items = [item for row in rows() for item in row[0].split(", ")]
    assert len(items) == len(set(items))
    missing = [item for _, item in LABELS if item not in items]
    missing += [item for item in UNLABELLED if item not in items]
    assert not missing
    for analysis in ANALYSES:
        assert f"`bellmask analyze {analysis}" in page(), analysis
    for suite in SUITES:
        assert f"--suite {suite}" in page() or f"`{suite}`" in page(), suite


def test_no_analysis_is_called_untested_that_has_a_test() -> None:
    for path in (ROOT / "tests" / "analyze").glob("test_*.py"):
        assert f"tests/analyze/{path.name}" in page(), f"{path.name} is not in docs/paper-map.md"


def test_numbers_have_no_gaps() -> None:
    items = {item for row in rows() for item in row[0].split(", ")}
    for kind, count in (("Eq.", 34), ("Fig.", 13), ("Table", 9), ("Finding", 3)):
        assert {i for i in items if i.startswith(kind)} == {f"{kind} {n + 1}" for n in range(count)}


def without_comments(text: str) -> str:
    """The paper's own pages: neither comments nor the bibliography entries in between."""
    text = re.sub(r"(?<!\\)%.*", "", text)
    head, _, tail = text.partition("\\bibliography{")
    return head + tail[tail.index("\\appendix") :]


@pytest.mark.skipif(not PAPER.exists(), reason="the paper is not part of the repository")
def test_labels_and_numbers_are_those_of_the_paper() -> None:
    """In LaTeX's way: floats count captions, displays count lines, statements share a counter."""
    text = without_comments(PAPER.read_text(encoding="utf-8"))
    labels = [name for name in re.findall(r"\\label\{([^}]+)\}", text) if name[:4] != "sec:"]
    assert labels == [label for label, _ in LABELS]

    expected = dict(LABELS)
    text = re.sub(r"\\substack\{.*?\n    \}\}", "", text, flags=re.DOTALL)
    inner = re.compile(r"\\begin\{(cases|gathered)\}.*?\\end\{\1\}", re.DOTALL)
    text = inner.sub(lambda found: "\\nonumber" if "\\nonumber" in found[0] else "", text)
    section, statements, is_appendix = 0, 0, False
    equations = figures = tables = 0
    number = ""
    pattern = re.compile(
        r"\\appendix|\\section\{"
        r"|\\begin\{(?P<display>align|gather|equation)\}(?P<body>.*?)\\end\{(?P=display)\}"
        r"|\\begin\{(?P<float>(?:wrap)?(?:figure|table))\*?\}(?P<inside>.*?)\\end\{(?P=float)"
        r"|\\begin\{(?P<statement>restatable|definition|lemma|proposition)\}[^\n]*\n?[^\n]*",
        re.DOTALL,
    )
    at = 0
    seen: dict[str, str] = {}
    while found := pattern.search(text, at):
        at = found.end()
        if found[0] == "\\appendix":
            section, is_appendix = 0, True
        elif found[0] == "\\section{":
            section, statements = section + 1, 0
        elif found["display"]:
            for line in re.split(r"\\\\(?![a-z])", found["body"]):
                if "\\nonumber" not in line:
                    equations += 1
                    for label in re.findall(r"\\label\{([^}]+)\}", line):
                        seen[label] = f"Eq. {equations}"
        elif found["float"]:
            is_figure = "figure" in found["float"]
            for part in found["inside"].split("\\caption{")[1:]:
                figures, tables = figures + is_figure, tables + (not is_figure)
                number = f"Fig. {figures}" if is_figure else f"Table {tables}"
                for label in re.findall(r"\\label\{([^}]+)\}", part):
                    seen[label] = number
        else:
            statements += 1
            place = f"{chr(64 + section) if is_appendix else section}.{statements}"
            for label in re.findall(r"\\label\{((?:prop|def|lem|lemma):[^}]+)\}", found[0]):
                seen[label] = f"{expected[label].split()[0]} {place}"
            at = found.start() + len("\\begin{")  # displays inside count as well
    seen["tab:downstream"] = "Table 4"  # stands before its caption
    assert seen == expected
    assert (equations, figures, tables) == (34, 13, 9)
    assert text.count("\\textbf{Finding") == 3
