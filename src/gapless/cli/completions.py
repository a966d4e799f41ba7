"""Print a script that completes this command's words in a shell: bash, zsh or fish.

    source <(gapless completions bash)             in ~/.bashrc
    source <(gapless completions zsh)              in ~/.zshrc, after compinit
    gapless completions fish | source              in ~/.config/fish/config.fish
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator

from gapless.cli.parser import Parser, UsageError

SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: Parser) -> None:
    """The options of ``gapless completions``."""
    parser.usage = "gapless completions {bash,zsh,fish}"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    if len(arguments.prompts) != 1 or arguments.prompts[0] not in SHELLS:
        given = " ".join(arguments.prompts) or "none"
        raise UsageError(f"shell {given!r} is not allowed: one of {', '.join(SHELLS)}")
    print(script(arguments.prompts[0]))
    return 0


def script(shell: str) -> str:
    """For one of `SHELLS`. It names the options of now, and is to be made anew at each start of a shell."""
    if shell == "fish":
        return "\n".join(_fish())
    cases = "\n".join(f"    '{name}') words='{' '.join(options)}' ;;" for name, options, _ in _commands())
    head = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    names = sorted({name.split()[0] for name, _, _ in _commands()})
    seconds = "|".join(f"'{name}'" for name, _, _ in _commands() if " " in name)
    return f"""{head}_gapless() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" command="${{COMP_WORDS[1]}}" words=''
  case "$command ${{COMP_WORDS[2]}}" in {seconds}) command="$command ${{COMP_WORDS[2]}}" ;; esac
  case "$command" in
{cases}
  esac
  if [ "$COMP_CWORD" = 1 ]; then
    words='{" ".join(names)}'
  fi
  if [ "$COMP_CWORD" = 1 ] || [[ "$current" == -* ]]; then
    COMPREPLY=($(compgen -W "$words" -- "$current"))
  else
    COMPREPLY=($(compgen -f -- "$current"))
  fi
}}
complete -o filenames -F _gapless gapless"""


def _fish() -> Iterator[str]:
    for name, options, summary in _commands():
        first, *second = name.split()
        if not second:
            yield f"complete -c gapless -n __fish_use_subcommand -f -a {first} -d {_quoted(summary)}"
            when = f"__fish_seen_subcommand_from {first}"
        else:
            when = f"__fish_seen_subcommand_from {first}; and __fish_seen_subcommand_from {second[0]}"
        for option in options:
            if option.startswith("--"):
                yield f"complete -c gapless -n {_quoted(when)} -l {option[2:]}"


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _commands() -> Iterator[tuple[str, list[str], str]]:
    """Name, options and summary of every command."""
    from gapless.cli import COMMANDS

    for name, (module, summary) in COMMANDS.items():
        parser = Parser(prog=f"gapless {name}")
        importlib.import_module(module).add_arguments(parser)
        yield name, sorted(option for option in parser._option_string_actions if option.startswith("--")), summary
