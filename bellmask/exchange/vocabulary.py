"""Which row of another project's embedding belongs to which of our tokens.

Ours has the mask last, and may have a pad that the tokenizer itself has not. Theirs has the mask
where the tokenizer has it (BERT's is 103) or, where it has none, right after all tokens (GPT-2).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bellmask.data.tokenizers import FastTokenizer, Ids, Tokenizer


@dataclass(frozen=True)
class IdMap:
    """Their ids of our tokens."""

    tokens_V: Ids
    """Of each token that can be predicted; -1 where they have no such row."""
    mask: int
    size: int
    """Their rows, the mask's included."""

    @property
    def ours(self) -> Ids:
        """Our ids of the rows that both have, without the mask."""
        return np.flatnonzero(self.tokens_V >= 0)

    @property
    def theirs(self) -> Ids:
        """Their ids of the same rows, in the same order."""
        return self.tokens_V[self.ours]

    def completed(self) -> Ids:
        """An id for each of our V + 1 rows: theirs, and new ones at the end for what they lack."""
        ids = np.append(self.tokens_V, self.mask)
        is_new = ids < 0
        ids[is_new] = self.size + np.arange(is_new.sum())
        return ids


def map_ids(tokenizer: Tokenizer) -> IdMap:
    """The map for a tokenizer: mdlm's rule of where the mask is."""
    if not isinstance(tokenizer, FastTokenizer):
        num_tokens = tokenizer.num_tokens
        return IdMap(np.arange(num_tokens), num_tokens, num_tokens + 1)
    *tokens, mask = tokenizer.original_ids.tolist()
    size = max(*tokens, mask) + 1
    if mask < 0:
        mask, size = size, size + 1
    return IdMap(np.array(tokens, dtype=np.int64), mask, size)
