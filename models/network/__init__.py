"""Networks: headrace's decoder with its configuration and parameters, and mlx-lm's classes."""
