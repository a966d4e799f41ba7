"""What a model's ``generation_config.json`` says about sampling: used where a request gives nothing."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gapless.errors import ConfigError, RequestError
from gapless.model.load.files import read_json
from gapless.request.sampling_params import SamplingParams

logger = logging.getLogger("gapless")

FILE = "generation_config.json"
FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Those that `SamplingParams` has under the same name. Lengths are the request's affair."""


def sampling_defaults(model: Any) -> dict[str, float]:
    """Fields of `SamplingParams` that differ from its own defaults.

    Args:
        model: a name or folder as `load_model` takes, or a ``transformers`` model; anything else has none.

    Raises:
        ConfigError: a value is out of range; the message names it.
    """
    if isinstance(model, (str, Path)):
        from gapless.model.load.loading import model_folder

        path = model_folder(model) / FILE
        values: Mapping[str, Any] = read_json(path, str(model)) if path.is_file() else {}
    else:
        own = getattr(model, "generation_config", None)
        values = own.to_diff_dict() if own is not None else {}
    names = FIELDS if values.get("do_sample") is not False else ("repetition_penalty",)  # it says: greedy
    given = {name: values[name] for name in names if values.get(name) is not None}
    try:
        params = SamplingParams.from_dict(given)
    except RequestError as error:
        raise ConfigError(f"{FILE}: {error}. Correct it, or leave it out with generation_config=False") from error
    plain = SamplingParams()
    found = {name: getattr(params, name) for name in given if getattr(params, name) != getattr(plain, name)}
    if found:
        listed = ", ".join(f"{name}={value}" for name, value in found.items())
        logger.info("requests that do not say otherwise sample with %s, as %s has it", listed, FILE)
    return found
