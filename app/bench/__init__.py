"""Benchmarks: plan tests, measure them on the real engine, and say what the figures mean. Prints nothing itself."""
