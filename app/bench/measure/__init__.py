"""Measurements: plans, interleaved repetitions, headrace and its peers, ratios and the JSON document."""
