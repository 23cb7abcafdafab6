"""The HTTP server: OpenAI and Anthropic endpoints over the engine process."""
