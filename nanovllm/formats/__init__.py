"""How weights are stored and multiplied, beside plain ones: FP8, int8 and int4, GGUF."""
