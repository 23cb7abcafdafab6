"""Programs that run in a peer's Python, not in ours: each file stands alone and imports nothing of headrace.

Protocol, one JSON object a line: the child prints {"ready": version, "threads": N, "threads_batch": N, "settings": {}}
once loaded, with what the library itself says it uses (null: it does not say), then answers every request
{"prompt": P, "generate": N, "depth": D} on standard input with clock readings or {"error": text}. Tests of several
sequences come with "batch": B, to a child that has them. A child that tunes gets "tune": true with the first request of
every test, and may take its time to find what is fastest for it.
"""
