"""Text files sent along with a message: `/file PATH` anywhere on a line of its own, or `@path` within the text.

A folder (`@src/`) stands for all text files in it, a pattern (`@src/*.py`) for those that fit; what is no text is
left out of them.
`@word` is only an attachment if such a file exists, or if it clearly means one: it begins with `~/`, `./`, `../` or
`/`, or ends as files of text do (`@notes.txt`). Mail addresses, decorators and user names stay text, as does what
stands in backquotes. Paths with spaces go in double quotes.
"""

import glob
import re
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path, PurePath

from headrace.app.chat.file_patterns import MOST_FILES, files_of, is_several
from headrace.app.sessions.records import Attachment, Message
from headrace.runtime.errors import UsageError
from headrace.runtime.metrics.units import format_bytes

MAX_BYTES = 256 << 10  # one file, or all of a folder; more does not fit a context anyway
_COMMAND = re.compile(r"^/file[ \t]+(?P<path>\S.*?)[ \t]*$\n?", re.MULTILINE)
_MENTION = re.compile(r'(?<!\S)@(?:"(?P<quoted>[^"\n]+)"|(?P<bare>[^\s"]+))')
_TRAILING = ".,;:!?)]}'"
_ENDINGS = re.compile(  # of files of text
    r"\.(bat|bib|c|cc|cfg|conf|cpp|cs|css|csv|cxx|diff|go|h|hpp|html?|ini|ipynb|java|jl|jsx?|jsonl?|kt|log|lua|md|mjs|patch"
    r"|php|pl|proto|ps1|pyi?|rb|rs|rst|scala|sh|sql|srt|swift|tex|toml|tsv|tsx?|txt|vtt|xml|ya?ml|zig)",
    re.IGNORECASE,
)


def unquoted(path: str) -> str:
    """A path as it was typed alone after a command, without the double quotes it may be in."""
    return path[1:-1] if len(path) > 2 and path[0] == path[-1] == '"' else path


def parse_message(text: str, old: Message | None = None) -> tuple[str, tuple[Attachment, ...]]:
    """What is sent of what was typed, see `take_attachments`. Raises UsageError also where there is nothing to send.

    old: the message that `text` is an edit of. Its files stay, but for those that only its text still mentions and
    those that another of the same name replaces.
    """
    content, attachments = take_attachments(text, old.attachments if old else ())
    if old is not None:
        replaced = {attachment.name for attachment in attachments}
        dropped = _mentioned_names(old.content) - _mentioned_names(content)
        kept = (
            attachment
            for attachment in old.attachments
            if attachment.name not in replaced and not any(_stands_for(name, attachment) for name in dropped)
        )
        attachments = (*kept, *attachments)
    if not content.strip() and not attachments:
        raise UsageError("there is nothing to send")
    return content, attachments


def take_attachments(
    text: str, stored: Sequence[Attachment] = (), read: Callable[[str], Sequence[Attachment]] | None = None
) -> tuple[str, tuple[Attachment, ...]]:
    """The text without its `/file` lines, and the files it names. Raises UsageError for one that cannot be sent.

    stored: taken by their names where the file cannot be read any more. read: in place of `read_attachments`.
    """
    found: dict[str, str | None] = {unquoted(match["path"]): None for match in _COMMAND.finditer(text)}
    rest = _COMMAND.sub("", text).strip("\n")
    for match in _MENTION.finditer(rest):
        if (name := _mentioned(match)) is not None:
            found.setdefault(name, f"to say it and send no file: `@{name}`")
    attachments = (one for name, hint in found.items() for one in _read_or_stored(name, hint, stored, read))
    return rest, tuple(dict.fromkeys(attachments))


def _read_or_stored(
    name: str, hint: str | None, stored: Sequence[Attachment], read: Callable[[str], Sequence[Attachment]] | None
) -> Sequence[Attachment]:
    try:
        return (read or read_attachments)(name)
    except UsageError as error:
        kept = [attachment for attachment in stored if _stands_for(name, attachment)]
        if not kept:
            raise UsageError(str(error), error.hint or hint) from None
        return kept


def read_attachments(name: str) -> list[Attachment]:
    """The file called `name`, or the text files of the folder or pattern. Raises UsageError as `read_attachment`."""
    if (files := files_of(name)) is None:
        return [read_attachment(name)]
    if len(files) > MOST_FILES:
        raise UsageError(f"{name} stands for more than {MOST_FILES} files", "a pattern names fewer: @src/*.py")
    found: list[Attachment] = []
    for file in files:
        with suppress(UsageError):  # no text, or too long
            found.append(replace(read_attachment(file), name=file))
    if not found:
        raise UsageError(f"{name} has no file of text")
    if (size := sum(len(one.text.encode()) for one in found)) > MAX_BYTES:
        raise UsageError(
            f"the {len(found)} files of {name} have {format_bytes(size)}, more than the {format_bytes(MAX_BYTES)} "
            "that can be attached",
            "a pattern names fewer: @src/*.py",
        )
    return found


def _stands_for(name: str, attachment: Attachment) -> bool:
    """Whether the attachment came by this name: its own, or that of a folder or pattern."""
    try:
        path = Path(name).expanduser()
    except RuntimeError:
        path = Path(name)
    inside = path in PurePath(attachment.name).parents or fnmatch(attachment.name, str(path))
    return attachment.name == path.name or inside


def read_attachment(name: str) -> Attachment:
    """The file called `name` (~ allowed). Raises UsageError if it is missing, too large or not UTF-8 text."""
    try:
        path = Path(name).expanduser()
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise UsageError(f"{name} is a directory")
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"{name} is not a regular file")
        if status.st_size > MAX_BYTES:
            size = format_bytes(status.st_size)
            raise UsageError(f"{name} has {size}, more than the {format_bytes(MAX_BYTES)} that can be attached")
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror}") from None
    except (RuntimeError, ValueError):  # a home that nobody has, a NUL
        raise UsageError(f"cannot read {name}: no such file") from None
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not UTF-8 text (byte {error.start})") from None
    if "\0" in text:
        raise UsageError(f"{name} is not a text file")
    return Attachment(path.name, text)


def with_attachments(content: str, attachments: Sequence[Attachment]) -> str:
    """A message as the model reads it: the files, each named and fenced, then what was typed."""
    parts = []
    for attachment in attachments:
        longest = max((len(run) for run in re.findall("`+", attachment.text)), default=0)
        fence = "`" * max(3, longest + 1)
        parts.append(f"File {attachment.name}:\n{fence}\n{attachment.text.rstrip()}\n{fence}")
    return "\n\n".join([*parts, content]) if content else "\n\n".join(parts)


def _mentioned_names(text: str) -> set[str]:
    """All paths that mentions could mean, whether there are such files or not."""
    return {
        form
        for match in _MENTION.finditer(text)
        for form in ([match["quoted"]] if match["quoted"] else [match["bare"], match["bare"].rstrip(_TRAILING)])
    }


def _mentioned(match: re.Match[str]) -> str | None:
    """The path a mention means, if it means one."""
    if match["quoted"]:
        return match["quoted"]
    bare = match["bare"]
    for name in (bare, bare.rstrip(_TRAILING)):
        if name and (_is_file(name) or (_several(name) and is_several(name))):
            return name
    name = bare.rstrip(_TRAILING)
    a_path = name.startswith(("~/", "./", "../", "/")) or _ENDINGS.fullmatch(PurePath(name).suffix) is not None
    return name if a_path else None


def _several(name: str) -> bool:
    """Whether a folder or a pattern is meant, and no word."""
    return "/" in name or glob.has_magic(name)


def _is_file(name: str) -> bool:
    try:
        return Path(name).expanduser().is_file()
    except (OSError, RuntimeError, ValueError):
        return False
