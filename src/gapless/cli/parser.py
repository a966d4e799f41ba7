"""An argument parser that never guesses: no abbreviations; a misspelt option names the nearest right one."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from gapless.errors import InputError, did_you_mean

_NUMBER = re.compile(r"-\d|-\.\d")


class UsageError(InputError):
    """The command line, or a file that it names, is wrong. Exit code 2."""


class CommandError(RuntimeError):
    """The command cannot go on, for a reason that one line explains. Exit code 1."""


class Parser(argparse.ArgumentParser):
    """Errors are `UsageError`. Options may stand between the other arguments, but not after ``--``."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse(self, arguments: Sequence[str], rest: str) -> argparse.Namespace:
        """Parse; what is no option ends up as a list in attribute ``rest``.

        Raises:
            UsageError: an unknown option or a bad value.
        """
        before, after = list(arguments), list[str]()
        if "--" in before:
            cut = before.index("--")
            before, after = before[:cut], before[cut + 1 :]
        namespace, other = self.parse_known_args(before)
        for word in other:
            if _is_option(word):
                name = word.partition("=")[0]
                near = did_you_mean(name, self._option_string_actions)
                raise UsageError(f"unknown option {name!r}.{near} {self._more}")
        setattr(namespace, rest, other + after)
        return namespace

    def error(self, message: str) -> NoReturn:
        """Instead of printing and leaving."""
        raise UsageError(f"{message.removesuffix('.')}. {self._more}")

    @property
    def _more(self) -> str:
        return f"`{self.prog} --help` lists all options"


def _is_option(word: str) -> bool:
    return len(word) > 1 and word[0] == "-" and " " not in word and not _NUMBER.match(word)
