"""The engine: from a program and a region to lower bounds of the margins.

functions      the scalar functions, one table
relaxations    function on an interval → lines above and below
products       planes of x·y and the choice of alpha
wholes         weights times values that move linearly, all features of a head at once
softmax        softmax taken apart, or bounded as a whole
choices        what is free in a relaxation, and how it is chosen (`learning`: how it is learned)
intervals      interval arithmetic of every operation
medians        the median of a few numbers, many times over
forms          linear forms of a node and of the input
pieces         what a (relaxed) operation does to linear forms, backwards and forwards
scene          the network on one sentence, before anything moves
substitution   rows of a node → linear forms of the input; keys: rows of scores, split by token
propagation    the walks over the graph: interval, forward, baf, backward
"""
