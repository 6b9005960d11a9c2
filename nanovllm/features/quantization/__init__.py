"""How weights are stored and multiplied, apart from plain ones: FP8, int8 and int4, GGUF."""
