"""Time-out of all waits in the tests. Waits end with their event, so only a failure takes this long."""

PATIENCE_S = 60.0
CAMPAIGN_S = 4 * PATIENCE_S  # of a process that does many things, one after the other
