"""Text being unmasked, live in the terminal; frames now and then where there is none.

Masked positions are dim blocks, tokens of the last step stand out, tokens that were masked again
are red blocks, given ones are underlined. Lines are folded anywhere, so that in a text of single
characters every position keeps its place. B rows of one batch, L length.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from rich.cells import chop_cells
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text
from torch import Tensor

from bellmask.data.tokenizers import Tokenizer
from bellmask.generate.canvas import Step, TokenTexts
from bellmask.utils.console import MASK, REMASKED, plain_ascii, visible
from bellmask.utils.errors import UserError

STYLES = {
    "given": "underline",
    "masked": "dim",
    "remasked": "bold #e5484d",
    "new": "bold #04210c on #6fd67e",
    "changed": "bold #2b2000 on #f2c94c",
    "old": "",
}
_BLOCKS = {"masked": MASK, "remasked": REMASKED}
PLAIN_FRAMES = 8
"""Frames per batch, besides the first, where the screen is no terminal."""
BAR_WIDTH = 24


@dataclass(frozen=True, eq=False)
class Frame:
    """A step beside the one before it and the canvas."""

    step: Step
    before_BL: Tensor
    canvas_BL: Tensor
    mask_id: int

    @property
    def share(self) -> float:
        """Share of the positions to generate that have a token now."""
        num_gaps = int((self.canvas_BL == self.mask_id).sum())
        num_left = int((self.step.ids_BL == self.mask_id).sum())
        return 1 - num_left / num_gaps if num_gaps else 1.0

    def kinds(self, row: int) -> list[str]:
        """What happened to each position of a row: a key of ``STYLES``."""
        now, before, canvas = (
            ids_BL[row].tolist() for ids_BL in (self.step.ids_BL, self.before_BL, self.canvas_BL)
        )
        return [_kind(*ids, self.mask_id) for ids in zip(now, before, canvas, strict=True)]


def _kind(now: int, before: int, canvas: int, mask_id: int) -> str:
    if now == mask_id:
        return "masked" if before == mask_id else "remasked"
    if canvas != mask_id:
        return "given"
    if before == mask_id:
        return "new"
    return "old" if now == before else "changed"


class LiveView:
    """What views of a generation share: the screen, the pace, steps beside those before them.

    ``fps`` is the most steps shown per second (a quick model is slowed down to be seen); 0 shows
    them as they come. The view is on stderr, so texts can be piped; ``keep_last`` leaves the last
    frame on the screen.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        fps: float,
        keep_last: bool,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not 0 <= fps < float("inf"):
            raise UserError(f"--fps must be 0 (no waiting) or more, got {fps}")
        self.console = console or Console(stderr=True, highlight=False)
        self.seconds_waited = 0.0
        """How long steps were held to be seen; no part of the model's time."""
        self._mask_id, self._texts = tokenizer.mask_id, TokenTexts(tokenizer)
        self._fps, self._clock, self._sleep = fps, clock, sleep
        self._frame: Frame | None = None
        self._next_time = 0.0
        self._live = Live(
            console=self.console,
            auto_refresh=False,
            transient=not keep_last,
            vertical_overflow="crop",
        )

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.console.is_terminal:
            self._live.stop()

    def _take(self, step: Step) -> Frame:
        """A step, kept as it is now, beside the last one; step 0 begins anew."""
        step, last = replace(step, ids_BL=step.ids_BL.clone()), self._frame
        if last is None or step.number == 0:
            self._frame = Frame(step, step.ids_BL, step.ids_BL, self._mask_id)
        else:
            self._frame = Frame(step, last.step.ids_BL, last.canvas_BL, self._mask_id)
        return self._frame

    def _wait(self) -> None:
        """Hold a frame until the one before it has been seen."""
        if self._fps:
            seconds = max(0.0, self._next_time - self._clock())
            self.seconds_waited += seconds
            self._sleep(seconds)
            self._next_time = self._clock() + 1 / self._fps


class Watch(LiveView):
    """A live view of a generation: ``with Watch(tokenizer) as watch: ...`` and ``on_step=watch``.

    Options as for :class:`LiveView`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        title: str = "",
        fps: float = 12.0,
        keep_last: bool = True,
        **more: Any,
    ) -> None:
        super().__init__(tokenizer, fps=fps, keep_last=keep_last, **more)
        self._title, self._printed = title, -1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        if not self.console.is_terminal:
            self._print_last()

    def __call__(self, step: Step) -> None:
        """Show one step."""
        if self._frame is None or step.number == 0:
            if not self.console.is_terminal:
                self._print_last()
            self._printed = -1
        frame = self._take(step)
        if self.console.is_terminal:
            self._wait()
            self._live.update(self.render(frame), refresh=True)
        elif self._is_due(step):
            self._print_last()

    def _is_due(self, step: Step) -> bool:
        if step.number == 0:
            return True
        part = PLAIN_FRAMES / max(1, step.num_steps)
        return int(step.number * part) > int((step.number - 1) * part)

    def _print_last(self) -> None:
        """The latest frame as plain text, unless it has been printed."""
        if self._frame is not None and self._frame.step.number != self._printed:
            self._printed = self._frame.step.number
            self.console.print(self.render(self._frame, height=None))

    def render(self, frame: Frame, height: int | None = -1) -> Group:
        """A frame: the line of numbers, then as many samples as the height allows (None: all)."""
        room = self.console.height - 2 if height == -1 else height
        lines = [self._head(frame.step, frame.share)]
        num_rows = len(frame.step.ids_BL)
        for row in range(num_rows):
            sample = self._sample(frame, row)
            if num_rows > 1:
                sample.insert(0, Text(f"sample {frame.step.first_sample + row}", style="bold cyan"))
            left = None if room is None else room - len(lines)
            if left is not None and len(sample) > left:
                return Group(*lines, *_cut(sample, left, row, num_rows))
            lines += sample
        return Group(*lines)

    def _head(self, step: Step, share: float) -> Text:
        name = f"{visible(self._title)}  " if self._title else ""
        line = Text(f"{name}step {step.number} of {step.num_steps}", style="bold")
        numbers = f"  {share:4.0%} unmasked  t {step.t:.3f}  {step.num_calls} calls  "
        line.append(numbers, style="not bold")
        width = max(0, min(BAR_WIDTH, self.console.width - len(line)))
        filled = round(width * share)
        done, rest = ("=", "-") if self.console.options.ascii_only else ("━", "┈")
        line.append(done * filled, style="not bold green")
        line.append(rest * (width - filled), style="not bold dim")
        line.no_wrap, line.overflow = True, "crop"
        return line

    def _sample(self, frame: Frame, row: int) -> list[Text]:
        """A row's lines, folded at the screen's width."""
        text = Text()
        for token, kind in zip(frame.step.ids_BL[row].tolist(), frame.kinds(row), strict=True):
            shown = _BLOCKS.get(kind) or visible(self._texts(token))
            if self.console.options.ascii_only:
                shown = plain_ascii(shown)
            text.append(shown, style=STYLES[kind])
        pieces = chop_cells(text.plain, self.console.width)
        cuts = [sum(map(len, pieces[: n + 1])) for n in range(len(pieces) - 1)]
        return list(text.divide(cuts))


def _cut(sample: list[Text], room: int, row: int, num_rows: int) -> list[Text]:
    """What is shown of a sample without room: the beginning of the first one, of others a note."""
    if row > 0:
        return [Text(f"... {num_rows - row} more samples", style="dim")]
    kept = max(1, room - 1)
    more = f" and {num_rows - 1} more samples" if num_rows > 1 else ""
    return [*sample[:kept], Text(f"... {len(sample) - kept} more lines{more}", style="dim")]
