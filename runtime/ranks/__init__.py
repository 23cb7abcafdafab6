"""Several machines as ranks of one model: collectives, the control channel, and passes that followers repeat.

    rank 0    Engine -> LeaderNetwork, LeaderBackend (leader.py) -> a log of calls -> PeerConnection
    others    PeerConnection (peer_connection.py) -> follow (follower.py): the same calls on their part of the model
    all       Group (group.py): sums and gathers within a pass

`split.py` divides layers or heads, `head.py` has all of this for a prediction head, `pass_limit.py` finds a rank that
hangs. `app/hosts/` starts the processes.
"""
