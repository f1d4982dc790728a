"""Keys and values of positions that were seen before, so that later calls need not repeat them.

Causal models keep every call's: exact. For a bidirectional one the keys and values of a prefix
change a little whenever a later token does; keeping those of the prefix is exact in the first layer
and an approximation above it.

B batch, L length, H heads, E head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class KeyValues:
    """Layer by layer, what the positions before a call's own have to offer."""

    keep: int | None = None
    """Positions of the first call to keep, and nothing later; None keeps all of every call."""
    layers: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def extend(self, layer: int, k_BLHE: Tensor, v_BLHE: Tensor) -> tuple[Tensor, Tensor]:
        """The kept keys and values followed by a call's own."""
        if layer == len(self.layers):
            self.layers.append((k_BLHE[:, : self.keep], v_BLHE[:, : self.keep]))
            return k_BLHE, v_BLHE
        past_k, past_v = self.layers[layer]
        whole = torch.cat([past_k, k_BLHE], dim=1), torch.cat([past_v, v_BLHE], dim=1)
        if self.keep is None:
            self.layers[layer] = whole
        return whole

    def select(self, rows: Tensor) -> KeyValues:
        """Those of some rows of the batch."""
        picked = [(k.index_select(0, rows), v.index_select(0, rows)) for k, v in self.layers]
        return KeyValues(self.keep, picked)
