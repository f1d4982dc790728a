"""``bellmask chat``: talk to a run in the terminal and see its answers being unmasked."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from bellmask.commands.chat_commands import COMMANDS
from bellmask.config.presets import parse_command
from bellmask.generate.settings import Sampling
from bellmask.utils.errors import UserError, look_up

if TYPE_CHECKING:
    from rich.console import Console

    from bellmask.answers import Answer
    from bellmask.generate.steps import OnStep
    from bellmask.talk import Talk


@dataclass(frozen=True)
class ChatOptions:
    """Talk to a run; its answers are unmasked before your eyes. /help lists commands, /quit ends.

    Lines from a pipe are asked one after the other; their answers are lines of the output.

    Examples:
    bellmask chat runs/sft

    bellmask chat runs/sft --rule most_confident --steps 16 --temperature 0.7

    bellmask chat runs/sft --length 128 --block-length 32 --system 'Answer in one sentence.'

    echo 'What is a bell?' | bellmask chat runs/sft
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folder, exported folder, or a name on the hub."""
    length: int | None = None
    """Tokens of an answer, at most; default: what most of the training examples needed."""
    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = field(default_factory=Sampling)
    """How to sample."""
    seed: int = 0
    """The same words in the same order get the same answers from the same seed."""
    system: str = ""
    """Said to the model before all else."""
    memory: Literal["auto", "on", "off"] = "auto"
    """on: all that was said is part of the prompt; off: each line is asked alone. auto: as the run
    was fine-tuned, on conversations or on single prompts (template and examples tell)."""
    fps: float | None = None
    """Changes shown per second at most, 24 by default; 0 does not wait."""
    checkpoint: str = "latest"
    """latest, best, or a step."""
    weights: Literal["auto", "ema", "raw"] = "auto"
    """auto: the moving average where there is one."""
    device: str = "auto"
    """auto, cpu, cuda, ..."""


def run(args: Sequence[str]) -> int:
    """Load the run and talk until the user ends it."""
    options = parse_command(ChatOptions, args, command="chat")
    options.sampling.check()

    from rich.console import Console

    from bellmask.report.chat_view import DEFAULT_FPS

    fps = DEFAULT_FPS if options.fps is None else options.fps
    if not 0 <= fps < float("inf"):
        raise UserError(f"--fps must be 0 (no waiting) or more, got {fps}")
    for stream, errors in ((sys.stdin, "replace"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)
    chat = Chat(_talk(options), Console(stderr=True, highlight=False), fps)
    for line in introduction(chat.talk):
        chat.say(line)
    if sys.stdin.isatty():
        _at_a_terminal(chat)
    else:
        for line in sys.stdin:
            if not chat.take(line.rstrip("\r\n")):
                break
    return 0


def _talk(options: ChatOptions) -> Talk:
    from bellmask.answers import Answerer
    from bellmask.exchange.loading import load
    from bellmask.talk import Talk

    answerer = Answerer(
        load(
            options.run,
            checkpoint=options.checkpoint,
            weights=options.weights,
            device=options.device,
        )
    )
    return Talk(
        answerer,
        has_memory=answerer.knows_turns if options.memory == "auto" else options.memory == "on",
        length=answerer.length if options.length is None else options.length,
        sampling=options.sampling,
        seed=options.seed,
        system=options.system,
    )


def introduction(talk: Talk) -> list[str]:
    """What one should know before the first line."""
    loaded, sft = talk.answerer.run, talk.answerer.run.config.sft
    steps = f" in {talk.sampling.steps} steps" if talk.sampling.steps else ""
    lines = [
        f"{loaded.folder.name}, step {loaded.step}, on {loaded.device}: answers of up to "
        f"{talk.length} tokens{steps}; /help lists commands"
    ]
    if not talk.answerer.is_tuned:
        lines.append("the run was never fine-tuned on prompts: it just continues your text")
    else:
        kind = "conversations" if talk.answerer.knows_turns else "single prompts"
        lines.append(f"fine-tuned on {kind} (template {sft.template})")
    if talk.has_memory:
        lines.append("what was said before is part of the prompt")
    else:
        lines.append("each line is asked alone")
    if talk.system and not talk.answerer.knows_turns:
        lines.append("the run has seen no system texts; this one is written before your line")
    return lines


def _at_a_terminal(chat: Chat) -> None:
    """Read lines until Ctrl-D, Ctrl-C or /quit; a line that ends with \\ goes on in the next."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (arrow keys and history)
    try:
        while chat.take(_read()):
            pass
    except (EOFError, KeyboardInterrupt):
        chat.say("")


def _read() -> str:
    line = _input("> ")
    while line.endswith("\\"):
        line = line[:-1] + "\n" + _input(". ")
    return line


def _input(prompt: str) -> str:
    if sys.stdout.isatty():
        return input(prompt)
    sys.stderr.write(prompt)  # answers go to a file: the prompt does not belong there
    sys.stderr.flush()
    return input()


class Chat:
    """Lines in, answers and notes out."""

    def __init__(self, talk: Talk, console: Console, fps: float) -> None:
        self.talk, self.console, self.fps = talk, console, fps
        self.is_live = sys.stdin.isatty()

    def say(self, text: str) -> None:
        """A note, beside the answers."""
        from rich.text import Text

        from bellmask.utils.console import visible_lines

        self.console.print(Text(visible_lines(text), style="dim"), soft_wrap=True)

    def take(self, line: str) -> bool:
        """Answer a line or do what its command says; False when it is over."""
        if not line.strip():
            if not self.is_live:
                print()  # line n of the output belongs to line n of the input
            return True
        try:
            command = re.fullmatch(r"/([a-z]+)(?:\s+(.*))?", line.strip(), re.DOTALL)
            if command and not line[0].isspace():
                return self._obey(command[1], (command[2] or "").strip())
            self._answer(lambda on_step: self.talk.ask(line, on_step))
        except UserError as error:
            if not self.is_live:
                raise
            self.say(f"error: {error}")
        return True

    def _obey(self, name: str, rest: str) -> bool:
        command = look_up("command", f"/{name}", COMMANDS)
        if rest and not (command.needs or command.takes):
            raise UserError(f"/{name} takes nothing, got {rest!r}")
        if command.needs and not rest:
            raise UserError(f"/{name} needs {command.needs}: /{name} {command.example}")
        return command.do(self, rest) is not False

    def retry(self) -> None:
        """Another answer to the last question."""
        self._answer(self.talk.retry)

    def _answer(self, ask: Callable[[OnStep | None], Answer]) -> None:
        from bellmask.report.chat_view import AnswerView
        from bellmask.utils.console import visible, visible_lines

        view = AnswerView(self.talk.answerer.run.tokenizer, fps=self.fps, console=self.console)
        start = time.monotonic()
        try:
            with view if self.is_live else contextlib.nullcontext():
                answer = ask(view if self.is_live else None)
        except KeyboardInterrupt:
            if not self.is_live:
                raise
            self.say("stopped; /retry asks again")
            return
        seconds = time.monotonic() - start - view.seconds_waited
        text = visible_lines(answer.text) if self.is_live else visible(answer.text)
        print(text, flush=True)
        if answer.is_cut:
            self.say("note: the prompt was too long; its oldest tokens were dropped")
        if self.is_live and view.step is not None:
            speed = answer.num_tokens / max(seconds, 1e-9)
            self.say(
                f"{view.step.num_steps} steps, {view.step.num_calls} calls, {seconds:.2f} s, "
                f"{answer.num_tokens} tokens, {speed:.0f} tokens/s"
            )
