"""Planning by simulation agrees with formulas, with the real loop in virtual time, and with what was measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gapless.cli import script
from proof import simulate
from proof.harness import Job, make_request
from proof.operations import Operation
from proof.planning import BEFORE_LAUNCH, Times, predict
from proof.simulated import SimulatedDevice
from proof.simulated_runs import Workload, prompt, run_on

HOST = 0.72
"""Host work per step on the machine that the figures are from: between 0.55 and 0.88 ms."""
MEASURED = {  # 8B model on one H200: device ms/step; then ms/step and busy share at depth 1, and at depth 2 if measured
    "long: 32 x 3,584 + 512": (8.80, 9.58, 0.942, 8.80, 0.9999),
    "mid: 32 x 256 + 512": (5.59, 6.24, 0.904, None, None),
    "one: 1 x 128 + 256": (4.64, 5.27, 0.882, None, None),
}
DOCUMENT = Path(__file__).parent.parent / "docs" / "planning.md"


@pytest.mark.parametrize("name", list(MEASURED))
def test_measured_steps_are_predicted_within_5_percent(name: str) -> None:
    device, step_1, busy_1, step_2, busy_2 = MEASURED[name]
    one, two = (predict(Times(HOST, device), depth, steps=300) for depth in (1, 2))
    assert one.step_ms == pytest.approx(step_1, rel=0.05)
    assert one.busy == pytest.approx(busy_1, rel=0.05)
    if step_2 is not None:
        assert two.step_ms == pytest.approx(step_2, rel=0.05)
        assert two.busy == pytest.approx(busy_2, rel=0.05)
    row = f"| {name} | {device:.2f} | {step_1:.2f} | {one.step_ms:.2f} | {busy_1:.1%} | {one.busy:.1%} |"
    row = row.replace("%", " %")
    assert row in DOCUMENT.read_text(encoding="utf-8").splitlines(), row


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("host", [0.2, 0.9, 1.7])
def test_without_jitter_it_is_a_formula(host: float, depth: int) -> None:
    found = predict(Times(host, 1.0), depth, steps=200)
    assert found.step_ms == pytest.approx(1.0 + host if depth == 1 else max(1.0, host), rel=0.02)
    assert found.busy == pytest.approx(1.0 / found.step_ms, rel=0.01)
    assert found.idle == 1 - found.busy


def test_latency_counts_at_depth_1_only() -> None:
    assert predict(Times(0.5, 2.0, latency=0.3), 1, steps=200).step_ms == pytest.approx(2.8, rel=0.01)
    assert predict(Times(0.5, 2.0, latency=0.3), 2, steps=200).step_ms == pytest.approx(2.0, rel=0.01)


def test_depth_absorbs_jitter_and_pauses() -> None:
    for times in (Times(0.8, 1.0, jitter=0.8), Times(0.2, 1.0, pause=2.5, pause_every=20)):
        steps = [predict(times, depth, steps=3000).step_ms for depth in (1, 2, 3, 4)]
        assert steps == sorted(steps, reverse=True)
        assert steps[1] > 1.01 > steps[3] * 0.95
        assert steps[0] > steps[1] > steps[2]


def test_a_seed_repeats_itself() -> None:
    times = Times(0.8, 1.0, jitter=0.5, device_jitter=0.1)
    assert predict(times, 2, seed=1) == predict(times, 2, seed=1) != predict(times, 2, seed=2)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_real_loop_in_virtual_time_takes_as_long(depth: int) -> None:
    """Scheduler, runner and loop on the simulated device's clock, against the few lines of `predict`."""
    times = Times(0.7, 1.0, latency=0.1)
    costs = {
        "fill": times.host * BEFORE_LAUNCH, "read": times.host * (1 - BEFORE_LAUNCH), "forward": 0.8, "sample": 0.2,
        "h2d": times.latency / 2, "d2h": times.latency / 2,
    }  # fmt: skip

    def cost(operation: Operation) -> float:
        return costs[operation.name]

    spans = []
    for tokens in (10, 40):
        workload = Workload(
            "decode",
            lambda n=tokens: [Job(make_request(0, prompt(1, 4), n))],
            options={"max_model_len": 64},
            num_blocks=20,
        )
        device = SimulatedDevice(costs=cost)
        run_on(device, workload, depth)
        spans.append(device.now)
    step = (spans[1] - spans[0]) / 30
    assert step == pytest.approx(predict(times, depth, steps=500).step_ms, rel=0.01)


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    chart = tmp_path / "idle.svg"
    line = "--host-ms 0.72 --device-ms 8.8 --depth 1,2 --steps 100 --batch 32 --plot"
    assert script("simulate", simulate, [*line.split(), str(chart)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "depth  ms/step  GPU idle %  steps/s  tokens/s  of 1,000 GPUs idle"
    assert out[1].split() == ["1", "9.520", "7.56", "105.0", "3,361", "76"]
    assert out[2].split() == ["2", "8.800", "0.00", "113.6", "3,636", "0"]
    text = chart.read_text(encoding="utf-8")
    assert text.count("<polyline") == 2
    assert "depth 2" in text


@pytest.mark.parametrize(
    "options",
    ["--host-ms 0 --device-ms 1", "--host-ms 1 --device-ms 1 --depth 0", "--host-ms 1 --device-ms 1 --depth x",
     "--host-ms 1 --device-ms 1 --jitter -1", "--host-ms 1 --device-ms 1 more", "--device-ms 1",
     "--host-ms 1 --device-ms 1 --pause-every 0"],
)  # fmt: skip
def test_bad_options_are_named(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert script("simulate", simulate, options.split()) == 2
    assert "error" in capsys.readouterr().err


def test_what_the_document_says_of_depths() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    times = Times(0.3, 1.0, jitter=0.5)
    for host in (0.1, 0.3, 0.6, 0.9):
        cells = [f"{100 * predict(replace(times, host=host), depth).idle:.1f} %" for depth in (1, 2, 3, 4)]
        assert f"| {host} | {' | '.join(cells)} |" in text, f"| {host} | {' | '.join(cells)} |"
