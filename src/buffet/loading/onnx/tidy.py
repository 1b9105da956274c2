"""A program without what nobody reads, in which only the tokens that are read are computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from buffet.network import Builder, First, Offset, Program


def tidied(program: Program, root: int, sizes: Sequence[tuple[int, int]]) -> Program:
    """The program up to the node `root`, with every `First` as early as it can be.

    Where only the first token of a node is read, it is computed alone: a classifier that reads the class
    token attends, in its last layer, from that token only. The function is the same.
    """
    nodes = program.nodes
    wanted = [0] * len(nodes)  # how many of the first tokens of every node are read
    wanted[root] = 1
    for index in range(root, 0, -1):
        if wanted[index]:
            for place, source in enumerate(nodes[index].inputs):
                reads = nodes[index].op.reads(place, wanted[index], sizes[source][0])
                wanted[source] = max(wanted[source], reads)
    wanted[0] = sizes[0][0]
    net = Builder()
    whole: dict[int, int] = {0: net.input}
    firsts: dict[int, int] = {}

    def first(index: int) -> int:
        """The new node of the first token of an old one."""
        if index not in firsts:
            alone = wanted[index] <= 1 or sizes[index][0] == 1
            firsts[index] = whole[index] if alone else net.add(First(), whole[index])
        return firsts[index]

    for index, node in enumerate(nodes[: root + 1]):
        if not index or not wanted[index]:
            continue
        if isinstance(node.op, First):
            whole[index] = first(node.inputs[0])
            continue
        op, tokens = node.op, sizes[index][0]
        one = wanted[index] == 1 < tokens
        inputs = [
            first(source)
            if one and op.reads(place, 1, sizes[source][0]) == 1 < sizes[source][0]
            else whole[source]
            for place, source in enumerate(node.inputs)
        ]
        if one and isinstance(op, Offset):
            op = replace(op, value=op.value[:1])
        whole[index] = net.add(op, *inputs)
    return net.build()
