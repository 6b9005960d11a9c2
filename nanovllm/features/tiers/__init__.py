"""KV beyond the pool: byte stores of the prefix cache, and whose bytes they hold."""
