"""Speculative decoding: draft token proposers, acceptance rates, and the number of draft tokens per pass.

Output is unchanged. A draft token is one more row of a pass; the sequence's sampler chooses a token there as always,
and the draft token is accepted if it is that token (`runtime.engine.decode`).

    Proposer (proposer.py): ngram.py, forced.py, networks in `runtime.engine.draft_networks`
    acceptance.py, dry_run.py: the chances of draft tokens; controller.py, pass_costs.py: the cost of passes
    `runtime.engine.drafting` weighs both for each pass
"""
