"""Token selection: sampling parameters, sampler, random keys and log probabilities.

The stages stand in `sampler.py`. `constraint.py` and `section_limit.py` exclude tokens before them.
"""
