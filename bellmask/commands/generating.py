"""What continuing and answering share: loading, a live view or a bar, the trace, the output."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bellmask.generate.settings import DEFAULT_STEPS, Sampling
from bellmask.utils.files import sound

if TYPE_CHECKING:
    from bellmask.commands.generate import GenerateOptions
    from bellmask.generate.steps import OnStep
    from bellmask.generate.trace import Recorder
    from bellmask.run import Run

SEPARATOR = "\n--------\n"


def note(text: str) -> None:
    """Something to know, beside the results."""
    print(f"note: {text}", file=sys.stderr)


def load_noted(options: GenerateOptions, name: str) -> Run:
    """The run, with a note where it is used otherwise than it was trained."""
    from bellmask.exchange.loading import load

    loaded = load(
        name, checkpoint=options.checkpoint, weights=options.weights, device=options.device
    )
    if loaded.config.data.document_attention:
        note("the run was trained with attention inside documents; here all of a row is seen")
    return loaded


@dataclass(frozen=True)
class Observed:
    """What a generation reports to."""

    on_step: OnStep | None
    advance: Callable[[int], None]
    """Takes the number of samples that are done."""
    recorder: Recorder | None

    def save(
        self,
        options: GenerateOptions,
        loaded: Run,
        texts: Sequence[str],
        is_answer: bool = False,
    ) -> None:
        """Write the trace, if one is asked for."""
        if self.recorder is not None and options.trace is not None:
            title = f"{loaded.folder.name}, step {loaded.step}"
            settings = settings_of(options, is_answer)
            self.recorder.save(Path(options.trace), title, settings, texts)


@contextlib.contextmanager
def observing(options: GenerateOptions, loaded: Run, title: str, total: int) -> Iterator[Observed]:
    """Shown live with --watch, else a progress bar; recorded with --trace."""
    from bellmask.generate.steps import to_all
    from bellmask.generate.trace import Recorder
    from bellmask.report.watch import Watch
    from bellmask.utils.console import progress_bar

    recorder = Recorder(loaded.tokenizer) if options.trace is not None else None
    receivers = [] if recorder is None else [recorder]
    if options.watch:
        keep_last = not (sys.stdout.isatty() and options.output is None)  # the texts follow
        with Watch(
            loaded.tokenizer,
            title=loaded.folder.name,
            fps=12.0 if options.fps is None else options.fps,
            keep_last=keep_last,
        ) as watch:
            yield Observed(to_all(*receivers, watch), lambda done: None, recorder)
    else:
        with progress_bar(title, "samples", total) as advance:
            yield Observed(to_all(*receivers) if receivers else None, advance, recorder)


def settings_of(options: GenerateOptions, is_answer: bool = False) -> dict[str, Any]:
    """How the texts were made, for who reads them."""
    from bellmask.answers import DEFAULT_STEPS as ANSWER_STEPS

    default_steps = ANSWER_STEPS if is_answer else DEFAULT_STEPS
    sampling, plain = options.sampling, asdict(Sampling())
    asked = {name: v for name, v in asdict(sampling).items() if v != plain[name]}
    steps = {"steps": sampling.steps or default_steps} if sampling.has_steps else {}
    return {"rule": sampling.rule, **steps, **asked, "seed": options.seed}


def write_out(content: str, output: str | None) -> None:
    """As a whole file, or to a pipe; on a screen without control codes, which would steer it."""
    if output is None:
        from bellmask.utils.console import visible_lines

        is_screen = sys.stdout.isatty()
        sys.stdout.write(visible_lines(content) if is_screen else sound(content))
    else:
        from bellmask.utils.files import write_text

        write_text(Path(output), content)
