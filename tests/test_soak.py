"""The soak command for a minute; GAPLESS_SOAK_SECONDS=1800 for longer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SECONDS = int(os.environ.get("GAPLESS_SOAK_SECONDS", "60"))
COMMAND = Path(__file__).parent.parent / "benchmarks" / "soak.py"


@pytest.mark.timeout(SECONDS + 240)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads memory and open files from /proc")
def test_a_minute_of_random_traffic(tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    words = [sys.executable, str(COMMAND), "--seconds", str(SECONDS), "--json", str(target)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS + 200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(target.read_text(encoding="utf-8"))
    assert report["ok"]
    assert report["samples"] >= 4
    for name in ("canaries", "aborted", "cancelled", "left", "finished", "refused"):
        assert report["requests"][name] > 5
    assert report["preemptions"] > 0
    assert report["overrun_tokens"] > 0
