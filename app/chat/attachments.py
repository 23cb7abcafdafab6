"""Text files attached to a message: `/file PATH` on a line of its own, or `@path` within the text.

A folder (`@src/`) attaches its text files, a pattern (`@src/*.py`) the matching ones. `@word` is an attachment if the
file exists, or if the word is written as a path: it begins with `~/`, `./`, `../` or `/`, ends with `/`, or has the
suffix of a text file (`@notes.txt`). Mail addresses, decorators, user names and backquoted text stay text. Paths with
spaces need double quotes.

The chat and `headrace run` parse messages here; docs/chat.md describes the rules for users.

Guard: tests/app/chat/test_attachments.py.
"""

import glob
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path, PurePath

from msgspec.structs import replace

from headrace.app.config.bounded_input import decoded
from headrace.app.sessions.records import Attachment, Message
from headrace.runtime.errors import UsageError
from headrace.runtime.metrics.units import format_bytes

MAX_BYTES = 256 << 10  # one file, or all of a folder
# A line of its own: `/file notes.txt`, `/file "my notes.txt"`. The end of the line belongs to it.
_COMMAND = re.compile(r"^/file[ \t]+(?P<path>\S.*?)[ \t]*$\n?", re.MULTILINE)
# After a space or at a beginning: `@notes.txt`, `@"my notes.txt"`; not `me@example.org`.
_MENTION = re.compile(r'(?<!\S)@(?:"(?P<quoted>[^"\n]+)"|(?P<bare>[^\s"]+))')
_TRAILING = ".,;:!?)]}'"  # after a path, these are the sentence's: `see @notes.txt.`
# A name with such a suffix is a path even if no such file exists, so that a misspelt one is an error.
_TEXT_SUFFIXES = re.compile(
    r"\.(bat|bib|c|cc|cfg|conf|cpp|cs|css|csv|cxx|diff|go|h|hpp|html?|ini|ipynb|java|jl|jsx?|jsonl?|kt|log|lua|md|mjs|patch"
    r"|php|pl|proto|ps1|pyi?|rb|rs|rst|scala|sh|sql|srt|swift|tex|toml|tsv|tsx?|txt|vtt|xml|ya?ml|zig)",
    re.IGNORECASE,
)
MAX_FILES = 100  # of a folder or pattern: more are hardly meant, such as those of `@~/`
_MAX_ENTRIES = 20_000  # searched for a folder or pattern, which takes a fraction of a second


def unquoted(path: str) -> str:
    """Return a path without double quotes around it."""
    if len(path) > 2 and path[0] == path[-1] == '"':
        return path[1:-1]
    return path


def parse_message(text: str, old: Message | None = None) -> tuple[str, tuple[Attachment, ...]]:
    """Return text and attachments of a typed message. Raises UsageError, also for an empty one.

    old: the message that is edited. It keeps its attachments, except those whose mention was removed and those replaced
    by another of the same name.
    """
    if old is None:
        content, attachments = take_attachments(text)
    else:
        content, attachments = take_attachments(text, old.attachments)
        replaced = {attachment.name for attachment in attachments}
        dropped = _mentioned_names(old.content) - _mentioned_names(content)
        stored = (
            attachment
            for attachment in old.attachments
            if attachment.name not in replaced and not any(_stands_for(name, attachment) for name in dropped)
        )
        attachments = (*stored, *attachments)
    if not content.strip() and not attachments:
        raise UsageError("there is nothing to send")
    return content, attachments


def take_attachments(
    text: str, stored: Sequence[Attachment] = (), read: Callable[[str], Sequence[Attachment]] | None = None
) -> tuple[str, tuple[Attachment, ...]]:
    """Return the text without `/file` lines, and its attachments. Raises UsageError for a file that cannot be sent.

    text: with lines such as `/file notes.md`.
    stored: earlier attachments; they replace files that cannot be read any more.
    read: instead of `read_attachments`.
    """
    # Paths in order, each with the hint of the error if it cannot be read.
    hints: dict[str, str | None] = {unquoted(match["path"]): None for match in _COMMAND.finditer(text)}
    rest = _COMMAND.sub("", text).strip("\n")
    for match in _MENTION.finditer(rest):
        if (name := _mentioned(match)) is not None:
            hints.setdefault(name, f"to send it as text: `@{name}`")
    attachments = (
        attachment for name, hint in hints.items() for attachment in _read_or_stored(name, hint, stored, read)
    )
    return rest, tuple(dict.fromkeys(attachments))


def _read_or_stored(
    name: str, hint: str | None, stored: Sequence[Attachment], read: Callable[[str], Sequence[Attachment]] | None
) -> Sequence[Attachment]:
    try:
        return (read or read_attachments)(name)
    except UsageError as error:
        fitting = [attachment for attachment in stored if _stands_for(name, attachment)]
        if not fitting:
            raise UsageError(str(error), error.hint or hint) from None
        return fitting


def read_attachments(name: str) -> list[Attachment]:
    """Return the file, or the text files of a folder or pattern. Raises UsageError."""
    if (files := files_of(name)) is None:
        return [read_attachment(name)]
    if len(files) > MAX_FILES:
        raise UsageError(f"{name}: more than {MAX_FILES} files", "a pattern names fewer: @src/*.py")
    attachments: list[Attachment] = []
    for file in files:
        with suppress(UsageError):  # not text, or too long
            attachments.append(replace(read_attachment(file), name=file))
    if not attachments:
        raise UsageError(f"{name}: no text files")
    if (size := sum(len(attachment.text.encode()) for attachment in attachments)) > MAX_BYTES:
        raise UsageError(
            f"{name}: {len(attachments)} files of {format_bytes(size)}; {format_bytes(MAX_BYTES)} can be attached",
            "a pattern names fewer: @src/*.py",
        )
    return attachments


def _stands_for(name: str, attachment: Attachment) -> bool:
    """True if this name, or a folder or pattern of this name, gave the attachment."""
    try:
        path = Path(name).expanduser()
    except (RuntimeError, ValueError):
        path = Path(name)
    inside = path in PurePath(attachment.name).parents or fnmatch(attachment.name, str(path))
    return attachment.name == path.name or inside


def read_attachment(name: str) -> Attachment:
    """Return a file (~ allowed). Raises UsageError if it is missing, too large or not UTF-8 text."""
    try:
        path = Path(name).expanduser()
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise UsageError(f"{name} is a directory")
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"{name} is not a regular file")
        if status.st_size > MAX_BYTES:
            size = format_bytes(status.st_size)
            raise UsageError(f"{name}: {size}; {format_bytes(MAX_BYTES)} can be attached")
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror}") from None
    except (RuntimeError, ValueError):  # an unknown home, a NUL
        raise UsageError(f"{name} cannot be read: no such file") from None
    text = decoded(content, name)
    if "\0" in text:  # bytes of a binary file may be UTF-8 by chance
        raise UsageError(f"{name} is not a text file")
    return Attachment(path.name, text)


def with_attachments(content: str, attachments: Sequence[Attachment]) -> str:
    """Return the prompt text of a message: the files, named and fenced, then the typed text."""
    parts = []
    for attachment in attachments:
        # A fence is longer than any run of backquotes in the file, so that the file cannot end it.
        longest = max((len(run) for run in re.findall("`+", attachment.text)), default=0)
        fence = "`" * max(3, longest + 1)
        parts.append(f"File {attachment.name}:\n{fence}\n{attachment.text.rstrip()}\n{fence}")
    if content:
        parts.append(content)
    return "\n\n".join(parts)


def _mentioned_names(text: str) -> set[str]:
    """Return all paths that mentions could mean."""
    names = set()
    for match in _MENTION.finditer(text):
        if match["quoted"]:
            names.add(match["quoted"])
        else:
            names |= {match["bare"], match["bare"].rstrip(_TRAILING)}
    return names


def _mentioned(match: re.Match[str]) -> str | None:
    """Return the path of a mention, None if it is text."""
    if match["quoted"]:
        return match["quoted"]
    bare = match["bare"]
    for name in (bare, bare.rstrip(_TRAILING)):
        if name and (_is_file(name) or (_is_pattern(name) and _is_file_group(name))):
            return name
    name = bare.rstrip(_TRAILING)
    return name if _is_written_as_path(name) else None


def _is_written_as_path(name: str) -> bool:
    """True if a name that may not exist can only be a path."""
    if name.startswith(("~/", "./", "../", "/")) or name.endswith("/"):
        return True
    return _TEXT_SUFFIXES.fullmatch(PurePath(name).suffix) is not None


def _is_pattern(name: str) -> bool:
    """True if a name looks like a folder or a pattern."""
    return "/" in name or glob.has_magic(name)


def _is_file(name: str) -> bool:
    try:
        return Path(name).expanduser().is_file()
    except (OSError, RuntimeError, ValueError):
        return False


def _is_file_group(name: str) -> bool:
    """True if this is an existing folder, or a pattern that matches a file; an existing file is neither."""
    try:
        return files_of(name) is not None
    except UsageError:  # too many entries to search: refused when the files are read
        return True


def files_of(name: str) -> list[str] | None:
    """Return the sorted files, without hidden ones, at most MAX_FILES + 1; None for anything but a folder or pattern.

    The paths begin as `name` does. Raises UsageError if more than _MAX_ENTRIES entries would have to be searched.
    """
    try:
        path = Path(name).expanduser()
        if path.is_file():
            return None
        is_folder = path.is_dir()
        paths = sorted(islice(_files(path, name), MAX_FILES + 1))
    except (OSError, RuntimeError, ValueError):
        return None
    if not paths and not is_folder:
        return None
    return paths


def _files(path: Path, name: str) -> Iterator[str]:
    """Yield the files below a folder, without hidden ones, or those that match a pattern. name: as typed."""
    if path.is_dir():
        yield from _Search(name).files(path, ("**",))
    elif glob.has_magic(str(path)):
        yield from _Search(name).files(Path(), path.parts)


class _Search:
    """Search of folders for files, which ends with UsageError after _MAX_ENTRIES entries, matching or not.

    Wildcards are those of `glob`: `**` stands for any folders, and matches no link to a folder.
    """

    def __init__(self, name: str) -> None:
        """Begin a search. name: as typed, for the error."""
        self._name = name
        self._count = 0  # of entries

    def files(self, folder: Path, parts: Sequence[str]) -> Iterator[str]:
        """Yield the files whose paths below a folder match the parts of a pattern."""
        part, *rest = parts
        if glob.has_magic(part):
            yield from self._files_among(self._entries(folder), folder, parts)
            return
        path = folder / part
        if rest:
            yield from self.files(path, rest)
        elif path.is_file():
            yield str(path)

    def _files_among(self, entries: Sequence[os.DirEntry[str]], folder: Path, parts: Sequence[str]) -> Iterator[str]:
        """Yield the same files, from the entries of the folder. The first part has a wildcard."""
        part, *rest = parts
        is_any = part == "**"
        if is_any and rest:  # `**` stands for no folder, too: the same entries
            if glob.has_magic(rest[0]):
                yield from self._files_among(entries, folder, rest)
            else:
                yield from self.files(folder, rest)
        for entry in entries:
            if entry.name.startswith(".") and not part.startswith("."):
                continue
            if is_any and entry.is_dir(follow_symlinks=False):
                yield from self.files(folder / entry.name, parts)
            elif rest and not is_any and fnmatch(entry.name, part) and entry.is_dir():
                yield from self.files(folder / entry.name, rest)
            elif not rest and (is_any or fnmatch(entry.name, part)) and entry.is_file():
                yield str(folder / entry.name)

    def _entries(self, folder: Path) -> list[os.DirEntry[str]]:
        """Return the entries of a folder, none if it cannot be read."""
        entries = []
        with suppress(OSError), os.scandir(folder) as listing:
            for entry in listing:
                self._count += 1
                if self._count > _MAX_ENTRIES:
                    raise UsageError(f"{self._name}: too many files and folders to search; name a folder further down")
                entries.append(entry)
        return entries
