"""Options of vLLM's command: taken where they mean the same here, else answered with the reason and the way.

Only for options that the command does not have itself: what it has is never looked up here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from gapless.errors import InputError


@dataclass(frozen=True, slots=True)
class Word:
    """What becomes of an option.

    Attributes:
        to: our option of the same meaning, which gets the value; of a ``flag``, all that it becomes.
        flag: it has no value.
        same: values with which it means what happens anyway, so that it can be left out; a flag without ``to`` and
            without ``reason`` is such.
        reason: why other values cannot be served, and what to do.
    """

    to: str = ""
    flag: bool = False
    same: tuple[str, ...] = ()
    reason: str = ""


_ONE_GPU = "a model runs on one GPU. Start one engine for each GPU, with CUDA_VISIBLE_DEVICES, behind a balancer"
_ALWAYS = Word(flag=True)
_PROXY = "leave it to a proxy in front of the server, as docs/deployment.md shows"
_HUB = "transformers fetches the model: "
_TEXT_ONLY = Word(reason="only text is served: images and sound are not")

WORDS: dict[str, Word] = {
    # one device
    **dict.fromkeys(
        ("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp", "--data-parallel-size", "-dp"),
        Word(same=("1",), reason=_ONE_GPU),
    ),
    "--enable-expert-parallel": Word(flag=True, reason=_ONE_GPU),
    "--distributed-executor-backend": Word(same=("uni",), reason=_ONE_GPU),
    "--disable-custom-all-reduce": _ALWAYS,
    # weights
    **dict.fromkeys(
        ("--quantization", "-q"),
        Word(same=("none", "None"), reason="it cannot be chosen: what a folder's config says is read, or refused"),
    ),
    "--trust-remote-code": Word(
        flag=True,
        reason="code of a model's folder is never run. Architectures that transformers has need none: leave it out",
    ),
    "--load-format": Word(same=("auto", "safetensors"), reason="weights are safetensors, or a .gguf file"),
    "--revision": Word(reason=_HUB + "fetch a revision with `hf download NAME --revision R` and give its folder"),
    "--download-dir": Word(reason=_HUB + "set HF_HOME to move its cache"),
    "--hf-token": Word(reason=_HUB + "set HF_TOKEN, or run `hf auth login`"),
    "--tokenizer-mode": Word(same=("auto", "hf"), reason="the tokenizer is the one that transformers makes"),
    "--cpu-offload-gb": Word(same=("0",), reason="weights stay on the device: take a smaller model or dtype"),
    "--swap-space": Word(same=("0",), reason="a preempted request is computed again and not swapped: leave it out"),
    "--task": Word(same=("generate", "auto"), reason="models generate text: embeddings and scores are not served"),
    "--runner": Word(same=("generate", "auto"), reason="models generate text: embeddings and scores are not served"),
    "--limit-mm-per-prompt": _TEXT_ONLY,
    "--mm-processor-kwargs": _TEXT_ONLY,
    # the engine
    "--num-gpu-blocks-override": Word("--num-kv-blocks"),
    "--lora-modules": Word("--lora"),
    "--max-cpu-loras": Word(reason="adapters are loaded to the device, --max-loras of them: leave it out"),
    "--enable-chunked-prefill": _ALWAYS,
    "--no-enable-chunked-prefill": Word(flag=True, reason="prompts are always computed in chunks"),
    "--async-scheduling": _ALWAYS,
    "--no-async-scheduling": Word("--pipeline-depth=1", flag=True),
    "--scheduling-policy": Word(same=("priority", "fcfs"), reason="it is by priority, then first come, first served"),
    "--speculative-config": Word(reason="give --speculative METHOD,NAME=VALUE, such as ngram,num_speculative_tokens=4"),
    "--guided-decoding-backend": Word(same=("auto", "guidance"), reason="structured output is by llguidance"),
    "--compilation-config": Word(reason="CUDA graphs are always captured, unless --enforce-eager: leave it out"),
    "-O": Word(reason="CUDA graphs are always captured, unless --enforce-eager: leave it out"),
    "--max-seq-len-to-capture": Word(reason="graphs serve every length: leave it out"),
    "--max-logprobs": Word(same=tuple(map(str, range(21))), reason="at most 20 can be asked for"),
    "--disable-log-requests": _ALWAYS,
    "--disable-log-stats": _ALWAYS,
    # the server
    "--seed": Word("--engine-seed"),
    **dict.fromkeys(
        ("--api-key", "--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--ssl-cert-reqs"),
        Word(reason="it is for a server: gapless serve --help lists what it takes"),
    ),
    "--enable-auto-tool-choice": _ALWAYS,
    "--uvicorn-log-level": Word("--log-level"),
    "--disable-uvicorn-access-log": Word("--no-access-log", flag=True),
    "--root-path": Word(reason=_PROXY),
    "--allowed-origins": Word(same=("[]",), reason=_PROXY),
    "--middleware": Word(reason=_PROXY),
}  # fmt: skip


def translated(arguments: Sequence[str], known: Collection[str]) -> list[str]:
    """Arguments with these words replaced, for a command whose own options are ``known``.

    Raises:
        InputError: with the reason why one of them cannot be served, and the way.
    """
    out: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument.partition("=")
        spelt = "--" + name[2:].replace("_", "-") if name.startswith("--") else name
        word = WORDS.get(spelt)
        if word is None or name in known or (word.to and word.to.partition("=")[0] not in known):
            out.append(argument)
        elif word.flag:
            if word.reason:
                raise InputError(f"{name}: {word.reason}")
            out += [word.to] if word.to else []
        else:
            if not equals:
                value = rest.pop(0) if rest and not rest[0].startswith("--") else ""
            if word.to:
                out.append(f"{word.to}={value}")
            elif value not in word.same:
                raise InputError(f"{name} {value}".rstrip() + f": {word.reason}")
    return out
