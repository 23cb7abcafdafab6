"""Token counts of answers for result documents, among them OpenAI's `usage` object."""


def token_counts(prompt: int, completion: int) -> dict[str, int]:
    """Return the numbers of tokens of prompt and completion, and their sum."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def openai_usage(prompt: int, completion: int, cached: int) -> dict[str, object]:
    """Return OpenAI's `usage` object. cached: prompt tokens that were in the cache."""
    return {**token_counts(prompt, completion), "prompt_tokens_details": {"cached_tokens": cached}}
