"""Request: one sequence to generate, as the engine sees it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from gapless.errors import RequestError
from gapless.request.checks import check_integer
from gapless.request.prompt_embeds import PromptEmbeds
from gapless.request.sampling_params import SamplingParams

MAX_PRIORITY = 2**20
"""Largest ``priority``, and with a minus the smallest."""

MAX_CACHE_SALT = 1024
"""Characters of a ``cache_salt``."""


@dataclass(frozen=True, slots=True)
class LoraRef:
    """A loaded LoRA adapter, as a request names it.

    Attributes:
        id: from 1, unique per load and never given again: other weights under an old name are another adapter, which
            is what the prefix cache goes by.
        slot: where its weights lie on the device, from 1; 0 is no adapter.
        name: what users call it.
    """

    id: int
    slot: int
    name: str


@dataclass(slots=True)
class Request:
    """One sequence to generate, as the engine sees it. ``n`` completions are ``n`` of these.

    Attributes:
        id: unique in the engine for ever; given by the engine, never by a client.
        prompt_token_ids: int32 ``[prompt_len]``, at least one.
        max_tokens: the bound that admission settled on; prompt and new tokens fit ``max_model_len``.
        stop_token_ids: every id that ends the request, the model's own included unless they are ignored.
        seed: 64 bits.
        bad_words: `SamplingParams.bad_words` as token ids.
        prompt_logprobs: `SamplingParams.prompt_logprobs`, for the first of ``n`` completions only.
        streaming: the output side wants each token, not the finished sequence only.
        priority: lower runs earlier; first come, first served among equals.
        cache_key: keeps its blocks apart from those of requests with another one; see `cache_key`.
        grammar: where `SamplingParams.structured_outputs` has got to, a `gapless.grammar.matcher.Grammar`.
        lora: the adapter that its tokens run with; None for the model alone.
        embeds: of prompt tokens that are given so, and whose id is `OVERRIDDEN`.
        block_hashes: the scheduler's memory of the hash chain of its full blocks.
    """

    id: int
    prompt_token_ids: npt.NDArray[np.int32]
    params: SamplingParams
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int
    streaming: bool
    arrival: float = 0.0
    bad_words: tuple[tuple[int, ...], ...] = ()
    prompt_logprobs: int | None = None
    priority: int = 0
    cache_key: bytes = b""
    grammar: Any = None  # a type of a higher layer
    lora: LoraRef | None = None
    embeds: PromptEmbeds | None = None
    block_hashes: list[bytes] = field(default_factory=list)


def cache_key(salt: object, lora_id: int = 0) -> bytes:
    """The extra key of a request's blocks: what must be equal, beside the tokens, for one to be found again.

    At most 32 bytes; empty for None and 0. ``lora_id`` is `LoraRef.id`, 0 for the model alone: keys and values behind
    an adapter are of its making.

    Raises:
        RequestError: not a string of 1 to `MAX_CACHE_SALT` characters.
    """
    if salt is None and not lora_id:
        return b""
    if salt is None:
        salt = ""  # which nobody may give
    elif not isinstance(salt, str) or not 1 <= len(salt) <= MAX_CACHE_SALT:
        shown = f"a string of {len(salt)} characters" if isinstance(salt, str) else repr(salt)
        raise RequestError(
            f"cache_salt: {shown} is not allowed: a string of 1 to {MAX_CACHE_SALT} characters, or None to share "
            "blocks with everybody who gives none"
        )
    parts = b"%d:" % lora_id + salt.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(parts, digest_size=32, person=b"cache_salt").digest()


def check_priority(priority: object) -> int:
    """A request's priority.

    Raises:
        RequestError: not an integer in the range.
    """
    allowed = f"an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}; lower runs earlier"
    return check_integer("priority", priority, -MAX_PRIORITY, allowed, MAX_PRIORITY)
