"""Arguments of `/compare`: the second answer's setup."""

import shlex
from dataclasses import replace
from typing import Any

from headrace.app.chat.answer_setup import AnswerSetup
from headrace.app.chat.parameters import PARAMETERS, read_parameter
from headrace.app.config.presets import load_presets
from headrace.runtime.errors import UsageError

_NAMES = {parameter.name for parameter in PARAMETERS}
HINT = "as in /compare qwen3-0.6b, /compare temperature=0.2, /compare preset=NAME system=TEXT"


def read_setup(text: str, session: AnswerSetup) -> AnswerSetup:
    """Parse `MODEL`, `PRESET` and `NAME=VALUE` in any order; names are parameters, `model`, `preset` and `system`.

    The rest is the session's. Raises UsageError, but not for an unknown model.
    """
    try:
        words = shlex.split(text)
    except ValueError:
        raise UsageError("missing quotation mark", HINT) from None
    presets = load_presets()
    setup = session
    if text.strip() in presets:
        words = [f"preset={text.strip()}"]
    while words:
        name, equals, value = words.pop(0).partition("=")
        if not equals and name.replace("-", "_") in _NAMES and words:
            value, equals = words.pop(0), "="  # as after /set
        if not equals:
            name, value = ("preset" if name in presets else "model"), name
        setup = _with(setup, name, value, presets)
    return setup


def _with(setup: AnswerSetup, name: str, value: str, presets: Any) -> AnswerSetup:
    if name == "model":
        return replace(setup, model=value or None)
    if name == "system":
        return replace(setup, system="" if value == "none" else value)
    if name == "preset":
        if value not in presets:
            raise UsageError(f"preset {value}: not found", "one of " + ", ".join(presets) if presets else None)
        return replace(setup, system=presets[value].system, sampling=dict(presets[value].sampling))
    changed = {**setup.sampling, name.replace("-", "_"): read_parameter(name, value)}
    return replace(setup, sampling={key: kept for key, kept in changed.items() if kept is not None})


def installed_models() -> list[str]:
    from headrace.models.registry.store import Store

    return list(Store().names())


def suggestions(session: AnswerSetup, models: list[str], temperature: float) -> list[tuple[str, str]]:
    """Return suggestions, (text, arguments), most useful first.

    models: the installed ones. temperature: the one in effect.
    """
    other = [(f"another model: {name}", name) for name in models if name != session.model_name]
    presets = [(f"the preset {name}", f"preset={shlex.quote(name)}") for name in load_presets()]
    warmth = [
        (f"the same model at temperature {value:g}" + (", greedy" if not value else ""), f"temperature={value:g}")
        for value in (0.0, 0.7, 1.2)
        if value != temperature
    ]
    return [*other, *presets, *warmth, ("the same setup again", "")]
