"""bellmask: train masked diffusion language models, fast.

The names in ``__init__.pyi`` are loaded on first use, so that ``import bellmask`` costs next to
nothing, has no side effects and needs no optional package.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.2.0"

with open(f"{__file__}i", encoding="utf-8") as _stub:  # "from HOME import NAME as NAME"
    _HOMES = {words[3]: words[1] for words in map(str.split, _stub) if words[:1] == ["from"]}

__all__ = ["__version__", *sorted(_HOMES)]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'bellmask' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
