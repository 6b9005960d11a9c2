"""What runs in the Pythons of other engines: none of it imports nanovllm.

`program.py ENGINE` reads a job in JSON from standard input: `model`, `options` of the engine,
`requests` (prompt, sampling parameters), and `ways`, each a name with calls (lists of indices of
requests). It writes a line of JSON with `engine`, its name and version, and then one for each
way: `way`, `answers` (index, [tokens, log-probabilities, those of the prompt]), `counts` of what
happened in the engine so far, and `seconds`.

A module `ENGINE_engine` has `version()`, and the class `Engine(model, **options)` whose
`generate(requests)` returns the answers of a call, and whose `counts()` those counts that it has.
"""
