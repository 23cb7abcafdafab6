"""Many requests from a file of lines to a file of lines: parsed, answered side by side, written, and gone on with."""
