# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""What the kernels of `gapless.model.products.few_tokens` do with a product."""

from __future__ import annotations

import triton
import triton.language as tl

PLAIN = tl.constexpr(0)  # scaled, bias added
RESIDUAL = tl.constexpr(1)  # bias added, added to the residual; with weight and squares for the norm that follows
GLU = tl.constexpr(2)  # scaled, silu(first half) * second half
OPS = {"plain": 0, "residual": 1, "glu": 2}


@triton.jit
def _silu(gate, up, dtype: tl.constexpr):
    """Rounded where the modules round."""
    gate = gate.to(dtype).to(tl.float32)
    up = up.to(dtype).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    return (silu * up).to(dtype)
