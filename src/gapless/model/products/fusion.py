# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""What the kernels of `gapless.model.products.few_tokens` do with a product."""

from __future__ import annotations

import triton
import triton.language as tl

from gapless.model.ops.triton import _act

PLAIN = tl.constexpr(0)  # scaled, bias added
RESIDUAL = tl.constexpr(1)  # bias added, added to the residual; with weight and squares for the norm that follows
GLU = tl.constexpr(2)  # scaled, act(first half) * second half
OPS = {"plain": 0, "residual": 1, "glu": 2}


@triton.jit
def _gate(gate, up, ACT: tl.constexpr, dtype: tl.constexpr):
    """Rounded where the modules round."""
    gate = gate.to(dtype).to(tl.float32)
    up = up.to(dtype).to(tl.float32)
    return (_act(gate, ACT).to(dtype).to(tl.float32) * up).to(dtype)
