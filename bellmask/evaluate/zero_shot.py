"""Zero-shot perplexity: a run on texts it was not trained on (paper Table 7, App. C.3).

The protocol of mdlm and duo: the set's published detokeniser, the run's own tokenizer and block
length, documents packed without overlap, every token of a block scored. What differs is the
estimate: exact mask counts instead of times, several draws, errors (docs/zero-shot.md).
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bellmask import __version__
from bellmask.config.options import DataOptions
from bellmask.data.blocks import Blocks
from bellmask.data.corpora import CORPORA, IMPORTED, is_toy
from bellmask.data.prepare import OnProgress, locate, parse_mixture, prepare
from bellmask.evaluate.likelihood import evaluate_run
from bellmask.evaluate.result import Likelihood, perplexity_of
from bellmask.storage.loading import Loaded
from bellmask.utils.errors import UserError

EosPolicy = Literal["mdlm", "duo"]

TITLES = {
    "ptb": "PTB",
    "wikitext2": "WikiText-2",
    "wikitext103": "WikiText-103",
    "lm1b": "LM1B",
    "lambada": "LAMBADA",
    "ag_news": "AG News",
    "pubmed": "PubMed",
    "arxiv": "arXiv",
}


@dataclass(frozen=True)
class TextSet:
    """One set of the table, and the local files to read it from where they are given."""

    name: str
    files: str | None = None
    column: str | None = None

    @property
    def title(self) -> str:
        """As the table's column is called."""
        return TITLES.get(self.name, CORPORA[self.name].title)


def set_options(run: Loaded, text: TextSet, eos: EosPolicy) -> DataOptions:
    """How a run reads a set: the set's own rules for text, the run's for tokens and rows.

    mdlm ends every document of these sets with EOS, duo none.
    """
    return replace(
        run.config.data,
        train=text.name,
        from_files=text.files,
        valid=None,
        mixture=(),
        documents="auto",
        column=text.column,
        detokenizer="auto",
        packing="packed",
        remainder="drop",
        wrap=run.is_wrapped,
        insert_eos=eos == "mdlm",
    )


def check_run(run: Loaded, eos: EosPolicy) -> None:
    """Refuse runs that cannot read these sets as they were trained to read."""
    if is_toy(run.config.data.train):
        raise UserError(f"{run.folder} was trained on {run.config.data.train}: it reads no text")
    if eos == "duo" and run.config.data.document_attention:
        raise UserError(
            f"{run.folder} keeps attention inside documents, which are told apart by EOS: "
            "--eos duo leaves that out; use --eos mdlm"
        )


def own_family(run: Loaded, text: TextSet) -> bool | None:
    """True when the run was trained on the set's own training text: not zero-shot.

    None where nobody knows, of an imported run.
    """
    data = run.config.data
    if data.train == IMPORTED:
        return None
    trained = [data.train, *parse_mixture(data.mixture)]
    return text.name.rstrip("0123456789") in [name.rstrip("0123456789") for name in trained]


def find_missing(runs: Sequence[Loaded], sets: Sequence[TextSet], eos: EosPolicy) -> dict[str, str]:
    """Sets that cannot be had, and why; nothing is read but what tells a file from another."""
    return _try_each(sets, lambda text: [_locate(run, text, eos) for run in runs])[1]


def load_sets(
    runs: Sequence[Loaded],
    sets: Sequence[TextSet],
    eos: EosPolicy,
    on_progress: OnProgress | None = None,
) -> tuple[dict[str, list[Blocks]], dict[str, str]]:
    """(blocks of each set, one for each run; sets that cannot be read, and why)."""

    def load(text: TextSet) -> list[Blocks]:
        wanted = [set_options(run, text, eos) for run in runs]
        return [prepare(o, run.tokenizer, "valid", on_progress) for o, run in zip(wanted, runs)]

    return _try_each(sets, load)


def _locate(run: Loaded, text: TextSet, eos: EosPolicy) -> Path:
    return locate(set_options(run, text, eos), run.tokenizer, "valid")[0]


def _try_each(
    sets: Sequence[TextSet], work: Callable[[TextSet], Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    found, missing = {}, {}
    for text in sets:
        try:
            found[text.name] = work(text)
        except UserError as error:
            missing[text.name] = str(error).partition(" Offline?")[0]
    return found, missing


def refuse_missing(missing: Mapping[str, str], sets: Sequence[TextSet], skip_missing: bool) -> None:
    """A file that was given must be readable; a set that was not may be left out if so wished."""
    given = {text.name for text in sets if text.files}
    bad = {n: why for n, why in missing.items() if n in given or not skip_missing}
    if not bad:
        if len(missing) == len(sets):
            raise UserError("none of the sets is here: " + "; ".join(missing.values()))
        return
    lines = [f"{len(bad)} of {len(sets)} sets cannot be had; nothing was measured:"]
    lines += [f"  {name}: {why}" for name, why in bad.items()]
    absent = [name for name in bad if name not in given]
    if absent:
        files = " ".join(f"--from {name}=PATH" for name in absent)
        lines += [f"give local files, read by the set's own rules: {files}"]
        lines += ["or leave them out with --skip-missing, or name others with --corpora"]
    raise UserError("\n".join(lines))


def measure(
    run: Loaded,
    blocks: Blocks,
    *,
    draws: int,
    seeds: Sequence[int],
    batch_size: int = 64,
    keep: Sequence[Path] = (),
    on_batch: Callable[[int], None] | None = None,
) -> list[Likelihood]:
    """One evaluation per seed; an exact NLL has no masks and needs a single one.

    ``keep`` are files for the seeds' evaluations: one that is there is not made again.
    ``on_batch`` is told the blocks done, over all seeds.
    """
    results = []
    for number, seed in enumerate(seeds[:1] if run.framework.is_exact else seeds):
        path = keep[number] if keep else None
        if path is not None and (kept := _kept(path)):
            results.append(kept)
            continue

        def advance(done: int, before: int = number * len(blocks)) -> None:
            if on_batch:
                on_batch(before + done)

        result = evaluate_run(
            run, blocks, draws=draws, seed=seed, batch_size=batch_size, on_batch=advance
        )
        if path is not None:
            result.save(path)
        results.append(result)
    return results


def _kept(path: Path) -> Likelihood | None:
    """A kept evaluation; None where there is none, or a damaged one."""
    try:
        return Likelihood.load(path)
    except (OSError, ValueError):
        return None


def result_key(run: Loaded, weights: str, blocks: Blocks, draws: int) -> str:
    """What decides a measurement besides its seed: the hash of the weights, blocks and draws."""
    data, schedule = run.config.data, run.config.schedule
    parts = [__version__, run.config.framework.name, weights, blocks.fingerprint]
    parts += [str(schedule), str(data.document_attention), data.pads]
    parts += ["exact"] if run.framework.is_exact else [str(draws)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def join_seeds(results: Sequence[Likelihood], blocks: Blocks, seeds: Sequence[int]) -> Likelihood:
    """The draws of all seeds as one evaluation: its error has the masks of all of them.

    Exact and estimated values of the same blocks stay paired.
    """
    fingerprint = f"{blocks.fingerprint}/{'+'.join(map(str, seeds))}"
    return replace(
        results[0],
        count_BR=np.concatenate([result.count_BR for result in results], axis=1),
        ce_BR=np.concatenate([result.ce_BR for result in results], axis=1),
        fingerprint=fingerprint,
    )


def summarise(results: Sequence[Likelihood], joined: Likelihood) -> dict[str, Any]:
    """Perplexity with its two errors: over documents and masks, and over evaluation seeds.

    The standard error is carried from nats by the delta method: d ppl = ppl d nll.
    """
    each = [result.perplexity for result in results]
    return {
        **joined.summary(),
        "num_draws": results[0].num_draws,
        "num_seeds": len(results),
        "perplexity_se": joined.perplexity * joined.standard_error,
        "seed_perplexities": each,
        "seed_mean": statistics.fmean(each),
        "seed_deviation": statistics.stdev(each) if len(each) > 1 else math.nan,
    }


def compare(joined: Likelihood, first: Likelihood) -> dict[str, float] | None:
    """Nats per token more than the first run, paired; None on other tokens or blocks."""
    if not joined.is_paired_with(first):
        return None
    difference, error = joined.difference(first)
    return {"difference": difference, "se": error, "perplexity_ratio": perplexity_of(difference)}


def collect(
    runs: Mapping[str, Loaded],
    sets: Sequence[TextSet],
    blocks: Mapping[str, Sequence[Blocks]],
    missing: Mapping[str, str],
    results: Mapping[tuple[str, str], Sequence[Likelihood]],
    seeds: Sequence[int],
) -> dict[str, Any]:
    """All numbers of the table, ready for JSON; results go by (set, run)."""
    told = []
    for text in sets:
        here = zip(runs.items(), blocks.get(text.name, ()))
        joined = {n: join_seeds(results[text.name, n], own, seeds) for (n, _), own in here}
        names = list(joined)
        told.append(
            {
                "name": text.name,
                "title": text.title,
                "files": text.files,
                "missing": missing.get(text.name),
                "results": {
                    name: {
                        **summarise(results[text.name, name], joined[name]),
                        "is_own_text": own_family(runs[name], text),
                        "data_fingerprint": own.fingerprint,
                    }
                    for name, own in zip(names, blocks.get(text.name, ()))
                },
                "differences": {n: compare(joined[n], joined[names[0]]) for n in names[1:]},
            }
        )
    kinds = [
        {"name": name, "run": run.folder.name, "step": run.step, "wraps_rows": run.is_wrapped}
        for name, run in runs.items()
    ]
    return {"runs": kinds, "sets": told}
