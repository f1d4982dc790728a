"""How an example becomes text: plain, or a chat with marked roles.

plain   one message: itself, and "Answer:" on a line of its own unless it ends so (App. C.1).
        Several: "role: text" paragraphs, then "assistant:".
chat    the tokenizer's own chat template (a Hugging Face one, in Jinja) where it is given, else
        "role: text" lines, then "assistant:", which any tokenizer can write.
vicuna  Vicuna 1.5's: a sentence about the chat (or the system message), "USER: ... ASSISTANT:".
auto    chat for conversations (examples that came with roles), plain for the rest.

The response follows after a space, unless the prompt ends with white space. It ends with EOS, never
with a template's own end mark. Special tokens that a template writes ("<|im_start|>") become
their ids; the same characters inside a message are plain text. A template is untrusted code:
it runs in Jinja's sandbox, without a clock, so that rows do not depend on the day.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from typing import Any, Literal, NoReturn

import numpy as np

from bellmask.data.readers import Source
from bellmask.data.tokenizers import Ids, Tokenizer
from bellmask.utils.errors import UserError
from bellmask.utils.files import sanitize
from bellmask.utils.libraries import first_line

# An example for fine-tuning: the prompt (given) and the response (learned).

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True)
class Message:
    """A message and its role."""

    role: Role
    text: str


@dataclass(frozen=True)
class Example:
    """Messages of which the last, the assistant's, is the response; all before is the prompt."""

    messages: tuple[Message, ...]
    is_conversation: bool = False
    """The example came with roles, which ``--sft.template auto`` marks."""

    @staticmethod
    def plain(prompt: str, response: str) -> Example:
        """A prompt and its response, without roles of their own."""
        return Example((Message("user", prompt), Message("assistant", response)))

    @property
    def prompt_messages(self) -> tuple[Message, ...]:
        return self.messages[:-1]

    @property
    def is_first_answer(self) -> bool:
        """True if the assistant says nothing before its response."""
        return all(message.role != "assistant" for message in self.prompt_messages)

    @property
    def response(self) -> str:
        """The text to be learned."""
        return self.messages[-1].text


Numbered = tuple[int, Example]
"""(document, example). A conversation's turns are one document and never split between training and
validation."""


ExampleSource = Source[Numbered]
"""Its ``read`` takes a Counter for used and dropped examples, with reasons."""


# How messages become text.

Kind = Literal["auto", "plain", "chat", "vicuna"]
ANSWER = "Answer:"
VICUNA = files("bellmask.data").joinpath("vicuna.jinja").read_text(encoding="utf-8").rstrip("\n")
"""Its sentence about the chat, one space between parts, EOS after an answer."""


@dataclass(frozen=True)
class PromptPart:
    """A part of a prompt: written by the template, or a message's text."""

    text: str
    is_template: bool = False


@dataclass(frozen=True)
class Template:
    """Turns messages into a prompt and a response; see the top of this file."""

    kind: Kind = "auto"
    source: str | None = None
    """A Hugging Face chat template."""
    bos_token: str = ""
    eos_token: str = ""

    @property
    def identity(self) -> str:
        """Everything that determines the text, for cache keys."""
        return json.dumps(["templates-2", self.kind, self.source, self.bos_token, self.eos_token])

    def parts(self, messages: Sequence[Message], is_conversation: bool) -> tuple[PromptPart, ...]:
        """The prompt in parts: text written by the template, and text of messages."""
        is_chat = self.kind in ("chat", "vicuna") or (self.kind == "auto" and is_conversation)
        if is_chat and self.source is not None:
            return self._rendered(messages)
        if not is_chat and len(messages) == 1:
            return (PromptPart(ask_plainly(messages[0].text)),)
        gap = "\n" if is_chat else "\n\n"
        lines = [f"{message.role}: {message.text.strip()}{gap}" for message in messages]
        return (PromptPart("".join(lines) + "assistant:"),)

    def _rendered(self, messages: Sequence[Message]) -> tuple[PromptPart, ...]:
        """Apply the chat template to stand-ins for the messages, to find its own text.

        If a template inspects messages and treats stand-ins differently, all text counts as its
        own.
        """
        texts = [message.text.strip() for message in messages]
        marks = [f"\ue000{number}\ue001" for number in range(len(messages))]
        whole = self._render(messages, texts)
        pieces = re.split("\ue000(\\d+)\ue001", self._render(messages, marks))
        parts = [
            PromptPart(texts[int(piece)]) if place % 2 else PromptPart(piece, is_template=True)
            for place, piece in enumerate(pieces)
        ]
        kept = tuple(part for part in parts if part.text)
        return kept if join(kept) == whole else (PromptPart(whole, is_template=True),)

    def _render(self, messages: Sequence[Message], texts: Sequence[str]) -> str:
        said = [{"role": m.role, "content": text} for m, text in zip(messages, texts, strict=True)]
        signs = {"bos_token": self.bos_token, "eos_token": self.eos_token}
        template = self._compiled
        try:
            return sanitize(template.render(messages=said, add_generation_prompt=True, **signs))
        except Exception as error:
            roles = ", ".join(message.role for message in messages)
            raise UserError(
                f"the tokenizer's chat template fails on the roles {roles}: {first_line(error)}; "
                "use --sft.template plain, or a tokenizer without a chat template"
            ) from None

    @cached_property
    def _compiled(self) -> Any:
        import jinja2.ext
        import jinja2.sandbox

        rules = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        rules.filters["tojson"] = lambda value, **options: json.dumps(
            value, **{"ensure_ascii": False, **options}
        )
        rules.globals["raise_exception"] = _refuse
        try:
            return rules.from_string(self.source or "")
        except Exception as error:  # not Jinja, nested too deeply, or not even text
            found = f"the tokenizer's chat template is not valid: {first_line(error)}"
            raise UserError(f"{found}; use --sft.template plain") from None


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)


def ask_plainly(prompt: str) -> str:
    """The prompt, ending with ``Answer:``; an empty one stays empty."""
    if not prompt.strip() or prompt.rstrip().endswith(ANSWER):
        return prompt
    return f"{prompt.rstrip()}\n{ANSWER}"


def join(parts: Sequence[PromptPart]) -> str:
    return "".join(part.text for part in parts)


def response_after(prompt: str, response: str) -> str:
    """The response with a space in front, unless the prompt ends with white space or is empty."""
    is_apart = not prompt or prompt[-1].isspace()
    return response.strip() if is_apart else f" {response.strip()}"


# Prompts and responses as tokens.


def make_template(kind: Kind, tokenizer: Tokenizer, chat_template: str | None = None) -> Template:
    """The template for these options and the tokenizer's chat template, if any."""
    if kind == "vicuna":
        chat_template = VICUNA
    if chat_template is None or kind == "plain":
        return Template(kind)
    names = {number: name for name, number in tokenizer.special_ids.items()}
    bos, eos = (names.get(number, "") for number in (tokenizer.bos_id, tokenizer.eos_id))
    return Template(kind, chat_template, bos, eos)


class PromptEncoder:
    """Prompts in parts → ids, with the special tokens that a template wrote."""

    def __init__(self, tokenizer: Tokenizer, template: Template) -> None:
        self.tokenizer, self.template = tokenizer, template
        self._specials = tokenizer.special_ids if template.source is not None else {}
        names = sorted(self._specials, key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(map(re.escape, names)) or '(?!)'})")

    def encode(self, prompts: Sequence[Sequence[PromptPart]]) -> list[Ids]:
        """Ids of each prompt; text between two specials is encoded as a whole."""
        split = [self._split(prompt) for prompt in prompts]
        texts = [piece for pieces in split for piece in pieces if isinstance(piece, str)]
        encoded = iter(self.tokenizer.encode_batch(texts))
        nothing = np.empty(0, dtype=np.int64)
        return [
            np.concatenate(
                [nothing, *(next(encoded) if isinstance(p, str) else np.array([p]) for p in pieces)]
            )
            for pieces in split
        ]

    def encode_one(self, messages: Sequence[Message], is_conversation: bool = True) -> Ids:
        """Ids of a prompt to be answered."""
        return self.encode([self.template.parts(messages, is_conversation)])[0]

    def _split(self, parts: Sequence[PromptPart]) -> list[str | int]:
        """Texts and ids of special tokens, in order."""
        found: list[str | int] = [""]
        for part in parts:
            pieces = self._pattern.split(part.text) if part.is_template else [part.text]
            for place, piece in enumerate(pieces):
                if place % 2:
                    found += [self._specials[piece], ""]
                else:
                    found[-1] += piece  # type: ignore[operator]
        return [piece for piece in found if piece != ""]
