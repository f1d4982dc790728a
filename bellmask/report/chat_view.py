"""One answer being unmasked, live in the terminal: the answer alone, up to its first EOS.

Masked positions are dim blocks, tokens of the last step stand out. What comes after the leftmost
EOS so far is not shown: it will not be part of the answer. Lines break where the text does and are
folded anywhere, as a terminal folds the finished answer. One row, L length.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.cells import chop_cells
from rich.console import Group
from rich.text import Text

from bellmask.data.tokenizers import Tokenizer
from bellmask.generate.steps import Step
from bellmask.report.watch import STYLES, Frame, LiveView
from bellmask.utils.console import MASK, REMASKED, plain_ascii, visible_lines

END = "|"
"""Where the answer ends."""
DEFAULT_FPS = 24.0


class AnswerView(LiveView):
    """``with AnswerView(tokenizer) as view: ...`` and ``on_step=view``, for one answer.

    ``fps`` is the most changes shown per second; 0 does not wait. The view goes away at the end,
    when the finished answer is to be printed; of an interrupted one the last frame stays.
    """

    def __init__(self, tokenizer: Tokenizer, *, fps: float = DEFAULT_FPS, **more: Any) -> None:
        super().__init__(tokenizer, fps=fps, keep_last=False, **more)
        self._eos_id = tokenizer.eos_id
        self._shown: Text | None = None

    @property
    def step(self) -> Step | None:
        """The last one, if any."""
        return None if self._frame is None else self._frame.step

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.transient = kind is None
        super().__exit__(kind, error, trace)

    def __call__(self, step: Step) -> None:
        """Show one step, if it changes anything that is seen."""
        frame = self._take(step)
        answer = self._answer(frame)
        if self.console.is_terminal and answer != self._shown:
            self._shown = answer
            self._wait()
            self._live.update(Group(*self._lines(answer, frame.step)), refresh=True)

    def render(self) -> list[Text]:
        """The latest frame: the answer's lines, as many as fit on the screen, and the step."""
        assert self._frame is not None
        return self._lines(self._answer(self._frame), self._frame.step)

    def _lines(self, answer: Text, step: Step) -> list[Text]:
        lines = self._fold(answer)
        room = max(1, self.console.height - 3)
        if len(lines) > room:
            more = Text(f"... {len(lines) - room + 1} more lines", style="dim")
            lines = [*lines[: room - 1], more]
        return [*lines, Text(f"step {step.number} of {step.num_steps}", style="dim")]

    def _answer(self, frame: Frame) -> Text:
        """The gap up to the leftmost EOS, each token in the style of what happened to it."""
        text = Text()
        blocks = {"masked": MASK, "remasked": REMASKED}
        ids = zip(frame.canvas_BL[0].tolist(), frame.step.ids_BL[0].tolist(), strict=True)
        for (canvas, token), kind in zip(ids, frame.kinds(0), strict=True):
            if canvas != self._mask_id:
                continue
            if token == self._eos_id:
                text.append(END, style="dim")
                break
            shown = blocks.get(kind) or visible_lines(self._texts(token))
            if not text.plain:
                shown = shown.lstrip()  # as the finished answer
            if self.console.options.ascii_only:
                shown = "\n".join(plain_ascii(line) for line in shown.split("\n"))
            text.append(shown, style=STYLES[kind])
        return text

    def _fold(self, text: Text) -> list[Text]:
        """Lines no wider than the screen."""
        lines: list[Text] = []
        for line in text.split("\n", allow_blank=True):
            pieces = chop_cells(line.plain, self.console.width)
            cuts = [sum(map(len, pieces[: n + 1])) for n in range(len(pieces) - 1)]
            lines += line.divide(cuts)
        return lines
