"""A causal LM becomes a masked one (Sec. 5.3): measured on small ones, then shown."""

from __future__ import annotations

import json
import random
import re
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bellmask import load_run
from bellmask.cli import run_command
from bellmask.compare.compare import compare
from bellmask.compare.execute import (
    TRAINING_FORMAT,
    TrainingOptions,
    execute,
    for_comparison,
    plan_runs,
)
from bellmask.compare.report import curves_figure, show_gap, show_speed_up
from bellmask.compare.stages import stage_figure, stage_table
from bellmask.compare.variants import parse_variants
from bellmask.config.config import RunConfig, override
from bellmask.config.presets import preset
from bellmask.data.corpora import open_corpus
from bellmask.data.readers import cache_folder
from bellmask.evaluate.likelihood import evaluate
from bellmask.evaluate.paper_suite import main_table
from bellmask.generate.answers import Answerer, Question
from bellmask.generate.settings import Sampling
from bellmask.storage.build import build_framework
from bellmask.train.setup import open_start
from bellmask.utils.errors import UserError
from bellmask.utils.files import write_text
from bellmask.utils.stats import Estimate
from bellmask.utils.table import Table

sys.path.insert(0, str(Path(__file__).parent))
from analyses import ROOT
from pages import (
    DISAGREES,
    INCONCLUSIVE,
    Judged,
    Verdict,
    outside_zero,
    picture,
    read_result,
    trimmed,
    write_result,
)

RUNS = ROOT.parent / "adapting"
STORIES_VARIANTS = [
    "base",
    "bell",
    "base from scratch=--objective nelbo --law uniform --start.fresh --start.anneal-steps 1",
    "bell from scratch=--objective bell --law gaussian --start.fresh --start.anneal-steps 1",
]


def story_options(model: str, text: str) -> list[str]:
    """stories260K on the beginnings of stories, one per row, as it was pretrained (with BOS)."""
    args = "--start.anneal-steps 150 --data.documents endoftext --data.packing unpacked"
    args += " --data.wrap True --data.block-length 64 --train.steps 600 --optim.lr 3e-3"
    args += " --optim.warmup-steps 50 --validation.blocks 116"
    places = ["--start.model", model, "--data.train", text, "--validation.every", "50 steps"]
    return [*args.split(), *places]


STORIES_SFT = "sft_tiny --sft.train toy:reverse:4 --sft.round-to 10 --train.steps 500"
STORIES_SFT += " --validation.every '50 steps'"


def measure_stages(name: str, cpt: Sequence[str], sft: str, *more: str) -> None:
    """CPT base/bell x SFT base/bell, from the runs that were compared already."""
    out = RUNS / name
    suite = ["compare", "--suite", "cpt_sft", "--cpt", shlex.join(cpt), "--sft", sft, *more]
    suite += ["--jobs", "2", "--out", str(out), "--runs", str(RUNS / "runs")]
    if run_command(suite):
        raise UserError("the suite cpt_sft failed")
    found = json.loads((out / "results.json").read_text(encoding="utf-8"))
    text, examples = found["cpt"]["data"]["train"], found["sft"]["sft"]["train"]
    for stage in ("cpt", "sft"):  # no paths of a machine
        found[stage] = {"train": found[stage]["train"], "sft": found[stage]["sft"]}
    found["cpt"]["data"] = {"train": Path(text).name}
    found["sft"]["sft"]["train"] = Path(examples).name
    write_result(f"adapting-{name}", found)


SMOLLM2 = shlex.split(
    "cpt --data.train wikitext2 --data.block-length 128 --start.anneal-steps 100"
    " --train.steps 400 --train.batch-size 8 --optim.lr 1e-4 --optim.warmup-steps 40"
    " --validation.every '25 steps' --validation.blocks 48 --validation.batch-size 16"
    " --checkpoint.every '100 steps' --checkpoint.keep-last 1 --checkpoint.no-keep-best"
    " --optim.curve constant --log.every 10"
)
"""SmolLM2-135M on WikiText-2: a real model, as many steps as a CPU has time for."""
WORDS_SFT = (
    "sft --sft.train {} --sft.round-to 8 --data.block-length 128 --train.steps 200"
    " --train.batch-size 16 --optim.lr 1e-4 --optim.warmup-steps 20 --validation.every '25 steps'"
    " --validation.blocks 128 --checkpoint.every '100 steps' --checkpoint.keep-last 1"
)
WORDS_ASKED = (
    "--seeds 1 --examples 128 --sampling-seeds 1 --sampling.rule most_confident"
    " --sampling.temperature 0 --sampling.steps 8"
)
NUM_WORDS, NUM_EXAMPLES = 4, 6000
CHAT_SFT = (
    "sft --sft.turns first --sft.template vicuna --data.block-length 256 --train.steps 150"
    " --train.batch-size 8 --optim.warmup-steps 15 --validation.every '50 steps'"
    " --validation.blocks 16 --checkpoint.every '50 steps' --checkpoint.keep-last 1"
)
LAWS = {"base": "--objective nelbo --law uniform", "bell": "--objective bell --law gaussian"}
PROMPTS = Path("examples/prompts.jsonl")
"""Like the four of App. E."""
ASKED = "--limit 20 --seeds 1 --draws 2 --skip-missing".split()
"""Of Table 4's command."""


def measure_benchmarks(name: str) -> None:
    """Table 4's command on the six runs of a two by two."""
    found = json.loads((RUNS / name / "results.json").read_text(encoding="utf-8"))
    folder = RUNS / f"{name}-runs"
    folder.mkdir(parents=True, exist_ok=True)
    links = []
    for row in found["rows"]:
        link = folder / "-".join(filter(None, [row["cpt"], row["sft"] or "cpt"]))
        link.unlink(missing_ok=True)
        link.symlink_to((RUNS / "runs" / row["runs"][0]["run"]).resolve())
        links.append(str(link))
    out = RUNS / f"{name}-benchmarks"
    if run_command(["evaluate", *links, "--suite", "paper", *ASKED, "--out", str(out)]):
        raise UserError("the suite paper failed")
    paper = json.loads((out / "paper.json").read_text(encoding="utf-8"))
    write_result(f"adapting-{name}-benchmarks", paper)


def measure_answers(chat: str) -> None:
    """App. E: base and bell, each at both stages, after the same conversations."""
    config = override(preset(SMOLLM2[0]), SMOLLM2[1:]).check()
    options = TrainingOptions(jobs=2, runs=str(RUNS / "runs"))
    adapted = plan_runs(for_comparison(config), parse_variants(list(LAWS)), options)
    execute(adapted, options)
    asked = [json.loads(line)["prompt"] for line in PROMPTS.read_text("utf-8").splitlines()]
    answers = {}
    for run in adapted:
        folder = RUNS / f"chat-{run.variant}"
        args = [*shlex.split(CHAT_SFT), "--sft.train", f"sharegpt:{chat}"]
        args += ["--start.model", str(run.folder), *LAWS[run.variant].split()]
        if run_command(["train", *args, "--out", str(folder), "--resume", "auto"]):
            raise UserError("fine-tuning on conversations failed")
        answerer = Answerer(load_run(folder))
        questions = [Question.plain(prompt) for prompt in asked]
        found = answerer.answer(questions, sampling=Sampling(), seed=1)
        answers[run.variant] = [answer.text for answer in found]
    rows = len(load_run(folder).blocks()[0])
    train = override(preset("sft"), shlex.split(CHAT_SFT)[1:]).train
    about = {"steps": train.steps, "rows": rows, "epochs": train.steps * train.batch_size / rows}
    write_result("adapting-answers", {**about, "prompts": asked, "answers": answers})


def write_words(path: Path) -> None:
    """Prompts to write common words of WikiText-2 in reverse order, with the answers."""
    source, _ = open_corpus(preset("cpt_tiny").data, "train", cache_folder(None))
    counts: Counter[str] = Counter()
    for piece in source.read():
        counts.update(re.findall(r"\b[a-z]{3,8}\b", piece.text))
    words = [word for word, _ in counts.most_common(1000)]
    rng = random.Random(1)
    lines = []
    for _ in range(NUM_EXAMPLES):
        some = rng.sample(words, NUM_WORDS)
        prompt = f"Write these words in reverse order: {' '.join(some)}."
        lines.append(json.dumps({"prompt": prompt, "response": " ".join(reversed(some))}))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "\n".join(lines) + "\n")


def nll_before(config: RunConfig, framework: str) -> tuple[float, float]:
    """(NLL, standard error) of the start itself: as the causal LM it is, or opened as it is."""
    closed = replace(config, start=replace(config.start, anneal_steps=1))
    args = ["--framework", framework] if framework != "mdm" else []
    start = open_start(override(closed, args).check())
    tokenizer, data = start.load_data()
    model = start.build_model(tokenizer).eval()
    found = evaluate(
        model,
        data.valid.spread(config.validation.blocks),
        mask_id=tokenizer.mask_id,
        framework=build_framework(start.config),
        seed=config.validation.seed,
        batch_size=config.validation.batch_size,
    )
    return found.nll, found.standard_error


def measure_comparison(name: str, config: RunConfig, variants: list[str], seeds: int) -> None:
    """Train the variants; with the start's NLL as a causal LM and opened."""
    results = compare(
        config,
        parse_variants(variants),
        TrainingOptions(seeds=seeds, jobs=2, runs=str(RUNS / "runs")),
        reference="base",
        out=RUNS / name,
    )
    kept: dict[str, Any] = trimmed(results)
    kept["data"]["train"] = Path(kept["data"]["train"]).name  # no paths of a machine
    kept["causal_before"] = nll_before(config, "arm")
    kept["masked_before"] = nll_before(config, "mdm")
    kept["options"] = {
        "steps": config.train.steps,
        "anneal_steps": config.start.anneal_steps,
        "batch_size": config.train.batch_size,
        "block_length": config.data.block_length,
        "lr": config.optim.lr,
        "format": TRAINING_FORMAT,
    }
    write_result(f"adapting-{name}", kept)


def measure_adapting(stories: str | None, text: str | None, chat: str | None) -> bool:
    """All of it; False when something had to be left out."""
    is_whole = True
    if stories and text:
        config = override(preset("cpt_tiny"), story_options(stories, text)).check()
        measure_comparison("stories", config, ["base", "bell"], seeds=3)
        measure_comparison("stories-scratch", config, STORIES_VARIANTS, seeds=1)
        cpt = ["cpt_tiny", *story_options(stories, text)]
        measure_stages("stages", cpt, STORIES_SFT, "--seeds", "3")
    else:
        print("left out: stories; give --stories MODEL --stories-text FILE", file=sys.stderr)
        is_whole = False
    try:
        config = override(preset(SMOLLM2[0]), SMOLLM2[1:]).check()
        measure_comparison("smollm2", config, ["base", "bell"], seeds=1)
        write_words(RUNS / "words.jsonl")
        sft = WORDS_SFT.format(RUNS / "words.jsonl")
        measure_stages("words", SMOLLM2, sft, *WORDS_ASKED.split())
        measure_benchmarks("words")
        if chat:
            measure_answers(chat)
        else:
            print("left out: answers of App. E; give --chat FILE", file=sys.stderr)
            is_whole = False
    except UserError as error:
        print(f"left out: {error}", file=sys.stderr)
        is_whole = False
    return is_whole


TITLES = {
    "stories": "stories260K (260K parameters, Llama) on TinyStories",
    "smollm2": "SmolLM2-135M-Instruct (4-bit weights, converted) on WikiText-2",
}


def judge_adapting() -> list[Judged]:
    """Continual pretraining on each start, then the stages of fine-tuning."""
    rows = []
    for name, title in TITLES.items():
        if found := read_result(f"adapting-{name}"):
            compared = found["variants"]["bell"]["comparison"]
            said = f"{show_gap(compared, 2)}, {show_speed_up(compared)}"
            where = title.partition(" (")[0].partition(" on ")[0]
            claim = f"{where}, continual pretraining: the bell beats the base"
            rows.append(Judged(claim, "Sec. 5.3", Verdict(_word(compared), said)))
    for name, task in STAGE_TASKS.items():
        if found := read_result(f"adapting-{name}"):
            by_stage = {(row["cpt"], row["sft"]): row for row in found["rows"]}
            rows += [_judge_stages(task, by_stage, stages) for stages in STAGE_CLAIMS]
    return rows


def _judge_stages(
    task: str, by_stage: Mapping[tuple[str, str], Any], stages: tuple[str, str]
) -> Judged:
    """Without an interval over training seeds nothing is decided."""
    change = by_stage[stages]["difference"]["exact_match"]
    low, high = change["low"], change["high"]
    word = outside_zero(low, high)
    if stages == LITTLE and word != INCONCLUSIVE:
        word = DISAGREES
    said = f"{100 * change['value']:+.0f} points"
    said += " (one seed)" if low is None else f" ({100 * low:+.0f} to {100 * high:+.0f})"
    return Judged(f"{task}, exact match: {STAGE_CLAIMS[stages]}", "Table 4", Verdict(word, said))


LITTLE = ("base", "bell")
"""The stages for which the paper sees little difference."""
STAGE_TASKS = {
    "stages": "Four letters backwards (stories260K)",
    "words": "Four words backwards (SmolLM2)",
}
STAGE_CLAIMS = {
    ("bell", "bell"): "the bell at both stages helps",
    ("bell", "base"): "the bell in continual pretraining alone helps",
    LITTLE: "the bell in fine-tuning alone makes little difference",
}


def adapting_page() -> list[str]:
    """Sec. 5.3 at a small scale."""
    columns = ["start", "as causal LM", "opened, untrained", "steps", "base", "bell"]
    columns += ["bell - base", "speed-up"]
    rows, curves = [], []
    for name, title in TITLES.items():
        found = read_result(f"adapting-{name}")
        rows.append(_row(title, found) if found else [title, "not run yet", *[""] * 6])
        if found:
            curves += _curves(f"{title}: curves", f"adapting-{name}", found)
    return [
        *NOTE,
        Table("", columns, rows).markdown(),
        *curves,
        *_scratch(),
        *_stages(),
        *_answers(),
    ]


def _row(title: str, found: Mapping[str, Any]) -> list[str]:
    bell = found["variants"]["bell"]
    nll = [f"{found['variants'][name]['nll']:.3f}" for name in ("base", "bell")]
    before = [f"{found[key][0]:.3f}" for key in ("causal_before", "masked_before")]
    cells = [title, *before, f"{found['steps']}", *nll, show_gap(bell["comparison"], 3)]
    return [*cells, show_speed_up(bell["comparison"])]


def _word(compared: Mapping[str, Any]) -> str:
    """Over three seeds by their t-interval; one seed says nothing."""
    low, high = Estimate.over_seeds([-gap for gap in compared["gaps"]]).interval
    return outside_zero(low, high)


def _curves(alt: str, name: str, found: dict[str, Any]) -> list[str]:
    return picture(alt, name, lambda: curves_figure(found, with_time=False))


def _scratch() -> list[str]:
    """What pretraining was worth."""
    found = read_result("adapting-stories-scratch")
    if found is None:
        return []
    columns = ["variant", "final NLL", "difference"]
    rows = []
    for name, variant in found["variants"].items():
        gap = show_gap(variant["comparison"], 3) if "comparison" in variant else "reference"
        rows.append([name, f"{variant['nll']:.3f}", gap])
    lines = ["## Adapted or from scratch", ""]
    lines += ["The same network, tokenizer, text and steps, with and without pretrained weights"]
    lines += ["(one seed; errors are over validation rows).", ""]
    lines += [Table("", columns, rows).markdown()]
    return [*lines, *_curves("adapted or from scratch", "adapting-stories-scratch", found)]


def _stages() -> list[str]:
    """The two by two of its suite."""
    lines = ["## Fine-tuning, two by two (Table 4)", ""]
    for name, note in STAGES_NOTES.items():
        if found := read_result(f"adapting-{name}"):
            table = stage_table(found)
            lines += [*note, "", table.markdown(), *(f"- {line}" for line in table.notes), ""]
            draw = partial(stage_figure, found)
            lines += picture("NLL of held-out responses", f"adapting-{name}", draw)
        if found := read_result(f"adapting-{name}-benchmarks"):
            lines += [f"Table 4's command on these runs ({' '.join(ASKED)}):", ""]
            lines += [main_table(found).markdown()]
    return lines


def _answers() -> list[str]:
    """App. E: everything that was answered, as it came."""
    found = read_result("adapting-answers")
    if found is None:
        return []
    lines = ["## Answers side by side (App. E)", ""]
    lines += [f"SmolLM2, adapted as above, then {found['steps']} steps on {found['rows']} first"]
    lines += [f"answers of conversations ({found['epochs']:.1f} epochs), base and bell at both"]
    lines += ["stages. Sampled once with seed 1; the first line of each prompt is shown.", ""]
    for at, prompt in enumerate(found["prompts"]):
        lines += [f"**{prompt.splitlines()[0]}**", ""]
        for name, texts in found["answers"].items():
            text = texts[at].replace("```", "'''").strip()
            lines += [f"{name}:", "", "```text", text, "```", ""]
    return lines


NOTE = [
    "# From a causal LM to a masked one (Sec. 5.3)",
    "",
    "The paper adapts GPT-2 Large (0.7B) in 100K steps of 256 rows. Here two small causal LMs are",
    "adapted in at most a few hundred steps of few rows. *As causal LM* is the exact NLL of the",
    "original model on the same validation rows, with position 0 given; *opened, untrained* is the",
    "bound with full attention and masks, before any step. NLLs are per token of each model's own",
    "tokenizer, so only those of the same start can be compared. A speed-up without an interval is",
    "of one seed.",
    "",
    "## Continual pretraining",
    "",
]
STAGES_NOTES = {
    "stages": [
        "stories260K, adapted as above (base and bell, the same runs), then 500 steps of writing",
        "four letters backwards (`toy:reverse:4`), with either objective. In the paper the bell at",
        "the first stage matters most; the objective of fine-tuning makes little difference.",
    ],
    "words": [
        "SmolLM2, adapted as above, then 200 steps of writing four common words in reverse order.",
    ],
}
