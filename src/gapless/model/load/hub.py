"""From a model's name on the Hub to its folder in the local cache: one look-up decides whether it can be had."""

from __future__ import annotations

import logging
from pathlib import Path

from gapless.errors import ConfigError, did_you_mean

logger = logging.getLogger("gapless")

OWN_NAMES = ("smollm2",)
"""Models that gapless itself knows how to get, see `gapless.model.load.smollm2`."""
CONFIG_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]
WEIGHT_FILES = ["*.safetensors"]
LOOK_UP_SECONDS = 10.0


def fetch(name: str, *, weights: bool) -> Path:
    """The folder with the files of ``name``; those that are in the cache already are not fetched again.

    Args:
        name: as on the Hub.
        weights: with them. Without, the configuration and the tokenizer alone, so that a model can be refused first.

    Raises:
        ConfigError: there is no such name, or the Hub cannot be reached and the cache does not have it.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, snapshot_download, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = isinstance(try_to_load_from_cache(name, "config.json"), str)
        offline = constants.HF_HUB_OFFLINE
        if not offline:
            try:  # once: the library's own downloads try for half a minute each
                get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=LOOK_UP_SECONDS)
            except Exception as error:  # httpx, requests and the Hub have no base class in common
                if not cached:
                    raise _unknown(name, error) from error
                logger.warning("%s: the Hub cannot be reached (%s); the cached files are used", name, _line(error))
                offline = True
        elif not cached:
            raise _unknown(name, None)
        patterns = CONFIG_FILES + (WEIGHT_FILES if weights else [])
        return Path(snapshot_download(name, allow_patterns=patterns, local_files_only=offline))
    except HFValidationError as error:
        raise ConfigError(f"model={name!r}: there is no such folder, and the Hub can have no such name") from error
    except OSError as error:
        raise _unknown(name, error) from error


def _unknown(name: str, error: Exception | None) -> ConfigError:
    near = "" if "/" in name else did_you_mean(name, OWN_NAMES)
    why = "HF_HUB_OFFLINE is set, and it is not in the cache" if error is None else _line(error)
    return ConfigError(
        f"model={name!r}: its config cannot be read.{near} It is no folder here, and could not be fetched from the "
        f"Hub: check the name, the network and HF_HUB_OFFLINE, log in if it is private, or give a local folder. ({why})"
    )


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
