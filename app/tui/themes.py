"""The two themes of headrace, and the base of apps with them; all text has a contrast of at least 4.5:1.

Two variables of our own exist in any theme: `$quiet` (labels) and `$faint` (missing values).

A colour of a theme is used by its name (`$primary`, `$text-warning`), never as a number, so that all themes work; a
changed colour needs its contrast checked, and new pictures (tests/tui/test_snapshots.py).
"""

import os

from textual.color import Color
from textual.reactive import Reactive
from textual.theme import Theme

from headrace.app.tui.textual_overrides.crash import CrashReports


def own_variables(theme: Theme) -> dict[str, str]:
    """Return `quiet` and `faint`: the foreground faded towards the background, plain grey with ANSI colours.

    With ANSI colours, the marked row of a list is underlined, which is readable on any of them.
    """
    if theme.ansi:
        return {
            "quiet": "ansi_default",
            "faint": "ansi_bright_black",
            "border": "ansi_bright_black",  # quieter than the text in the frame
            "border-blurred": "ansi_bright_black",
            "block-cursor-background": "ansi_default",
            "block-cursor-foreground": "ansi_default",
            "block-cursor-text-style": "bold underline",
            "block-cursor-blurred-text-style": "bold underline",
        }
    ground = Color.parse(theme.background or ("#121212" if theme.dark else "#f0f0f0"))
    text = Color.parse(theme.foreground or ("#e0e0e0" if theme.dark else "#202020"))
    return {"quiet": ground.blend(text, 0.72).hex, "faint": ground.blend(text, 0.42).hex}


DARK = Theme(
    name="headrace-dark",
    primary="#57b6e6",
    secondary="#3f7fae",
    accent="#f0b357",
    success="#7fcf95",
    warning="#f2a65a",
    error="#f0766b",
    foreground="#d7e0e8",
    background="#0e141a",
    surface="#18212a",
    panel="#22303c",
    dark=True,
    variables={
        "footer-background": "#131b22",
        "footer-key-foreground": "#f0b357",
        "footer-description-foreground": "#93a4b3",
        "border": "#2f4251",
        "border-blurred": "#22303c",
        "scrollbar": "#2a3a47",
        "scrollbar-hover": "#3b5366",
        "scrollbar-active": "#57b6e6",
        "scrollbar-background": "#0e141a",
        "scrollbar-background-hover": "#0e141a",
        "scrollbar-background-active": "#0e141a",
        "block-cursor-background": "#1d3c50",
        "block-cursor-blurred-background": "#1d3c50",
        "block-cursor-foreground": "#f2f7fb",
        "block-cursor-text-style": "bold",
        "input-selection-background": "#57b6e6 30%",
    },
)

LIGHT = Theme(
    name="headrace-light",
    primary="#0f6a99",
    secondary="#4a8db5",
    accent="#a35a00",
    success="#227a3d",
    warning="#9a5b00",
    error="#b3261e",
    foreground="#1d2830",
    background="#f7f9fa",
    surface="#e9eef2",
    panel="#dbe3e9",
    dark=False,
    variables={
        "footer-background": "#e9eef2",
        "footer-key-foreground": "#a35a00",
        "footer-description-foreground": "#4c5d69",
        "border": "#b9c7d1",
        "border-blurred": "#d0dae1",
        "scrollbar": "#c3d0d9",
        "scrollbar-hover": "#9db3c2",
        "scrollbar-active": "#0f6a99",
        "scrollbar-background": "#f7f9fa",
        "scrollbar-background-hover": "#f7f9fa",
        "scrollbar-background-active": "#f7f9fa",
        "block-cursor-background": "#cfe0ea",
        "block-cursor-blurred-background": "#cfe0ea",
        "block-cursor-foreground": "#0b2c40",
        "block-cursor-text-style": "bold",
        "input-selection-background": "#0f6a99 25%",
    },
)

OWN_THEMES = {theme.name: theme for theme in (DARK, LIGHT)}


def terminal_theme() -> str:
    """Return the theme for the background in COLORFGBG (foreground;background, 0 to 15), else the dark one."""
    ground = os.environ.get("COLORFGBG", "").rpartition(";")[2]
    return theme_for_background(light=ground in ("7", "15"))


def theme_for_background(*, light: bool) -> str:
    """Return the theme for a light or a dark background."""
    return LIGHT.name if light else DARK.name


class ThemedApp(CrashReports[None]):
    """An app with the themes of headrace: the chat, and `headrace top`."""

    theme: Reactive[str] = Reactive(terminal_theme)  # from the first frame on: a change would style every widget again

    def get_theme(self, theme_name: str) -> Theme | None:
        """Find the themes of headrace before they are registered, too: textual asks while it is constructed."""
        return OWN_THEMES.get(theme_name) or super().get_theme(theme_name)

    def get_css_variables(self) -> dict[str, str]:
        return {**super().get_css_variables(), **own_variables(self.current_theme)}

    def begin_with_theme(self, wanted: str) -> None:
        """Register the themes, and use one by its name; the one for the terminal, if there is none of that name."""
        for theme in OWN_THEMES.values():
            self.register_theme(theme)
        self.theme = wanted if wanted in self.available_themes else terminal_theme()
