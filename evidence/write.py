"""docs/results/*.json → docs/results.md, its pages in docs/results, and figures."""

from __future__ import annotations

import sys
import textwrap
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import pages
from adapting import adapting_page, judge_adapting
from downstream import downstream_page, judge_downstream
from medium import judge_medium, medium_page
from pages import AGREES, DISAGREES, INCONCLUSIVE, Judged
from perplexities import judge_perplexities, perplexities_page
from suites import (
    ARM,
    HEADLINE,
    TEXTS,
    headline_figure,
    headline_table,
    judge_suites,
    load,
    suites_page,
    targets_table,
)
from tuning import tuning_page
from why import analyses_page, judge_findings

from bellmask.utils.table import Table


@dataclass(frozen=True)
class Page:
    """A page of details, and the verdicts that it explains."""

    title: str
    judge: Callable[[], list[Judged]]
    write: Callable[[], list[str]]


PAGES = {
    "medium": Page("Larger runs", judge_medium, medium_page),
    "suites": Page("Speed-ups, time laws, objectives", judge_suites, suites_page),
    "analyses": Page("Why training is slow: the Findings", judge_findings, analyses_page),
    "perplexities": Page("Perplexities", judge_perplexities, perplexities_page),
    "adapting": Page("From a causal LM to a masked one", judge_adapting, adapting_page),
    "downstream": Page("Downstream benchmarks", judge_downstream, downstream_page),
    "tuning": Page("A law that tunes itself", list, tuning_page),
}
"""docs/results/NAME.md, by NAME."""

HEAD = """# Results

Base (NELBO, uniform times), bell (times around one half, unweighted loss) and their ablations were
trained with paired seeds on two CPU cores, on the texts and at the sizes below. NLL is the NELBO in
nats per token, on the same held-out blocks and masks for all. The paper trains 100M parameters for
1M steps of batch 512. The runs here have a tiny fraction of that budget, which may explain
disagreements.

## Speed-up
"""
HEADLINE_NOTE = """*Speed-up*: the base's number of steps divided by the step from which
the bell stays at or below the base's final NLL; geometric mean over paired seeds with its 95 %
t-interval. *Progress*: how far the base is on the way from the unigram NLL to that of an ARM of the
same size and budget (<: upper bound from the best run, where there is no ARM). Below 30 % a
speed-up mostly measures which run leaves the unigram plateau first, so none is claimed.
"""
RULE = """A claim **agrees** or **disagrees** if the 95 % interval of the measurement (Student's t)
excludes zero; otherwise it is **inconclusive**. Differences are paired by seed; for variants with
one seed, the noise is estimated from the paired seeds of base and bell. Rows on contexts,
gradients, toys and downstream benchmarks are of one training run: their errors do not cover
training noise. A row over several runs gets the worst of their verdicts; the smallest and the
largest number are shown. Claims of equality, stability and additivity have thresholds, defined in
`evidence/claims.py` and `evidence/findings.py`. Unless the row says otherwise, numbers are
differences of final NLLs in nats per token on WikiText-2, negative where they speak for the claim,
with a 95 % interval in brackets or ± a standard error. Each heading links to the details.
"""
FOLLOW_UPS = {
    "Single-mask gradients add up (cosine)": (
        "Gradients of up to 8 masks nearly add up, those of 32 do not. At `medium`, with the "
        "paper's blocks of 128 tokens, the similarity is higher than at `small`, where 32 masks "
        "are half of a block. But it falls during training, so more steps alone would not lead to "
        "the paper's value. Its network is about a hundred times larger; that was not tried."
    ),
    "Generative perplexity is lower (scorer SmolLM2": (
        "A matter of scale and scorer: bell's text is better under an ARM of the same tokenizer, "
        "costs SmolLM2 fewer nats per sample, and has fewer tokens there, each less likely. At "
        "`medium` base and bell are equal under SmolLM2, and both are far from real text."
    ),
    "Four letters backwards (stories260K), exact match: the bell in fine-tuning alone": (
        "The task has a plateau and is then learned within a hundred steps. After 500 the base is "
        "still learning, so the bell's faster start shows. Longer fine-tuning was not tried."
    ),
}
"""By the beginning of a claim: is it the scale, our reading, or the paper?"""
NOT_SHOWN = """- The paper's sizes: 100M parameters, 1M steps, LM1B (3.86x packed, 2.32x
  unpacked) and OpenWebText (1.78x). The presets `lm1b`, `lm1b_unpacked` and `owt` exist, but have
  not been run on a GPU.
- Table 4 on GPT-2 Large. The models here are too small for most of the benchmarks.
- Table 5, win rates judged by GPT-4o: [the judge](evaluating.md#judges-the-papers-table-5) was
  only tested with a mock endpoint.
- Wall-clock time, because two runs shared the cores; see [performance](performance.md).
"""
LINKS = """- Every number: `docs/results/*.json`. `make evidence` repeats the measurements
  (hours; `make evidence DRY=1` estimates how many), `python evidence/write.py` writes these pages.
- Beyond the paper: [the fast recipe and the race](performance.md#the-fast-recipe).
- [Every item of the paper](paper-map.md) with its code, command and test; [log](log.md) of
  experiments, including negative results.
"""


def results_page() -> list[str]:
    """The one page."""
    title, figure = headline_figure()
    lines = [HEAD, headline_table(), HEADLINE_NOTE]
    lines += [f"![{title}: base and bell](figures/{figure}.png)", "", *targets_table()]
    lines += ["## Verdicts", "", *verdict_table(), *differences(), "## What is not shown", ""]
    if pages.read_result("adapting-answers") is None:
        lines.append("- App. E: answers side by side (`make evidence CHAT=FILE` writes them).")
    lines += [NOT_SHOWN.rstrip(), *few_seeds(), "", "## Details", ""]
    lines += [f"- [{page.title}](results/{name}.md)" for name, page in PAGES.items()]
    return [*lines, LINKS]


def verdict_table() -> list[str]:
    """All claims, under headings that link to their pages."""
    judged = {name: page.judge() for name, page in PAGES.items()}
    words = Counter(row.verdict.word for rows in judged.values() for row in rows)
    count = f"{words[AGREES]} rows agree, {words[DISAGREES]} disagree, {words[INCONCLUSIVE]} are "
    count += "inconclusive at this scale."
    lines = [count, "", RULE, "| claim | paper | here | verdict |", "|---|---|---|---|"]
    for name, rows in judged.items():
        if not rows:
            continue
        lines.append(f"| **[{PAGES[name].title}](results/{name}.md)** | | | |")
        lines += (
            Table("", ["", "", "", ""], [row.cells() for row in rows]).markdown().splitlines()[2:]
        )
    return [*lines, ""]


def differences() -> list[str]:
    """What is known about claims that were not confirmed."""
    rows = [row for page in PAGES.values() for row in page.judge()]
    wrong = [row.claim for row in rows if row.verdict.word == DISAGREES]
    notes = {
        start: note
        for start, note in FOLLOW_UPS.items()
        if any(claim.startswith(start) for claim in wrong)
    }
    if not notes:
        return []
    lines = [f"- {start.partition(' (')[0]}: {note}" for start, note in notes.items()]
    return ["## Where they disagree", "", *(wrap(line) for line in lines), ""]


def wrap(line: str) -> str:
    """An item of a list, in lines of 100 characters."""
    return textwrap.fill(line, 100, subsequent_indent="  ", break_on_hyphens=False)


def few_seeds() -> list[str]:
    """Comparisons whose verdicts do not rest on seeds of their own, by text."""
    lines = []
    for setting, comparisons in load().items():
        single = [
            name
            for name, results in comparisons.items()
            if len(results["seeds"]) == 1 and name != ARM
        ]
        if single:
            lines.append(f"- {TEXTS[setting]}: training noise of {', '.join(single)} (one seed).")
    return lines


def build_pages() -> dict[Path, str]:
    """Every page; its figures are drawn on the way."""
    if not load():
        raise SystemExit(f"docs/results has no *-{HEADLINE}.json yet; run evidence/run.py")
    parts = {pages.DOCS / "results.md": results_page()}
    parts |= {pages.DOCS / f"results/{name}.md": page.write() for name, page in PAGES.items()}
    return {path: "\n".join(lines).rstrip() + "\n" for path, lines in parts.items()}


def write_pages() -> None:
    """Rebuild docs/results.md and its pages from whatever has been measured."""
    for path, text in build_pages().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_pages()
