"""Formatting of counts, sizes, rates, times and shares.

Memory and files are binary (1 GiB = 2**30 bytes); bandwidth is decimal (1 GB/s = 1e9 bytes/s). An unknown figure, None,
is `–` in a line of text, empty in a table of figures and `unknown` in a report.

Every surface formats by these functions, so that one figure looks the same everywhere. Bounds such as 999.5 and 0.9995
are where rounding gives one more digit: 999.6 is `1.00` of the next unit, not `1000`.

Guard: tests/runtime/metrics/test_units.py.
"""

_UNKNOWN = "–"


def format_bytes(count: float | None) -> str:
    """Format a memory or file size in binary units with three significant digits: `94.2 MiB`, `23.5 GiB`."""
    if count is None:
        return _UNKNOWN
    return _scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def counted(count: int, noun: str) -> str:
    """Format a number of things: `1 token`, `2,048 tokens`. noun: in the singular."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun}s"


def format_context(count: int) -> str:
    """Format a length of context: `8k` for a multiple of 1,024 tokens, other numbers in digits: `1000`."""
    if count >= 1024 and count % 1024 == 0:
        return f"{count // 1024}k"
    return str(count)


def format_rate(bytes_per_second: float) -> str:
    """Format a bandwidth in decimal units with three significant digits: `54.0 GB/s`, `1.79 TB/s`."""
    return _scaled(bytes_per_second, 1000, ("B/s", "kB/s", "MB/s", "GB/s", "TB/s"))


def format_link(latency_us: float, gb_s: float, digits: int = 2) -> str:
    """Format latency and bandwidth of a network link: `1,200 us, 1.17 GB/s`. digits: decimals of the bandwidth."""
    return f"{latency_us:,.0f} us, {gb_s:.{digits}f} GB/s"


def _scaled(value: float, base: int, units: tuple[str, ...]) -> str:
    for unit in units:
        if abs(value) < 999.5 or unit == units[-1]:
            break
        value /= base
    if unit == units[0]:  # whole bytes
        return f"{value:.0f} {unit}"
    return f"{three_digits(value)} {unit}"


def format_seconds(seconds: float | None) -> str:
    """Format a duration of up to minutes with two or three significant digits: `1.20 s`, `510 ms`, `51.3 ms`."""
    if seconds is None:
        return _UNKNOWN
    if seconds >= 0.9995:
        return f"{seconds:.2f} s"
    if seconds >= 0.09995:
        return f"{seconds * 1e3:.0f} ms"
    return f"{seconds * 1e3:.1f} ms"


def format_milliseconds(seconds: float) -> str:
    """Format a duration in milliseconds, without the unit, with three digits or fewer: `9.84`, `51.3`, `510`."""
    if seconds < 0.00995:
        return f"{seconds * 1e3:.2f}"
    if seconds < 0.0995:
        return f"{seconds * 1e3:.1f}"
    return f"{seconds * 1e3:.0f}"


def format_long(seconds: float) -> str:
    """Format a duration of up to days, in whole seconds: `42 s`, `4 min 10 s`, `3 h 07 min`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    if minutes:
        return f"{minutes} min {rest:02d} s"
    return f"{rest} s"


def format_roughly(seconds: float, hour_digits: int = 0) -> str:
    """Format an estimated duration in one unit: `40 s`, `3 min`, `2 h`; with one hour digit `2.5 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.{hour_digits}f} h"


def format_joules(joules: float) -> str:
    """Format an energy with three significant digits: `1.20 J`, `96.1 mJ`."""
    if joules >= 0.9995:
        return f"{three_digits(joules)} J"
    return f"{three_digits(joules * 1e3)} mJ"


def three_digits(value: float | None) -> str:
    """Format with three significant digits, at most two decimals and all whole digits: `9.84`, `96.1`, `2754`."""
    if value is None:
        return _UNKNOWN
    return f"{value:.{_decimals_of_three(value)}f}"


def speed_text(value: float | None) -> str:
    """Format a figure of a table like `three_digits`, with commas: `9.84`, `2,754`."""
    if value is None:
        return ""
    return f"{value:,.{_decimals_of_three(value)}f}"


def _decimals_of_three(value: float) -> int:
    """Return the decimals that make three significant digits, at most two."""
    if abs(value) < 9.995:
        return 2
    if abs(value) < 99.95:
        return 1
    return 0


def decimals(value: float | None, digits: int = 2) -> str:
    """Format a figure of a table with a fixed number of decimals."""
    if value is None:
        return ""
    return f"{value:.{digits}f}"


def percent(value: float | None, digits: int = 0, *, is_signed: bool = False) -> str:
    """Format a share: `83 %`, with one digit `83.1 %`, signed `+4 %`; "" if it is None."""
    if value is None:
        return ""
    sign = "+" if is_signed else ""
    return f"{value * 100:{sign}.{digits}f} %"


def times(ratio: float | None) -> str:
    """Format a ratio: `1.25x`; "" if it is None."""
    return "" if ratio is None else f"{ratio:.2f}x"


def report_seconds(seconds: float | None) -> str:
    """Format a duration for a report: `1.203 s`, `51.34 ms`."""
    if seconds is None:
        return "unknown"
    if seconds >= 0.1:
        return f"{seconds:.3f} s"
    return f"{seconds * 1e3:.2f} ms"


def report_rate(value: float | None, unit: str) -> str:
    """Format a speed for a report: `96.1 tok/s`, `54.0 GB/s`."""
    if value is None:
        return "unknown"
    return f"{value:.1f} {unit}"
