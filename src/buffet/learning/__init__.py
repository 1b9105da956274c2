"""What is free in the relaxations, learned by gradient. `bounds` knows nothing of it.

starts         the shares learning starts from
sheet          all shares in one tensor; adam: steps on it
optimise       the shares of the margin, learned; plans: in how many steps
tuning         the shares behind the boxes, learned
lessons        what was learned, for the next ε and the next word
control        what a computation remembers, when it has to end, who is told
lagrangian     the margin over fixed boxes and its gradient in what is free, quickly and roughly
links          what an operation over a fixed box does to multipliers and values; softmax_link: softmax
lines          all free lines over fixed boxes, made together
"""
