"""How the parameters of relaxations are learned by gradient: optimisers (`table`), each owning its loop.

optimiser      what an optimiser is, and the one that learns nothing
margin         the parameters of the margin, boxes fixed; steps: how a search parameters out the steps
boxes          that, and the parameters behind the boxes
end_to_end     every α, through the boxes that it changes
starts         the parameters that learning starts from
flat           all parameters in one tensor; adam: steps on it
dual           rows over fixed boxes and their gradient in the parameters, quickly and roughly
dual_lines     all free lines over fixed boxes, made together
warm_starts    what was learned, for the next ε and the next word
context        what a computation remembers, when it has to end, who is told
"""
