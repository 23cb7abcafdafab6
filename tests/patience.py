"""How long tests wait for what comes: a wait ends as soon as it has come, so that only a failure takes this long."""

PATIENCE_S = 600.0  # a machine that others use, too, can be a hundred times slower for minutes
