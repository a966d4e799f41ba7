"""An argument parser that never guesses: no abbreviations; a misspelt option names the nearest right one."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from gapless.cli.vllm_words import translated
from gapless.errors import InputError

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
        before = translated(before, self._option_string_actions)
        namespace, other = self.parse_known_args(before)
        for word in other:
            if _is_option(word):
                name = word.partition("=")[0]
                raise UsageError(f"unknown option {name!r}.{self._near(name)} {self._more}")
        setattr(namespace, rest, other + after)
        return namespace

    def error(self, message: str) -> NoReturn:
        """Instead of printing and leaving."""
        raise UsageError(f"{message.removesuffix('.')}. {self._more}")

    def _near(self, name: str) -> str:
        """A suggestion, if an option is really near: the dashes that all begin with make none so."""
        bare = {option.lstrip("-"): option for option in self._option_string_actions if option.startswith("--")}
        near = difflib.get_close_matches(name.lstrip("-").replace("_", "-"), bare, n=1, cutoff=0.7)
        return f" Did you mean {bare[near[0]]!r}?" if near else ""

    @property
    def _more(self) -> str:
        return f"`{self.prog} --help` lists all options"


def _is_option(word: str) -> bool:
    return len(word) > 1 and word[0] == "-" and " " not in word and not _NUMBER.match(word)
