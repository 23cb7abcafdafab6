"""The decode view: one widget a file, all drawn from `app.tui.metrics.live`."""
