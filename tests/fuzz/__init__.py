"""Hostile input for everything that reads files or arguments: one line of complaint or none, never a crash.

`python -m fuzz` (from `tests`; `make fuzz`) runs as many inputs as one likes, in one process; the tests run
a few.

mutate         bytes, JSON and text put wrong in every way somebody has thought of
place          what is valid, and what must hold
models, tokenizers, results, certificates, arguments      what is put wrong
targets        all of them by name
"""
