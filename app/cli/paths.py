"""`headrace paths`: locations of settings, sessions, models, caches and logs, and the documented settings file.

Guard: tests/app/cli/test_sessions.py.
"""

import click

from headrace.app.cli.decorators import json_option
from headrace.app.cli.say import print_json
from headrace.app.config.presets import presets_path
from headrace.app.config.settings import settings_path, write_default
from headrace.app.engine.link import log_path
from headrace.app.sessions.kv_cache import kv_cache_bytes
from headrace.app.sessions.store import database_path
from headrace.models.registry.store import Store
from headrace.runtime.config.paths import cache_dir, kept_chats_dir
from headrace.runtime.metrics.units import format_bytes


@click.command()
@json_option
@click.option("--write-settings", is_flag=True, help="New settings file with every setting documented.")
def paths(as_json: bool, write_settings: bool) -> None:
    """Show the locations of headrace's files. HEADRACE_HOME=DIR moves all of them to one folder."""
    if write_settings:
        outcome = "written" if write_default() else "exists already"
        click.echo(f"{settings_path()} {outcome}", err=True)
    locations = {
        "settings": settings_path(),
        "presets": presets_path(),
        "sessions": database_path(),
        "models": Store().root,
        "cache": cache_dir(),
        "kept chats": kept_chats_dir(),
        "engine log": log_path(),
    }
    if as_json:
        print_json({name.replace(" ", "_"): str(path) for name, path in locations.items()})
        return
    for name, path in locations.items():
        note = ""
        if not path.exists():
            note = "  (not created yet)"
        elif path == kept_chats_dir():
            note = f"  ({format_bytes(kv_cache_bytes())})"
        click.echo(f"{name:<12}{path}{note}")
