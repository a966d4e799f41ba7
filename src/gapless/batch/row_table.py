"""RowTable: the host's side of the persistent rows, as arrays over all rows, so that a step costs a few numpy calls
and no Python object per token.

Touched by the loop's thread only. For a row in use, as half-open ranges of positions:

    [0, prompt_len)   the prompt
    [0, known)        tokens that the host knows; ``tokens[row, :known]`` holds them
    [0, total)        tokens that exist, counting those that steps in flight will draw; known <= total
    [0, computed)     positions whose key and value some launched step has written or will write; computed <= total
    [0, limit)        where the request ends by length; total <= limit

A row is ready while computed < total < limit, or while its prompt is not computed yet. Planning reads these counts and
never a token, so it never waits for one.
"""

from __future__ import annotations

import numpy as np

from gapless.batch.row_layout import I32, RowLayout
from gapless.batch.row_params import needs_prompt_on_device, row_features
from gapless.batch.row_updates import changes, request_updates
from gapless.request.request import Request
from gapless.request.sampling_params import MAX_STOP_TOKEN_IDS

NEVER = np.iinfo(np.int32).max
"""In place of a count that is to be reached: it never is."""
ID_BITS = 42
"""Bits of a rank that hold the request's id; those above hold its priority."""


class RowTable:
    """Arrays indexed by row. A row's blocks are in `gapless.cache.block_tables.BlockTables`."""

    def __init__(self, layout: RowLayout) -> None:
        rows = layout.max_num_seqs
        self.layout = layout
        self.requests: list[Request | None] = [None] * rows
        self.prompt_len = np.zeros(rows, np.int32)
        self.known = np.zeros(rows, np.int32)
        self.total = np.zeros(rows, np.int32)
        self.computed = np.zeros(rows, np.int32)
        self.limit = np.zeros(rows, np.int32)
        self.min_end = np.zeros(rows, np.int32)
        self.in_flight = np.zeros(rows, np.int32)  # launched steps that name the row and are not committed
        self.blocks_hashed = np.zeros(rows, np.int32)  # [0, blocks_hashed) are in ``hashes`` and published
        self.finished = np.zeros(rows, np.bool_)
        self.streaming = np.zeros(rows, np.bool_)
        self.features = np.zeros(rows, np.int32)
        self.lora = np.zeros(rows, np.bool_)  # the row runs with an adapter
        self.to_score = np.zeros(rows, np.int32)  # [0, to_score): positions of the prompt whose next token is scored
        self.scored = np.zeros(rows, np.int32)  # [0, scored) are, in launched steps
        self.constrained = np.zeros(rows, np.bool_)  # a grammar restricts its tokens
        self.needs_prompt = np.zeros(rows, np.bool_)  # the sampler reads the prompt in the token table
        self.ids = np.zeros(rows, np.int64)
        self.priority = np.zeros(rows, np.int64)
        self.ranks = np.zeros(rows, np.int64)  # who goes first: by priority, then by id
        self.cache_keys: list[bytes] = [b""] * rows
        self.preemptions = np.zeros(rows, np.int32)
        self.cached = np.zeros(rows, np.int32)  # tokens of the prompt that a prefix held at the first start
        self.first_token_time = np.zeros(rows, np.float64)
        self.stop_ids = np.full((rows, MAX_STOP_TOKEN_IDS), -1, np.int32)
        self.tokens = np.zeros((rows, layout.max_model_len), np.int32)
        self.hashes: list[list[bytes]] = [[] for _ in range(rows)]
        self._free = list(range(rows - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Rows that no request has."""
        return len(self._free)

    def assign(self, request: Request) -> int:
        """Give a free row to ``request``."""
        row = self._free.pop()
        prompt = request.prompt_token_ids
        n = len(prompt)
        self.requests[row] = request
        self.ids[row] = request.id
        self.priority[row] = request.priority
        self.ranks[row] = (request.priority << ID_BITS) + request.id
        self.cache_keys[row] = request.cache_key
        self.tokens[row, :n] = prompt
        self.prompt_len[row] = self.known[row] = self.total[row] = n
        self.limit[row] = n + request.max_tokens
        self.min_end[row] = n + request.params.min_tokens
        self.computed[row] = self.in_flight[row] = self.preemptions[row] = 0
        self.blocks_hashed[row] = self.cached[row] = 0
        self.finished[row] = False
        self.streaming[row] = request.streaming
        self.features[row] = int(row_features(request))
        self.lora[row] = request.lora is not None
        self.to_score[row] = 0 if request.prompt_logprobs is None else n - 1
        self.scored[row] = 0
        self.constrained[row] = request.grammar is not None
        self.needs_prompt[row] = needs_prompt_on_device(request)
        self.stop_ids[row] = -1
        self.stop_ids[row, : len(request.stop_token_ids)] = request.stop_token_ids
        self.hashes[row] = request.block_hashes
        return row

    def release(self, row: int) -> None:
        """Take the row back. No step in flight may name it."""
        if self.in_flight[row]:
            raise RuntimeError(f"row {row} is released while {self.in_flight[row]} steps in flight name it")
        self.requests[row] = None
        self._free.append(row)

    def param_updates(self, row: int) -> I32:
        """Changes ``[n, 2]`` that bring everything that the row's request asks of the sampler to the device."""
        request = self.requests[row]
        if request is None:
            raise RuntimeError(f"row {row} has no request")
        return request_updates(request, self.layout, row)

    def token_updates(self, row: int, first: int, end: int) -> I32:
        """Changes ``[n, 2]`` that bring the row's tokens [first, end), all of them known, to the device."""
        return changes(row * self.layout.max_model_len + first, self.tokens[row, first:end])
