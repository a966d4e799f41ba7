"""A prompt of which some tokens are given by their embeddings, checked and made plain data, on the caller's thread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from gapless.errors import RequestError, did_you_mean
from gapless.request.prompt_embeds import I32, PromptEmbeds
from gapless.text.chat import EncodedPrompt, check_token_ids

FIELDS = ("prompt_embeds", "prompt_token_ids", "prompt_embeds_positions")


def encode_embeds(
    prompt: Mapping[Any, Any], vocab_size: int, width: int, dtype: torch.dtype, most: int
) -> EncodedPrompt:
    """A prompt with ``prompt_embeds``.

    Args:
        prompt: ``prompt_embeds`` is a floating-point tensor ``[n, width]``. Alone it is the whole prompt. Beside
            ``prompt_token_ids`` it stands for the tokens at ``prompt_embeds_positions``, n rising integers; the ids
            there do not matter, and are what an output repeats.
        vocab_size, width, dtype: of the model.
        most: ``max_prompt_embeds`` of the engine.

    Raises:
        RequestError: naming the field and what is wrong with it.
    """
    for key in prompt:
        if key not in FIELDS:
            hint = did_you_mean(str(key), FIELDS)
            raise RequestError(f"unknown prompt field {key!r}.{hint} With prompt_embeds there are {', '.join(FIELDS)}")
    embeds = prompt["prompt_embeds"]
    if not most:
        raise RequestError(
            "prompt_embeds is not allowed: this engine has no room for embeddings. Make it with max_prompt_embeds=N, "
            "the most tokens of running requests that are given so"
        )
    if not isinstance(embeds, torch.Tensor) or not embeds.is_floating_point():
        kind = f"{embeds.dtype} tensor" if isinstance(embeds, torch.Tensor) else type(embeds).__name__
        raise RequestError(f"prompt_embeds of type {kind} is not allowed: a floating-point tensor is")
    if embeds.dim() != 2 or embeds.shape[1] != width or not len(embeds):
        raise RequestError(f"prompt_embeds has shape {tuple(embeds.shape)}, not allowed: [tokens, {width}] is")
    count = len(embeds)
    if count > most:
        raise RequestError(
            f"prompt_embeds has {count} rows, more than max_prompt_embeds={most}: the request could never start. Raise "
            "that, or give fewer"
        )
    data = embeds.detach().to("cpu", dtype, copy=True).contiguous()  # the caller's thread may wait for its own tensor
    if not bool(torch.isfinite(data).all()):
        raise RequestError(f"prompt_embeds holds numbers that are not finite in {str(dtype).removeprefix('torch.')}")
    ids, positions = _places(prompt, count, vocab_size)
    return EncodedPrompt(None, ids, PromptEmbeds(positions, data.view(torch.uint8).numpy()))


def _places(prompt: Mapping[Any, Any], count: int, vocab_size: int) -> tuple[I32, I32]:
    """The prompt's ids, and the positions of the embeddings among them."""
    if "prompt_token_ids" not in prompt:
        if "prompt_embeds_positions" in prompt:
            raise RequestError("prompt_embeds_positions needs prompt_token_ids, whose tokens it names")
        return np.zeros(count, np.int32), np.arange(count, dtype=np.int32)
    ids = check_token_ids(prompt["prompt_token_ids"], vocab_size)
    if "prompt_embeds_positions" not in prompt:
        raise RequestError("prompt_embeds_positions is missing: it says which of prompt_token_ids the embeds replace")
    positions = check_token_ids(prompt["prompt_embeds_positions"], len(ids), "prompt_embeds_positions")
    if len(positions) != count:
        raise RequestError(f"prompt_embeds_positions has {len(positions)} entries and prompt_embeds {count} rows")
    if (np.diff(positions) <= 0).any():
        raise RequestError("prompt_embeds_positions must rise: give rows in the order of the prompt, each place once")
    return ids, positions
