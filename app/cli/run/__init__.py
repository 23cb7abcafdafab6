"""`headrace run`: arguments, prompt, one or several answers, their reports."""
