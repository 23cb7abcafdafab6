"""Guessing tokens: what guesses them, how often it was right, and when verifying guesses is worth its time.

Nothing here decides what a sequence says. A guess rides along in a pass as a row of its own; the sequence's sampler
chooses there as it would have, and the guess is accepted where that is the token chosen (`runtime.engine.decode`).
"""
