"""Networks of mlx-lm's model classes, for architectures that headrace's decoder does not run."""
