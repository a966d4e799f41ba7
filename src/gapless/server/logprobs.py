"""Log-probabilities as clients read them.

A client may compare numbers exactly: is the chosen token the most likely one? So both come from the same record, and
nothing is rounded. JSON has no infinity; `FLOOR` stands for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gapless.request.outputs import Logprob
from gapless.server.protocol import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from gapless.text.detokenizer import token_bytes

FLOOR = -9999.0


def _value(logprob: Logprob) -> float:
    return max(logprob.logprob, FLOOR)


class LogprobWriter:
    """Writes the log-probabilities of one request.

    Args:
        tokenizer: None names tokens by their ids.
        count: most likely tokens that were asked for.
        as_ids: name tokens ``token_id:123``.
    """

    def __init__(self, tokenizer: Any, count: int, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._count = count
        self._as_ids = as_ids or tokenizer is None

    def name(self, token: int, logprob: Logprob | None) -> str:
        """What a client sees of a token."""
        if self._as_ids:
            return f"token_id:{token}"
        if logprob is not None and logprob.decoded_token is not None:
            return logprob.decoded_token
        text: str = self._tokenizer.decode([token], clean_up_tokenization_spaces=False)
        return text

    def completion(
        self, ids: Sequence[int], positions: Sequence[dict[int, Logprob] | None], offset: int
    ) -> CompletionLogprobs:
        """The four lists of ``/v1/completions``.

        Args:
            ids: of the tokens.
            positions: what is known of each; None for the first token of a prompt.
            offset: characters of the tokens before.
        """
        out = CompletionLogprobs([], [], [], [])
        for token, found in zip(ids, positions, strict=True):
            own = None if found is None else found[token]
            name = self.name(token, own)
            out.text_offset.append(offset)
            out.tokens.append(name)
            out.token_logprobs.append(None if own is None else _value(own))
            offset += len(name)
            if found is None or not self._count:
                out.top_logprobs.append(None)
                continue
            top: dict[str, float] = {}
            for other, logprob in found.items():  # of two tokens with one text the likelier counts
                key = self.name(other, logprob)
                top[key] = max(top.get(key, FLOOR), _value(logprob))
            out.top_logprobs.append(top)
        return out

    def chat(self, ids: Sequence[int], positions: Sequence[dict[int, Logprob]]) -> ChatLogprobs:
        """``logprobs.content`` of ``/v1/chat/completions``."""
        content = []
        for token, found in zip(ids, positions, strict=True):
            ranked = sorted(found.items(), key=lambda item: item[1].rank or 0)[: self._count]
            top = [TopLogprob(self.name(t, p), _value(p), self._bytes(t)) for t, p in ranked]
            own = found[token]
            content.append(TokenLogprob(self.name(token, own), _value(own), self._bytes(token), top))
        return ChatLogprobs(content)

    def _bytes(self, token: int) -> list[int] | None:
        return None if self._tokenizer is None else list(token_bytes(self._tokenizer, token))


def prompt_logprobs(positions: Sequence[dict[int, Logprob] | None]) -> list[Any]:
    """``prompt_logprobs``, an extension: for each token of the prompt, by token id."""
    return [
        None
        if found is None
        else {
            str(token): {"logprob": _value(p), "rank": p.rank, "decoded_token": p.decoded_token}
            for token, p in found.items()
        }
        for found in positions
    ]
