"""Summaries of answers for tests."""

from headrace.runtime.metrics.telemetry import Percentiles, Summary


def make_summary(
    prompt_tokens: int = 20,
    reused_tokens: int = 12,
    completion_tokens: int = 7,
    ttft_s: float | None = 0.05,
    prefill_rate: float = 300.0,
    decode_rate: float = 150.0,
    achieved_gb_s: float | None = 15.0,
    mbu: float | None = 0.3,
    kv_cache_bytes: int = 9000,
) -> Summary:
    fed = prompt_tokens - reused_tokens - 1
    step_s = 1 / decode_rate
    latencies = Percentiles(step_s, step_s, step_s, step_s)
    return Summary(
        prompt_tokens=prompt_tokens,
        reused_tokens=reused_tokens,
        prefill_tokens=fed,
        completion_tokens=completion_tokens,
        steps=completion_tokens,
        prefill_s=fed / prefill_rate,
        first_step_s=step_s,
        ttft_s=ttft_s,
        step_latency=latencies,
        step_s=step_s,
        itl=latencies,
        tpot_s=step_s,
        weight_bytes_per_step=98_000_000,
        kv_bytes_per_token=768,
        kv_cache_bytes=kv_cache_bytes,
        achieved_gb_s=achieved_gb_s,
        peak_memory_bytes=140_000_000,
        mbu=mbu,
    )
