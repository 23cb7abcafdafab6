"""Measuring: plans, interleaved repetitions, headrace itself and its peers, from samples to the JSON document."""
