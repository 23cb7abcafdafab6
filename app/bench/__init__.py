"""Benchmarks of the engine and its peers: measurement, comparison, quality and views."""
