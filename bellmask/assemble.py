"""Config → parts → a run. The only module that knows every folder."""

from __future__ import annotations

import json
import platform
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bellmask import __version__
from bellmask.build import build_law, build_model, build_objective
from bellmask.config import RunConfig
from bellmask.data.blocks import Blocks, load_blocks
from bellmask.data.tokenizer import Tokenizer, load_tokenizer
from bellmask.diffusion.objectives import Objective
from bellmask.errors import UserError, look_up
from bellmask.evaluate.likelihood import Likelihood, evaluate
from bellmask.generate.canvas import empty_canvas
from bellmask.generate.engine import generate
from bellmask.generate.grids import uniform_grid
from bellmask.intervals import Interval
from bellmask.model.transformer import count_parameters
from bellmask.resume import check_resumable
from bellmask.train.checkpoint import CheckpointStore, load_tensors, read_state, write_text
from bellmask.train.distributed import World, open_world, pick_precision
from bellmask.train.metrics import Display, MetricsFile, open_trackers
from bellmask.train.optim import Ema, Optimizer
from bellmask.train.step import StepPlanner, TrainStep
from bellmask.train.trainer import Action, Trainer, TrainState


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
    folder = Path(out)
    with open_world(config.train.device) as world:
        if config.train.batch_size % (world.size * (config.train.microbatch_size or 1)):
            raise UserError(
                f"train.batch_size={config.train.batch_size} must be a multiple of {world.size} "
                f"processes times train.microbatch_size={config.train.microbatch_size or 1}"
            )
        checkpoint = _find_start(config, folder, resume, world)
        tokenizer = load_tokenizer(config.data.tokenizer)
        if world.is_main:  # others wait, then find the cache filled
            load_blocks(config.data, tokenizer)
        world.barrier()
        blocks = load_blocks(config.data, tokenizer)
        run = _Training(config, folder, world, tokenizer, objective, blocks, is_quiet)
        return run.fit(checkpoint)


def _find_start(config: RunConfig, folder: Path, resume: str, world: World) -> Path | None:
    """The checkpoint to start from; refuses a folder that is in use or cannot be continued."""
    modes = {"no": False, "auto": True, "yes": True}
    may_resume = look_up("resume mode", resume, modes)
    has_run = (folder / "config.json").exists()
    if has_run and not may_resume:
        raise UserError(
            f"{folder} already holds a run; continue it with --resume auto, or choose another --out"
        )
    if not has_run and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not a run of bellmask; choose another --out")
    if not has_run and resume == "yes":
        raise UserError(f"{folder} holds no run to resume; use --resume auto to start one")
    if not has_run:
        return None
    check_resumable(folder / "config.json", config)
    store = CheckpointStore(folder / "checkpoints", config.checkpoint, world)
    found, complaints = store.newest_intact()
    if complaints and found is None:
        raise UserError("\n".join([*complaints, "no intact checkpoint is left to resume from"]))
    for complaint in complaints if world.is_main else []:
        print(f"warning: {complaint}; using an older one")
    return found


class _Training:
    """The parts of one training, wired together."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        world: World,
        tokenizer: Tokenizer,
        objective: Objective,
        blocks: tuple[Blocks, Blocks],
        is_quiet: bool,
    ) -> None:
        self.config, self.folder, self.world, self.tokenizer = config, folder, world, tokenizer
        self.train_blocks, valid = blocks
        limit = config.validation.blocks or len(valid)
        self.valid_blocks = valid.slice(0, min(limit, len(valid)))
        self.schedule = objective.schedule
        self.precision = pick_precision(config.train.precision, world.device)
        model = build_model(config, tokenizer.num_tokens).to(world.device)
        ema = Ema(model, config.optim.ema) if config.optim.ema else None
        self.state = TrainState(model, Optimizer(model, config.optim), ema)
        planner = StepPlanner(self.train_blocks, objective, config.train, world)
        self.step = TrainStep(
            model,
            planner,
            world,
            mask_id=tokenizer.num_tokens,
            divide_by_c=config.objective.divide_by_c,
            clip=config.optim.clip,
            precision=self.precision,
        )
        self.store = CheckpointStore(folder / "checkpoints", config.checkpoint, world)
        self.metrics = MetricsFile(folder / "metrics.jsonl")
        self.display = Display(config.train.steps, is_quiet=is_quiet or not world.is_main)

    def fit(self, checkpoint: Path | None) -> TrainResult:
        """Start or resume, train, and say how it ended."""
        if checkpoint is not None:
            self._check_same_data()
        self._open_folder(checkpoint)
        if checkpoint is not None:
            load_tensors(checkpoint, self.state.tensors(), self.world)
            self.state.restore(read_state(checkpoint))
        self._introduce(checkpoint)
        log = self.config.log
        trackers = (
            open_trackers(log.trackers, self.folder, log.project, self.config.to_dict())
            if self.world.is_main
            else []
        )
        with self.display:
            self.trainer = Trainer(
                self.state,
                self.step,
                self.world,
                num_steps=self.config.train.steps,
                optim=self.config.optim,
                log_every=log.every,
                actions=self._actions(),
                metrics=self.metrics,
                trackers=trackers,
                display=self.display,
            )
            try:
                stopped_by = self.trainer.fit()
            finally:
                for tracker in trackers:
                    tracker.close()
        return TrainResult(self.folder, self.state.step, self.state.nll, stopped_by)

    def _actions(self) -> list[Action]:
        validation, checkpoint = self.config.validation, self.config.checkpoint
        return [
            Action(
                Interval.parse(validation.every),
                self._validate,
                also_last=validation.every != "never",
            ),
            Action(
                Interval.parse(validation.samples_every),
                self._write_samples,
                also_last=validation.samples_every != "never",
            ),
            Action(
                Interval.parse(checkpoint.every),
                self._save,
                at_steps=checkpoint.keep_steps,
                also_when_stopped=True,
            ),
        ]

    def _open_folder(self, checkpoint: Path | None) -> None:
        """Write what describes the run, and undo what happened after the checkpoint."""
        if self.world.is_main:
            for part in ("checkpoints", "validation", "samples"):
                (self.folder / part).mkdir(parents=True, exist_ok=True)
            self.store.clean()
            step = 0 if checkpoint is None else read_state(checkpoint)["step"]
            self.metrics.cut_back(step)
            for later in self.store.all():
                if later != checkpoint and int(later.name.split("-")[1]) > step:
                    shutil.rmtree(later)
            write_text(self.folder / "run.json", json.dumps(self._description(), indent=1) + "\n")
            write_text(
                self.folder / "config.json", json.dumps(self.config.to_dict(), indent=1) + "\n"
            )
        self.world.barrier()

    def _check_same_data(self) -> None:
        """Refuse to go on with other text or another tokenizer than the run began with."""
        before, now = json.loads((self.folder / "run.json").read_text()), self._description()
        for key, what in (
            ("tokenizer_fingerprint", "the tokenizer"),
            ("train_fingerprint", "the training text"),
            ("valid_fingerprint", "the validation text"),
        ):
            if before[key] != now[key]:
                raise UserError(
                    f"{what} has changed since {self.folder} was started; "
                    "restore it, or start another run with another --out"
                )

    def _description(self) -> dict[str, Any]:
        return {
            "bellmask": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "device": str(self.world.device),
            "processes": self.world.size,
            "precision": str(self.precision).removeprefix("torch."),
            "parameters": count_parameters(self.state.model),
            "num_tokens": self.tokenizer.num_tokens,
            "mask_id": self.tokenizer.num_tokens,
            "tokenizer_fingerprint": self.tokenizer.fingerprint,
            "train_fingerprint": self.train_blocks.fingerprint,
            "valid_fingerprint": self.valid_blocks.fingerprint,
            "train_blocks": len(self.train_blocks),
            "valid_blocks": len(self.valid_blocks),
            "started": time.strftime("%Y-%m-%d %H:%M:%S"),
        }

    def _introduce(self, checkpoint: Path | None) -> None:
        config, state = self.config, self.state
        where = f"resuming from step {state.step}" if checkpoint else "starting"
        self.display.say(
            f"{self.folder}: {where}; {count_parameters(state.model):,} parameters, "
            f"{len(self.train_blocks):,} blocks of {self.train_blocks.block_length}, "
            f"objective {config.objective.name}, law {build_law(config.law)}, "
            f"{self.world.size} process(es) on {self.world.device.type}, "
            f"{str(self.precision).removeprefix('torch.')}"
        )

    def _validate(self, state: TrainState) -> None:
        options = self.config.validation
        with state.evaluating() as model:
            result: Likelihood = evaluate(
                model,
                self.valid_blocks,
                mask_id=self.tokenizer.num_tokens,
                draws=options.draws,
                seed=options.seed,
                batch_size=options.batch_size,
                schedule=self.schedule,
                world=self.world,
                precision=self.precision,
            )
        state.nll = result.nll
        self.trainer.record("validation", result.summary())
        self.display.validated(state.step, result.nll, result.standard_error)
        if self.world.is_main:
            result.save(self.folder / "validation" / f"step-{state.step:09d}.npz")

    def _write_samples(self, state: TrainState) -> None:
        if not self.world.is_main:
            return
        options = self.config.validation
        canvas = empty_canvas(self.tokenizer, self.config.data.block_length)
        with state.evaluating() as model:
            made = generate(
                model,
                canvas.repeat(options.num_samples),
                uniform_grid(options.sample_steps),
                mask_id=self.tokenizer.num_tokens,
                seed=options.seed,
                schedule=self.schedule,
                device=self.world.device,
            )
        texts = [self.tokenizer.decode(row.numpy()) for row in made.ids_BL]
        path = self.folder / "samples" / f"step-{state.step:09d}.txt"
        write_text(path, "\n\n--------\n\n".join(texts) + "\n")

    def _save(self, state: TrainState) -> None:
        if self.world.is_main:
            self.metrics.sync()
        scalars = {"format": 1, "mask_id": self.tokenizer.num_tokens, **state.scalars()}
        self.store.save(state.step, state.tensors(), scalars)
