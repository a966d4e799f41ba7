"""What a benchmark runs: the model that was named, and its peers."""

from __future__ import annotations

import argparse
from typing import Any

from gapless.bench.sweep import Subject
from gapless.bench.workloads import Workload


def compare(arguments: argparse.Namespace, subject: Subject, loads: list[Workload], show: Any) -> list[dict[str, Any]]:
    """The peers that were asked for."""
    if not arguments.compare:
        return []
    from gapless.bench.peer import compare as run_peers

    return run_peers(subject, loads, arguments.compare, arguments.peer_attention, show)


def make_subject(arguments: argparse.Namespace, options: dict[str, Any]) -> Subject:
    """Load or make the model."""
    from gapless.bench.models import load_once, random_model
    from gapless.engine.build import resolve_device

    if arguments.quiet:
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
    device = resolve_device(options.get("device", "auto"))
    dtype = options.get("dtype", "auto")
    if arguments.model is None and arguments.shape is None:
        arguments.model, arguments.shape = (None, "llama-8b") if device.type == "cuda" else ("smollm2", None)
    if arguments.model is not None:
        return Subject(load_once(arguments.model, device, dtype), arguments.model, device, options, False)
    import torch

    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" else "float32"
    return Subject(random_model(arguments.shape, device, getattr(torch, dtype)), arguments.shape, device, options)
