"""The chat without a screen: prompts, growing answers, sessions."""
