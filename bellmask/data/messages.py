"""An example for fine-tuning: what is given (the prompt) and what is learned (the response)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True)
class Message:
    """What one side said."""

    role: Role
    text: str


@dataclass(frozen=True)
class Example:
    """Messages of which the last, the assistant's, is the response; all before is the prompt."""

    messages: tuple[Message, ...]
    is_conversation: bool = False
    """It came with roles, so that ``--sft.template auto`` marks them."""

    def __post_init__(self) -> None:
        if len(self.messages) < 2 or self.messages[-1].role != "assistant":
            raise ValueError("an example ends with what the assistant says to something")

    @staticmethod
    def plain(prompt: str, response: str) -> Example:
        """A prompt and its response, without roles of their own."""
        return Example((Message("user", prompt), Message("assistant", response)))

    @property
    def prompt_messages(self) -> tuple[Message, ...]:
        """All but the response."""
        return self.messages[:-1]

    @property
    def response(self) -> str:
        """The text to be learned."""
        return self.messages[-1].text


def turns(messages: Sequence[Message]) -> tuple[Example, ...]:
    """A conversation as one example per assistant turn, what came before as its prompt."""
    return tuple(
        Example(tuple(messages[: place + 1]), is_conversation=True)
        for place, message in enumerate(messages)
        if message.role == "assistant" and place > 0
    )


Numbered = tuple[int, Example]
"""(document, example). A conversation's turns, or questions on one story, are one document: they
are never spread over training and validation."""


@dataclass(frozen=True)
class ExampleSource:
    """Examples, and where they come from; read any number of times, the same each time."""

    name: str
    identity: str
    """Hash of the content, or of what pins it (a commit); changes when examples would."""
    read: Callable[[Counter[str]], Iterator[Numbered]]
    """Reads from the start; counts what was taken and what was left out, and why."""
    origin: dict[str, str]
    """For the data card: file or repository → SHA-256 or commit."""

    def __iter__(self) -> Iterator[Example]:
        return (example for _, example in self.read(Counter()))
