"""`nanovllm prove`: does a request get the same bits however it is computed? Stands on `LLM`."""
