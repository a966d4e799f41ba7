"""A checkpoint that is not the model of its config is refused, with tensors and counts; so is one that writes no "
"text."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig

from gapless import LLM, EngineConfig, SamplingParams
from gapless.cli.prompts import jobs_from_arguments, read_jobs
from gapless.errors import AdapterError, ConfigError, UnsupportedModelError
from gapless.model.config_checks import UNBOUNDED, longest_context
from gapless.model.load.complete import check_finite
from gapless.model.load.loading import load_model, load_tokenizer
from gapless.model.load.sampling_defaults import sampling_defaults
from gapless.server.parameters import sampling_params
from gapless.server.protocol import ChatRequest
from models import tiny, tiny_config

CPU = torch.device("cpu")
Change = Callable[[dict[str, torch.Tensor]], None]
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "whole"
    tiny("llama", tie_word_embeddings=False).save_pretrained(path)
    return path


def changed(whole: Path, folder: Path, change: Change = lambda tensors: None, **config: Any) -> Path:
    """A copy of the folder with other tensors, or another config."""
    folder.mkdir(exist_ok=True)
    tensors = load_file(whole / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    values = json.loads((whole / "config.json").read_text()) | config
    values.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def refused(folder: Path, *says: str, **options: Any) -> None:
    with pytest.raises((ConfigError, UnsupportedModelError)) as caught:
        load_model(folder, device=CPU, **options)
    for text in says:
        assert text in str(caught.value)


def drop(*names: str) -> Change:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in names:
            del tensors[name]

    return change


def add(name: str, *shape: int) -> Change:
    return lambda tensors: tensors.update({name: torch.zeros(*shape)})


def prefixed(tensors: dict[str, torch.Tensor]) -> None:
    for name in list(tensors):
        tensors[f"student.{name}"] = tensors.pop(name)


def test_missing_tensors(whole: Path, tmp_path: Path) -> None:
    refused(changed(whole, tmp_path, drop(UP)), "1 tensor missing", UP, "allow_missing")
    refused(changed(whole, tmp_path, drop("lm_head.weight")), "1 tensor missing", "lm_head.weight")
    refused(changed(whole, tmp_path, drop("model.embed_tokens.weight")), "model.embed_tokens.weight")
    refused(changed(whole, tmp_path, num_hidden_layers=4), "9 tensors missing", "model.layers.3", "and 4 more")
    refused(changed(whole, tmp_path, attention_bias=True), "12 tensors missing", ".bias")


def test_tensors_that_nothing_takes(whole: Path, tmp_path: Path) -> None:
    refused(changed(whole, tmp_path, num_hidden_layers=2), "9 tensors not known to the model", "model.layers.2")
    bias = "model.layers.0.self_attn.q_proj.bias"
    refused(changed(whole, tmp_path, add(bias, 48)), "1 tensor not known", bias)
    refused(changed(whole, tmp_path, prefixed), "missing", "not known", "student.model.layers.0")
    refused(changed(whole, tmp_path, add("model.layers.0.mlp.up_proj.qweight", 4)), "qweight")


def test_shapes(whole: Path, tmp_path: Path) -> None:
    refused(changed(whole, tmp_path, vocab_size=200), "2 tensors of another shape", "lm_head.weight is 199 x 48 there")
    refused(changed(whole, tmp_path, intermediate_size=96), "9 tensors of another shape", "96 x 48 in the model")


def test_what_is_no_fault(whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"):
        load_model(changed(whole, tmp_path, add(name, 4)), device=CPU, probe=False)
    with caplog.at_level(logging.INFO, "gapless"):
        load_model(changed(whole, tmp_path, add("vision_tower.patch.weight", 4, 4)), device=CPU, probe=False)
    assert "not used: vision_tower (1 tensors)" in caplog.text
    tied = tmp_path / "tied"
    tiny("llama", tie_word_embeddings=True).save_pretrained(tied)
    load_model(tied, device=CPU, probe=False)


def test_tensors_that_may_be_missing(whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = changed(whole, tmp_path, drop(UP, UP.replace(".1.", ".2.")))
    refused(folder, "1 tensor missing", UP.replace(".1.", ".2."), allow_missing=[UP])
    load_model(folder, device=CPU, probe=False, allow_missing=["*.up_proj.weight"])
    assert "2 tensors missing and drawn at random" in caplog.text
    with LLM(str(folder), device="cpu", num_kv_blocks=9, allow_missing="model.layers.?.mlp.up_proj.weight") as llm:
        assert llm.config.allow_missing == ("model.layers.?.mlp.up_proj.weight",)
    with pytest.raises(ConfigError, match="allow_missing"):
        EngineConfig(allow_missing=[""])


def test_a_draft_model_too(whole: Path, tmp_path: Path) -> None:
    draft = changed(whole, tmp_path, drop(UP))
    with pytest.raises(ConfigError, match=UP):
        LLM(str(whole), device="cpu", num_kv_blocks=9, speculative=f"draft_model,model={draft}")


def test_files_that_are_missing_or_cut(whole: Path, tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    tiny("llama").save_pretrained(shards, max_shard_size="50KB")
    files = sorted(shards.glob("*.safetensors"))
    data = files[1].read_bytes()
    files[1].unlink()
    refused(shards, f"1 of the {len(files)} files", files[1].name, "model.layers")
    files[1].write_bytes(data[:-40])
    refused(shards, files[1].name, "is cut", "1 of its", "model.layers")
    files[1].write_bytes(b"")
    refused(shards, files[1].name, "no whole table")
    files[1].write_bytes(data[:9] + b"!!!!" + data[13:])
    refused(shards, files[1].name, "table of tensors is broken")
    (shards / "model.safetensors.index.json").write_text("{")
    refused(shards, "index.json cannot be read")


def test_weights_that_are_not_finite(whole: Path, tmp_path: Path) -> None:
    for value in (float("nan"), float("inf"), -float("inf")):
        folder = changed(whole, tmp_path, lambda tensors, value=value: tensors[UP][3].fill_(value))  # type: ignore[misc]
        refused(folder, "1 tensor with NaN or infinite values", UP)
    model = tiny("llama").to(torch.float16)
    model.get_parameter(UP).data[0, 0] = 6e4  # the largest that there are: their sum would not be finite
    model.get_parameter(UP).data[0, 1:] = 6e4
    check_finite(model, "large")
    model.get_parameter(UP).data[0, 0] = float("nan")
    with pytest.raises(ConfigError, match="NaN"):
        load_model(model, device=CPU)


def test_configs_that_cannot_be_read(whole: Path, tmp_path: Path) -> None:
    folder = changed(whole, tmp_path)
    for text, says in (("{", "config.json cannot be read"), ("[]", "holds list"), ('{"a": 1}', "type None")):
        (folder / "config.json").write_text(text)
        (folder / "tokenizer_config.json").write_text("{}")
        refused(folder, says)
        with pytest.raises(ConfigError, match=r"model=.*config|type None"):  # and not: tokenizer=
            LLM(str(folder), device="cpu")
    refused(changed(whole, tmp_path, hidden_size="many"), "config.json is not allowed")


@pytest.mark.parametrize(
    ("architecture", "says"),
    [
        ("LlamaForSequenceClassification", "a classifier"),
        ("LlamaForTokenClassification", "a classifier"),
        ("Qwen2ForProcessRewardModel", "a reward model"),
        ("LlamaModel", "without the head"),
    ],
)
def test_models_that_write_no_text(whole: Path, tmp_path: Path, architecture: str, says: str) -> None:
    refused(changed(whole, tmp_path, architectures=[architecture]), architecture, says)


def test_models_by_class(whole: Path) -> None:
    from transformers import LlamaForSequenceClassification, LlamaModel

    for kind in (LlamaModel, LlamaForSequenceClassification):
        with pytest.raises(UnsupportedModelError, match="no head that chooses tokens"):
            load_model(kind(tiny_config("Llama")), device=CPU)


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "compressed-tensors", "bitsandbytes", "mxfp4", "new_method"])
def test_quantized_folders(whole: Path, tmp_path: Path, method: str) -> None:
    options = {"quant_method": method, "bits": 4}
    refused(changed(whole, tmp_path, quantization_config=options), f"quantized with {method}")


def test_quantized_folders_of_older_tools(whole: Path, tmp_path: Path) -> None:
    folder = changed(whole, tmp_path)
    (folder / "quantize_config.json").write_text('{"bits": 4}')
    refused(folder, "quantized with GPTQ")


def test_adapters_are_no_models(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')
    refused(tmp_path, "is an adapter", "'some/base'", "load_lora")
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny("llama"), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ConfigError, match="merge_and_unload"):
        load_model(model, device=CPU)


def test_lengths_are_refused_before_the_weights_are_read(whole: Path, tmp_path: Path) -> None:
    folder = changed(whole, tmp_path)
    (folder / "model.safetensors").unlink()
    refused(folder, "max_model_len=513 is more than the 512 positions", max_model_len=513)


def test_code_of_a_folder_is_refused(whole: Path, tmp_path: Path) -> None:
    own = {"auto_map": {"AutoConfig": "own.OwnConfig"}, "model_type": "own"}
    refused(changed(whole, tmp_path, **own), "brings code of its own", "never runs")
    options = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(options))
    with pytest.raises(ConfigError, match="OwnTokenizer is code of the model's folder") as caught:
        load_tokenizer(tmp_path)
    assert "trust_remote_code" not in str(caught.value)


def test_longest_context() -> None:
    def length(rope_type: str, **more: Any) -> int:
        rope = {"rope_type": rope_type, "rope_theta": 10000.0, **more}
        return longest_context(tiny_config("Llama", max_position_embeddings=80, rope_parameters=rope))

    assert length("default") == 80
    assert length("yarn", factor=4.0, original_max_position_embeddings=64) == 256
    assert length("yarn", factor=1.5, original_max_position_embeddings=40) == 80
    assert length("linear", factor=4.0) == 320
    bands = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert length("llama3", factor=8.0, original_max_position_embeddings=32, **bands) == 256
    assert longest_context(PreTrainedConfig()) == UNBOUNDED


def test_longrope_says_what_short_prompts_get(caplog: pytest.LogCaptureFixture) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64, **factors}
    model = tiny("phi3", rope_parameters=rope, max_position_embeddings=256, original_max_position_embeddings=64)
    load_model(model, device=CPU, max_model_len=64)
    assert "set max_model_len" not in caplog.text
    load_model(model, device=CPU, max_model_len=128)
    assert "set max_model_len=64" in caplog.text


def test_an_adapter_with_a_hole(whole: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    options = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    folder = tmp_path / "adapter"
    peft.get_peft_model(tiny("llama"), options).save_pretrained(folder)
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    lost = [name for name in tensors if "layers.1.mlp.up_proj" in name]
    assert len(lost) == 2
    engine = {"device": "cpu", "num_kv_blocks": 9, "enable_lora": True}
    with LLM(str(whole), **engine) as llm:
        llm.load_lora("whole", folder)
        save_file({name: tensor for name, tensor in tensors.items() if name not in lost}, file)
        with pytest.raises(AdapterError, match=r"1 of the modules .* missing .*: model\.layers\.1\.mlp\.up_proj"):
            llm.load_lora("hole", folder)
    with LLM(str(whole), **engine, allow_missing=["model.layers.1.*"]) as llm:
        llm.load_lora("hole", folder)
    config = json.loads((folder / "adapter_config.json").read_text()) | {"layers_to_transform": [0, 2]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    rest = {name: tensor for name, tensor in tensors.items() if ".1." not in name}
    save_file(rest, file)
    with LLM(str(whole), **engine) as llm:
        llm.load_lora("some layers", folder)


def test_sampling_defaults_of_the_model(whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = changed(whole, tmp_path)
    file = folder / "generation_config.json"
    file.write_text(json.dumps({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 1.0, "max_new_tokens": 9}))
    with caplog.at_level(logging.INFO, "gapless"), LLM(str(folder), device="cpu", num_kv_blocks=9) as llm:
        assert llm._client.default_params() == SamplingParams(temperature=0.6, top_k=20)
        seen = []
        submit = llm._client.submit
        llm._client.submit = lambda many: (seen.extend(many), submit(many))[1]  # type: ignore[method-assign]
        own = SamplingParams(max_tokens=2)
        llm.generate({"prompt_token_ids": [3]}, use_tqdm=False)
        llm.generate({"prompt_token_ids": [3]}, own, use_tqdm=False)
        assert [s.params for s in seen] == [SamplingParams(temperature=0.6, top_k=20), own]
    assert "temperature=0.6, top_k=20" in caplog.text
    with LLM(str(folder), device="cpu", num_kv_blocks=9, generation_config=False) as llm:
        assert llm._client.default_params() == SamplingParams()
    file.write_text(json.dumps({"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.1}))
    assert sampling_defaults(folder) == {"repetition_penalty": 1.1}
    file.write_text(json.dumps({"temperature": -1}))
    with pytest.raises(ConfigError, match=r"generation_config.json: temperature=-1.*generation_config=False"):
        sampling_defaults(str(folder))
    model = tiny("llama")
    model.generation_config.update(do_sample=True, top_p=0.9)
    assert sampling_defaults(model) == {"top_p": 0.9}
    assert sampling_defaults(object()) == {}


def test_what_the_user_gave_stays(tmp_path: Path) -> None:
    defaults = {"temperature": 0.6, "top_k": 20}
    (job,) = jobs_from_arguments(["a"], {"temperature": 0.0}, chat=False)
    assert job.with_defaults(defaults).params == SamplingParams(temperature=0.0, top_k=20)
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a", "top_k": 3}\n{"prompt": "b"}\n')
    jobs = [job.with_defaults(defaults) for job in read_jobs(str(file), True, {}, False)]
    assert [(job.params.temperature, job.params.top_k) for job in jobs] == [(0.6, 3), (0.6, 20)]
    request = ChatRequest(messages=[], top_k=5)
    params = sampling_params(request, 1, defaults)
    assert (params.temperature, params.top_k) == (0.6, 5)
