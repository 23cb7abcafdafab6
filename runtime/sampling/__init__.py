"""Token selection: sampling parameters, sampler, random keys and log probabilities."""
