"""LoRA adapters: small products added to the linears of a model, for some requests or for all."""
