"""Tests of Triton kernels without a GPU: the file once more, in a child process that interprets the kernels.

Triton chooses when the kernels are defined, so it cannot be asked in a process that may have imported them already.
"""

from __future__ import annotations

import os
import subprocess
import sys

CHILD = os.environ.get("GAPLESS_TRITON_TEST_CHILD") == "1"


def run_in_the_interpreter(file: str, *options: str) -> None:
    """Run ``file``, with more ``options`` of pytest; some tests must pass, and none may fail."""
    env = dict(os.environ, TRITON_INTERPRET="1", GAPLESS_TRITON_TEST_CHILD="1")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *options, file]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    print(done.stdout[-6000:], done.stderr[-2000:])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert " passed" in done.stdout
