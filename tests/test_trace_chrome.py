"""Reading traces: any chunking gives what ``json`` gives; what is broken is said."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.trace import chrome
from gapless.trace.chrome import TraceError, read_events
from traces import synchronous

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
values = st.recursive(scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=4), v, max_size=3))
events = st.lists(st.dictionaries(st.text(max_size=6), values, max_size=4), max_size=8)


class Drip(io.BytesIO):
    """Gives a few bytes at a time, whatever is asked for."""

    def __init__(self, data: bytes, most: int) -> None:
        super().__init__(data)
        self.most = most

    def read(self, size: int | None = -1) -> bytes:
        return super().read(self.most)


@settings(max_examples=80, deadline=None)
@given(events, st.integers(1, 40), st.sampled_from([None, 0, 2]), st.booleans(), st.integers())
def test_any_chunking(made: list[dict[str, object]], most: int, indent: int | None, bare: bool, number: int) -> None:
    whole = made if bare else {"n": number, "x": {"traceEvents": [1]}, "traceEvents": made, "after": {}}
    data = json.dumps(whole, indent=indent, ensure_ascii=False).encode("utf-8", "surrogatepass")
    try:
        data.decode()
    except UnicodeDecodeError:
        return
    assert list(chrome._Scanner(Drip(data, most)).events()) == made


def test_plain_and_gzip(tmp_path: Path) -> None:
    trace = synchronous()
    for name in ("a.json", "a.json.gz"):
        assert list(read_events(trace.write(tmp_path / name))) == trace.events


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"hello", "neither"),
        (b"", "too soon"),
        (b'{"a": 1}', "no list traceEvents"),
        (b'{"traceEvents": 3}', "no list"),
        (b'{"traceEvents": [{"ph": "X"', "too soon"),
        (b'{"traceEvents": [{"ph" "X"}]}', "broken"),
        (b'{"traceEvents" [', "expected"),
        (gzip.compress(b'{"traceEvents": []}', mtime=0)[:-9], "bad.json"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=words) as caught:
        list(read_events(path))
    assert "bad.json" in str(caught.value)


def test_memory_stays_small(tmp_path: Path) -> None:
    """A file of 60 MB, read in a process of its own, within a few chunks of memory."""
    path = tmp_path / "large.json"
    event = json.dumps({"ph": "X", "cat": "cpu_op", "name": "aten::mm" * 20, "ts": 1.5, "args": {"a": [1] * 40}})
    with path.open("w") as file:
        file.write('{"traceEvents": [')
        file.write(",".join([event] * 150_000))
        file.write("]}")
    code = (
        "import resource, sys; from pathlib import Path; from gapless.trace.chrome import read_events; "
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; before = peak(); "
        "n = sum(1 for _ in read_events(Path(sys.argv[1]))); print(n, peak() - before)"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True, timeout=120)
    count, grown = map(int, done.stdout.split())
    assert count == 150_000
    assert grown * (1 if sys.platform != "darwin" else 1 / 1024) < 100_000  # kilobytes
