"""Everything that overrides or uses textual's insides, each with its reason.

Works for the textual that pyproject.toml pins; `tests/tui/test_overrides.py` fails where another one is installed, and
where its insides are used elsewhere.

`driver`: overrides `LinuxDriver.run_input_thread`, because the parser of its input is made there. Correctness.
`paste`: extends `textual._xterm_parser.XTermParser`, which passes a part of what is pasted on as keys. Correctness.
`background`: takes the answer to OSC 11 out of the same parser's input, for a light theme on a light ground.
`partial_repaint`: replaces the screen's `Compositor`, and puts a change of a widget down where textual's own passing on
ends. Speed: while an answer streams in a window of 120x40, the chat's process takes 2.0 % of a core with both, 2.6
without the compositor, 2.3 without the short way (means of two interleaved rounds of 1000 tokens on two vCPUs,
`tests.bench.ui_tax`); what it saves, `app.tui.poll_interval` makes smoother text of. Its `put` writes a line that has
grown past all of that: 1 ms of a busy core where textual's way takes 4 (`tests.bench.text_flow`).

What no measurement justified any more is gone: a driver that slept until there was input and wrote an update in one
piece gave 99.8 % of the decode speed of textual's and the same processor time (seven interleaved rounds).
`app.tui.widgets.style_cache`, worth 0.4 % of a core, keeps to textual's documented parts.
"""
