"""`headrace bench`: options, a run of measurements, its output."""
