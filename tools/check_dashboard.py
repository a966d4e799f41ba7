"""Ask a real Prometheus every question of the dashboard, about a real server, and name those without an answer.

    python tools/check_dashboard.py http://127.0.0.1:8000                  # with the program `prometheus` of the PATH
    python tools/check_dashboard.py --prometheus /opt/prometheus/prometheus --seconds 60 http://127.0.0.1:8000

Start the server, and some load (`gapless bench serve`), before. Prometheus runs in a folder of its own, which goes with
it, and reads /metrics once a second; a server with keys needs --public-metrics. The exit code is 1 if a question is
wrong, or no series answers it, or one answers with what is not a number, which is nothing divided by nothing: a share
of a time in which nothing happened.
"""

from __future__ import annotations

import argparse
import json
import math
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import grafana_dashboard

FILLED = {"${prefix}": "gapless", "$__rate_interval": "1m", "$model": ".*", "$instance": ".*"}


def questions() -> list[tuple[str, str]]:
    """Title of the panel, and query with the dashboard's variables as for everything."""
    found = []
    for panel in grafana_dashboard.dashboard()["panels"]:
        for target in panel["targets"]:
            query = target["expr"]
            for name, value in FILLED.items():
                query = query.replace(name, value)
            found.append((panel["title"], query))
    return found


def ask(address: str, query: str) -> list[dict[str, Any]]:
    """Series that answer now.

    Raises:
        ValueError: the query is wrong; what Prometheus says of it.
    """
    url = f"{address}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
            return found
    except urllib.error.HTTPError as error:
        raise ValueError(json.load(error)["error"]) from error


def check(program: str, server: str, seconds: float) -> list[str]:
    """Panels and what is wrong with them, after ``seconds`` of watching ``server``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = "{}:{}".format(*free.getsockname())
    target = urllib.parse.urlsplit(server).netloc
    job = {"job_name": "gapless", "scrape_interval": "1s", "static_configs": [{"targets": [target]}]}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prometheus.yml"
        path.write_text(json.dumps({"scrape_configs": [job]}))  # JSON is YAML
        options = [f"--config.file={path}", f"--storage.tsdb.path={folder}/data", f"--web.listen-address={address}"]
        process = subprocess.Popen([program, *options], stderr=subprocess.DEVNULL)
        try:
            time.sleep(seconds)
            wrong = []
            for title, query in questions():
                try:
                    series = ask(f"http://{address}", query)
                except (OSError, ValueError) as error:
                    wrong.append(f"{title}: {error}")
                    continue
                if not series:
                    wrong.append(f"{title}: no series for {query}")
                wrong += [f"{title}: not a number: {query}" for s in series if math.isnan(float(s["value"][1]))]
            return wrong
        finally:
            process.terminate()
            process.wait()


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server", help="its address")
    parser.add_argument("--prometheus", default="prometheus", help="the program")
    parser.add_argument("--seconds", type=float, default=15.0, help="of watching")
    options = parser.parse_args()
    wrong = check(options.prometheus, options.server, options.seconds)
    print("\n".join(wrong) if wrong else f"{len(questions())} questions, all answered")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
