"""OpenAI's batch files: a line in is a request to an endpoint, a line out its response.

``{"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}``. What a body may hold is what
`SamplingParams` can do; tools and images are refused by name.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gapless.cli.parser import UsageError
from gapless.errors import did_you_mean
from gapless.request.outputs import CompletionOutput, RequestOutput

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_SAME = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "stop", "stop_token_ids"),
    *("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words", "structured_outputs"),
)
_WITHOUT_EFFECT = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
"""What OpenAI's own service keeps for itself: no answer depends on it."""
_KNOWN = (
    *("model", "messages", "prompt", "max_completion_tokens", "logprobs", "top_logprobs", "response_format", "stream"),
    *(*_SAME, *_WITHOUT_EFFECT),
)
_LINE = ("custom_id", "method", "url", "body")


@dataclass(frozen=True, slots=True)
class BatchLine:
    """What the answer needs of the request.

    Attributes:
        url: the endpoint that was asked.
        model: the name that was asked for; it is repeated.
    """

    url: str
    model: str

    @classmethod
    def parse(cls, record: dict[str, Any], loras: Sequence[str]) -> tuple[dict[str, Any], BatchLine]:
        """A line as this command's own line, and what the answer needs.

        Raises:
            UsageError: naming the field.
        """
        for key in record:
            if key not in _LINE:
                raise UsageError(f"unknown key {key!r}.{did_you_mean(key, _LINE)} A batch line has {', '.join(_LINE)}")
        if not isinstance(record.get("custom_id"), str):
            raise UsageError(f"custom_id={record.get('custom_id')!r} is not allowed: a batch line needs a text")
        method, url, body = record.get("method", "POST"), record.get("url"), record["body"]
        if method != "POST":
            raise UsageError(f"method={method!r} is not allowed: POST")
        if url not in (CHAT, COMPLETIONS):
            raise UsageError(f"url={url!r} is not allowed: {CHAT} or {COMPLETIONS}")
        if not isinstance(body, dict):
            raise UsageError(f"body of type {type(body).__name__} is not allowed: an object")
        model = body.get("model") or ""
        fields = _fields({k: v for k, v in body.items() if v is not None}, url)
        if model in loras:
            fields["lora"] = model
        return fields, cls(url, model)

    def response(self, id: str, output: RequestOutput, model: str) -> dict[str, Any]:
        """The ``body`` of the answer."""
        chat = self.url == CHAT
        generated = sum(len(c.token_ids) for c in output.outputs)
        prompt = len(output.prompt_token_ids)
        return {
            "id": id,
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": self.model or model,
            "choices": [_chat_choice(c) if chat else _text_choice(c) for c in output.outputs],
            "usage": {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated},
        }


def _fields(body: dict[str, Any], url: str) -> dict[str, Any]:
    for key in body:
        if key not in _KNOWN:
            raise UsageError(f"body.{key} cannot be served from a file.{did_you_mean(key, _KNOWN)}")
    if body.get("stream"):
        raise UsageError("body.stream=true is not allowed: a file holds whole answers")
    if not isinstance(body.get("model", ""), str):
        raise UsageError(f"body.model={body['model']!r} is not allowed: a text")
    fields = {key: body[key] for key in _SAME if key in body}
    if isinstance(bias := fields.get("logit_bias"), dict):
        try:
            fields["logit_bias"] = {int(id): value for id, value in bias.items()}
        except ValueError as error:
            raise UsageError(f"body.logit_bias={bias!r} is not allowed: token ids are its keys") from error
    if "response_format" in body and (form := _structure(body["response_format"])) is not None:
        fields["structured_outputs"] = form
    (_chat if url == CHAT else _text)(body, fields)
    return fields


def _chat(body: dict[str, Any], fields: dict[str, Any]) -> None:
    if "messages" not in body:
        raise UsageError("body.messages is missing")
    if "prompt" in body:
        raise UsageError(f"body.prompt is not for {CHAT}: give messages")
    fields["messages"] = [_message(m, i) for i, m in enumerate(_list(body, "messages"))]
    if "max_completion_tokens" in body:
        fields["max_tokens"] = body["max_completion_tokens"]
    fields.setdefault("max_tokens", None)  # as OpenAI's: to the end
    wanted, most = body.get("logprobs", False), body.get("top_logprobs")
    if not isinstance(wanted, bool):
        raise UsageError(f"body.logprobs={wanted!r} is not allowed for {CHAT}: true or false, and top_logprobs=N")
    if most is not None and not wanted:
        raise UsageError("body.top_logprobs is allowed only with logprobs=true")
    if wanted:
        fields["logprobs"] = most or 0


def _text(body: dict[str, Any], fields: dict[str, Any]) -> None:
    for key in ("messages", "max_completion_tokens", "top_logprobs"):
        if key in body:
            raise UsageError(f"body.{key} is not for {COMPLETIONS}")
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and all(isinstance(id, int) for id in prompt):
        fields["prompt_token_ids"] = prompt
    elif isinstance(prompt, str):
        fields["prompt"] = prompt
    else:
        raise UsageError("body.prompt is needed: a text, or a list of token ids; several prompts are several lines")
    if "logprobs" in body:
        fields["logprobs"] = body["logprobs"]


def _list(body: dict[str, Any], name: str) -> list[Any]:
    if not isinstance(body[name], list):
        raise UsageError(f"body.{name} of type {type(body[name]).__name__} is not allowed: a list")
    return list(body[name])


def _message(message: Any, index: int) -> Any:
    """Content in parts becomes one text."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    parts = message["content"]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise UsageError(f"body.messages[{index}].content has a part of type {kind!r}: only text can be served")
    return {**message, "content": "".join(part["text"] for part in parts)}


def _structure(form: Any) -> dict[str, Any] | None:
    kind = form.get("type") if isinstance(form, dict) else form
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema" and isinstance(inner := form.get("json_schema"), dict) and "schema" in inner:
        return {"json": inner["schema"]}
    raise UsageError(
        f"body.response_format of type {kind!r} is not allowed: text, json_object, or json_schema with a schema"
    )


def _text_choice(c: CompletionOutput) -> dict[str, Any]:
    logprobs = None
    if c.logprobs is not None:
        own = [found[id] for id, found in zip(c.token_ids, c.logprobs, strict=True)]
        logprobs = {
            "tokens": [p.decoded_token for p in own],
            "token_logprobs": [p.logprob for p in own],
            "top_logprobs": [{str(p.decoded_token): p.logprob for p in found.values()} for found in c.logprobs],
        }
    return {"index": c.index, "text": c.text, "logprobs": logprobs, "finish_reason": c.finish_reason}


def _chat_choice(c: CompletionOutput) -> dict[str, Any]:
    logprobs = None
    if c.logprobs is not None:
        content = []
        for id, found in zip(c.token_ids, c.logprobs, strict=True):
            top = [{"token": p.decoded_token, "logprob": p.logprob} for p in found.values()]
            own = found[id]
            content.append({"token": own.decoded_token, "logprob": own.logprob, "top_logprobs": top})
        logprobs = {"content": content}
    message = {"role": "assistant", "content": c.text, "refusal": None}
    return {"index": c.index, "message": message, "logprobs": logprobs, "finish_reason": c.finish_reason}
