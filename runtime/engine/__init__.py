"""Requests in, events out: scheduling, the decode loop, prefill.

`engine.py` has the step. In its order: `scheduler.py` and `prompt_chunks.py`, `drafting.py`, `decode.py` and
`prefill.py` (one pass), `in_flight.py` (its states), `batch_clock.py` (its times), `commit.py`, `ending.py`.
`sequence.py` is the state of a request, `work_memory.py` that of the device's memory.
"""
