"""The time-out of every wait in the tests. A wait ends with its event, so only a failure takes this long."""

PATIENCE_S = 60.0
