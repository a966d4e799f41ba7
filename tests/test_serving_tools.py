"""`gapless bench serve`, `gapless top`, the dashboard and the files of deployment, against the real server."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

import check_dashboard
import grafana_dashboard
from engines import tokenizer
from gapless.cli import main
from gapless.server.top.reading import Reading, parse
from live_server import LiveServer, serving

ROOT = Path(__file__).parent.parent

NAME = re.compile(r"\$\{prefix\}:(\w+)")


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with serving() as live:
        live.canary()
        yield live


def metrics(server: LiveServer) -> str:
    return str(server.client.get("/metrics").text)


# ---- bench serve and top ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_bench_counts_what_the_server_counts(server: LiveServer, backend: str, tmp_path: Path) -> None:
    def counted() -> tuple[float, float, float]:
        reading = Reading.of(0.0, metrics(server))
        names = ("prompt_tokens_total", "generation_tokens_total", "request_success_total")
        return tuple(reading.value(name) or 0.0 for name in names)  # type: ignore[return-value]

    before = counted()
    options = ["--num-prompts=10", "--random-input-len=9", "--random-output-len=6", "--request-rate=200", "--quiet"]
    options += [f"--random-vocab={len(tokenizer())}", f"--backend={backend}", f"--base-url={server.url}"]
    options += ["--save-result", f"--result-dir={tmp_path}", "--result-filename=r.json"]
    assert main(["bench", "serve", *options]) == 0
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["errors"] == [""] * 10
    assert found["output_lens"] == [6] * 10
    gaps = [len(each) for each in found["itls"]]
    assert max(gaps) == 5  # a chunk for each token, also where it has no text
    assert min(gaps) >= 1  # but tokens that come while the task of a stream waits for its turn are joined
    assert found["model_id"] == "tiny"
    if backend == "openai":
        assert found["input_lens"] == [9] * 10
    first = found["input_lens"][0]  # of the request before the measurement, which is the first one again
    after = counted()
    assert after[0] - before[0] == found["total_input_tokens"] + first
    assert after[1] - before[1] == found["total_output_tokens"] + 6
    assert after[2] - before[2] == 11


def test_bench_says_what_the_server_says(server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    options = [f"--base-url={server.url}", "--num-prompts=2", "--random-input-len=4000"]
    assert main(["bench", "serve", *options]) == 1
    assert "context_length_exceeded" in capsys.readouterr().err


def test_top_of_a_real_server(server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", server.url, "--once", "--interval=0.05"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"gapless top   tiny   {server.url}")
    assert any(line.startswith("GPU busy") for line in lines)
    assert any(line.startswith("requests   running 0   waiting 0") for line in lines)


# ---- the dashboard ----------------------------------------------------------------------------------------------


def queries() -> list[str]:
    """All of the dashboard's, with its variables filled in as for everything."""
    dashboard = json.loads(grafana_dashboard.OUTPUT.read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def filled(query: str) -> str:
    for name, value in (("${prefix}", "gapless"), ("$__rate_interval", "1m"), ("$model", ".*"), ("$instance", ".*")):
        query = query.replace(name, value)
    return query


def test_the_dashboard_is_the_one_that_is_made() -> None:
    assert grafana_dashboard.OUTPUT.read_text() == grafana_dashboard.text(), "run tools/grafana_dashboard.py"


def test_every_name_of_the_dashboard_is_exported(server: LiveServer) -> None:
    exported = {name.partition(":")[2] for name in parse(metrics(server)) if ":" in name}
    text = grafana_dashboard.OUTPUT.read_text()
    named = set(NAME.findall(text))
    assert len(named) > 20
    assert named <= exported, sorted(named - exported)
    labels = {label for rows in parse(metrics(server)).values() for own, _ in rows for label in own} | {"instance"}
    for query in queries():
        grouped = re.findall(r"by \((\w+)\)", query) + re.findall(r"(\w+)=~?\"", query)
        assert set(grouped) <= labels, query
        assert "$" not in filled(query)


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in grafana_dashboard.dashboard()["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & taken
        assert at["x"] + at["w"] <= 24
        taken |= cells


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool, of Prometheus, is not installed")
def test_prometheus_reads_the_queries(tmp_path: Path) -> None:
    rules = [{"record": f"panel:q{i}", "expr": filled(query)} for i, query in enumerate(queries())]
    path = tmp_path / "rules.yaml"
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))  # JSON is YAML
    done = subprocess.run(["promtool", "check", "rules", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed")
def test_prometheus_answers_every_question_of_the_dashboard(server: LiveServer) -> None:
    ended = threading.Event()

    def load() -> None:
        while not ended.wait(0.3):
            server.post("/v1/completions", {"prompt": [5] * 20, "max_tokens": 9, "ignore_eos": True})

    thread = threading.Thread(target=load)
    thread.start()
    try:
        assert check_dashboard.check("prometheus", server.url, 8.0) == []
    finally:
        ended.set()
        thread.join()


# ---- deployment -------------------------------------------------------------------------------------------------


def test_files_of_deployment_use_options_and_routes_that_exist() -> None:
    from gapless.cli.options import option_name
    from gapless.config import EngineConfig
    from gapless.server import app, options

    source = Path(app.__file__).read_text()
    known = {option_name(cls, f) for cls in (options.ServerOptions, EngineConfig) for f in cls.__dataclass_fields__}
    for path in sorted((ROOT / "deploy").iterdir()):
        if path.suffix == ".json":
            continue
        text = path.read_text()
        lines = [line for line in text.splitlines() if "gapless" in line or line.strip().startswith("- --")]
        used = {word for line in lines for word in re.findall(r"(?<![\w-])--[a-z][a-z-]+", line)}
        others = {"--no-cache-dir", "--home-dir", "--create-home", "--uid", "--format"}
        assert used - others <= known, f"{path.name}: {sorted(used - others - known)}"
        for route in re.findall(r"path: (/\w+),", text) + re.findall(r":8000(/\w+)", text):
            assert f'Route("{route}"' in source, f"{path.name}: {route}"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    path = tmp_path / "gapless.service"
    text = (ROOT / "deploy" / path.name).read_text()
    path.write_text(text.replace("/opt/gapless/bin/gapless", sys.executable))  # it wants a program that is there
    done = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_manifests_are_yaml() -> None:
    yaml = pytest.importorskip("yaml")
    deployment, service = yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    drain = next(int(a.partition("=")[2]) for a in container["args"] if a.startswith("--shutdown-timeout"))
    assert pod["terminationGracePeriodSeconds"] > pause + drain
    assert service["spec"]["ports"][0]["targetPort"] == container["ports"][0]["name"]
    assert yaml.safe_load((ROOT / "deploy" / "prometheus.yaml").read_text())["scrape_configs"]


# ---- the openai package -----------------------------------------------------------------------------------------


def test_openai_streams_in_order_from_both_of_its_clients(server: LiveServer) -> None:
    import asyncio

    settings: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 9, "extra_body": {"ignore_eos": True}}
    talk: Any = [{"role": "user", "content": "hello"}]
    address = {"base_url": server.url + "/v1", "api_key": "none", "max_retries": 0}
    with openai.OpenAI(**address) as client:
        whole = client.chat.completions.create(messages=talk, **settings)
        want = whole.choices[0].message.content

    async def many() -> list[str]:
        async with openai.AsyncOpenAI(**address) as own:

            async def one() -> str:
                stream = await own.chat.completions.create(messages=talk, stream=True, **settings)
                return "".join([part.choices[0].delta.content or "" async for part in stream])

            return await asyncio.gather(*(one() for _ in range(5)))

    assert asyncio.run(many()) == [want] * 5


class Answer(BaseModel):
    """What is asked for."""

    yes: bool


def test_openai_parses_a_structured_answer(server: LiveServer) -> None:
    pytest.importorskip("llguidance")
    talk: Any = [{"role": "user", "content": "hello"}]
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        found = client.chat.completions.parse(
            model="tiny", messages=talk, response_format=Answer, seed=3, max_tokens=100
        )
    assert isinstance(found.choices[0].message.parsed, Answer)


# ---- the document -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["serving", "deployment", "security"])
def test_metrics_that_are_named_are_exported(server: LiveServer, name: str) -> None:
    text = (ROOT / "docs" / f"{name}.md").read_text()
    named = set(re.findall(r"gapless:(\w+)", text)) | set(re.findall(r"`(\w+_(?:total|seconds|steps))[`{]", text))
    assert named
    exported = {sample.rpartition(":")[2] for sample in parse(metrics(server))}
    exported |= {sample.removesuffix("_bucket") for sample in exported}
    assert named <= exported, sorted(named - exported)


def test_every_option_is_documented_and_exists(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == 0
    shown = set(re.findall(r"^  (?:-\w, )?(--[a-z-]+)", capsys.readouterr().out, re.M)) - {"--help"}
    assert len(shown) > 40
    text = (ROOT / "docs" / "serving.md").read_text()
    rows = [line.split("|")[1] for line in text.partition("## Options")[2].splitlines() if line.startswith("| `")]
    named = re.findall(r"--[a-z-]+", "".join(rows))
    assert sorted(named) == sorted(shown)
