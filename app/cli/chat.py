"""`headrace chat`: the chat on a terminal.

The first frame comes before the model: the engine starts in its own process. Three surfaces share a `Conversation`: the
full screen (`app.tui`), and line by line with or without redrawing (`app.line_chat`).

Everything that can refuse the command comes before the first write to the sessions: sampling options, the server's
address, the question whether a .gguf file is copied. So a refused command neither leaves an empty session nor changes
the resumed one.

Guard: tests/app/cli/test_commands.py.
"""

import gc
import os
import sys
from functools import partial
from typing import TYPE_CHECKING

import click
from msgspec import Struct

from headrace.app.cli.answer_options import answer_option, read_options
from headrace.app.cli.completion import session_ids
from headrace.app.cli.decorators import as_object
from headrace.app.cli.load_for_answers import agree_to_copy
from headrace.app.cli.model_options import (
    LoadArguments,
    activations_option,
    adapter_option,
    draft_option,
    hosts_options,
    kv_option,
    load_arguments,
    model_option,
)
from headrace.app.cli.say import say
from headrace.app.output.terminal import can_redraw, on_terminal
from headrace.runtime.errors import FullDiskError, HeadraceError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.app.chat.conversation import Conversation
    from headrace.app.config.settings import Settings
    from headrace.app.engine.client import ChatEngine
    from headrace.app.sessions.records import Session
    from headrace.app.sessions.store import SessionStore


class ChatArguments(Struct, frozen=True, kw_only=True):
    """Arguments of `headrace chat`, named as click names them; help texts explain them. None: not given."""

    model: str | None
    resume: str | None
    system: str | None
    temperature: float | None
    seed: int | None
    speculate: str | None
    thinking: str | None
    load: LoadArguments
    connect: str | None
    api_key: str | None
    plain: bool
    inline: bool

    @property
    def sampling(self) -> dict[str, object]:
        """The answer options that the session keeps, as it stores them. Raises UsageError that names the flag."""
        names = ("temperature", "seed", "speculate", "thinking")
        return read_options({name: getattr(self, name) for name in names}).stored()


@click.command()
@model_option
@click.option(
    "--resume",
    metavar="ID",
    shell_complete=session_ids,
    help="Session to continue: its id, the beginning of it, or `last`.",
)
@click.option("-s", "--system", metavar="TEXT", help="System prompt [the settings'].")
@answer_option("temperature")
@answer_option("seed")
@click.option(
    "--context", type=click.IntRange(1), metavar="N", help="Context limit in tokens [the largest for model and memory]."
)
@adapter_option
@kv_option
@activations_option
@answer_option("speculate")
@answer_option("thinking")
@draft_option
@hosts_options
@click.option("--connect", metavar="URL", help="Server with OpenAI's API that answers, instead of this machine.")
@click.option("--api-key", metavar="KEY", help="Key of that server [HEADRACE_API_KEY].")
@click.option("--plain", is_flag=True, help="Line by line: no redraw, no cursor movement [with TERM=dumb].")
@click.option("--inline", is_flag=True, help="Line by line, answers as rendered Markdown in the scrollback.")
@load_arguments
@as_object(ChatArguments)
def chat(arguments: ChatArguments) -> int:
    """Chat in the terminal and watch the decode loop.

    F1 shows all keys and commands. -s, -t, --seed and --thinking are kept with the session. New sessions start from the
    settings file, whose path `headrace paths` shows. HEADRACE_MODEL overrides its model, and -m overrides both.
    """
    # textual draws on standard error on every Unix.
    if not on_terminal():
        raise UsageError("the chat needs a terminal", "`headrace run PROMPT` works in pipes and scripts")
    from headrace.app.config.settings import load_settings
    from headrace.app.sessions.unsaved import store_for_chat

    if arguments.plain and arguments.inline:
        raise UsageError("--plain excludes --inline", "--plain redraws nothing, --inline the end of a growing answer")
    if arguments.plain or not os.environ.get("TERM"):
        os.environ["TERM"] = "dumb"  # for progress lines and questions, too
    _ = arguments.sampling  # raises for a wrong value before the sessions are opened
    settings = load_settings()
    draft = arguments.load.chosen_draft(settings, arguments.speculate)
    new_engine = _engine_of(arguments)
    if arguments.connect is None:
        agree_to_copy(draft)
    with store_for_chat() as store:
        try:
            session = _session(store, arguments, settings)
        except FullDiskError:
            store.go_unsaved()
            session = _session(store, arguments, settings)
        by_line = arguments.inline or os.environ["TERM"] == "dumb"
        if not by_line:
            gc.disable()  # until the first frame, which is a tenth sooner; the app enables it
        from headrace.app.chat.conversation import Conversation

        conversation = Conversation(new_engine(), store, session, arguments.load.spec(settings, draft))
        if by_line:
            return _line_chat(conversation, settings)
        return _screen_chat(conversation, settings, new_engine)


def _engine_of(arguments: ChatArguments) -> "Callable[[], ChatEngine]":
    """Return the maker of engines: on this machine, or on a server. Raises UsageError for an address that is none."""
    from headrace.app.engine.client import EngineClient

    if arguments.connect is None:
        return EngineClient
    if arguments.load.hosts is not None:
        raise UsageError("--connect excludes --hosts", "the server's own --hosts divides its model")
    from headrace.app.engine.http_address import HTTPAddress
    from headrace.app.engine.remote import RemoteEngine
    from headrace.runtime.config import environment

    return partial(
        RemoteEngine, HTTPAddress(arguments.connect, arguments.api_key or environment.api_key()), arguments.model
    )


def _line_chat(conversation: "Conversation", settings: "Settings") -> int:
    """Chat line by line. Raises SessionError if the last answer cannot be stored."""
    from headrace.app.line_chat.chat import LineChat
    from headrace.app.line_chat.terminal import LineTerminal
    from headrace.app.output.plain_output import PlainOutput
    from headrace.app.output.rendered_markdown import MarkdownOutput

    redraws = can_redraw(sys.stdout)
    terminal = LineTerminal(hides_typing=redraws)
    output = MarkdownOutput if redraws else PlainOutput
    with terminal.interrupts_noted():
        chat = LineChat(conversation, terminal, output=output, show_thinking=settings.chat.show_thinking)
        try:
            chat.run()
        finally:
            chat.close()
    _print_end(chat.conversation)
    return 0


def _screen_chat(conversation: "Conversation", settings: "Settings", new_engine: "Callable[[], ChatEngine]") -> int:
    """Chat on the whole screen. Raises SessionError if the last answer cannot be stored."""
    from headrace.app.tui.app import HeadraceApp
    from headrace.app.tui.metrics.machine_watch import MachineWatch

    engines = [conversation.engine]

    def second_engine() -> "ChatEngine":
        engines.append(new_engine())
        return engines[-1]

    watch = MachineWatch(lambda: [os.getpid(), *(engine.pid for engine in engines if engine.pid)])
    app = HeadraceApp(conversation, settings=settings, watch=watch, second_engine=second_engine)
    try:
        app.run(mouse=settings.screen.mouse)
    finally:
        app.state.close()
    _print_end(app.state.conversation, failed=app.state.store_error is not None or app.crash is not None)
    if app.state.store_error is not None:
        raise app.state.store_error
    if app.crash is not None:
        stored = app.state.conversation.session.id
        raise HeadraceError(app.crash, f"`headrace chat --resume {stored}` goes on with this conversation")
    return app.return_code or 0


def _print_end(conversation: "Conversation", *, failed: bool = False) -> None:
    """Print the command that continues the conversation, or that nothing is saved.

    Messages that were kept in memory on a full disk are written now, if there is room again.
    failed: the chat ends with an error, which names the way on.
    """
    store = conversation.store
    session = conversation.session
    if store.unsaved is not None and not store.save_again():
        say(f"headrace: {store.unsaved}", err=True)
    elif not failed and (conversation.messages or session.draft):
        line = f"saved: headrace chat --resume {session.id}"
        if session.draft:
            line += " (with unsent text)"
        say(line, err=True)


def _session(store: "SessionStore", arguments: ChatArguments, settings: "Settings") -> "Session":
    """Resume the session asked for, with the model and options given, or create one.

    Raises HeadraceError if its model is a .gguf file that is not to be copied.
    """
    from headrace.app.config.settings import chosen_model

    chosen = arguments.sampling
    if arguments.resume is None:
        sampling = {**settings.sampling.stored(), **chosen}
        model = chosen_model(arguments.model, settings)
        if arguments.connect is None:
            agree_to_copy(model, chat=True)
        system = arguments.system
        if system is None:
            system = settings.chat.system
        return store.create(model=model, system=system, sampling=sampling)
    session = store.find(arguments.resume, drafts=True)
    model = session.model
    if arguments.model is not None:
        model = arguments.model
    if arguments.connect is None:
        agree_to_copy(model, chat=True)

    # Only now is the session changed.
    if arguments.model is not None:
        session = store.set_model(session.id, arguments.model)
    if arguments.system is not None:
        session = store.set_system(session.id, arguments.system)
    if chosen:
        session = store.set_sampling(session.id, {**session.sampling, **chosen})
    return session
