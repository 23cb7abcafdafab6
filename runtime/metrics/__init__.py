"""Step records, costs in bytes and FLOPs, running medians, units.

Every figure that a surface shows is defined here once. No module imports MLX, so any process may read records.
"""
