"""The walk over the graph that bounds every node (`walk`). No formulas of relaxations here.

plan           what a walk will do: which nodes keep forms, what is derived from what
clean_run      the network on one sentence, before anything moves
substitution   rows of a node become linear forms of the input; descent: rows on their way down
key_split      rows of attention scores, split by token where nothing is lost by it
rounding       an account of what floating point may do to bounds
"""
