"""The control tokens that end a turn in one of the model families in use, whatever a checkpoint declares as its EOS.

A name alone proves nothing: who reads a checkpoint takes those of them that its vocabulary has as control tokens and,
where there is a chat template, that the template writes.
"""

TURN_ENDS = (
    "<|im_end|>",  # ChatML: Qwen, SmolLM
    "<|eot_id|>",  # Llama 3
    "<|eom_id|>",  # Llama 3, before a tool's answer
    "<end_of_turn>",  # Gemma 2 and 3
    "<turn|>",  # Gemma 4
    "<|end|>",  # Phi
    "<|endoftext|>",  # of a text: base models, and chats without a token of their own
    "<|end_of_text|>",  # the same, Llama 3
)
