"""Shared options of the suites of ``bellmask evaluate``: models, seeds, and the results folder."""

from __future__ import annotations

import contextlib
import io
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from bellmask import __version__
from bellmask.storage.loading import LoadOptions
from bellmask.utils.distributed import World, open_world
from bellmask.utils.errors import UserError, check_least
from bellmask.utils.files import check_folder, without_nan, write_json, write_text


@dataclass(frozen=True, kw_only=True)
class SuiteOptions(LoadOptions):
    """Several models, each evaluated with several seeds."""

    models: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN...")]
    """Run folders, exports or names on the hub; all are compared with the first."""
    seeds: int = 5
    """Number of evaluation seeds: --seed, --seed + 1, ..."""
    seed: int = 0
    """The first evaluation seed."""
    out: str | None = None
    """Folder for the results; default RUN/SUITE for a single run folder, else runs/SUITE."""

    @property
    def all_seeds(self) -> list[int]:
        return list(range(self.seed, self.seed + self.seeds))

    def check(self, **least: int) -> None:
        """UserError for invalid options; ``least`` are the minimum values of other options."""
        check_folder(self.out)
        if not self.models:
            raise UserError("the suite needs at least one model: a run folder")
        check_least(self, seeds=1, **least)


def on_all_ranks(
    measure: Callable[[Any, World, Path], None], options: Any, models: Sequence[str], name: str
) -> int:
    """Call ``measure(options, world, folder)`` on torchrun's processes; exit code 0.

    The folder for results is ``--out``, or in the run folder if there is only one. Only the main
    process is seen: others are silent and write into a copy of the folder, so that all find the
    same cached results and take the same steps.
    """
    is_single = len(models) == 1 and Path(models[0]).is_dir()
    folder = Path(options.out or Path(models[0] if is_single else "runs") / name)
    with open_world(options.device) as world, contextlib.ExitStack() as stack:
        if not world.is_main:
            copy = Path(stack.enter_context(tempfile.TemporaryDirectory())) / folder.name
            if folder.exists():
                shutil.copytree(folder, copy)
            folder = copy
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        world.barrier()
        measure(options, world, folder)
    return 0


def write_results(folder: Path, numbers: dict[str, Any], name: str, **pages: str) -> None:
    """Write ``name.json`` and pages by their suffixes (``md=...``); nan becomes null."""
    folder.mkdir(parents=True, exist_ok=True)
    content = without_nan({"bellmask": __version__, **numbers})
    write_json(folder / f"{name}.json", content, allow_nan=False, default=str)
    for suffix, text in pages.items():
        write_text(folder / f"{name}.{suffix}", text)
