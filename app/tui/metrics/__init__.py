"""Live decode metrics, computed from the engine's events; no widgets.

`live.py` takes the events in and is all that views read. Its parts: `answers.py` (the turn's sequences), `facts.py`
(machine, model, ended turns), `rates.py` (sums over steps, speed by context, energy), `figures.py` (means, stalls,
roofline points). `machine_watch.py` samples the load.
"""
