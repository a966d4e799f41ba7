"""Which lines wait: notes on the CPU, matching on synthetic traces, all of it on a GPU."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path

import pytest
import torch

from gapless.cli import main
from gapless.trace.recording import collect
from gapless.trace.syncs import Note, Waits, match, noting, render, targets, watch
from traces import LOOP, PAGEABLE_H2D, Trace

THREAD = LOOP[1]


def test_functions_note_their_line_and_are_put_back() -> None:
    before = [vars(owner).get(name) for owner, name, _ in targets()]
    with noting() as notes:
        x = torch.ones(3)
        value = x.sum().item(); here = inspect.currentframe().f_lineno  # type: ignore[union-attr]  # noqa: E702
        y = x.to(torch.float64)
        with warnings.catch_warnings(record=True) as others:
            warnings.warn("something else", stacklevel=1)
    assert [vars(owner).get(name) for owner, name, _ in targets()] == before
    assert (value, y.dtype) == (3.0, torch.float64)
    by_what = {note.what: note for note in notes}
    assert by_what["Tensor.item"].line == f"{__file__}:{here}"
    assert by_what["Tensor.to"].line == f"{__file__}:{here + 1}"
    assert by_what["Tensor.item"].start < by_what["Tensor.item"].end
    assert len(others) == 1


def test_a_warning_is_a_note(recwarn: pytest.WarningsRecorder) -> None:
    with noting() as notes:
        warnings.warn("called a synchronizing CUDA operation (Triggered internally at ...)", stacklevel=1)
        warnings.warn("called a synchronizing CUDA operation (Triggered internally at ...)", stacklevel=1)
    assert [n.what for n in notes] == ["synchronizing operation"] * 2
    assert notes[0].line.startswith(f"{__file__}:")
    assert not recwarn.list


def test_calls_find_their_lines() -> None:
    """Two explicit waits, a masked index that only warns, a pageable copy with its wait, and a wait without a line."""
    t = Trace()
    t.kernel(0, 1000)
    for i in range(2):
        t.call("cudaDeviceSynchronize", 100 + 100 * i, 150 + 100 * i)
    t.call("cudaStreamSynchronize", 400, 480)
    link = t.call("cudaMemcpyAsync", 600, 610)
    t.copy(602, 608, link, PAGEABLE_H2D)
    t.call("cudaStreamSynchronize", 611, 640)
    t.call("cudaEventSynchronize", 5000, 5010)
    t.call("cudaLaunchKernel", 700, 705)
    shift = 50.0

    def note(start: float, end: float, what: str, line: str, thread: int = THREAD) -> Note:
        return Note(thread, (start - shift) * 1e-6, (end - shift) * 1e-6, what, line)

    notes = [
        note(95, 155, "torch.cuda.synchronize", "a.py:1"),
        note(195, 255, "torch.cuda.synchronize", "a.py:1"),
        note(490, 490, "synchronizing operation", "a.py:2"),
        note(590, 660, "Tensor.cuda", "lib.py:9"),
        note(595, 650, "Tensor.to", "a.py:3"),
        note(650, 650, "synchronizing operation", "a.py:3"),
        note(4990, 5050, "Tensor.to", "a.py:4", thread=7),
    ]
    lanes = {f"thread {THREAD}": THREAD}
    rows = {row.what: row for row in match(collect(t.events), notes, lanes, lambda s: s * 1e6 + shift)}
    wait, masked, copy, other = (
        rows[k] for k in ("torch.cuda.synchronize", "synchronizing operation", "Tensor.to", "cudaEventSynchronize")
    )
    assert (wait.line, wait.count, wait.pageable) == ("a.py:1", 2, 0)
    assert wait.ms == pytest.approx(0.1)
    assert (masked.line, masked.ms) == ("a.py:2", pytest.approx(0.08))
    assert (copy.line, copy.count, copy.pageable) == ("a.py:3", 2, 1)
    assert copy.calls == ("cudaMemcpyAsync", "cudaStreamSynchronize")
    assert other.line == ""
    assert len(rows) == 4
    text = render(Waits(list(rows.values()), 10.0))
    assert "1 pageable copies: pin the memory" in text
    assert "(line not known)" in text
    assert render(Waits([], 5.0)) == "the host did not wait for the GPU in 5.0 ms"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "s.py"
    script.write_text("print('ran')")
    assert main(["trace", "syncs", "--", str(script)]) == 1
    assert "there is no GPU" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no GPU"), watch():
        pass


@pytest.mark.parametrize(("words", "text"), [([], "script.py"), (["--", "no/such.py"], "no such file")])
def test_usage(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "syncs", *words]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.gpu
def test_the_fault_is_found_on_a_gpu(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Ten lines with the classic fault: an index that is moved to the device in every step."""
    script = tmp_path / "fault.py"
    script.write_text(
        "import torch\n"
        "x = torch.ones(1000, 1000, device='cuda')\n"
        "index = torch.arange(10)\n"
        "for step in range(5):\n"
        "    x = x @ x / 1000\n"
        "    rows = x[index.to('cuda')]\n"
        "    y = x[x > 0]\n"
        "good = index.pin_memory()\n"
        "for step in range(5):\n"
        "    rows = x[good.to('cuda', non_blocking=True)]\n"
        "torch.cuda.synchronize()\n"
    )
    assert main(["trace", "syncs", "--", str(script)]) == 0
    lines = capfd.readouterr().err.splitlines()
    (copy,) = [line for line in lines if f"{script}:6" in line]
    assert "5 pageable copies" in copy
    assert "Tensor.to" in copy
    assert any(f"{script}:7" in line for line in lines)
    assert any(f"{script}:11" in line and "torch.cuda.synchronize" in line for line in lines)
    assert not any(f"{script}:10" in line for line in lines)
