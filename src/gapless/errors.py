"""The exceptions of gapless. A bad request is a ``ValueError``; a broken engine is a ``RuntimeError``."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator


class ConfigError(ValueError):
    """An engine option is out of range. The message names the field, the value, what is allowed, what to do."""


class RequestError(ValueError):
    """A request cannot be served. Only this request is refused; the others are not touched.

    Attributes:
        prompt_index: which of several prompts of one call it is about, from 0; the text begins with it.
    """

    prompt_index: int | None = None

    def __str__(self) -> str:
        text = super().__str__()
        return text if self.prompt_index is None else f"prompt {self.prompt_index}: {text}"


@contextlib.contextmanager
def naming_prompt(index: int, count: int) -> Iterator[None]:
    """A `RequestError` from within says which of ``count`` prompts it is about."""
    try:
        yield
    except RequestError as error:
        if count > 1:
            error.prompt_index = index
        raise


class AdapterError(ValueError):
    """A LoRA adapter cannot be loaded or unloaded. Nothing has changed; running requests are not touched."""


class InputError(ValueError):
    """A file that was named is wrong, or does not go with what else was asked for. The message names file and line."""


class UnavailableError(RuntimeError):
    """What was asked for needs a package, a device or a server that is not there."""


class BenchmarkError(RuntimeError):
    """A measurement cannot be made, or would not count."""


class UnsupportedModelError(ValueError):
    """The model holds a part that this engine would compute wrongly. Raised at load, naming the part."""


class WeightError(ValueError):
    """New weights do not fit the model. The message names the tensor; nothing has been changed."""


class EngineDeadError(RuntimeError):
    """The engine stopped because of an earlier error, which is the ``__cause__``. It takes no more work."""


class EngineClosedError(RuntimeError):
    """The engine was closed; it takes no more work."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` for the nearest of ``known``, or an empty string when nothing is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""


def shorter(prompt_len: int, max_tokens: int, longest: int) -> str:
    """What to do about a prompt of ``prompt_len`` tokens that does not fit into ``longest`` with ``max_tokens``."""
    left = longest - prompt_len
    if left > 0:
        return f"Shorten the prompt or lower max_tokens to {left} or less"
    if max_tokens < longest:
        return f"Shorten the prompt to {longest - max_tokens} tokens or less"
    return f"Shorten the prompt and lower max_tokens: the two may be {longest} together"
