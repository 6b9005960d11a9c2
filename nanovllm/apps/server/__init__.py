"""An OpenAI-compatible HTTP server on `AsyncLLM`. Needs the extra `server`."""
