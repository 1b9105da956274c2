"""The engine broken on purpose, one mistake at a time: the soundness campaign has to notice every one.

hunting  what a mutant is, and whether it is noticed
table    what is broken
staged   cases for mistakes that random networks hide
exact    claims that have to hold to the last bit
"""
