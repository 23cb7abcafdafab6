"""The decode view: one widget a file, all drawn from `app.tui.decode.metrics`."""
