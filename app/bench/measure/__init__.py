"""Measuring: plans, interleaved repetitions, headrace itself and its peers, ratios, the JSON document."""
