"""Other programs' names for commands and options, and what to type instead.

Options of `_OPTION_ALIASES` work, though no help text shows them. All other rows end in an error with a hint. A command
that leaves headrace gets a row in `_COMMANDS`, an option one in `_OPTION_HINTS` or `_HINTS_BY_COMMAND`.

Guard: tests/app/cli/test_commands.py.
"""

from collections.abc import Collection, Iterable

# Other programs' option -> headrace's; without dashes, as click normalizes options.
_OPTION_ALIASES = {
    "temp": "temperature",
    "ctx-size": "context",
    "repeat-penalty": "repetition-penalty",
    "n-predict": "max-tokens",
}
# Words that are no commands -> the command to type instead.
_COMMANDS = {
    **dict.fromkeys(("ask", "generate", "prompt", "complete", "answer"), "run"),
    **dict.fromkeys(("download", "fetch", "get", "install", "update"), "pull"),
    **dict.fromkeys(("remove", "delete", "uninstall"), "rm"),
    **dict.fromkeys(("info", "inspect"), "show"),
    **dict.fromkeys(("benchmark", "perf", "speed"), "bench"),
    **dict.fromkeys(("config", "settings"), "paths --write-settings"),
    **dict.fromkeys(("check", "status", "system"), "doctor"),
    **dict.fromkeys(("history", "chats", "conversations"), "sessions list"),
    **dict.fromkeys(("estimate", "roofline"), "predict"),
    "ls": "list",
    "search": "sessions search",
    "export": "sessions export",
    "resume": "chat --resume last",
    "continue": "run -c",
    "convert": "pull FILE.gguf",
    "tokens": "tokenize",
    "tui": "chat",
    "test": "verify",
}
_QUANTIZE = "`headrace pull NAME --quantize 4` keeps a quantized copy, which runs by its own name"
# Options that no command has, or few -> hint for the others.
_OPTION_HINTS = {"--quantize": _QUANTIZE, "--group-size": _QUANTIZE}
# Options that one command lacks, or whose value it refuses -> hint.
_HINTS_BY_COMMAND = {
    ("headrace bench", "--output"): "`--json` prints one JSON document with every figure",
    ("headrace bench", "--save"): "`--json > FILE` keeps the document, which `headrace bench compare` reads",
    ("headrace sessions export", "--json"): "`--format json` writes JSON",
    ("headrace predict", "--acceptance"): "`headrace bench --speculate` measures the gain of draft tokens here",
    ("headrace verify", "--server"): "`run --json`, `batch` and `serve` give the same tokens for the same --seed",
}


def canonical_option(name: str) -> str:
    """Return headrace's name of an option without its dashes."""
    return _OPTION_ALIASES.get(name, name)


def suggested_command(word: str, commands: Iterable[str]) -> str | None:
    """Return the command for a word that is none: by its meaning, or that of a word spelled alike."""
    from difflib import get_close_matches  # late: no command needs it

    words = {**_COMMANDS, **{command: command for command in commands}}  # headrace's names win
    near = get_close_matches(word.lower(), words, n=1)  # the word itself, if it is there
    if not near:
        return None
    return words[near[0]]


def suggested_subcommand(word: str, subcommands: Collection[str]) -> str | None:
    """Return the subcommand for a word that is none, such as LIST; None if none has its meaning."""
    subcommand = _COMMANDS.get(word.lower(), word.lower())
    return subcommand if subcommand in subcommands else None


def hint_for_option(option: str, command: str) -> str | None:
    """Return a hint for an option that a command does not have; None without any.

    command: with the program's name, such as `headrace bench`.
    """
    return _HINTS_BY_COMMAND.get((command, option), _OPTION_HINTS.get(option))


def hint_for_value(option: str, command: str) -> str | None:
    """Return a hint for an option whose value a command refuses; None without any.

    command: as for `hint_for_option`.
    """
    return _HINTS_BY_COMMAND.get((command, option))
