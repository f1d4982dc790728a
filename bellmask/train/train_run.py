"""Config → parts → a training: the module that wires every folder together."""

from __future__ import annotations

import contextlib
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bellmask.config.config import RunConfig, is_free_option, load_config
from bellmask.data.inputs import describe_blocks, load_inputs
from bellmask.data.prepare import LoadedData, make_tokenizer
from bellmask.data.tokenizers import Tokenizer
from bellmask.diffusion.objectives import Objective
from bellmask.evaluate.likelihood import unigram_cross_entropy
from bellmask.model.transformer import count_parameters, describe_size
from bellmask.storage.build import (
    build_framework,
    build_model,
    build_objective,
    build_rules,
    describe_learning,
    learning_cautions,
)
from bellmask.storage.checkpoint import CheckpointStore, Saver, load_tensors, read_state
from bellmask.storage.run_folder import (
    MetricsFile,
    RunState,
    drop_files_after,
    is_free,
    read_description,
    resume_command,
    write_description,
)
from bellmask.train.metrics import Display, TrackedRun, Window, find_trackers, open_trackers
from bellmask.train.optim import Ema, Optimizer
from bellmask.train.parallel import parallelize, plan_parallel
from bellmask.train.periodic import Periodic
from bellmask.train.planning import StepPlanner, build_recipe
from bellmask.train.setup import Start, open_start
from bellmask.train.step import TrainStep
from bellmask.train.trainer import Trainer, TrainState
from bellmask.utils.distributed import World, fork_rng, open_world
from bellmask.utils.errors import SavingError, TrainingError, UserError, look_up
from bellmask.utils.files import is_number
from bellmask.utils.progress import progress_bar


@dataclass(frozen=True)
class TrainResult:
    """How a training ended."""

    folder: Path
    step: int
    nll: float | None
    """Validation NLL at the last step; None when stopped before it."""
    stopped_by: int | None
    """The signal that ended it early."""


def train_run(
    config: RunConfig, out: str | Path, *, resume: str = "no", is_quiet: bool = False
) -> TrainResult:
    """Train a run into the folder ``out``.

    ``resume``: "no" refuses a folder that already holds a run, "auto" continues it (or starts it),
    "yes" insists that there is one to continue.
    """
    config = config.check()
    objective = build_objective(config)
    find_trackers(config.log.trackers)
    folder = Path(out)
    with open_world(config.train.device) as world, fork_rng(world.device):
        size = config.train.microbatch_size
        unit = world.size * (size or 1)
        if config.train.batch_size % unit:
            below = config.train.batch_size // unit * unit
            near = " or ".join(str(n) for n in (below, below + unit) if n)
            raise UserError(
                f"train.batch_size={config.train.batch_size} must be a multiple of {world.size} "
                "processes" + (f" times train.microbatch_size={size}" if size else "") + f": {near}"
            )
        start = open_start(config, folder)
        checkpoint = find_start(start.config, folder, resume, world)
        world.barrier()  # all have looked at the folder before anything is written into it
        tokenizer, data = _load_data(start, world, is_quiet)
        if checkpoint is not None:
            start = replace(start, fill=None)  # its weights are in the checkpoint
        run = _Training(start, folder, world, tokenizer, objective, data, is_quiet)
        return run.fit(checkpoint)


def _load_data(start: Start, world: World, is_quiet: bool) -> tuple[Tokenizer, LoadedData]:
    """Tokenizer and blocks; the main process prepares them, the others find the cache filled."""

    def prepare() -> tuple[Tokenizer, LoadedData]:
        tokenizer = start.tokenizer or make_tokenizer(start.config.data)
        with progress_bar("preparing", "documents", is_quiet=is_quiet) as progress:
            return tokenizer, load_inputs(start.config, tokenizer, start.backbone, progress)

    if world.size > 1:
        world.on_main(prepare)
        is_quiet = True
    return prepare()


class _Training:
    """The parts of one training, wired together."""

    def __init__(
        self,
        start: Start,
        folder: Path,
        world: World,
        tokenizer: Tokenizer,
        objective: Objective,
        data: LoadedData,
        is_quiet: bool,
    ) -> None:
        config = start.config
        self.config, self.folder, self.world, self.tokenizer = config, folder, world, tokenizer
        self.start, self.backbone = start, start.backbone_for(tokenizer)
        self.train_blocks, self.counts = data.train, data.counts
        limit = config.validation.blocks or len(data.valid)
        self.valid_blocks = data.valid.slice(0, min(limit, len(data.valid)))
        self.rules = build_rules(config.data, tokenizer)
        self.framework = build_framework(config)
        self.placing = plan_parallel(config, world)
        model = build_model(config, tokenizer.num_tokens, self.backbone, start.fill)
        model = parallelize(model, self.placing, config, world)
        ema = Ema(model, config.optim.ema) if config.optim.ema else None
        self.state = TrainState(model, Optimizer(model, config.optim), ema)
        planner = StepPlanner(
            data.train,
            objective,
            config.train,
            world,
            recipe=build_recipe(config),
            rules=self.rules,
            sizes=data.sizes,
            weights=data.weights,
        )
        self.step = TrainStep(
            model,
            planner,
            self.framework,
            mask_id=tokenizer.mask_id,
            clip=config.optim.clip,
            precision=self.placing.precision,
        )
        self.run_id = uuid.uuid4().hex[:12]
        in_background = self.placing.in_background
        savers = world.aside() if in_background else world
        command = resume_command(folder, world.size, world.machine_size)
        self.marks = RunState(folder, config.train.steps, command)
        self.store = CheckpointStore(
            folder / "checkpoints", config.checkpoint, savers, self.marks.running
        )
        self.saver = Saver(self.store, world.device, in_background=in_background)
        self.metrics = MetricsFile(folder / "metrics.jsonl")
        self.skipped = MetricsFile(folder / "skipped.jsonl")
        self.display = Display(config.train.steps, is_quiet=is_quiet or not world.is_main)

    def fit(self, checkpoint: Path | None) -> TrainResult:
        """Start or resume, train, and say how it ended."""
        self.world.on_main(lambda: self._open_folder(checkpoint))
        if checkpoint is not None:
            load_tensors(checkpoint, self.state.tensors(), self.world, is_intact=True)
            self.state.restore(read_state(checkpoint))
        self._introduce(checkpoint)
        trackers = []
        if self.world.is_main:
            tracked = TrackedRun(self.folder, self.run_id, self.state.step, self.config)
            trackers = open_trackers(tracked)
        periodic = Periodic(
            self.config,
            self.folder,
            self.world,
            self.tokenizer,
            self.framework,
            self.rules,
            self.valid_blocks,
            self.placing,
            self.saver,
            self.run_id,
        )
        periodic.trainer = trainer = Trainer(
            self.state,
            self.step,
            self.world,
            num_steps=self.config.train.steps,
            optim=self.config.optim,
            log_every=self.config.log.every,
            skip_limit=self.config.train.skip_limit,
            actions=periodic.actions(),
            saver=self.saver,
            metrics=self.metrics,
            skipped=self.skipped,
            trackers=trackers,
            display=self.display,
        )
        try:
            with self.display:
                return self._run(trainer)
        finally:
            for tracker in trackers:
                tracker.close()

    def _run(self, trainer: Trainer) -> TrainResult:
        """Train, and leave in the folder how it ended."""
        state = self.state
        # on_main: whoever left earlier would have torchrun end the one who writes the mark
        self.world.on_main(lambda: self.marks.running(state.step))
        try:
            stopped_by = trainer.fit()
        except TrainingError as error:
            reason = str(error)
            with contextlib.suppress(SavingError):
                self.saver.wait()
            self._mark_end(lambda: self.marks.failed(state.step, reason))
            raise
        if stopped_by is None:
            self._mark_end(self.marks.done)
        else:
            self._mark_end(lambda: self.marks.stopped(state.step, stopped_by))
        return TrainResult(self.folder, state.step, state.nll, stopped_by)

    def _mark_end(self, mark: Callable[[], None]) -> None:
        """Everything is saved: a mark that cannot be written changes nothing about that."""

        def attempt() -> None:
            try:
                mark()
            except OSError as error:
                self.display.say(f"warning: {error}")

        self.world.on_main(attempt)

    def _open_folder(self, checkpoint: Path | None) -> None:
        """Write what describes the run, and undo what happened after the checkpoint."""
        before = {} if checkpoint is None else read_description(self.folder)
        if checkpoint is not None:
            check_same_run(before, self._description(), self.config, self.folder)
        self.run_id = before.get("id", self.run_id)
        description = {**self._description(), "id": self.run_id}
        description["unigram_nll"] = before.get("unigram_nll") or self._unigram()
        write_description(
            self.folder, self.config, self.tokenizer, description, before, self.backbone
        )
        step = 0 if checkpoint is None else read_state(checkpoint)["step"]
        self.store.clean()
        self.store.set_aside_after(step)  # before its lines go: a kill here must not part them
        self.metrics.cut_back(step)
        if self.skipped.path.exists():
            self.skipped.cut_back(step)
        drop_files_after(self.folder, step)

    def _description(self) -> dict[str, Any]:
        return {
            "device": str(self.world.device),
            "processes": self.world.size,
            "threads": torch.get_num_threads(),
            **self.placing.describe(),
            "parameters": count_parameters(self.state.model),
            "num_tokens": self.tokenizer.num_tokens,
            "mask_id": self.tokenizer.mask_id,
            "tokenizer_fingerprint": self.tokenizer.fingerprint,
            **describe_blocks(self.config, self.train_blocks, self.valid_blocks, self.counts),
        }

    def _unigram(self) -> float:
        """Cross-entropy of training frequencies: where a model without context would be."""
        num_tokens = self.tokenizer.num_tokens
        return unigram_cross_entropy(self.train_blocks, self.valid_blocks, num_tokens)

    def _introduce(self, checkpoint: Path | None) -> None:
        config, state = self.config, self.state
        where = f"resuming from step {state.step}" if checkpoint else "starting"
        if self.marks.has_failed:
            self.display.say(f"note: {self.folder} is marked FAILED, and is tried again")
        self.display.say(
            f"{self.folder}: {where}; {describe_size(state.model)}, "
            f"{len(self.train_blocks):,} blocks of {self.train_blocks.block_length}, "
            f"{describe_learning(config)}, "
            f"{self.world.size} process{'es' * (self.world.size > 1)} on {self.world.device.type}"
        )
        choices = self.placing.describe().items()
        self.display.say("; ".join(f"{name} {value}" for name, value in choices))
        if self.counts:
            told = ", ".join(f"{name} {count:,}" for name, count in self.counts.items())
            self.display.say(f"examples: {told}; {len(self.valid_blocks):,} for validation")
        if state.step == config.train.steps:
            self.display.say("all steps are done already; for more give --train.steps")
        for caution in [*self.start.notes, *self.placing.notes, *learning_cautions(config)]:
            self.display.say(f"note: {caution}")


# Where a run starts: anew or from a checkpoint, and which options may differ then.


def _may_change(option: str, config: RunConfig) -> bool:
    """Some options affect the result only beside others."""
    if option == "train.microbatch_size":
        return config.model.dropout == 0
    if option == "train.steps":
        return config.optim.curve == "constant"
    return is_free_option(option)


def check_same_run(
    before: dict[str, Any], now: dict[str, Any], config: RunConfig, folder: Path
) -> None:
    """Refuse to go on where text, tokenizer, precision or dropout's noise would be others.

    ``before`` is the run's run.json, ``now`` what it would be.
    """
    watched = {
        "tokenizer_fingerprint": "the tokenizer",
        "train_fingerprint": "the training text",
        "valid_fingerprint": "the validation text",
        "precision": "the precision of matrix products",
    }
    if config.model.dropout and config.train.microbatch_size is None:
        watched["processes"] = (
            "the number of processes, on which dropout's noise depends where no "
            "train.microbatch_size was given,"
        )
    for key, what in watched.items():
        if before.get(key) != now[key]:
            values = "" if "fingerprint" in key else f" (was {before.get(key)}, now {now[key]})"
            raise UserError(
                f"{what} has changed since {folder} was started{values}; "
                "restore it, or start another run with another --out"
            )


def check_resumable(path: Path, config: RunConfig) -> None:
    """Refuse, naming them, options that differ from the run's and would change its course."""
    before, now = load_config(path).resolved().flat(), config.resolved().flat()
    changed = [o for o in now if now[o] != before[o] and not _may_change(o, config)]
    if changed:
        lines = [f"  {o}: was {before[o]}, now {now[o]}" for o in changed]
        raise UserError(
            "these options cannot change when a run is resumed:\n"
            + "\n".join(lines)
            + "\nresume without them, or start another run with another --out"
        )


def find_start(config: RunConfig, folder: Path, resume: str, world: World) -> Path | None:
    """The checkpoint to start from; refuses a folder that is in use or cannot be continued."""
    modes = {"no": False, "auto": True, "yes": True}
    may_resume = look_up("resume mode", resume, modes)
    has_run = world.agree((folder / "config.json").exists())
    if has_run and not may_resume:
        raise UserError(
            f"{folder} already holds a run; continue it with --resume auto, or choose another --out"
        )
    if not has_run and not is_free(folder):
        raise UserError(f"{folder} exists and is not a run of bellmask; choose another --out")
    if not has_run and resume == "yes":
        raise UserError(f"{folder} holds no run to resume; use --resume auto to start one")
    if not has_run:
        return None
    check_resumable(folder / "config.json", config)
    store = CheckpointStore(folder / "checkpoints", config.checkpoint, world)
    found, complaints = store.newest_intact()
    if complaints and config.checkpoint.when_damaged == "stop":
        advice = "with --checkpoint.when-damaged older the newest intact one would be used"
        raise UserError("\n".join([*complaints, advice]))
    if complaints and found is None:
        advice = "no intact checkpoint is left; move the folder away or choose another --out"
        raise UserError("\n".join([*complaints, advice]))
    for complaint in complaints if world.is_main else []:
        print(f"warning: {complaint}; using an older one", file=sys.stderr)
    if found is not None:
        _check_state(read_state(found), found, folder, config)
    return found


def _check_state(state: dict[str, Any], found: Path, folder: Path, config: RunConfig) -> None:
    """Refuse a whole checkpoint that is not this run's, before anything is changed."""
    if state["step"] > config.train.steps:
        raise UserError(
            f"{folder} is at step {state['step']}, beyond train.steps="
            f"{config.train.steps}; give at least that many to resume it"
        )
    own = read_description(folder).get("id")
    if state.get("run", own) != own:
        raise UserError(f"{found} is of another run than {folder}; remove it, and an older is used")
    window = state.get("window")
    numbers = [state.get("tokens"), state.get("seconds"), state.get("skipped", 0)]
    if (
        not isinstance(window, dict)
        or not set(window) <= set(Window.__dataclass_fields__)
        or not all(map(is_number, [*window.values(), *numbers]))
    ):
        raise UserError(
            f"{found}/state.json does not say where the run was; remove that checkpoint"
        )
