"""The timeline as data, as a page in a real browser, and as a PNG; the Chrome trace that is written."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gapless.cli import main
from gapless.trace import timeline as module
from gapless.trace.analyze import analyze
from gapless.trace.causes import COPYING, HOST
from gapless.trace.export import finish
from gapless.trace.picture import spans, write_html
from gapless.trace.recording import collect, load
from gapless.trace.steps import find_steps
from gapless.trace.timeline import timeline
from traces import Trace, asynchronous, synchronous

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
PROBE = """<script>
  const box = canvas.getBoundingClientRect(), root = document.documentElement;
  const out = {ready: document.body.dataset.ready, wide: root.scrollWidth};
  const fire = (kind, type, x, y, more) => canvas.dispatchEvent(
    new kind(type, {clientX: box.left + x, clientY: box.top + y, bubbles: true, cancelable: true, ...more}));
  $("all").click(); out.all = to - from;
  fire(WheelEvent, "wheel", 600, 60, {deltaY: -500}); out.zoomed = to - from;
  $("gap").click(); out.gap = to - from;
  look(gapLane.start[0] - 300, gapLane.start[0] + 700);
  const middle = LABEL + (gapLane.start[0] + 50 - from) / (to - from) * (width - LABEL), row = AXIS + ROW / 2;
  fire(PointerEvent, "pointermove", middle, row); out.tip = tip.textContent; out.shown = tip.style.display;
  const ratio = devicePixelRatio;
  out.pixel = [...g.getImageData(Math.round(middle * ratio), Math.round((AXIS + 6) * ratio), 1, 1).data].slice(0, 3);
  $("three").click(); out.three = to - from;
  const done = document.createElement("pre"); done.id = "probe"; done.textContent = JSON.stringify(out);
  document.body.append(done);
</script>"""


def data_of(trace: Trace, count: int = 100) -> dict[str, Any]:
    recording = collect(trace.events)
    steps = find_steps(recording)
    report, found = analyze(recording, steps)
    return timeline(recording, steps, report, found, "a <title>", count)


def test_lanes_and_gaps() -> None:
    data = data_of(asynchronous(8))
    names = [lane["name"] for lane in data["lanes"]]
    assert names[:3] == ["gaps by cause", "h2d: stream 20", "compute: stream 7"]
    assert names[3:] == ["launch", "fill", "wait", "commit", "calls of thread 100"]
    assert len(data["steps"]) == 8
    data = data_of(synchronous(6))
    assert data["lanes"][0]["kind"] == "gaps"
    shown = [(a, n, data["names"][i].split("\n")) for a, n, i in spans(data["lanes"][0])]
    commit = [(a, n) for a, n, (cause, detail, _) in shown if (cause, detail) == (HOST, "commit")]
    assert [n for _, n in commit] == [600] * 5  # 60 us
    assert commit[1][0] - commit[0][0] == 10_000
    assert [lane["name"] for lane in data["lanes"] if lane["kind"] == "phase"] == ["ranges of thread 100"]
    assert dict(data["causes"])[COPYING] == pytest.approx(0.05)


def test_a_hundred_steps_of_a_large_model_stay_small(tmp_path: Path) -> None:
    t = Trace()
    for i in range(103):
        at = 8000.0 * i
        t.range("gapless:launch", at - 8000, at - 7000)
        nodes = [(at + 18.7 * k, at + 18.7 * (k + 1) - 0.5 - (k % 5) * 0.3) for k in range(420)]
        t.graph(at - 7900, at - 7890, nodes[:416], name="nvjet_tst_128x8_64x12_2x1_v_bz_TNT_some_long_kernel_name")
        t.graph(at - 7880, at - 7870, nodes[416:], name="sample")
    data = data_of(t)
    assert len(data["steps"]) == 101
    assert data["coarse_us"] == 0
    assert sum(len(lane["spans"]) for lane in data["lanes"]) > 3 * 42_000
    page = tmp_path / "t.html"
    write_html(data, page)
    assert page.stat().st_size < 2_000_000


def test_what_does_not_fit_is_drawn_coarser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 30_000)
    t = Trace()
    link = t.call("cudaGraphLaunch", 0, 1)
    for k in range(5_000):
        t.kernel(3.0 * k, 3.0 * k + 2.4, link)
    data = data_of(t)
    assert data["coarse_us"] >= 1
    assert len(json.dumps(data, separators=(",", ":"))) < 31_000
    assert any(name.endswith("in a row") for name in data["names"])


def test_the_page_needs_no_network_and_holds_its_data(tmp_path: Path) -> None:
    t = synchronous()
    t.range("</script><b>bad", 5, 6)
    page = tmp_path / "t.html"
    write_html(data_of(t), page)
    text = page.read_text()
    assert not re.search(r"https?://|src=|@import|url\(", text)
    assert "a &lt;title&gt;" in text
    (block,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', text, re.S)
    assert "</script><b>bad" in json.loads(block)["names"]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    page = tmp_path / "t.html"
    write_html(data_of(synchronous(30)), page)
    page.write_text(page.read_text().replace("</body>", PROBE + "</body>"))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,800", "--virtual-time-budget=2000"]
    folder = f"--user-data-dir={tmp_path / 'profile'}"
    command = [str(CHROMIUM), *options, folder, "--enable-logging=stderr", "--dump-dom", f"file://{page}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert "CONSOLE" not in done.stderr, done.stderr
    (block,) = re.findall(r'<pre id="probe">(.*?)</pre>', done.stdout, re.S)
    out = json.loads(html.unescape(block))
    assert int(out["ready"]) == 5  # gaps, two streams, ranges, calls
    assert out["wide"] <= 1280
    assert out["zoomed"] < out["all"] / 2
    assert out["three"] < out["all"] / 5
    assert out["gap"] < out["zoomed"]
    assert out["shown"] == "block"
    assert out["tip"].startswith("launch latency: cudaMemcpyAsync")
    assert out["pixel"] == [0xE8, 0xC5, 0x1B]


def test_png(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    png, page = tmp_path / "t.png", tmp_path / "t.html"
    file = str(synchronous().write(tmp_path / "t.json"))
    assert main(["trace", "analyze", file, "--png", str(png), "--html", str(page), "--picture-steps", "3"]) == 0
    assert png.read_bytes()[:4] == b"\x89PNG"
    assert "<canvas" in page.read_text()
    assert main(["trace", "analyze", file, "--picture-steps", "0"]) == 2


def test_a_written_trace_says_the_same(tmp_path: Path) -> None:
    made = asynchronous(8)
    made.events.append({"ph": "C", "name": "requests", "pid": 1, "tid": 100, "ts": 5.0, "args": {"running": 3}})
    for name in ("t.json", "t.json.gz"):
        finish(made.events, tmp_path / name)
        again = load(tmp_path / name)
        before, after = (analyze(r, find_steps(r))[0].to_dict() for r in (collect(made.events), again))
        assert before == after
        assert again.counters == [("requests", 5.0, {"running": 3})]
