"""`nanovllm bench serve`: measures any server that speaks OpenAI's protocol."""
