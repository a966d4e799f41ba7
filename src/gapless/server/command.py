"""Serve a model over HTTP, with OpenAI's interface. MODEL is a folder, a name on the Hub, a .gguf file, or smollm2."""

from __future__ import annotations

import argparse
import logging
import os
import sys

from gapless.cli.adapters import config_for, parse_adapters
from gapless.cli.options import add_options, given
from gapless.cli.parser import CommandError, Parser, UsageError
from gapless.config import EngineConfig
from gapless.server.options import ServerOptions


def add_arguments(parser: Parser) -> None:
    """The options of ``gapless serve``."""
    parser.usage = "gapless serve MODEL [OPTION ...]"
    parser.add_argument("--model", help="the same as MODEL")
    lora = "load a LoRA adapter from PATH; clients name it as a model; may be given several times"
    parser.add_argument("--lora", action="append", default=[], metavar="NAME=PATH", help=lora)
    add_options(parser, ServerOptions, "server")
    add_options(parser, EngineConfig, "engine")


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal."""
    models = [*arguments.prompts, *([arguments.model] if arguments.model is not None else [])]
    if len(models) != 1:
        raise UsageError(f"one model is served, and {len(models)} are named: gapless serve MODEL")
    model, named = models[0], given(arguments, ServerOptions)
    if model == "smollm2":
        from gapless.model.load.smollm2 import get_smollm2

        model = str(get_smollm2())
        named.setdefault("served_model_name", "smollm2")
    options = ServerOptions(**named)
    engine = given(arguments, EngineConfig)
    adapters = parse_adapters(arguments.lora)
    config = config_for(adapters, EngineConfig.from_dict(engine), engine)
    if adapters:
        engine |= {name: getattr(config, name) for name in ("enable_lora", "max_loras", "max_lora_rank")}
    try:
        from gapless.server.lifecycle import serve
    except ImportError as error:
        raise CommandError(f"{error}: pip install 'gapless[serve]'") from error
    code = serve(model, options, engine, adapters)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # everything is closed; taking a loaded interpreter apart would only take time
