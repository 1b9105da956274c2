"""What is free in the relaxations, learned by gradient.

starts         the parameters that learning starts from
flat           all parameters in one tensor; adam: steps on it
margin         the parameters of the margin, learned; steps: in how many steps
boxes          the parameters behind the boxes, learned
warm_starts    what was learned, for the next ε and the next word
context        what a computation remembers, when it has to end, who is told
dual           the margin over fixed boxes and its gradient in what is free, quickly and roughly
dual_passes    what an operation over a fixed box does to multipliers and values; dual_softmax: softmax
dual_lines     all free lines over fixed boxes, made together
"""
