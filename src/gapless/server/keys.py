"""API keys: from the environment and a file, kept as hashes, compared in constant time."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path

from gapless.errors import ConfigError

VARIABLE = "GAPLESS_API_KEY"


class Keys:
    """What may come in an Authorization header.

    Args:
        keys: the keys themselves, which are not kept.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._hashes = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        """True if a key is asked for."""
        return bool(self._hashes)

    def allow(self, header: bytes | None) -> bool:
        """Whether ``Bearer KEY`` holds a known key. Takes as long for a wrong one as for a right one."""
        scheme, _, key = (header or b"").partition(b" ")
        digest = hashlib.sha256(key).digest()
        matches = [secrets.compare_digest(digest, known) for known in self._hashes]
        return any(matches) and scheme.lower() == b"bearer"


def read_keys(file: str | None, environment: Mapping[str, str] = os.environ, given: str | None = None) -> Keys:
    """The keys of the file, one a line, and of `VARIABLE` and ``given``, with commas.

    Raises:
        ConfigError: the file cannot be read, holds no key, or a key has a space in it.
    """
    listed = f"{environment.get(VARIABLE, '')},{given or ''}"
    keys = [key.strip() for key in listed.split(",") if key.strip()]
    if file is not None:
        try:
            lines = Path(file).read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"api_key_file={file!r} cannot be read: {error}") from error
        of_file = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not of_file:
            raise ConfigError(f"api_key_file={file!r} holds no key: one a line")
        keys += of_file
    for key in keys:
        if any(c.isspace() or not c.isprintable() or not c.isascii() for c in key):
            raise ConfigError("an API key has a character that no header can hold: printable ASCII without spaces")
    return Keys(keys)
