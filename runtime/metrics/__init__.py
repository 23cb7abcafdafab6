"""Step records, costs in bytes and FLOPs, running medians, units."""
