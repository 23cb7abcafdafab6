"""Programs that run in a peer's Python; each file stands alone and imports nothing of headrace.

Protocol, one JSON object per line: once loaded the child prints {"ready": version, "threads": N, "threads_batch": N,
"settings": {}} with the library's own values (null: unknown). It answers every request {"prompt": P, "generate": N,
"depth": D} on standard input with clock readings or {"error": text}. A request for several sequences has "batch": B.
The first request of a test has "tune": true for a child that tunes; it may take its time to find the fastest settings,
and may name them as "chosen". A request of a workload is {"tokens": prompt, "generate": N, "stop": tokens,
"temperature": T}.

Clock readings are fields of `app.bench.measure.sample.Sample` by name: "prefill_s", "first_step_s" (0: part of
"prefill_s"; null: not measured), "latencies_s", maybe "own_tokens_per_second", and of a workload "prompt_tokens".

For logits, {"context": tokens} drops everything and feeds tokens; the answer is {"settings": {}}. {"feed": tokens,
"pieces": N, "file": FILE} feeds tokens after them, N per pass, and writes float32 logits (T, V) to FILE; the answer is
{"seconds": duration of the passes}. "exact": true in both asks for float32 throughout.
"""
