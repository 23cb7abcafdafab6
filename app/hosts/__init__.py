"""Ranks of one model on several machines: hostfiles, start, supervision, checks."""
