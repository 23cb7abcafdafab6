"""What an empty conversation shows: where you are, and the three keys worth knowing."""

from textual.content import Content

from headrace.app.engine.client import ChatEngine
from headrace.app.sanitise import sanitise
from headrace.app.sessions.records import Session
from headrace.runtime.units import format_bytes

# A mill wheel under its race, from half blocks and a line of water.
_WATER = ("≈≈≈≈≈≈≈≈≈≈≈≈≈≈≈╮", "               ╰≈≈≈≈≈≈≈≈")


def welcome_lines(engine: ChatEngine, session: Session) -> list[Content]:
    """Drawn anew when the engine's state changes."""
    card = engine.card
    lines = [
        Content.styled(_WATER[0], "$secondary"),
        Content.assemble(("h e a d r a c e", "bold $text-primary"), (_WATER[1].lstrip()[:9], "$secondary")),
        Content(""),
    ]
    if card is not None:
        weights = f"{format_bytes(card.weight_bytes)} of weights"
        facts = f"{weights} · context {card.context_limit:,} tokens · loaded in {card.load_s:.2f} s"
        lines += [Content.styled(sanitise(card.name), "bold"), Content.styled(facts, "$quiet")]
        lines.append(Content.styled(f"{card.machine.device_name} · {card.machine.backend}", "$quiet"))
    elif engine.state == "failed":
        lines.append(Content.styled("no model is loaded: F5 chooses one", "$text-error"))
    else:
        lines.append(Content.styled(f"loading {sanitise(session.model or 'the default model')} …", "$quiet"))
        lines.append(Content.styled("type on: it is sent as soon as the model is there", "$quiet"))
    lines.append(Content(""))
    for key, text in (
        ("Enter", "sends"),
        ("/", "commands"),
        ("@", "a file"),
        ("F2", "the decode loop, live"),
        ("F1", "all keys"),
    ):
        lines.append(Content.assemble((f"{key:>7}", "bold $text-accent"), (f"  {text}", "$quiet")))
    return lines
