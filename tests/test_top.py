"""`gapless top`: readings of a server, and frames."""

from __future__ import annotations

import functools
import io
import os
import pty
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from gapless.cli import main
from gapless.server.top.frame import frame, scaled, seconds
from gapless.server.top.reading import Difference, Reading, parse, percentile

LABELS = 'model_name="tiny",engine="0"'
BOUNDS = ("0.001", "0.01", "0.1", "+Inf")


def metrics(scale: float, running: int = 3, counts: tuple[int, ...] = (0, 50, 99, 100)) -> str:
    """A server's text after ``scale`` times the same work."""
    lines = ["# HELP gapless:steps_total Steps.", "# TYPE gapless:steps_total counter"]
    for name, value in (
        ("steps_total", 100), ("gpu_busy_seconds_total", 0.9), ("generation_tokens_total", 800),
        ("prompt_tokens_total", 400), ("overrun_tokens_total", 8), ("prefix_cache_queries_total", 400),
        ("prefix_cache_hits_total", 100), ("gpu_copies_total", 200), ("estimated_flops_per_gpu_total", 5.45e12),
        ("estimated_read_bytes_per_gpu_total", 321e9), ("estimated_write_bytes_per_gpu_total", 1e6),
        ("num_preemptions_total", 0), ("admission_rejections_total", 2),
    ):  # fmt: skip
        lines.append(f"gapless:{name}{{{LABELS}}} {value * scale}")
    for cause, value in (("host", 0.025), ("no_work", 0.075)):
        lines.append(f'gapless:gpu_idle_seconds_total{{{LABELS},cause="{cause}"}} {value * scale}')
    for reason, value in (("stop", 4), ("length", 0)):
        lines.append(f'gapless:request_success_total{{{LABELS},finished_reason="{reason}"}} {value * scale}')
    for stage in ("receive", "schedule", "launch", "wait", "commit", "publish"):
        lines.append(f'gapless:step_host_seconds_total{{{LABELS},stage="{stage}"}} {0.01 * scale}')
    for name, value in (("num_requests_running", running), ("num_requests_waiting", 1), ("inflight_steps", 2)):
        lines.append(f"gapless:{name}{{{LABELS}}} {value}")
    lines.append(f"gapless:kv_cache_usage_perc{{{LABELS}}} 0.5")
    for bound, count in zip(BOUNDS, counts, strict=True):
        lines.append(f'gapless:time_to_first_token_seconds_bucket{{{LABELS},le="{bound}"}} {count * scale}')
    lines.append(f"gapless:time_to_first_token_seconds_sum{{{LABELS}}} {2 * scale}")
    lines.append(f"gapless:time_to_first_token_seconds_count{{{LABELS}}} {100 * scale}")
    return "\n".join(lines) + "\n"


def change(before: str, now: str, seconds: float = 1.0) -> Difference:
    return Difference(Reading.of(5.0, before), Reading.of(5.0 + seconds, now))


# ---- the text format --------------------------------------------------------------------------------------------


def test_samples_and_labels() -> None:
    text = '# HELP a x\na 1\nb{x="1",y="a\\"b\\\\\\n"} 2.5e3 1700000000\nb{x="2",} NaN\nc{le="+Inf"} +Inf\n\n'
    found = parse(text)
    assert found["a"] == [({}, 1.0)]
    assert found["b"][0] == ({"x": "1", "y": 'a"b\\\n'}, 2500.0)
    assert np.isnan(found["b"][1][1])
    assert found["c"] == [({"le": "+Inf"}, float("inf"))]


@pytest.mark.parametrize("line", ["a", "a{x=1} 2", 'a{x="1} 2', "{} 2", "a b c d", "<html>"])
def test_what_is_not_the_format(line: str) -> None:
    with pytest.raises(ValueError, match="not"):
        parse(line)


def test_other_metrics_are_refused() -> None:
    with pytest.raises(ValueError, match="language models"):
        Reading.of(0.0, "node_load1 3\n")


def test_percentiles() -> None:
    buckets = [(1.0, 0.0), (2.0, 10.0), (4.0, 10.0), (8.0, 20.0), (float("inf"), 20.0)]
    assert percentile(buckets, 25) == 1.5
    assert percentile(buckets, 50) == 2.0
    assert percentile(buckets, 75) == 6.0
    assert percentile(buckets, 100) == 8.0
    assert percentile([(1.0, 0.0), (float("inf"), 3.0)], 50) == 1.0
    assert percentile([(1.0, 0.0), (float("inf"), 0.0)], 50) is None
    assert percentile([], 50) is None


def test_percentiles_lie_in_their_bucket() -> None:
    rng = random.Random(7)
    bounds = [0.1, 0.5, 1.0, 2.0, 5.0]
    values = [rng.uniform(0, 5) for _ in range(500)]
    buckets = [(b, float(sum(v <= b for v in values))) for b in bounds] + [(float("inf"), 500.0)]
    for p in (1, 10, 50, 90, 99):
        exact, found = float(np.percentile(values, p)), percentile(buckets, p)
        place = int(np.searchsorted(bounds, exact))
        assert ([0.0, *bounds][place]) <= found <= bounds[place]  # type: ignore[operator]


# ---- frames -----------------------------------------------------------------------------------------------------


def drawn(change: Difference, title: list[str], width: int = 120) -> list[str]:
    console = Console(width=width, file=io.StringIO(), highlight=False, markup=False)
    console.print(frame(change, title))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def test_a_frame() -> None:
    lines = drawn(change(metrics(1), metrics(3), 2.0), ["title"])
    text = "\n".join(lines)
    assert lines[0] == "gapless top   title"
    assert f"GPU busy   90.0 %   {'━' * 18}     idle: host 2.5 %   no_work 7.5 %" in text
    assert "steps/s    100   in flight 2   overrun 1.0 % of new tokens   copies/step 2.0" in text
    assert "estimate   5.45 TFLOP/s   read 321 GB/s   written 1 MB/s" in text
    assert "running 3   waiting 1   ended per s: stop 4.0   refused per s: 2.0" in text
    assert "prompt 400   new 800" in text
    assert f"50.0 %   {'━' * 10}             prefix hits 25.0 %   preemptions/s 0.0" in text
    first = next(line for line in lines if line.startswith("first token"))
    assert first.split()[2:] == ["10", "ms", "83.5", "ms", "100", "ms", "20", "ms"]
    assert "receive 100 us" in text


def test_nothing_has_happened_yet() -> None:
    lines = drawn(change(metrics(0), metrics(0)), [])
    busy = next(line for line in lines if line.startswith("GPU busy"))
    assert busy.split() == ["GPU", "busy", "-", "idle:", "host", "-", "no_work", "-"]
    assert any("ended per s: none" in line for line in lines)
    assert "nan" not in "\n".join(lines)


def test_a_server_of_another_make() -> None:
    text = metrics(2).replace("gapless:", "vllm:")
    kept = "\n".join(line for line in text.splitlines() if "gpu_" not in line and "step" not in line) + "\n"
    lines = drawn(change(kept, kept), [])
    assert not any("GPU" in line for line in lines)
    assert any("running 3" in line for line in lines)


def test_what_the_server_says_is_no_markup() -> None:
    assert drawn(change(metrics(0), metrics(1)), ["[red]m[/red]"])[0] == "gapless top   [red]m[/red]"


def test_a_restart_in_between() -> None:
    assert change(metrics(9), metrics(1)).grown("steps_total") == 100


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140])
def test_lines_fit_the_width(width: int) -> None:
    """And nothing is lost, but in the table of latencies where it is wider than the terminal."""
    title = ["some/model", "http://127.0.0.1:8000", "12:00:00", "last 10.0 s"]
    lines = drawn(change(metrics(1), metrics(3), 2.0), title, width)
    assert max(map(len, lines)) <= width
    wide = drawn(change(metrics(1), metrics(3), 2.0), title, 1000)
    if width >= 56:
        assert sorted(" ".join(lines).split()) == sorted(" ".join(wide).split())


def test_units() -> None:
    rates = [scaled(x, "B/s") for x in (None, 0.0, 12.34, 999.4, 999.6, 2.5e9, 4.2e12, 3e15)]
    assert rates == ["-", "0 B/s", "12.3 B/s", "999 B/s", "1 kB/s", "2.5 GB/s", "4.2 TB/s", "3 PB/s"]
    assert [seconds(x) for x in (None, 0.00012, 0.0123, 12.34)] == ["-", "120 us", "12.3 ms", "12.3 s"]


# ---- the command ------------------------------------------------------------------------------------------------


class _Server:
    def __init__(self) -> None:
        self.count = 0
        self.key: str | None = None
        self.text: str | None = None
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                ok = outer.key is None or self.headers["authorization"] == f"Bearer {outer.key}"
                outer.count += 1
                body = (outer.text or metrics(outer.count)).encode()
                self.send_response(200 if ok and self.path == "/metrics" else 401)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: Any) -> None:
                pass

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()


@pytest.fixture
def server() -> Iterator[_Server]:
    own = _Server()
    yield own
    own.http.shutdown()
    own.http.server_close()


def test_once(server: _Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    server.key = "secret"
    assert main(["top", server.url, "--once", "--interval=0.01"]) == 1
    assert "HTTP 401: set GAPLESS_API_KEY" in capsys.readouterr().err
    monkeypatch.setenv("GAPLESS_API_KEY", "secret,other")
    assert main(["top", server.url.removeprefix("http://"), "--once", "--interval=0.01"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"gapless top   tiny   {server.url}")
    assert "GPU busy   90.0 %" in out
    assert "\x1b" not in out


def test_what_is_wrong_is_said(server: _Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "127.0.0.1:1", "--once"]) == 1
    assert "127.0.0.1:1/metrics" in capsys.readouterr().err
    assert main(["top", "--interval=0"]) == 2
    assert main(["top", "a", "b"]) == 2
    server.text = "<html>\n"
    assert main(["top", server.url, "--once"]) == 1
    assert "not Prometheus' text format" in capsys.readouterr().err


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs a pseudo-terminal")
def test_on_a_terminal(server: _Server) -> None:
    """Frames in place, a server that goes away, an interrupt, and the terminal as it was."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "gapless", "top", server.url, "--interval=0.05"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it
    streams = {"stdout": theirs, "stderr": theirs, "stdin": theirs}
    process = subprocess.Popen(command, env=environment, preexec_fn=heed, **streams)
    os.close(theirs)
    out = ""

    def read_until(text: str) -> None:
        nonlocal out
        end = time.monotonic() + 20
        while text not in out and time.monotonic() < end:
            out += os.read(ours, 65536).decode()
        assert text in out

    read_until("GPU busy")
    read_until("\x1b[?1049h")
    server.http.shutdown()
    server.http.server_close()
    read_until("no answer")
    process.send_signal(signal.SIGINT)
    read_until("\x1b[?1049l")
    read_until("\x1b[?25h")
    assert process.wait(10) == 0
    os.close(ours)


def test_without_its_extra(
    server: _Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "gapless.server.top.watch", raising=False)
    monkeypatch.setitem(sys.modules, "rich.live", None)
    assert main(["top", server.url, "--once"]) == 1
    assert "pip install 'gapless[serve]'" in capsys.readouterr().err
