"""Hardware facts, chip table, memory bandwidth, compute speed, memory budget and load of this machine."""
