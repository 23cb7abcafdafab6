"""Welcome text of an empty conversation: model, machine, first keys; or the download, or the failure of a load.

`ChatView` gives the lines to `Transcript.welcome`, which centres them. Names come from catalogs and files, so they are
sanitised here.

Guards: tests/tui/test_sample_model.py and test_first_download.py.
"""

from textual.content import Content

from headrace.app.engine.client import ChatEngine
from headrace.app.output.sanitise import sanitise
from headrace.app.predict.uses import STAR, Recommendation
from headrace.app.sessions.records import Session
from headrace.app.tui.screens.model_loading import DownloadProgress
from headrace.runtime.metrics.units import format_bytes

# Water that runs above the name and falls at its end. The name has as many cells as the first line has waves.
_ABOVE = "≈≈≈≈≈≈≈≈≈≈≈≈≈≈≈╮"
_NAME = "h e a d r a c e"
_FALL = "╰≈≈≈≈≈≈≈≈"


def welcome_lines(
    engine: ChatEngine, session: Session, download: DownloadProgress, problem: str | None = None
) -> tuple[list[Content], list[Content]]:
    """Return the logo and the welcome text for the engine's state. problem: the error of a failed load."""
    card = engine.card
    default = "the server's model" if engine.is_remote else "the default model"
    name = session.model or default
    if engine.state == "failed":
        return [], failure_lines(name, problem or "", is_remote=engine.is_remote)
    if engine.state == "loading" and download.active:
        return [], download.lines(name)

    # A model that is loaded, or on its way: name, sizes, machine; then the first keys.
    logo = [
        Content.styled(_ABOVE, "$secondary"),
        Content.assemble((_NAME, "bold $text-primary"), (_FALL, "$secondary")),
        Content(""),
    ]
    lines = []
    if card is not None:
        weights = f"{format_bytes(card.weight_bytes)} of weights"
        facts = f"{weights} · context {card.context_limit:,} tokens · loaded in {card.load_s:.2f} s"
        lines += [Content.styled(sanitise(card.name), "bold"), Content.styled(facts, "$quiet")]
        lines.append(Content.styled(f"{card.machine.device_name} · {card.machine.backend}", "$quiet"))
        lines += [Content.styled(sanitise(note), "$text-warning") for note in card.notes]
        if card.is_sample:
            lines += _sample_lines(card.recommended)
    elif engine.state == "dead":
        lines.append(Content.styled("the engine is not running: F8 or a message starts it again", "$text-error"))
    else:
        size = f" {download.size}" if download.size else ""
        lines.append(Content.styled(f"loading {sanitise(name)} …{size}", "$quiet"))
        lines.append(Content.styled("you can type: it is sent once the model is loaded", "$quiet"))
    lines.append(Content(""))
    for key, text in (
        ("Enter", "sends"),
        ("/", "commands"),
        ("@", "a file"),
        ("F2", "the decode loop, live"),
        ("F1", "all keys"),
    ):
        lines.append(Content.assemble((f"{key:>7}", "bold $text-accent"), (f"  {text}", "$quiet")))
    return logo, lines


def failure_lines(name: str, why: str, *, is_remote: bool = False) -> list[Content]:
    """Return the lines for a model that could not be loaded; is_remote: a server's, which stays."""
    lines = [
        Content.assemble(("✗ ", "$text-error"), (f"{sanitise(name)} could not be loaded", "bold $text-error")),
        Content(sanitise(why)),
        Content(""),
    ]
    ways = [("F8", "tries again")]
    if is_remote:
        ways.append(("Ctrl+Q", "quits"))
    else:
        ways.append(("F5", "picks another; installed ones need no network"))
        ways.append(("Ctrl+Q", "quits; `headrace -m FILE.gguf` needs no hub"))
    return lines + [Content.assemble((f"{key:>6}", "bold $text-accent"), (f" {text}", "$quiet")) for key, text in ways]


def _sample_lines(recommended: Recommendation | None) -> list[Content]:
    """Return the lines about the sample model, and the model to use in its place, if that is known."""
    sample = "a sample to try headrace with: it knows little"
    if recommended is None:
        return [Content.styled(f"{sample}; F5 lists others", "$text-warning")]
    facts = [recommended.name, format_bytes(recommended.download_bytes)]
    if recommended.tokens_per_second is not None:
        about = "at most" if recommended.is_limit else "about"
        facts.append(f"{about} {recommended.tokens_per_second:,.0f} tok/s")
    verb = "takes" if recommended.installed else "fetches"
    return [
        Content.styled(f"{sample}; better here:", "$text-warning"),
        Content.assemble((f"{STAR} {', '.join(facts)}", "bold"), (f": Enter on an empty line {verb} it", "$quiet")),
    ]
