"""Tests of Triton kernels without a GPU: the file once more, in a child process that interprets the kernels.

Triton chooses when the kernels are defined, so it cannot be asked in a process that may have imported them already.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

CHILD = os.environ.get("GAPLESS_TRITON_TEST_CHILD") == "1"


def convert_fp8_as_a_gpu_does() -> None:
    """The interpreter of Triton 3.9 loses the carry when it rounds to e4m3, and its subnormals; torch does not."""
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    inner: Any = interpreter._convert_float
    dtypes = {tl.float32: torch.float32, tl.float16: torch.float16, tl.bfloat16: torch.bfloat16}
    dtypes[tl.float8e4nv] = torch.float8_e4m3fn

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if tl.float8e4nv not in (source, target) or not {source, target} <= dtypes.keys():
            return inner(data, source, target, rounding)
        raw = torch.from_numpy(np.frombuffer(data.tobytes(), dtype=np.uint8).copy())
        made = raw.view(dtypes[source]).to(dtypes[target]).view(torch.uint8).numpy()
        return np.frombuffer(made.tobytes(), dtype=f"uint{target.primitive_bitwidth}").reshape(data.shape)

    interpreter._convert_float = convert


def run_in_the_interpreter(file: str, *options: str) -> None:
    """Run ``file``, with more ``options`` of pytest; some tests must pass, and none may fail."""
    env = dict(os.environ, TRITON_INTERPRET="1", GAPLESS_TRITON_TEST_CHILD="1")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *options, file]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    print(done.stdout[-6000:], done.stderr[-2000:])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert " passed" in done.stdout


if CHILD:
    convert_fp8_as_a_gpu_does()
