"""Cost of a decode step and memory use, from shapes alone.

    shape_sources.py   headers or a config -> StepShape (step_shape.py); mlx_lm_shape.py for mlx-lm's classes
    costs.py           the same of a checkpoint that is about to be loaded, and its memory

`tests/models/cost` compares with the arrays of loaded networks and with peaks of processes.
"""
