"""Overrides of textual, and uses of its private parts, with their reasons.

They work for the textual version that pyproject.toml pins. `tests/tui/test_overrides.py` fails for another version, and
for private names elsewhere.

`driver`: overrides `LinuxDriver.run_input_thread`, which constructs the input parser. Correctness.

`paste`: extends `textual._xterm_parser.XTermParser`, which treats parts of a paste as keys. Correctness.

`columns`: rewrites the output for `LinuxDriver.write`, which relies on the terminal's width of emoji; replaces rich's
table of widths, which counts no vowel signs. Correctness.

`background`: takes the reply to OSC 11 out of the same parser's input, for the light theme. Correctness.

`option_list`: guards lists of options and the command palette against keys that come before entries are laid out, where
none has room, or after the palette closed. Correctness.

`single_dismissal`: overrides `Screen.dismiss`, which closes the current screen instead of its own. Correctness.

`input_method`: computes `App.cursor_position`, which textual sets before a layout moves the field. Correctness.

`crash`: replaces `App._fatal_error`, which prints a traceback with the values of local variables. Privacy.

`partial_repaint`: replaces the screen's `Compositor` and shortens the way of a change to the terminal. Speed; measured
with `tests.bench.ui_tax` and `tests.bench.text_flow`.

`line_strip` in `app.tui.widgets.lines`, for speed too, uses textual's documented parts only.
"""
