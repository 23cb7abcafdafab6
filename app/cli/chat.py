"""`headrace chat`: opens the chat on a terminal. Says what to use instead where there is no terminal.

The first frame comes before the model: this module imports what draws it, the engine starts in its own process.
"""

import os
import sys

import click

from headrace.app.cli.answer_options import answer_option
from headrace.app.cli.completion import model_names
from headrace.app.cli.draft import chosen_draft, draft_option
from headrace.app.cli.say import say
from headrace.app.config.kv_option import kv_option
from headrace.runtime.errors import UsageError


@click.command()
@click.option(
    "-m",
    "--model",
    metavar="MODEL",
    shell_complete=model_names,
    help="Catalog name, local directory, .gguf file or hub id; with --resume, the session goes on with it.",
)
@click.option("--resume", metavar="ID", help="Go on with a session: its id, the beginning of it, or `last`.")
@click.option(
    "--context", type=click.IntRange(1), help="Context limit in tokens. Default: what model and memory allow."
)
@kv_option
@answer_option("speculate")
@draft_option
def chat(
    model: str | None, resume: str | None, context: int | None, kv: str | None, speculate: str | None, draft: str | None
) -> int:
    """Chat in the terminal, with the decode loop in view.

    F1 shows all keys and commands. New sessions begin with what the settings file says, which `headrace paths` finds
    and writes. HEADRACE_MODEL names another model for them, and -m goes before both.
    """
    # The screen is drawn on standard error, as textual does on every Unix.
    if not all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
        raise UsageError("the chat needs a terminal", "`headrace run PROMPT` works in pipes and scripts")
    if os.environ.get("TERM", "") in ("", "dumb"):
        raise UsageError(
            "this terminal cannot draw the chat (TERM is dumb)", "`headrace run PROMPT` needs nothing of it"
        )
    from headrace.app.config.settings import chosen_model, load_settings
    from headrace.app.engine.client import EngineClient
    from headrace.app.sessions.unsaved import store_for_chat
    from headrace.app.tui.app import HeadraceApp
    from headrace.app.tui.metrics.machine_watch import MachineWatch

    settings = load_settings()
    draft = chosen_draft(draft, settings.chat.draft, speculate)
    chosen = {} if speculate is None else {"speculate": speculate}
    with store_for_chat() as (store, unsaved):
        if resume is not None:
            session = store.find(resume)
            if model is not None:
                session = store.set_model(session.id, model)
            if chosen:
                session = store.set_sampling(session.id, {**session.sampling, **chosen})
        else:
            session = store.create(
                model=chosen_model(model, settings),
                system=settings.chat.system,
                sampling={**settings.sampling_given, **chosen},
            )
        engines = [EngineClient(draft)]

        def second_engine() -> EngineClient:
            engines.append(EngineClient(draft))
            return engines[-1]

        limit = context or settings.chat.context or None
        watch = MachineWatch(lambda: [os.getpid(), *(engine.pid for engine in engines if engine.pid)])
        app = HeadraceApp(
            engines[0],
            store,
            session,
            settings=settings,
            context=limit,
            kv=kv or settings.chat.kv,
            warning=unsaved,
            watch=watch,
            second_engine=second_engine,
        )
        try:
            app.run(mouse=settings.screen.mouse)
        finally:
            app.state.close()
    if unsaved is not None:
        say(f"headrace: {unsaved}", err=True)
    if app.state.store_error is not None:
        raise app.state.store_error
    return app.return_code or 0
