"""A step's parts on a terminal: a bar, milliseconds and share each, and how well they add up."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.text import Text

_BAR = 24
_BARS_FROM = 76  # columns
CLOSURE = 0.10  # parts that miss the step by more do not explain it


def profile_rows(profile: dict[str, Any], width: int) -> list[tuple[str, "Text"]]:
    """(label, text) rows for the facts below the table; bars where the terminal has room for them."""
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
    """The same as plain text."""
    parts = ", ".join(f"{name} {milliseconds:.3f} ms" for name, milliseconds in profile["parts_ms"].items())
    return [headline(profile), parts]
