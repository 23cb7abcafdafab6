"""Figures as text: speeds, shares and intervals."""


def speed_text(value: float | None) -> str:
    """Format a speed with three significant digits, from 0.5 to 50,000; empty for None."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def decimals(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"
