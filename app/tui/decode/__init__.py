"""The decode view: one widget a file, all drawn from `app.tui.metrics.live`.

A section is a `Section` (`app.tui.widgets.lines`) whose `lines` returns text for a width and height. `panel.py` lists
the sections and places them; `drawing.py` has the parts of charts. Explanations of figures: assets/explain.toml.
"""
