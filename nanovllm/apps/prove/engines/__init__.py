"""Programs for the Pythons of other engines: none of them imports nanovllm.

Each reads a job in JSON from standard input: `model`, `options` of the engine, `requests` (prompt,
sampling parameters), and `ways`, each a name with calls (lists of indices of requests). It writes
a line of JSON for each way: `way`, and `answers` (index, [tokens, log-probabilities, those of the
prompt]), or `error`; and first a line with `engine`, its name and version.
"""
