"""Step records, costs in bytes and FLOPs, units."""
