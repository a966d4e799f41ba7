"""PromptEmbeds: the embeddings that a request brings for tokens of its prompt. Plain data; no torch.

Such a token has no id. In `gapless.request.request.Request` its place holds `OVERRIDDEN`; from the request's start on,
the row has ``-1 - r`` there, r being the row of the table on the device that holds its embedding. What the prefix cache
goes by is neither, but the digest of the embedding.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]

OVERRIDDEN = -1


@dataclass(frozen=True, slots=True, eq=False)
class PromptEmbeds:
    """Of n tokens.

    Attributes:
        positions: int32 ``[n]``, rising.
        data: ``[n, bytes]``, the embeddings in the model's dtype.
        digests: of each, 16 bytes.
    """

    positions: I32
    data: U8
    digests: list[bytes] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        made = [hashlib.blake2b(row, digest_size=16, person=b"prompt_embeds").digest() for row in self.data]
        object.__setattr__(self, "digests", made)

    def __len__(self) -> int:
        return len(self.positions)

    def over(self, token_ids: I32) -> I32:
        """A prompt with `OVERRIDDEN` in place of these tokens."""
        ids = token_ids.copy()
        ids[self.positions] = OVERRIDDEN
        return ids

    def digests_of(self, first: int, end: int) -> bytes:
        """Of the tokens at the positions [first, end)."""
        lo, hi = np.searchsorted(self.positions, (first, end))
        return b"".join(self.digests[lo:hi])
