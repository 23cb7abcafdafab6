"""The networks: headrace's decoder, its configuration and parameters, and mlx-lm's classes behind the same protocol."""
