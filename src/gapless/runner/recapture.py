"""The graphs once more, when a sleep has dropped them: every kernel is compiled by then. See `gapless.runner.sleep`."""

from __future__ import annotations

import numpy as np

from gapless.batch.plan import StepPlan
from gapless.batch.row_params import Feature
from gapless.batch.slot_layout import slot_layout
from gapless.runner.graphs import Graphs
from gapless.runner.keys import Key

NO_STEP = StepPlan(
    step=-1,
    rows=np.zeros(0, np.int32),
    starts=np.zeros(0, np.int32),
    query_lens=np.zeros(0, np.int32),
    flags=np.zeros(0, np.int32),
    input_ids=np.zeros(0, np.int32),
    carry=np.zeros(0, np.bool_),
    updates=np.zeros((0, 2), np.int32),
    features=Feature.GREEDY,
)
"""Nothing but padding: it names the null row and the null block alone."""


def recapture(graphs: Graphs) -> None:
    """What was captured at start. No step is in flight."""
    graphs.bind()
    if graphs.shapes.capture:
        keys = graphs.keys()
        warm(graphs, keys)
        graphs.capture(keys, run=False)


def warm(graphs: Graphs, keys: list[Key]) -> None:
    """Run the smallest key of each kind without a token. Libraries keep a handle and a workspace for each thread that
    calls them, which a capture may not be the first to ask for; and this thread has only replayed.

    Not the masks: they call no library, and their region of the slot still holds those of an earlier step, which would
    be written to rows that others have by now.
    """
    slot, device = graphs.slots[0], graphs.device
    kinds = [key for key in keys if key.part != "mask"]
    smallest = {(key.part, key.decode_only, key.lora, key.query_width, key.max_query_len): key for key in kinds}
    with device.thread_context():
        for key in smallest.values():
            slot.fill(NO_STEP, slot_layout(key.num_tokens, key.num_seqs), graphs.layout.null_row)
            slot.device.copy_(slot.host)
            graphs.build(key, slot)()
        device.synchronize()
