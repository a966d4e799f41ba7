"""The command ``tools/coverage.py`` and the document that it writes."""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import replace
from pathlib import Path

import pytest

from architectures import compare
from architectures.compare import Outcome, outcome
from architectures.small import NotSmall, small_config, small_model
from architectures.table import MAIN, between, parse, render, replaced
from gapless import LLM
from gapless.attention import reference
from gapless.cli import script
from gapless.model.adapter import TransformersModel
from tools import coverage as command

DOCUMENT = (Path(__file__).parent.parent / "docs" / "models.md").read_text("utf-8")


def documented() -> dict[str, Outcome]:
    return {o.model_type: o for o in parse(between(DOCUMENT))}


def test_the_document_is_what_the_command_writes() -> None:
    text = between(DOCUMENT)
    version = text.split()[1].rstrip(",")
    assert render(parse(text), version) == text
    assert replaced(DOCUMENT, text) == DOCUMENT


def test_the_main_architectures_are_equal_and_nothing_differs() -> None:
    found = documented()
    assert set(MAIN) <= set(found)
    assert {name: found[name].result for name in MAIN} == dict.fromkeys(MAIN, "equal")
    assert not [o for o in found.values() if o.result in ("differs", "fails")]


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_oss", "mistral"])
def test_a_fresh_run_finds_what_the_document_says(model_type: str) -> None:
    now, then = outcome(model_type), documented()[model_type]
    assert (now.result, now.windows) == (then.result, then.windows)


def test_a_refusal_names_the_part() -> None:
    o = outcome("bart")
    assert o.result == "refused"
    assert "encoder-decoder" in o.text


def test_a_model_has_every_kind_of_layer() -> None:
    config = small_config("gemma3_text")
    assert set(config.layer_types) == {"sliding_attention", "full_attention"}
    config.hidden_size = 100_000
    with pytest.raises(NotSmall, match="million parameters"):
        small_model(config)


def test_a_wrong_window_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention looks one position less far back than the model does."""

    def short(q, k, v, cache, context, params, scales):  # type: ignore[no-untyped-def]
        return reference.attend(q, k, v, cache, context, replace(params, window=params.window - 1), scales)

    def wrong(model, **options):  # type: ignore[no-untyped-def]
        return LLM(TransformersModel(model, attention=short), **options)

    monkeypatch.setattr(compare, "LLM", wrong)
    assert outcome("mistral").result == "differs"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_type_that_hangs_or_dies_takes_nothing_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_work", _faulty)
    fork = multiprocessing.get_context("fork")  # starts at once; the worker here uses no torch
    monkeypatch.setattr(multiprocessing, "get_context", lambda name: fork)
    found = list(command.outcomes(["dies", "good", "hangs", "good"], 1.0))
    assert [o.result for o in found] == ["not small", "equal", "no end", "equal"]


def _faulty(pipe, device) -> None:  # type: ignore[no-untyped-def]
    pipe.send("ready")
    while True:
        name = pipe.recv()
        if name == "dies":
            raise SystemExit(3)
        if name == "hangs":
            time.sleep(60)
        pipe.send(Outcome(name, "equal", "below 1e-6"))


def test_bad_arguments(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing")
    for arguments, told in (
        (["gema2"], "unknown model type 'gema2'. Did you mean 'gemma2'"),
        (["--write", "x"], "--write needs --all"),
        (["--all", "--write", "x", "--device", "cuda"], "--write goes with --device cpu"),
        (["--all", "llama"], "--all leaves nothing to name"),
        (["--seconds", "0"], "above 0"),
        (["--all", "--write", str(page)], "lacks the marks"),
    ):
        assert script("coverage", command, arguments) in (1, 2)
        assert told in capsys.readouterr().err


def test_an_outcome_survives_the_table() -> None:
    made = [
        Outcome("llama", "equal", "below 1e-5", (None,)),
        Outcome("gemma", "equal", "below 1e-6", (None, 10)),
        Outcome("mamba", "refused", "keeps a | state"),
        Outcome("bert", "no end", "more than 5 s"),
    ]
    assert {o.model_type: o for o in parse(render(made, "1.0"))} == {o.model_type: o for o in made}
