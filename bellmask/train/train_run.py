"""Config → parts → a training: the module that wires every folder together."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from bellmask.config.config import RunConfig, is_free_option
from bellmask.data.prepare import describe_blocks
from bellmask.diffusion.laws import TimeLaw
from bellmask.diffusion.objectives import Objective
from bellmask.diffusion.progress import NUM_ROWS, AdaptiveLaw
from bellmask.evaluate.likelihood import (
    BlockScorer,
    describe_text,
    evaluate,
    nll_by_rate,
    own_text,
    unigram_cross_entropy,
)
from bellmask.model.transformer import count_parameters, describe_size
from bellmask.storage import build, run_folder
from bellmask.storage.checkpoint import FORMAT, CheckpointStore, Saver, load_tensors, read_state
from bellmask.train import planning
from bellmask.train.metrics import TRACKERS, Display, Window, find_trackers
from bellmask.train.parallel import ParallelPlan, is_sharded, parallelize, plan_parallel
from bellmask.train.planning import StepPlanner
from bellmask.train.setup import Start, open_start
from bellmask.train.step import Pass, TrainStep
from bellmask.train.trainer import Action, Trainer, TrainState
from bellmask.utils.console import announced, plural
from bellmask.utils.distributed import (
    World,
    autocast,
    deterministic,
    find_device,
    fork_rng,
    open_world,
)
from bellmask.utils.errors import SavingError, TrainingError, UserError, look_up
from bellmask.utils.files import is_number, write_text

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainResult:
    """How a training ended."""

    folder: Path
    step: int
    nll: float | None
    """Validation NLL at the last step; None when stopped before it."""
    stopped_by: int | None
    """The signal that ended it early."""
    validated_on: str = ""
    """``512 blocks of the validation text``."""


def train_run(
    config: RunConfig,
    out: str | Path,
    *,
    resume: str = "no",
    law: TimeLaw | None = None,
    objective: Objective | None = None,
    is_quiet: bool = False,
) -> TrainResult:
    """Train a run into the folder ``out``.

    ``resume``: "no" refuses a folder that already holds a run, "auto" continues it (or starts it),
    "yes" insists that there is one to continue. ``law`` or ``objective``, of your own, take the
    place of the one that the options name; run.json says so, and resuming needs the same one.
    """
    config = config.check()
    given = own_objective(config, law, objective)  # rejected before anything is written
    find_trackers(config.log.trackers)
    folder = Path(out)
    with (
        deterministic(config.train.deterministic),
        open_world(config.train.device) as world,
        fork_rng(world.device),
    ):
        planning.split_batch(config.train, world.size)
        start = open_start(config, folder)
        checkpoint = find_start(start.config, folder, resume, world)
        world.barrier()  # all have looked at the folder before anything is written into it
        if world.size > 1:  # the main process prepares the text, the others find the cache filled
            world.on_main(lambda: start.load_data(is_quiet=is_quiet))
        if checkpoint is not None:
            start = replace(start, fill=None)  # its weights are in the checkpoint
        before = {} if checkpoint is None else run_folder.read_description(folder)
        return _Training(start, folder, world, is_quiet, given, before).fit(checkpoint)


class _Training:
    """The parts of one training wired together, and what it does now and then."""

    def __init__(
        self,
        start: Start,
        folder: Path,
        world: World,
        is_quiet: bool,
        own: Objective | None,
        before: dict[str, Any],
    ) -> None:
        """``before``: run.json of a run that is resumed."""
        self.config = config = start.config
        self.objective, self.is_own = own or build.build_objective(config), own is not None
        law = getattr(self.objective, "law", None)
        self.law = law if isinstance(law, AdaptiveLaw) else None
        if self.law:
            self.law.load_state({})  # one object may serve several runs
        self.start, self.folder, self.world = start, folder, world
        self.tokenizer, data = start.load_data(is_quiet=is_quiet or world.size > 1)
        self.data = replace(data, valid=data.valid.spread(config.validation.blocks))
        self.framework = build.build_framework(config)
        self.rules = build.build_rules(config.data, self.tokenizer)
        self.run_id = uuid.uuid4().hex[:12]
        command = run_folder.resume_command(folder, world.size, world.machine_size)
        self.marks = run_folder.RunState(folder, config.train.steps, command)
        self.display = Display(config.train.steps, is_quiet=is_quiet or not world.is_main)
        self.plan, is_guess = self._fit_memory(before)

        with announced("building the network", is_quiet=is_quiet):  # and reading its first weights
            model = parallelize(start.build_model(self.tokenizer), self.plan, world.device)
        self.state = TrainState.begin(model, config.optim)
        if is_guess:
            self.plan = replace(self.plan, microbatch=self._try_microbatches())
        step = TrainStep(
            model,
            self._planner(self.plan.microbatch),
            self.framework,
            mask_id=self.tokenizer.mask_id,
            clip=config.optim.clip,
            precision=self.plan.precision,
        )
        savers = world.aside() if self.plan.in_background else world
        self.store = CheckpointStore(
            folder / "checkpoints", config.checkpoint, savers, self.marks.running
        )
        saver = Saver(self.store, world.device, in_background=self.plan.in_background)
        # validation before checkpoint, so that a checkpoint knows its NLL
        actions = [Action(f"{self.law.every} steps", self._probe)] if self.law else []
        actions += [
            Action(config.validation.every, self._validate),
            Action(config.validation.samples_every, self._write_samples),
            Action(config.checkpoint.every, self._save, config.checkpoint.keep_steps, is_save=True),
        ]
        self.trainer = Trainer(config, folder, self.state, step, saver, self.display, actions)

    def _fit_memory(self, before: dict[str, Any]) -> tuple[ParallelPlan, bool]:
        """The choices for these devices, and whether their microbatch must be tried."""
        config, world, layout = self.config, self.world, None
        sizes = planning.microbatch_sizes(config.train, world.size)
        microbatch = planning.split_batch(config.train, world.size)
        is_guess = planning.is_automatic(config.train, world.device)
        is_tried = is_guess
        if is_guess and before and (recorded := microbatch_before(before, config)) in sizes:
            microbatch, is_guess = recorded, False
            is_tried = not config.model.dropout  # the device may be another, and smaller
        may_shard = config.scale.sharding == "auto" and world.size > 1
        if is_guess or (may_shard and world.device.type != "cpu"):
            from bellmask.train.memory import estimate_here  # traces: not needed on a CPU

            try:
                with announced("estimating memory", is_quiet=self.display.console.quiet):
                    found = estimate_here(self.start, self.tokenizer, world)
                layout, microbatch = found.layout, found.microbatch if is_guess else microbatch
            except UserError as error:  # a network that cannot be traced: the trial decides
                logger.warning("no estimate of memory: %s", error)
        plan = plan_parallel(config, world, layout, microbatch)
        # where weights are sharded, a process without memory would keep the others waiting
        return plan, is_tried and not plan.layout.is_sharded

    def _planner(self, microbatch: int) -> StepPlanner:
        data, given = self.data, (self.objective, self.config, self.world)
        more: dict[str, Any] = {"rules": self.rules, "microbatch": microbatch}
        return StepPlanner(data.train, *given, mixture=(data.sizes, data.weights), **more)

    def _try_microbatches(self) -> int:
        """The largest one, from the estimate down, that a first step has the memory for."""
        from bellmask.train.memory import first_that_runs

        model, device, mask_id = self.state.model, self.world.device, self.tokenizer.mask_id
        self.state.tensors()  # makes those of the optimizer

        def attempt(size: int) -> None:
            """Whole rows of full batches, all masked: no step needs more."""
            planner, first = self._planner(size), self.config.train.batch_warmup
            planner.sorts_by_length = False  # which would cut them
            step = max(range(first, first + TRIED_STEPS), key=planner.length)
            batch = max(planner(step).microbatches, key=lambda one: one.x0_BL.numel())
            batch = replace(batch, t_B=torch.ones_like(batch.t_B), context_B=None)
            try:
                for _ in range(2):  # the second one beside gradients
                    with autocast(device, self.plan.precision):
                        loss = Pass.of(batch, self.framework, mask_id).loss(model, device)
                    loss.backward()
            finally:
                model.zero_grad()
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(device)

        sizes = planning.microbatch_sizes(self.config.train, self.world.size)
        return first_that_runs(sizes[sizes.index(self.plan.microbatch) :], attempt, self.world)

    def fit(self, checkpoint: Path | None) -> TrainResult:
        """Start or resume, train, and leave in the folder how it ended."""
        state, world = self.state, self.world
        world.on_main(lambda: self._open_folder(checkpoint))
        if checkpoint is not None:
            load_tensors(checkpoint, state.tensors(), world, is_intact=True)
            state.restore(read_state(checkpoint))
        if self.law:
            self.law.load_state(state.law)
        self._introduce(checkpoint)
        self.trainer.full_speed = self._full_speed()
        with contextlib.ExitStack() as stack:
            for name in self.config.log.trackers if world.is_main else ():
                tracker = TRACKERS[name](self.config, self.folder, self.run_id, state.step)
                self.trainer.trackers.append(stack.enter_context(tracker))
            stack.enter_context(self.display.progress)
            # on_main: whoever left earlier would have torchrun end the one who writes the mark
            world.on_main(lambda: self.marks.running(state.step))
            try:
                stopped_by = self.trainer.fit()
            except TrainingError as error:
                reason = str(error)
                with contextlib.suppress(SavingError):
                    self.trainer.saver.wait()
                self._mark_end(lambda: self.marks.failed(state.step, reason))
                raise
            if stopped_by is None:
                self._mark_end(self.marks.done)
            else:
                self._mark_end(lambda: self.marks.stopped(state.step, stopped_by))
        return TrainResult(self.folder, state.step, state.nll, stopped_by, self._validated_on)

    def _full_speed(self) -> float | None:
        """Tokens per second at the data sheet's peak of all GPUs, if there is one for them.

        Not where prompts and pads take time, but do not count as tokens.
        """
        world, dtype, train = self.world, self.plan.precision, self.data.train
        if world.device.type != "cuda" or not world.is_main:
            return None
        if train.is_padded or train.starts is not None:
            return None
        with contextlib.suppress(UserError):  # a causal LM that cannot be traced
            if found := find_device(torch.cuda.get_device_name(world.device)):
                from bellmask.train.memory import flops_per_token  # traces: not needed on a CPU

                peak = found.peak(str(dtype).removeprefix("torch.")) * world.size
                return peak / flops_per_token(self.start, self.tokenizer, dtype)
        return None

    def _mark_end(self, mark: Callable[[], None]) -> None:
        """Everything is saved, so a mark that cannot be written is only a warning."""

        def attempt() -> None:
            try:
                mark()
            except OSError as error:
                self.display.say(f"warning: {error}")

        self.world.on_main(attempt)

    def _open_folder(self, checkpoint: Path | None) -> None:
        """Write what describes the run, and undo what happened after the checkpoint."""
        before = {} if checkpoint is None else run_folder.read_description(self.folder)
        about = self._description()
        if checkpoint is not None:
            check_same_run(before, about, self.config, self.folder)
        self.run_id = about["id"] = before.get("id", self.run_id)
        # cross-entropy of training frequencies: where a model without context would be
        about["unigram_nll"] = before.get("unigram_nll") or unigram_cross_entropy(
            self.data.train, self.data.valid, self.tokenizer.num_tokens
        )
        backbone = self.start.backbone_for(self.tokenizer)
        run_folder.write_description(
            self.folder, self.config, self.tokenizer, about, before, backbone
        )
        step = 0 if checkpoint is None else read_state(checkpoint)["step"]
        self.store.clean()
        self.store.set_aside_after(step)  # before its lines go: a kill here must not part them
        self.trainer.metrics.cut_back(step)
        if self.trainer.skipped.path.exists():
            self.trainer.skipped.cut_back(step)
        run_folder.drop_files_after(self.folder, step)

    def _description(self) -> dict[str, Any]:
        return {
            "device": str(self.world.device),
            "processes": self.world.size,
            "threads": torch.get_num_threads(),
            **self.plan.describe(),
            "parameters": count_parameters(self.state.model),
            **(describe_objective(self.objective) if self.is_own else {}),
            **run_folder.describe_tokenizer(self.tokenizer),
            **describe_blocks(self.config, self.data),
        }

    def _introduce(self, checkpoint: Path | None) -> None:
        config, state, data, say = self.config, self.state, self.data, self.display.say
        where = f"resuming from step {state.step}" if checkpoint else "starting"
        if self.marks.has_failed:
            say(f"note: {self.folder} is marked FAILED; trying again")
        say(
            f"{self.folder}: {where}; {describe_size(state.model)}, "
            f"{plural(len(data.train), 'block')} of {data.train.block_length} tokens, "
            f"{self.objective if self.is_own else build.describe_learning(config)}, "
            f"{self.world.size} process{'es' * (self.world.size > 1)} on {self.world.device.type}"
        )
        say("; ".join(f"{name} {value}" for name, value in self.plan.describe().items()))
        if data.counts:
            told = ", ".join(f"{name} {count:,}" for name, count in data.counts.items())
            say(f"examples: {told}; {len(data.valid):,} for validation")
        if self.trainer.is_done:
            say("all steps are done; to continue, increase --train.steps")
        notes = [*self.start.notes, *self.plan.notes, *build.learning_cautions(config)]
        epochs = config.train.steps * config.train.batch_size / len(data.train)
        if epochs > 1 and not data.sizes:  # in a mixture each corpus has its own
            notes.append(f"the run reads its {len(data.train):,} rows {epochs:,.1f} times")
        for note in notes:
            say(f"note: {note}")

    @property
    def _validated_on(self) -> str:
        return describe_text(len(self.data.valid), f"the {own_text(self.config.data)}")

    def _probe(self) -> None:
        """Let the law see what was learned since the last probe. It counts as training time.

        The next step may be planned already, in a thread: the new law begins with the one after.
        """
        state, law, started = self.state, self.law, time.perf_counter()
        assert law is not None
        if state.step % law.every:
            return  # the last step
        with state.evaluating(is_averaged=False) as model:
            scorer = BlockScorer(model, self.data.train.spread(NUM_ROWS), **self._how_to_score())
            nll_KB = nll_by_rate(scorer, in_step=is_sharded(model))
        law.update(nll_KB, state.step + 1)
        state.law = law.state()
        state.seconds += time.perf_counter() - started
        found = {"mean": law.mean, "width": law.deviation, "parameters": law.parameters}
        self.trainer.record("law", found)

    def _how_to_score(self) -> dict[str, Any]:
        return {
            "mask_id": self.tokenizer.mask_id,
            "framework": self.framework,
            "world": self.world,
            "precision": self.plan.precision,
            "rules": self.rules,
        }

    def _validate(self) -> None:
        options, state, trainer = self.config.validation, self.state, self.trainer
        with state.evaluating() as model:
            result = evaluate(
                model,
                self.data.valid,
                draws=options.draws,
                seed=options.seed,
                batch_size=options.batch_size,
                in_step=is_sharded(model),
                **self._how_to_score(),
            )
        state.nll = result.nll if math.isfinite(result.nll) else None
        trainer.record("validation", result.summary())
        self.display.validated(state.step, result.nll, result.standard_error, self._validated_on)
        if self.world.is_main:
            with trainer.writing():
                result.save(self.folder / "validation" / f"step-{state.step:09d}.npz")

    def _write_samples(self) -> None:
        """Run by the main process; for a sharded model, by all processes together."""
        state, device = self.state, self.world.device
        if not (self.world.is_main or is_sharded(state.model)):
            return
        with state.evaluating(), autocast(device, self.plan.precision):
            texts = self._samples()
        if self.world.is_main:
            with self.trainer.writing():
                write_text(self.folder / "samples" / f"step-{state.step:09d}.txt", texts)

    def _samples(self) -> str:
        """``validation.num_samples`` texts or answers to prompts, from the same noise each time."""
        # by default no samples are written, and the sampler need not be loaded
        from bellmask.generate.fill import fill
        from bellmask.generate.sampler import canvas_from_pieces
        from bellmask.generate.settings import Sampling

        options, tokenizer, valid = self.config.validation, self.tokenizer, self.data.valid
        model: Any = self.state.model
        is_real_BL = None
        if self.config.sft.train is None:
            before = [tokenizer.bos_id] * model.first_maskable
            room = self.config.data.block_length - len(before)
            canvas = canvas_from_pieces(tokenizer, [room], before)
            x_BL = canvas.repeat(options.num_samples, 1)
        else:
            rows = slice(0, options.num_samples)
            place = torch.arange(valid.block_length)
            is_real_BL = place < valid.row_lengths(rows)[:, None]
            is_given_BL = place < valid.row_starts(rows)[:, None]
            x_BL = torch.where(is_real_BL & ~is_given_BL, tokenizer.mask_id, valid.rows(rows))
        made = fill(
            model,
            x_BL,
            self.framework,
            Sampling(steps=None if self.framework.is_causal else options.sample_steps),
            mask_id=tokenizer.mask_id,
            is_real_BL=is_real_BL,
            seed=options.seed,
            device=self.world.device,
        )
        return SEPARATOR.join(tokenizer.decode(row.numpy()) for row in made.ids_BL) + "\n"

    def _save(self) -> None:
        if self.world.is_main:
            with self.trainer.writing():
                self.trainer.metrics.sync()
                self.trainer.skipped.sync()
        about = {"format": FORMAT, "run": self.run_id, "mask_id": self.tokenizer.mask_id}
        state = self.state
        self.trainer.saver.save(state.step, state.tensors(), about | state.scalars())


TRIED_STEPS = 100
"""Some of them have whole rows, where rows are cut to a random length now and then."""
SEPARATOR = "\n\n--------\n\n"
"""Between the texts of a file of samples."""


def own_objective(
    config: RunConfig, law: TimeLaw | None, objective: Objective | None
) -> Objective | None:
    """The objective given in Python; None where the options name it."""
    named: Any = build.build_objective(config)
    if (law is None and objective is None) or (law is not None and objective is not None):
        if law is not None:
            raise UserError("give law or objective: an objective has its own law")
        return None
    if config.framework.name != "mdm":
        raise UserError(f"framework {config.framework.name} has no times: leave law out")
    try:
        return objective or replace(named, law=law)
    except ValueError as error:
        raise UserError(str(error)) from None


NUM_LEVELS = 1025


def describe_objective(objective: Objective) -> dict[str, Any]:
    """What run.json says of an objective given in Python: its words, and what it does."""
    t = objective.times(torch.linspace(0, 1, NUM_LEVELS, dtype=torch.float64)[:-1])
    told = [[f"{x:.9e}" for x in part.tolist()] for part in (t, objective.weight(t))]
    text = json.dumps([*told, f"{objective.normalizer:.9e}"])
    mark = hashlib.sha256(text.encode()).hexdigest()[:16]
    return {"objective": str(objective), "objective_fingerprint": mark}


# Where a run starts: anew or from a checkpoint, and which options may differ then.


def check_same_run(
    before: dict[str, Any], now: dict[str, Any], config: RunConfig, folder: Path
) -> None:
    """Reject resuming if text, tokenizer, precision or dropout's noise would differ.

    ``before`` is the run's run.json, ``now`` what it would be.
    """
    watched = {
        "tokenizer_fingerprint": "the tokenizer",
        "train_fingerprint": "the training text",
        "valid_fingerprint": "the validation text",
        "precision": "the precision of matrix products",
        "objective_fingerprint": "the law or objective given in Python",
    }
    if config.model.dropout:
        watched["microbatch"] = "the microbatch (train.microbatch_size; by default it depends on "
        watched["microbatch"] += "the number of processes), on which dropout's noise depends,"
        before = before | {"microbatch": microbatch_before(before, config)}
    for key, what in watched.items():
        if before.get(key) != now.get(key):
            values = "" if "fingerprint" in key else f" (was {before.get(key)}, now {now[key]})"
            values += "; restore it, or use another --out"
            raise UserError(f"{what} has changed since {folder} was started{values}")


def microbatch_before(before: dict[str, Any], config: RunConfig) -> int:
    """Rows per forward pass of a run; without a record all at once, or as its options say."""
    processes = before.get("processes", 1)
    return before.get("microbatch") or planning.split_batch(config.train, processes)


def check_resumable(folder: Path, config: RunConfig) -> None:
    """Refuse, naming them, options that differ from the run's and would change its course."""
    is_described = (folder / "run.json").exists()  # not if it was killed while it began
    is_recorded = is_described and "microbatch" in run_folder.read_description(folder)
    beside = {  # these affect the result only together with others
        "train.microbatch_size": config.model.dropout == 0 or is_recorded,
        "train.steps": config.optim.curve == "constant",
    }
    before = run_folder.read_config(folder).resolved().flat()
    now = config.resolved().flat()
    changed = [o for o in now if now[o] != before[o] and not beside.get(o, is_free_option(o))]
    if changed:
        lines = [f"  {o}: was {before[o]}, now {now[o]}" for o in changed]
        words = "these options cannot change on resume (omit them, or use another --out):"
        raise UserError("\n".join([words, *lines]))


def find_start(config: RunConfig, folder: Path, resume: str, world: World) -> Path | None:
    """The checkpoint to start from; refuses a folder that is in use or cannot be continued."""
    look_up("resume mode", resume, dict.fromkeys(("no", "auto", "yes")))
    has_run = world.agree((folder / "config.json").exists())
    if has_run and resume == "no":
        raise UserError(f"{folder} already has a run: --resume auto, or another --out")
    if not has_run and not run_folder.is_free(folder):
        raise UserError(f"{folder} exists and is not a run folder; choose another --out")
    if not has_run and resume == "yes":
        raise UserError(f"{folder} has no run to resume; use --resume auto to start one")
    if not has_run:
        return None
    check_resumable(folder, config)
    store = CheckpointStore(folder / "checkpoints", config.checkpoint, world)
    found, complaints = store.newest_intact()
    advice = ""
    if config.checkpoint.when_damaged == "stop":
        advice = "use --checkpoint.when-damaged older to resume from the latest intact one"
    elif found is None:
        advice = "no intact checkpoint is left; move the folder away or choose another --out"
    if complaints and advice:
        raise UserError("\n".join([*complaints, advice]))
    for complaint in complaints if world.is_main else []:
        logger.warning("%s; using an older one", complaint)
    if found is not None:
        _check_state(read_state(found), found, folder, config)
    return found


def _check_state(state: dict[str, Any], found: Path, folder: Path, config: RunConfig) -> None:
    """Refuse a whole checkpoint that is not this run's, before anything is changed."""
    if state["step"] > config.train.steps:
        raise UserError(f"{folder} is at step {state['step']}, beyond train.steps; increase it")
    own = run_folder.read_description(folder).get("id")
    if state.get("run", own) != own:
        raise UserError(f"{found} belongs to another run; remove it to use an older one")
    window: Any = state.get("window")
    known = {field.name for field in fields(Window)}
    is_sound = isinstance(window, dict) and window.keys() <= known
    numbers = [*window.values(), state.get("tokens"), state.get("seconds")] if is_sound else []
    if not is_sound or not all(map(is_number, [*numbers, state.get("skipped", 0)])):
        raise UserError(f"{found}/state.json has no position in the run; remove that checkpoint")
