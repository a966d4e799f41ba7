"""The server's OpenAPI document against the server: requests made from the one must get what it says from the other.

The whole of it takes one or two minutes: ``GAPLESS_SCHEMA_EXAMPLES=20 pytest tests/test_server_schema.py``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import load_all_checks
from schemathesis.config import SchemathesisConfig

from gapless.server.openapi import document
from live_server import LiveServer

KEY = "a-key"
EXAMPLES = int(os.environ.get("GAPLESS_SCHEMA_EXAMPLES", "0"))
"""Of each operation. 0 is the quick run: a few of them, and not every boundary of every field."""
load_all_checks()
# Whether what fits the schema is served depends on more than the schema: the context's length, the vocabulary, fields
# that exclude each other. `test_server_mutations` starts from requests that are served.
CONFIG = SchemathesisConfig.from_dict(
    {
        "checks": {"positive_data_acceptance": {"enabled": False}},
        "generation": {"deterministic": True},
        "phases": {"coverage": {"enabled": EXAMPLES > 0}},
        "warnings": False,
    }
)
SCHEMA = schemathesis.openapi.from_dict(document("gapless", keys=True), config=CONFIG)


@pytest.fixture(scope="module")
def keyed() -> Iterator[LiveServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GAPLESS_API_KEY", KEY)
        live = LiveServer(max_body_bytes=2**20).wait_ready(authorization=f"Bearer {KEY}")
    yield live
    live.check_idle()
    assert live.stop() == 0


@SCHEMA.parametrize()
@settings(max_examples=EXAMPLES or 4, deadline=None, suppress_health_check=list(HealthCheck))
def test_document(case: Any, keyed: LiveServer) -> None:
    case.call_and_validate(base_url=keyed.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=20)


def test_the_server_still_serves(keyed: LiveServer) -> None:
    keyed.canary()
    served = keyed.client.get("/openapi.json").json()
    assert served == document("gapless", keys=True)
    assert httpx.get(keyed.url + "/openapi.json").status_code == 401
