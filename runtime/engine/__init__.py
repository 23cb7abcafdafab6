"""Requests in, events out: scheduling, the decode loop, prefill."""
