"""Options as users of other engines write them; values that are refused; completions; sizes."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from gapless import ConfigError, EngineConfig, SamplingParams
from gapless.cli import main
from gapless.cli.generate import add_arguments
from gapless.cli.options import given
from gapless.cli.parser import Parser
from gapless.cli.vllm_words import WORDS
from gapless.config import parse_size
from gapless.errors import InputError


def parse(*arguments: str) -> argparse.Namespace:
    parser = Parser(prog="gapless generate")
    add_arguments(parser)
    return parser.parse(["--model", "m", *arguments], "prompts")


@pytest.mark.parametrize(
    ("arguments", "config"),
    [
        (["--tensor-parallel-size", "1", "--dtype", "bf16"], EngineConfig(dtype="bfloat16")),
        (["-tp=1", "--dtype=half"], EngineConfig(dtype="float16")),
        (["--num-gpu-blocks-override", "9"], EngineConfig(num_kv_blocks=9)),
        (["--enable-chunked-prefill", "--kv-cache-dtype", "fp8"], EngineConfig(kv_cache_dtype="fp8_e4m3")),
        (["--no-async-scheduling"], EngineConfig(pipeline_depth=1)),
        (["--max-num-batched-tokens", "4096"], EngineConfig(max_num_batched_tokens=4096)),
        (["--kv-cache-memory-bytes", "2G"], EngineConfig(kv_cache_memory_bytes=2**31)),
        (["--quantization", "none", "--load_format=auto", "--disable-log-requests"], EngineConfig()),
    ],
)
def test_words_that_mean_the_same_are_taken(arguments: list[str], config: EngineConfig) -> None:
    parsed = parse(*arguments, "hello")
    assert EngineConfig.from_dict(given(parsed, EngineConfig)) == config
    assert parsed.prompts == ["hello"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tensor-parallel-size", "2"], ["2", "one GPU", "CUDA_VISIBLE_DEVICES"]),
        (["-tp", "8"], ["one GPU"]),
        (["--quantization", "awq"], ["awq", "config"]),
        (["--trust-remote-code"], ["never run"]),
        (["--api-key", "secret"], ["gapless serve"]),
        (["--ssl-keyfile=x.pem"], ["gapless serve"]),
        (["--cpu-offload-gb", "4"], ["smaller model"]),
    ],
)
def test_words_that_do_not_get_the_reason_and_the_way(arguments: list[str], words: list[str]) -> None:
    with pytest.raises(InputError) as error:
        parse(*arguments, "hello")
    assert all(word in str(error.value) for word in words), error.value
    assert "Did you mean" not in str(error.value)


def test_every_word_has_an_answer() -> None:
    for name, word in WORDS.items():
        assert word.to or word.reason or word.flag, name
        assert not word.same or word.reason, name


def test_nothing_is_suggested_when_nothing_is_near() -> None:
    for name in ("--frobnicate", "--xyz", "--use-v2-block-manager", "--rope-theta"):
        with pytest.raises(InputError, match="unknown option") as error:
            parse(name)
        assert "Did you mean" not in str(error.value)
    with pytest.raises(InputError, match="Did you mean '--max-model-len'"):
        parse("--max-modellen", "5")


def test_bad_values_show_no_private_names() -> None:
    """Every option that takes a value, with one that it cannot take."""
    parser = Parser(prog="gapless generate")
    add_arguments(parser)
    tried = 0
    for action in parser._actions:
        if action.type is None or not action.option_strings:
            continue
        if action.metavar == "METHOD,NAME=VALUE":  # checked with the config
            continue
        with pytest.raises(InputError) as error:
            parse(f"{action.option_strings[0]}=x:y,{{")
        text = str(error.value)
        assert "_" not in text.replace(action.option_strings[0], ""), text
        assert "lambda" not in text
        assert "x:y,{" in text
        tried += 1
    assert tried > 20


@pytest.mark.parametrize(
    ("text", "size"),
    [("2G", 2**31), ("512MiB", 2**29), ("1.5g", 3 * 2**29), ("4096", 4096), ("1 TB", 2**40), ("3k", 3072)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size
    assert EngineConfig.from_dict({"kv_cache_memory_bytes": text}).kv_cache_memory_bytes == size


@pytest.mark.parametrize("text", ["", "G", "2X", "-1G", "2 G G", "many"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="no size"):
        parse_size(text)
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes"):
        EngineConfig.from_dict({"kv_cache_memory_bytes": text})


def test_size_and_number_in_an_error(capsys: Any) -> None:
    assert main(["generate", "--model", "m", "--kv-cache-memory-bytes", "lots", "hi"]) == 2
    assert "'lots' is not allowed: a size in bytes, or such as 2G" in capsys.readouterr().err
    assert SamplingParams.from_dict(given(parse("--top-k", "5"), SamplingParams)).top_k == 5
