"""Text being unmasked, live in the terminal; nothing is shown without one.

Masked positions are dim blocks, tokens of the last step are highlighted, remasked tokens are red
blocks, given ones are underlined. Lines are folded at any character, so that positions do not move.
B rows of one batch, L length.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Self

from rich.cells import chop_cells
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text
from torch import Tensor

from bellmask.data.tokenizers import Tokenizer
from bellmask.generate.sampler import Step, token_texts
from bellmask.utils.console import MASK, REMASKED, plain_ascii, visible, visible_lines
from bellmask.utils.errors import UserError

STYLES = {
    "given": "underline",
    "masked": "dim",
    "remasked": "bold #e5484d",
    "new": "bold #04210c on #6fd67e",
    "changed": "bold #2b2000 on #f2c94c",
    "old": "",
}
BLOCKS = {"masked": MASK, "remasked": REMASKED}
BAR_WIDTH = 24


def check_fps(fps: float) -> None:
    """UserError unless frames can be shown at this pace."""
    if not 0 <= fps < float("inf"):
        raise UserError(f"--fps must be 0 (no waiting) or more, got {fps}")


@dataclass(frozen=True, eq=False)
class Frame:
    """A step with the previous one and the canvas."""

    step: Step
    before_BL: Tensor
    canvas_BL: Tensor
    mask_id: int

    @property
    def share(self) -> float:
        """Fraction of the positions to generate that have a token."""
        num_gaps = int((self.canvas_BL == self.mask_id).sum())
        num_left = int((self.step.ids_BL == self.mask_id).sum())
        return 1 - num_left / num_gaps if num_gaps else 1.0

    def kinds(self, row: int) -> list[str]:
        """What happened to each position of a row: a key of ``STYLES``."""
        rows = (self.step.ids_BL[row], self.before_BL[row], self.canvas_BL[row])
        return [self._kind(*ids) for ids in zip(*(row_L.tolist() for row_L in rows), strict=True)]

    def _kind(self, now: int, before: int, canvas: int) -> str:
        if now == self.mask_id:
            return "masked" if before == self.mask_id else "remasked"
        if canvas != self.mask_id:
            return "given"
        if before == self.mask_id:
            return "new"
        return "old" if now == before else "changed"


class LiveView:
    """Base of views of a generation: the screen, the pace, and changes between steps.

    ``fps`` is the maximum number of steps shown per second (fast models are slowed down); 0: no
    limit. The view is on stderr, so texts can be piped; ``keep_last`` leaves the last frame on the
    screen.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        title: str = "",
        fps: float = 12.0,
        keep_last: bool = True,
        console: Console | None = None,
    ) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self.frame: Frame | None = None
        self.seconds_waited = 0.0
        """Time spent waiting between frames, excluded from the model's time."""
        self._tokenizer, self._texts = tokenizer, token_texts(tokenizer)
        self._title, self._fps, self._next_time = title, fps, 0.0
        look: dict[str, Any] = {"transient": not keep_last, "vertical_overflow": "crop"}
        self._live = Live(console=self.console, auto_refresh=False, **look)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.console.is_terminal:
            self._live.stop()

    def _take(self, step: Step) -> Frame:
        """Compare a copy of the step with the last one; step 0 starts over."""
        step, last = replace(step, ids_BL=step.ids_BL.clone()), self.frame
        before_BL = canvas_BL = step.ids_BL
        if last is not None and step.number > 0:
            before_BL, canvas_BL = last.step.ids_BL, last.canvas_BL
        self.frame = Frame(step, before_BL, canvas_BL, self._tokenizer.mask_id)
        return self.frame

    def _show(self, lines: list[Text]) -> None:
        """Redraw, after the current frame was shown long enough."""
        if self._fps:
            seconds = max(0.0, self._next_time - time.monotonic())
            self.seconds_waited += seconds
            time.sleep(seconds)
            self._next_time = time.monotonic() + 1 / self._fps
        self._live.update(Group(*lines), refresh=True)

    def _append(self, text: Text, shown: str, kind: str) -> None:
        shown = plain_ascii(shown) if self.console.options.ascii_only else shown
        text.append(shown, style=STYLES[kind])

    def _fold(self, text: Text) -> list[Text]:
        """Lines no wider than the screen."""
        lines: list[Text] = []
        for line in text.split("\n", allow_blank=True):
            pieces = chop_cells(line.plain, self.console.width)
            lines += line.divide(list(accumulate(map(len, pieces[:-1]))))
        return lines


class Watch(LiveView):
    """A live view of a generation: ``with Watch(tokenizer) as watch: ...`` and ``on_step=watch``.

    Options as for :class:`LiveView`.
    """

    def __call__(self, step: Step) -> None:
        frame = self._take(step)
        if self.console.is_terminal:
            self._show(self.render(frame))

    def render(self, frame: Frame) -> list[Text]:
        """The line of numbers, then as many samples as fit on the screen."""
        room, num_rows = self.console.height - 2, len(frame.step.ids_BL)
        lines = [self._head(frame)]
        for row in range(num_rows):
            if len(lines) > room:
                break
            if num_rows > 1:
                lines.append(Text(f"sample {frame.step.first_sample + row}", style="bold cyan"))
            text = Text()
            for token, kind in zip(frame.step.ids_BL[row].tolist(), frame.kinds(row), strict=True):
                self._append(text, BLOCKS.get(kind) or visible(self._texts(token)), kind)
            lines += self._fold(text)
        return cut(lines, room)

    def _head(self, frame: Frame) -> Text:
        step, name = frame.step, f"{visible(self._title)}  " if self._title else ""
        line = Text(f"{name}step {step.number} of {step.num_steps}", style="bold")
        numbers = f"  {frame.share:4.0%} unmasked  t {step.t:.3f}  {step.num_calls} calls  "
        line.append(numbers, style="not bold")
        width = max(0, min(BAR_WIDTH, self.console.width - len(line)))
        filled = round(width * frame.share)
        done, rest = ("=", "-") if self.console.options.ascii_only else ("━", "┈")
        line.append(done * filled, style="not bold green")
        line.append(rest * (width - filled), style="not bold dim")
        line.no_wrap, line.overflow = True, "crop"
        return line


# One answer being unmasked, live in the terminal: only the answer, up to its first EOS.
#
# Masked positions are dim blocks, tokens of the last step are highlighted. Text after the leftmost
# EOS so far is hidden: it will not be part of the answer. Long lines are folded at any character,
# as a terminal folds the finished answer. One row, L length.

END = "|"
"""The end of the answer."""


class AnswerView(LiveView):
    """``with AnswerView(tokenizer) as view: ...`` and ``on_step=view``, for one answer.

    ``fps`` is the most changes shown per second; 0 does not wait. The view is removed at the end,
    before the finished answer is printed; after an interrupt the last frame stays.
    """

    _shown: Text | None = None

    def __exit__(self, *error: object) -> None:
        self._live.transient = error[0] is None
        super().__exit__(*error)

    def __call__(self, step: Step) -> None:
        """Show one step, if it changes the visible text."""
        frame = self._take(step)
        answer = self._answer(frame)
        if self.console.is_terminal and answer != self._shown:
            self._shown = answer
            self._show(self.render(frame))

    def render(self, frame: Frame) -> list[Text]:
        """The answer's lines, as many as fit on the screen, and the step."""
        lines, step = self._fold(self._answer(frame)), frame.step
        lines = cut(lines, self.console.height - 3)
        return [*lines, Text(f"step {step.number} of {step.num_steps}", style="dim")]

    def _answer(self, frame: Frame) -> Text:
        """The gap up to the leftmost EOS, each token in the style of what happened to it."""
        text = Text()
        ids = zip(frame.canvas_BL[0].tolist(), frame.step.ids_BL[0].tolist(), strict=True)
        for (canvas, token), kind in zip(ids, frame.kinds(0), strict=True):
            if canvas != self._tokenizer.mask_id:
                continue
            if token == self._tokenizer.eos_id:
                text.append(END, style="dim")
                break
            shown = BLOCKS.get(kind) or visible_lines(self._texts(token))
            # the finished answer does not begin with a space either
            self._append(text, shown if text.plain else shown.lstrip(), kind)
        return text


def cut(lines: list[Text], room: int) -> list[Text]:
    """As many lines as there is room for, with a note where some are left out."""
    if len(lines) <= room:
        return lines
    note = Text("... the rest does not fit on the screen", style="dim")
    return [*lines[: max(1, room - 1)], note]
