"""Speculative decoding: draft token proposers, acceptance rates, and the number of draft tokens per pass.

Output is unchanged. A draft token is one more row of a pass; the sequence's sampler chooses a token there as always,
and the draft token is accepted if it is that token (`runtime.engine.decode`).
"""
