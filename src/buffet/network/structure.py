"""What the graph of a network says of its attention layers and of the way from the input."""

from __future__ import annotations

from buffet.network.operation import Input, Linear
from buffet.network.ops import Mix, Scores
from buffet.network.program import Program


def local_nodes(program: Program) -> frozenset[int]:
    """Nodes behind linear operations on single tokens only: their linear forms are exact."""
    local: set[int] = set()
    for index, node in enumerate(program.nodes):
        alone = isinstance(node.op, Linear) and node.op.per_token
        if isinstance(node.op, Input) or (alone and node.inputs[0] in local):
            local.add(index)
    return frozenset(local)


def attention_nodes(program: Program) -> frozenset[int]:
    """Queries, keys, values, and everything from the scores to the mixed values."""
    weights: set[int] = set()  # from the scores to the attention weights
    others: set[int] = set()
    for index, node in enumerate(program.nodes):
        if isinstance(node.op, Scores | Mix):
            others |= {index, *node.inputs}
        if isinstance(node.op, Scores) or (not isinstance(node.op, Mix) and weights & set(node.inputs)):
            weights.add(index)
    return frozenset(weights | others)


def passages(program: Program) -> frozenset[int]:
    """For every attention layer the last node before it that all paths from the input pass through."""
    reach = list(range(len(program.nodes)))  # the last reader of every node
    for index, node in enumerate(program.nodes):
        for source in node.inputs:
            reach[source] = max(reach[source], index)
    found: set[int] = set()
    passed: list[int] = []
    furthest = 0
    for index, node in enumerate(program.nodes):
        if furthest <= index:
            passed.append(index)
        furthest = max(furthest, reach[index])
        if isinstance(node.op, Scores):
            found.add(max(p for p in passed if p < min(node.inputs)))
    return frozenset(found)


def layers_between(program: Program, low: int, high: int) -> int:
    """How many attention layers end above the node `low`, up to `high`."""
    return sum(isinstance(node.op, Mix) for node in program.nodes[low + 1 : high + 1])
