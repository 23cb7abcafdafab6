"""Control tokens that end a turn in known model families, whatever EOS a checkpoint declares.

They only count if the vocabulary has them as control tokens and the chat template, if any, writes them.
"""

TURN_ENDS = (
    "<|im_end|>",  # ChatML: Qwen, SmolLM
    "<|eot_id|>",  # Llama 3
    "<|eom_id|>",  # Llama 3, before a tool's answer
    "<end_of_turn>",  # Gemma 2 and 3
    "<turn|>",  # Gemma 4
    "<|end|>",  # Phi
    "<|endoftext|>",  # end of text: base models, and chats without their own token
    "<|end_of_text|>",  # the same in Llama 3
)
