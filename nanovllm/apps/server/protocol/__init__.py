"""The JSON of requests and answers, as pydantic models: OpenAI's names, and vLLM's too."""
