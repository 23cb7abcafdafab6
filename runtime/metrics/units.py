"""Formatting of sizes, rates and times.

Memory and files are binary (1 GiB = 2**30 bytes); bandwidth is decimal (1 GB/s = 1e9 bytes/s).
"""


def format_bytes(count: float) -> str:
    """Format a memory or file size in binary units with three significant digits: `94.2 MiB`, `23.5 GiB`."""
    return _scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def format_rate(bytes_per_second: float) -> str:
    """Format a bandwidth in decimal units with three significant digits: `54.0 GB/s`, `1.79 TB/s`."""
    return _scaled(bytes_per_second, 1000, ("B/s", "kB/s", "MB/s", "GB/s", "TB/s"))


def _scaled(value: float, base: int, units: tuple[str, ...]) -> str:
    for unit in units:
        if abs(value) < 999.5 or unit == units[-1]:
            break
        value /= base
    return f"{value:.0f} {unit}" if unit == units[0] else f"{three_digits(value)} {unit}"


def format_seconds(seconds: float) -> str:
    """Format a duration of up to minutes with two or three significant digits: `1.20 s`, `510 ms`, `51.3 ms`."""
    if seconds >= 0.9995:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.09995 else f"{seconds * 1e3:.1f} ms"


def format_joules(joules: float) -> str:
    """Format an energy with three significant digits: `1.20 J`, `96.1 mJ`."""
    return f"{three_digits(joules)} J" if joules >= 0.9995 else f"{three_digits(joules * 1e3)} mJ"


def format_long(seconds: float) -> str:
    """Format a duration of up to days, in whole seconds: `42 s`, `4 min 10 s`, `3 h 07 min`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def three_digits(value: float) -> str:
    """Format with three significant digits, at most two decimals and all whole digits: `9.84`, `96.1`, `2754`."""
    decimals = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{decimals}f}"
