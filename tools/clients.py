"""Run clients of OpenAI's interface, unmodified, against a real server, and print what came of it.

    python tools/clients.py [NAME ...] [--model FOLDER] [--folder FOLDER]

Each client has a virtual environment of its own, made once in ``--folder``; that takes minutes and gigabytes, since two
of them bring torch along. The server runs the small real model of the tests on a free port, on this machine alone.
Exit code: 0 if every client that was asked for got what it must get.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gapless.bench.table import grid

TASKS = Path(__file__).parent / "client_tasks"
NAME = "small-model"
QUESTION = "The capital of France is"
CLOSE = 2e-3
"""How far two log-likelihoods may be apart: both are sums in float32, of kernels that add in another order."""


class ClientError(RuntimeError):
    """A client did not get what it must get."""


@dataclass(frozen=True)
class Place:
    """Where a client runs.

    Attributes:
        bin: programs of its environment.
        url: of the server.
        model: folder of the model.
        work: an empty folder.
    """

    bin: Path
    url: str
    model: str
    work: Path

    def call(self, program: str, *arguments: str) -> str:
        """Standard output of a program of the client.

        Raises:
            ClientError: it failed.
        """
        environment = {**os.environ, "HF_DATASETS_CACHE": str(self.work / "datasets")}
        environment["PATH"] = f"{self.bin}{os.pathsep}{environment['PATH']}"
        environment.pop("HF_HUB_OFFLINE", None)  # aiperf takes a folder for a name on the Hub if it is set
        for name in ("PYTHONPATH", "OPENAI_API_KEY"):
            environment.pop(name, None)
        done = subprocess.run(
            [str(self.bin / program), *arguments],
            capture_output=True, text=True, cwd=self.work, env=environment, timeout=900, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        if done.returncode:
            lines = (done.stderr.strip() or done.stdout.strip()).splitlines()[-20:]
            raise ClientError(f"exit code {done.returncode}: {' '.join(lines)[-600:]}")
        return done.stdout

    def ask(self, path: str, body: dict[str, Any]) -> Any:
        """The server's own answer, without any client."""
        data = json.dumps({"model": NAME, "temperature": 0, "max_tokens": 8, **body}).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=300) as answer:
            return json.load(answer)["choices"][0]


def expect(name: str, got: Any, want: Any) -> None:
    """They are equal.

    Raises:
        ClientError: they are not.
    """
    if got != want:
        raise ClientError(f"{name}: {got!r} instead of {want!r}")


def check_texts(place: Place, script: str) -> str:
    """A script's texts are those of the server itself."""
    found = json.loads(place.call("python", str(TASKS / script), place.url, NAME, QUESTION).splitlines()[-1])
    text = place.ask("/v1/completions", {"prompt": QUESTION})["text"]
    reply = place.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": QUESTION}]})
    want = {
        "models": [NAME], "completion": text, "completion_stream": text, "chat": reply["message"]["content"],
        "chat_stream": reply["message"]["content"], "chat_async": reply["message"]["content"], "usage": 8,
        "parsed": True, "response": reply["message"]["content"],
    }  # fmt: skip
    for name, got in found.items():
        expect(name, got, want[name])
    return f"{', '.join(found)}: equal to the server's own answers"


def check_lm_eval(place: Place) -> str:
    """Scores, log-likelihoods and texts through the server are those of transformers."""
    for path in TASKS.iterdir():
        if path.suffix in (".yaml", ".jsonl"):
            shutil.copy(path, place.work)
    url = f"{place.url}/v1/completions"
    kinds = {
        "local-completions": f"model={NAME},base_url={url},tokenizer={place.model},tokenized_requests=True",
        "hf": f"pretrained={place.model},dtype=float32",
    }
    results, samples = {}, {}
    for kind, arguments in kinds.items():
        out = place.work / kind
        place.call(
            "lm_eval", "run", "--model", kind, "--model_args", f"{arguments},max_length=512",
            "--tasks", "gapless_choice,gapless_write", "--include_path", ".",
            "--log_samples", "--output_path", str(out),
            *(["--batch_size", "4"] if kind != "hf" else ["--batch_size", "1", "--device", "cpu"]),
        )  # fmt: skip
        (result,) = out.rglob("results_*.json")
        scores = json.loads(result.read_text())["results"]
        results[kind] = {
            f"{task}.{name}": value
            for task, values in scores.items()
            for name, value in values.items()
            if isinstance(value, float)
        }
        rows = [json.loads(line) for path in sorted(out.rglob("samples_*.jsonl")) for line in path.open()]
        samples[kind] = [(row["doc_id"], response) for row in rows for response in row["resps"]]
    expect("scores", results["local-completions"], results["hf"])
    worst = 0.0
    for (one, server), (two, own) in zip(samples["local-completions"], samples["hf"], strict=True):
        expect("question", one, two)
        if len(own[0]) == 2 and isinstance(own[0], list):
            worst = max(worst, abs(float(server[0][0]) - float(own[0][0])))
            expect(f"greedy of question {one}", server[0][1], own[0][1])
        else:
            expect(f"text of question {one}", server, own)
    if worst > CLOSE:
        raise ClientError(f"log-likelihoods differ by up to {worst}")
    shown = ", ".join(f"{n.partition(',')[0]} {v:.2f}" for n, v in results["hf"].items() if "stderr" not in n)
    return f"{shown}: as with transformers; {len(samples['hf'])} samples, log-likelihoods within {worst:.1g}"


def check_guidellm(place: Place) -> str:
    """All requests succeed and have the lengths that were asked for."""
    parts = []
    for api, options in (("chat", ""), ("completions", ",request_format=/v1/completions")):
        out = place.work / f"{api}.json"
        place.call(
            "guidellm", "run", "--backend", f"kind=openai_http,target={place.url}{options}",
            "--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=4",
            "--tokenizer", f"kind=huggingface_auto,model={place.model}",
            "--data", "kind=synthetic_text,prompt_tokens=24,output_tokens=6",
            "--output", f"kind=json,path={out}", "--disable-console-interactive",
        )  # fmt: skip
        (benchmark,) = json.loads(out.read_text())["benchmarks"]
        expect("requests", benchmark["metrics"]["request_totals"]["successful"], 4)
        expect("failed", benchmark["metrics"]["request_totals"]["errored"], 0)
        done = benchmark["requests"]["successful"]
        expect("lengths", [r["output_tokens"] for r in done], [6] * 4)
        if not all(r["time_to_first_token_ms"] > 0 for r in done):
            raise ClientError("a request has no time to its first token")
        parts.append(f"{api} 4 of 4")
    return f"{', '.join(parts)}; 6 tokens each"


def check_aiperf(place: Place) -> str:
    """All requests succeed, and the server's metrics are read."""
    place.call(
        "aiperf", "profile", "--model", NAME, "--url", place.url, "--endpoint-type", "chat", "--streaming",
        "--request-count", "4", "--concurrency", "2", "--tokenizer", place.model,
        "--synthetic-input-tokens-mean", "24", "--output-tokens-mean", "6", "--ui-type", "none",
        "--output-artifact-dir", str(place.work / "artifacts"),
    )  # fmt: skip
    (path,) = place.work.rglob("profile_export_aiperf.json")
    found = json.loads(path.read_text())
    expect("requests", found["request_count"]["avg"], 4)
    if found.get("error_request_count", {}).get("avg", 0):
        raise ClientError(f"{found['error_request_count']['avg']} requests failed")
    metrics = sorted(place.work.rglob("server_metrics_export*"))
    if not metrics:
        raise ClientError("no metrics of the server were written")
    return (
        f"4 of 4; first token {found['time_to_first_token']['avg']:.0f} ms; its file of the server's metrics is there"
    )


@dataclass(frozen=True)
class Client:
    """One row of the table.

    Attributes:
        packages: what pip installs.
        check: returns what was found, or raises `ClientError`.
    """

    packages: tuple[str, ...]
    check: Callable[[Place], str]


CLIENTS = {
    "openai": Client(("openai",), lambda place: check_texts(place, "with_openai.py")),
    "langchain": Client(("langchain-openai", "langchain"), lambda place: check_texts(place, "with_langchain.py")),
    "lm-eval": Client(("lm_eval[api,hf]", f"torch=={version('torch')}"), check_lm_eval),
    "guidellm": Client(("guidellm", f"torch=={version('torch')}"), check_guidellm),
    "aiperf": Client(("aiperf",), check_aiperf),
}


def environment(name: str, folder: Path) -> Path:
    """The folder ``bin`` of a client's environment, made if it is not there or is of other packages.

    Raises:
        ClientError: it cannot be installed.
    """
    place, packages = folder / name, CLIENTS[name].packages
    mark = place / "gapless-packages"
    wanted = hashlib.sha256("\n".join(packages).encode()).hexdigest()
    if not mark.exists() or mark.read_text() != wanted:
        print(f"installing {' '.join(packages)} ...", file=sys.stderr, flush=True)
        shutil.rmtree(place, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        command = [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", *packages]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ClientError(f"not installed: {done.stderr.strip().splitlines()[-1][:300]}")
        mark.write_text(wanted)
    return place / "bin"


def installed(bin: Path, name: str) -> str:
    """Version of a client."""
    code = f"from importlib.metadata import version; print(version({name.partition('[')[0]!r}))"
    return subprocess.run([bin / "python", "-c", code], capture_output=True, text=True).stdout.strip() or "?"


@contextmanager
def server(model: str) -> Iterator[str]:
    """The address of a server of ``model``, which ends with the block."""
    with tempfile.NamedTemporaryFile("r", suffix=".log") as log:
        command = [sys.executable, "-m", "gapless", "serve", model, "--port=0", f"--served-model-name={NAME}"]
        command += ["--max-model-len=512", "--max-num-seqs=8"]
        process = subprocess.Popen(command, stderr=log.fileno(), stdout=subprocess.DEVNULL)
        try:
            url, end = "", time.monotonic() + 300
            while True:
                text = Path(log.name).read_text()
                if process.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"the server did not start:\n{text[-2000:]}")
                if not url and (match := re.search(r"listening on (http://[^\s;]+)", text)):
                    url = match[1]
                if url and _ready(url):
                    break
                time.sleep(0.5)
            yield url
        finally:
            process.terminate()
            process.wait(60)


def _ready(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url + "/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def run(name: str, folder: Path, url: str, model: str) -> list[str]:
    """Cells of one row: client, version, result, what was found."""
    client, found = CLIENTS[name], "?"
    try:
        bin = environment(name, folder)
        found = installed(bin, client.packages[0])
        with tempfile.TemporaryDirectory(prefix=f"gapless-{name}-") as work:
            detail, result = client.check(Place(bin, url, model, Path(work))), "works"
    except (ClientError, subprocess.SubprocessError, OSError, ValueError, KeyError) as error:
        detail, result = str(error) or repr(error), "FAILS"
    return [name, found, result, " ".join(detail.split())]


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clients", nargs="*", metavar="NAME", help=f"of {', '.join(CLIENTS)} (default: all)")
    parser.add_argument("--model", help="folder of the model (default: the small one of the tests)")
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache" / "gapless" / "clients")
    arguments = parser.parse_args()
    unknown = set(arguments.clients) - set(CLIENTS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(CLIENTS)}")
    model = arguments.model
    if model is None:
        from gapless.model.load.smollm2 import get_smollm2

        model = str(get_smollm2())
    arguments.folder.mkdir(parents=True, exist_ok=True)
    rows = []
    with server(model) as url:
        for name in arguments.clients or CLIENTS:
            rows.append(run(name, arguments.folder, url, model))
            print(f"{rows[-1][0]}: {rows[-1][2]}: {rows[-1][3]}", file=sys.stderr, flush=True)
    print(grid(["client", "version", "result", "what"], rows))
    return 0 if all(row[2] == "works" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
