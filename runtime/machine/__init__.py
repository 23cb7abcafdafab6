"""Hardware facts, chip table, memory bandwidth, compute speed, memory budget and load of this machine.

Facts come through `hardware.py`, so that tests can put recorded machines in its place; an unknown fact is None, never
a guess. Measurements are stored in the cache folder, with the machine's key.
"""
