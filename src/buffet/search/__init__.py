"""The largest ε that can be proven.

radius         the certified radius of every task, and the attacked one
schedule       which tasks are asked about together, in which order, and who else is asked
root_finding   which ε a search tries next
branching      a region cut into parts, worst first
"""
