"""A step's parts: bar, milliseconds and share of each, and the closure of their sum."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.text import Text

_BAR = 24
_BARS_FROM = 76  # columns
CLOSURE = 0.10  # largest gap between the parts' sum and the step that counts as explained


def profile_rows(profile: dict[str, Any], width: int) -> list[tuple[str, "Text"]]:
    """Return (label, text) rows for a table; bars if the terminal is wide enough."""
    from rich.text import Text

    total = sum(profile["parts_ms"].values())
    rows = [("profile", Text(headline(profile)))]
    for name, milliseconds in profile["parts_ms"].items():
        filled = round(milliseconds / total * _BAR)
        bar = (("━" * filled, "cyan"), ("─" * (_BAR - filled), "dim")) if width >= _BARS_FROM else ()
        rows.append(("", Text.assemble(f"{name:<19}", *bar, f" {milliseconds:7.3f} ms {milliseconds / total:5.0%}")))
    return rows


def headline(profile: dict[str, Any]) -> str:
    total = sum(profile["parts_ms"].values())
    apart = abs(profile["closure"]) > CLOSURE
    doubt = ": too far apart to trust, measure again on a quieter machine" if apart else ""
    return (
        f"one step at depth {profile['depth']}: parts {total:.2f} ms, measured without overlap "
        f"{profile['synchronous_step_ms']:.2f} ms ({profile['closure']:+.0%}), "
        f"in the loop {profile['step_ms']:.2f} ms{doubt}"
    )


def profile_lines(profile: dict[str, Any]) -> list[str]:
    """Return the profile as plain text."""
    parts = ", ".join(f"{name} {milliseconds:.3f} ms" for name, milliseconds in profile["parts_ms"].items())
    return [headline(profile), parts]
