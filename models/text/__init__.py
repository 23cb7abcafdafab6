"""Conversion between text and token ids: tokenizer, templates, control tokens, stop strings, thinking, answers.

    prompts   chat_prompt.py -> adapt_messages.py, which asks template_rules.py -> tokenizer.py
    templates chat_template.py -> template_process.py, a process apart: template_worker.py -> template_sandbox.py
              template_text.py keeps origins; worker.py has the pipes between the two processes
    ids       tokenizer.py -> control_tokens.py, encoding.py; tokenizers_library.py, or other_formats.py, reads the file
    answers   answer.py -> detokenizer.py, thinking_forms.py, thinking.py, tools/, stop_strings.py -> events.py

`structured/` holds answers to a grammar.
"""
