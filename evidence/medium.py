"""The larger runs (preset ``medium``): what is measured of them, and docs/results/medium.md.

The headline and the ARMs are comparisons (``suites.py``). Here are, of one seed each: samples,
zero-shot and generative perplexity, NLL by context count and gradients over training; and the two
packings of sentences (App. C.1) at half the steps. Each part is measured once: its file in
docs/results says that it is done, so that a later machine continues where another one ended.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from analyses import ANALYSES
from findings import far_tokens_matter_less, gradients_add_up
from pages import (
    Judged,
    Verdict,
    picture,
    read_comparisons,
    read_result,
    worst,
    write_result,
)
from perplexities import SCORERS, keep_result, run_or_skip
from records import folders
from suites import ARM, HEADLINE, MEDIUM, MEDIUM_SEEDS, ROOT, measure_suites, variants_table
from why import SHOWN, TITLES

from bellmask import load_run
from bellmask.compare.execute import (
    TrainingOptions,
    execute,
    for_comparison,
    is_finished,
    plan_runs,
)
from bellmask.compare.variants import parse_variants
from bellmask.config.config import RunConfig
from bellmask.config.presets import medium
from bellmask.data.corpora import open_corpus
from bellmask.data.readers import cache_folder
from bellmask.utils.progress import NO_PROGRESS
from bellmask.utils.stats import plus_minus
from bellmask.utils.table import Table

VARIANTS = ("base", "bell")
NUM_SAMPLES = 10
NFE = (128, 256, 512, 1024)
GRADIENT_DRAWS = 128
SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[\"'(]?[A-Z0-9])")
"""Between two sentences; a rule that abbreviations deceive now and then."""
LEAST_WORDS = 5


def measure_medium(
    config: RunConfig, texts: Sequence[str], columns: Sequence[str], jobs: int
) -> bool:
    """Look at runs while their weights are here, then compare; False when something is left out."""
    is_whole = True
    for variants in VARIANTS, (*VARIANTS, ARM):
        if not all(has(name, variants) for name in looks(config, ARM in variants)):
            seed, runs = named_runs(config, variants, jobs)
            measure_samples(runs, seed)
            measure_analyses(config, runs, seed)
            is_whole &= measure_perplexities(runs, seed, texts, columns)
    is_whole &= measure_suites({MEDIUM: config}, jobs)
    return is_whole & measure_suites(sentence_settings(config), jobs)


def looks(config: RunConfig, has_arm: bool) -> list[str]:
    """What needs weights, by the names of the results."""
    contexts = [stem for _, stem, stage in analyses(config) if stage is None]
    if has_arm:
        return [*contexts, f"generative-medium-{ARM}"]
    gradients = [stem for _, stem, stage in analyses(config) if stage is not None]
    scored = ["zero-shot-medium", "generative-medium-smollm2"]
    return ["medium-samples", *gradients, *contexts, *scored]


def has(name: str, variants: Iterable[str]) -> bool:
    """Whether docs/results has it, of all these variants."""
    found = read_result(name)
    return found is not None and set(variants) <= set(found.get("variants", VARIANTS))


def named_runs(
    config: RunConfig, variants: Sequence[str], jobs: int
) -> tuple[int, dict[str, Path]]:
    """A seed that was trained here, else the first, and its runs by names that tables can show."""
    options = TrainingOptions(jobs=jobs, runs=str(ROOT / "runs"))
    for seed in range(MEDIUM_SEEDS, 0, -1):
        own = replace(config, train=replace(config.train, seed=seed))
        planned = plan_runs(for_comparison(own), parse_variants(variants), options)
        if all(map(is_finished, planned)):
            break
    folders(MEDIUM, planned, options, ROOT / "records")  # so that they are recorded at once
    execute(planned, options)  # records have no weights
    folder = ROOT / f"medium-seed{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for run in planned:
        link = folder / run.variant
        link.unlink(missing_ok=True)
        link.symlink_to(run.folder.resolve())
        found[run.variant] = link
    return seed, found


def measure_samples(runs: Mapping[str, Path], seed: int) -> None:
    """Ten texts of each, from the same noise."""
    if read_result("medium-samples") is None:
        found = {name: load_run(runs[name]).sample(NUM_SAMPLES, steps=NFE[0], seed=1)
                 for name in VARIANTS}  # fmt: skip
        write_result("medium-samples", {"seed": seed, "texts": found})


def measure_analyses(config: RunConfig, runs: Mapping[str, Path], seed: int) -> None:
    """Fig. 3; Tables 1 and 2 at several checkpoints."""
    for name, stem, stage in analyses(config):
        if has(stem, runs if stage is None else ()):
            continue
        print(f"== {stem}", flush=True)
        analysis = ANALYSES[f"wikitext2-{name}"]
        if stage is None:
            stages = (*config.checkpoint.keep_steps, config.train.steps)
            chosen = tuple(map(str, runs.values()))
            options = analysis.options(runs=chosen, checkpoints=stages, blocks=512, bins=12)
        else:
            own = {"checkpoint": str(stage), "draws": GRADIENT_DRAWS}
            options = analysis.options(runs=(str(runs["base"]),), **own)
        about = {"seed": seed, "variants": list(runs)}
        write_result(stem, analysis.measure(options, NO_PROGRESS) | about)


def analyses(config: RunConfig) -> Iterator[tuple[str, str, int | None]]:
    """(name, file, checkpoint): those of gradients take one checkpoint at a time."""
    for name in ("context-curve", "context-drop"):
        yield name, f"analysis-medium-{name}", None
    for name in ("gradient-radius", "gradient-additivity"):
        for stage in (*config.checkpoint.keep_steps, config.train.steps):
            yield name, f"analysis-medium-{name}-{stage}", stage


def measure_perplexities(
    runs: Mapping[str, Path], seed: int, texts: Sequence[str], columns: Sequence[str]
) -> bool:
    """Tables 7 and 8; an ARM's score where there is one."""
    models = [str(runs[name]) for name in VARIANTS]
    given = [part for text in texts for part in ("--from", text)]
    given += [part for column in columns for part in ("--column", column)]
    out = ROOT / f"medium-perplexities-seed{seed}"
    is_whole = True
    if read_result("zero-shot-medium") is None:
        command = ["evaluate", *models, "--suite", "zero-shot", *given, "--skip-missing"]
        if is_whole := run_or_skip([*command, "--out", str(out / "zero-shot")]):
            keep_result(out / "zero-shot/zero_shot.json", "zero-shot-medium", seed=seed)
    for scorer in SCORERS:
        name = f"generative-medium-{scorer}"
        if read_result(name) is not None or (scorer == ARM and ARM not in runs):
            continue
        folder = out / scorer
        command = ["evaluate", *models, "--suite", "generative", "--out", str(folder)]
        command += ["--scorer", str(runs[ARM]) if scorer == ARM else scorer]
        command += ["--num", "32", "--seeds", "2", "--nfe", *map(str, NFE)]
        if run_or_skip(command):
            keep_result(folder / "generative.json", name, seed=seed, variants=list(runs))
        else:
            is_whole = False
    return is_whole


# Sentences, packed and one per row


def sentence_settings(config: RunConfig) -> dict[str, RunConfig]:
    """The same text as sentences, in both packings, at half the steps."""
    files = {split: ROOT / f"sentences-{split}.txt" for split in ("train", "test")}
    for split, path in files.items():
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(sentences(config, split)) + "\n", encoding="utf-8")
    data = replace(
        config.data,
        train=str(files["train"]),
        valid=str(files["test"]),
        valid_split="valid",
        documents="line",
    )
    steps = config.train.steps // 2
    packed = replace(
        config,
        data=data,
        train=replace(config.train, steps=steps),
        checkpoint=replace(config.checkpoint, keep_steps=()),
    )
    unpacked = replace(packed, data=replace(data, packing="unpacked", pads="noised"))
    return {"sentences": packed, "sentences_unpacked": unpacked}


def sentences(config: RunConfig, split: Any) -> Iterator[str]:
    """The sentences of a split, one after another."""
    source, _ = open_corpus(config.data, split, cache_folder(config.data.cache))
    for piece in source.read():
        for line in piece.text.splitlines():
            for sentence in SENTENCE.split(line):
                if len(sentence.split()) >= LEAST_WORDS:
                    yield sentence.strip()


# The page


CLAIMS = {
    "gradient-radius": (
        "Far masks change the gradient less (cosine)",
        "Table 1: 0.108 to 0.935",
        far_tokens_matter_less,
    ),
    "gradient-additivity": (
        "Single-mask gradients add up (cosine)",
        "Table 2: 0.999 to 0.976",
        gradients_add_up,
    ),
}


HEADS = {"gradient-radius": "radius r", "gradient-additivity": "number of masks"}


def stages_of(name: str) -> dict[int, dict[str, Any]]:
    """What was measured of gradients, by checkpoint."""
    found = {
        stage: read_result(stem)
        for own, stem, stage in analyses(medium())
        if own == name and stage is not None
    }
    return {stage: numbers for stage, numbers in found.items() if numbers}


def judge_medium() -> list[Judged]:
    """Tables 1 and 2 again, on the larger base: a claim must hold at every checkpoint."""
    rows = []
    for name, (text, paper, judge) in CLAIMS.items():
        if verdicts := {stage: judge(found) for stage, found in stages_of(name).items()}:
            said = "; ".join(f"step {stage:,}: {v.measured}" for stage, v in verdicts.items())
            word = worst(v.word for v in verdicts.values())
            rows.append(Judged(f"{text}, base at `medium`", paper, Verdict(word, said)))
    return rows


INTRODUCTION = """# Larger runs: clean enwik8 at `medium`

4 layers of width 128, blocks of 128 tokens of a 2048-token BPE, 10,000 steps of batch 32: 41M
tokens, about an hour per run on one core. The learning rate (1.5e-3) is the best of four for the
base on validation text, judged by their first 1,600 to 2,500 steps; everything here is of the test
split. NLLs are in nats per token. What is not listed has not been measured yet.
"""


def medium_page() -> list[str]:
    lines = [INTRODUCTION]
    if found := read_comparisons(MEDIUM):
        lines += [
            "## Variants",
            "",
            variants_table({name: found[name] for name in sorted(found, key=_rank)}),
        ]
    lines += _zero_shot(read_result("zero-shot-medium"))
    for scorer, title in SCORERS.items():
        lines += _generative(read_result(f"generative-medium-{scorer}"), title)
    for name, stem, stage in analyses(medium()):
        if stage is None and (numbers := read_result(stem)):
            lines += [f"## {TITLES[name]}, seed {numbers['seed']}", ""]
            lines += _pictured(name, stem, numbers)
            for table in ANALYSES[f"wikitext2-{name}"].tables(numbers):
                if any(part in table.title for part in SHOWN[name]):
                    lines += [f"{table.title}:", "", table.markdown()]
    for name in CLAIMS:
        lines += _gradients(name)
    return lines + _samples(read_result("medium-samples"))


def _pictured(name: str, stem: str, numbers: dict[str, Any]) -> list[str]:
    return picture(TITLES[name], stem, partial(ANALYSES[f"wikitext2-{name}"].figure, numbers))


def _gradients(name: str) -> list[str]:
    """One table of all checkpoints; a figure of the last."""
    if not (stages := stages_of(name)):
        return []
    last, numbers = max(stages.items())
    rows = [
        [
            str(row["setting"]),
            *(
                plus_minus(one["whole"]["mean"], one["whole"]["se"], 3)
                for one in (found["models"][0]["rows"][at] for found in stages.values())
            ),
            f"{numbers['paper'][str(row['setting'])]:.3f}",
        ]
        for at, row in enumerate(numbers["models"][0]["rows"])
    ]
    steps = [f"step {stage:,}, seed {found['seed']}" for stage, found in stages.items()]
    columns = [HEADS[name], *steps, "paper, 1M steps"]
    lines = [f"## {TITLES[name]}", ""]
    lines += ["Base; cosine of gradients of all parameters, ± standard error over draws:", ""]
    lines += [Table("", columns, rows).markdown()]
    lines += [f"All parts of the network at step {last:,}, and an untrained one:", ""]
    return lines + _pictured(name, f"analysis-medium-{name}-{last}", numbers)


def _rank(name: str) -> bool:
    return name != HEADLINE


def _zero_shot(numbers: Mapping[str, Any] | None) -> list[str]:
    if numbers is None:
        return []
    there = [text for text in numbers["sets"] if not text["missing"]]
    rows = [
        [
            text["title"],
            *(
                plus_minus(found["perplexity"], found["perplexity_se"], 1)
                for found in (text["results"][name] for name in VARIANTS)
            ),
        ]
        for text in there
    ]
    note = "Perplexity per token of the model's tokenizer, ± one standard error over the text."
    return [
        f"## Zero-shot perplexity (Table 7), seed {numbers['seed']}",
        "",
        Table("", ["set", *VARIANTS], rows).markdown(),
        note,
        "",
    ]


def _generative(numbers: Mapping[str, Any] | None, scorer: str) -> list[str]:
    if numbers is None:
        return []
    runs = {run["name"]: run["settings"] for run in numbers["runs"]}
    rows = []
    for at, nfe in enumerate(NFE):
        means = [runs[name][at]["mean"] for name in VARIANTS]
        told = [f"{one['perplexity']:.1f} ({one['entropy']:.2f})" for one in means]
        rows.append([str(nfe), *told])
    (real,) = [text["settings"][0]["mean"] for text in numbers["real_text"]]
    note = (
        f"Perplexity (entropy). Test text itself: {real['perplexity']:.1f} ({real['entropy']:.2f})."
    )
    return [
        f"## Generative perplexity (Table 8), scorer {scorer}, seed {numbers['seed']}",
        "",
        Table("", ["NFE", *VARIANTS], rows).markdown(),
        note,
        "",
    ]


def _samples(found: Mapping[str, Any] | None) -> list[str]:
    """All of them, as they came."""
    if found is None:
        return []
    lines = [f"## Samples, seed {found['seed']}", ""]
    lines += [f"{NUM_SAMPLES} of each, {NFE[0]} steps, not selected.", ""]
    for name, texts in found["texts"].items():
        lines += [f"### {name}", ""]
        for text in texts:
            lines += ["```text", text.replace("```", "'''").strip(), "```", ""]
    return lines
