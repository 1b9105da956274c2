"""Linear bounds of nonlinear operations over boxes, and what is free in them.

relaxation     what a relaxation is; table: the relaxation of every operation
elementwise    lines above and below a function of one variable
products       the planes of a product, and α between them
headwise       attention weights times values, the features of a head bounded together
softmax        taken apart, by log-sum-exp, or with the differences of the scores
enclosures     what a relaxed operation does to linear forms, backwards and forwards
dual_passes    what it does to the multipliers and values of a Lagrangian; dual_softmax: softmax
"""
