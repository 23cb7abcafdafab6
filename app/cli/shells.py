"""Differences of bash, zsh and fish from click's completion: words with `=` and `@`, zsh without compinit.

Importing this module registers the three classes with click.
"""

from typing import ClassVar

from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    add_completion_class,
)

# `compdef` is part of compinit, which a plain ~/.zshrc does not load. -i: without a question about unsafe folders.
_ZSH_SETUP = """
if [[ $zsh_eval_context[-1] != loadautofunc ]] && (( ! $+functions[compdef] )); then
    autoload -Uz compinit && compinit -i
fi
"""
_PLAIN = "plain"


class _WholeWords(ShellComplete):
    """A shell that replaces the whole word, `--kv=` included."""

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem[str]]:
        found = super().get_completions(args, incomplete)
        name, equals, _ = incomplete.partition("=")
        if not (equals and name.startswith("-")):
            return found
        return [
            CompletionItem(f"{name}={item.value}", help=item.help) if item.type == _PLAIN else item for item in found
        ]


class Zsh(_WholeWords, ZshComplete):
    """zsh, with or without compinit in ~/.zshrc."""

    first, _, _rest = ZshComplete.source_template.partition("\n")  # `#compdef` has to stay the first line
    source_template: ClassVar[str] = f"{first}\n{_ZSH_SETUP}{_rest}"


class Fish(_WholeWords, FishComplete):
    """fish."""


class Bash(BashComplete):
    """bash, which makes `=` and `@` words of their own; it replaces what follows `=`, and `@` with what follows."""

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem[str]]:
        if args[-1:] == ["="]:
            args = args[:-1]
        elif args[-1:] == ["@"]:
            args = args[:-1]
            incomplete = f"@{incomplete}"
        return super().get_completions(args, incomplete)


for _kind in (Bash, Zsh, Fish):
    add_completion_class(_kind)
