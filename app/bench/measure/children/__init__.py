"""Programs that run in a peer's Python, not in ours: each file stands alone and imports nothing of headrace.

Protocol, one JSON object a line: the child prints {"ready": version} once loaded, then answers every request
{"prompt": P, "generate": N, "depth": D} on standard input with clock readings or {"error": text}.
"""
