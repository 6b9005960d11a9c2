"""The OpenAI-compatible server on `AsyncLLM`."""
