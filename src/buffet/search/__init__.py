"""The largest ε that can be proven, and in which order methods are asked.

radius           the certified radius of every task, and the attacked one
schedule         which tasks are asked about together, and in which order
portfolio        who else is asked, the cheapest first
cells            regions that are proven part by part
branching        a region cut into parts, worst first
margin_function  the smallest margin as a function of ε, by one method
root_finding     which ε a search tries next
policy           the constants that steer all this, with their reasons
"""
