"""Certificates: proofs that `buffet_checker` re-checks on its own (`docs/certificates.md` has the format).

A certificate holds what an engine chooses and a checker cannot guess cheaply: boxes of the nodes that nonlinearities
read, and the free numbers of every relaxation. Both are stored in float32, so the proof is made again here, in float64,
with the numbers as they are stored: boxes are rounded outward as soon as they are found, choices before they are used.
The checker, which does the same with rigorous rounding, then finds what is stored here up to float64's rounding.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from buffet.bounds.choices import Relaxer, Shares
from buffet.bounds.intervals import Box
from buffet.bounds.linear import LinesPiece, Piece
from buffet.bounds.optimise import Control
from buffet.bounds.products import Alpha, planes
from buffet.bounds.propagation import bound_nodes, kept_forms, margins, needed_boxes, stops_at
from buffet.bounds.relaxations import Side, default_slopes, relax, slope_range
from buffet.bounds.softmax import better_bound, softmax_piece
from buffet.bounds.substitution import Bounds, Scene, Stop, together
from buffet.errors import BuffetError
from buffet.loading import Model
from buffet.methods import Method, method_named
from buffet.program import Affine, Apply, Bilinear, Node, Pool, Program, Softmax
from buffet.regions import Box as BoxRegion
from buffet.regions import CandidateSet, LpBall, Region
from buffet.report import write_atomically
from buffet.verify import QUICK_RIVALS, clean_answer, proven, sized
from buffet_checker import BadInputError
from buffet_checker.certificate import KEY, SCHEMA
from buffet_checker.check import judge
from buffet_checker.network import Checkpoint, read_checkpoint

RELATIVE, ABSOLUTE = 1e-6, 1e-9
"""Boxes are widened by this share of their width, and of 1 + |clean value|. The checker's boxes differ from ours by
float64's rounding, about 1e-13 of the values that enter; a thousand times that is still nothing to a margin."""
Tensors = dict[str, Tensor]


@dataclass
class Recorder:
    """Relaxes as a `Relaxer` does, with choices rounded to float32, and takes down what was chosen."""

    relaxer: Relaxer
    chosen: dict[int, Tensors] = field(default_factory=dict)

    def __call__(self, bounds: Bounds, index: int, node: Node) -> Piece:
        clean = tuple(bounds.clean[i] for i in node.inputs)
        boxes = tuple(bounds.boxes[i] for i in node.inputs)
        shares = self.relaxer.learned.get(index, {})
        if isinstance(node.op, Bilinear):
            alphas = (shares["lower"], shares["upper"]) if shares else self.relaxer.alphas(bounds, node)
            low, high = (self._keep(index, side, a) for side, a in zip(("lower", "upper"), alphas, strict=True))
            return planes(node.op, clean, *boxes, alpha_lower=low, alpha_upper=high, dtype=bounds.dtype)
        if isinstance(node.op, Softmax):
            given: dict[str, Alpha] = {"point": 0.5, **shares}
            if "mixture" not in given:
                given["mixture"] = better_bound(node.op, clean[0], *boxes)
            kept = {name: self._keep(index, name, value) for name, value in given.items()}
            return softmax_piece(node.op, clean[0], *boxes, dtype=bounds.dtype, **kept)  # type: ignore[arg-type]
        assert isinstance(node.op, Apply)
        where = node.op.function, clean[0], boxes[0].lower, boxes[0].upper
        default = default_slopes(*where)

        def slope(side: Side, place: int) -> Alpha:
            free = torch.lerp(*slope_range(*where, side), shares[side]) if side in shares else default[place]
            return self._keep(index, side, free)

        lines = relax(*where, lower_slope=slope("lower", 0), upper_slope=slope("upper", 1), dtype=bounds.dtype)  # type: ignore[arg-type]
        return LinesPiece(lines.lower_slope, lines.lower_intercept, lines.upper_slope, lines.upper_intercept)

    def _keep(self, index: int, name: str, value: Alpha) -> Alpha:
        stored = torch.as_tensor(value, dtype=torch.float32).detach()
        self.chosen.setdefault(index, {})[name] = stored[0] if stored.ndim else stored
        return stored.double() if stored.ndim else float(stored)


@dataclass
class _Proof:
    """The proof of one task, as it grows: boxes, sets of choices, and how boxes are derived."""

    scene: Scene
    boxes: dict[int, Tensor] = field(default_factory=dict)
    sets: list[dict[int, Tensors]] = field(default_factory=list)
    own: dict[int, int] = field(default_factory=dict)  # first node of a group → its own set of choices
    derivations: list[dict[str, object]] = field(default_factory=list)
    used: set[tuple[int, int]] = field(default_factory=set)  # (set, node)
    margins: Tensor = field(default_factory=lambda: torch.tensor([math.nan]))

    def settle(self, index: int, box: Box) -> Box:
        """The box as it is stored: float32, rounded outward."""
        slack = RELATIVE * (box.upper - box.lower) + ABSOLUTE * (1 + self.scene.clean[index].abs())
        ends = torch.stack([box.lower - slack, box.upper + slack], 1).float()
        outward = torch.tensor([-math.inf, math.inf]).view(1, 2, 1, 1)
        stored = torch.nextafter(ends, outward.expand_as(ends))
        self.boxes[index] = stored[0]
        return Box(*stored.double().unbind(1))

    def keep(self, choices: dict[int, Tensors]) -> int:
        """The number of a set of choices; one that is there already is not stored twice."""
        for number, known in enumerate(self.sets):
            if all(i in known and _same(known[i], chosen) for i, chosen in choices.items()):
                return number
        self.sets.append(choices)
        return len(self.sets) - 1

    def derive(self, bounds: Bounds, nodes: Sequence[int], stops: Sequence[int], choices: int, keep: bool) -> None:
        """Boxes of nodes that are read together, by backward substitution."""
        entry: dict[str, object] = {"nodes": list(nodes), "choices": choices, "stops": list(stops), "keep": keep}
        self.derivations.append(entry)
        first = bounds.nodes[nodes[0]]
        pending = {first.inputs[0] if isinstance(first.op, Affine) else nodes[0]}
        while pending:
            index = max(pending)
            pending.remove(index)
            if index in stops or index in bounds.locals:
                continue
            self.used.add((choices, index))
            pending |= set(read(bounds.nodes[index]))

    def push(self, bounds: Bounds, index: int, keep: bool) -> None:
        """The box of a node from the linear forms of its inputs."""
        self.derivations.append({"nodes": [index], "push": True, "keep": keep})
        if index not in bounds.locals:
            self.used.add((0, index))

    def tensors(self, number: int) -> Tensors:
        """What is stored, by name."""
        stored = {f"{number}.box.{index}": box for index, box in self.boxes.items()}
        for choices, index in sorted(self.used):
            for name, value in self.sets[choices].get(index, {}).items():
                stored[f"{number}.{choices}.{index}.{name}"] = value
        return stored


def _same(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def read(node: Node) -> tuple[int, ...]:
    """The inputs that a substitution goes on to: softmax only looks at its scores."""
    return node.inputs[:1] if isinstance(node.op, Softmax) else node.inputs


def prove(
    scene: Scene, region: Region, method: Method, learned: Mapping[int, Mapping[int, Shares]]
) -> _Proof:
    """Make a proof of one task with numbers that can be stored; its margins may turn out not to be positive.

    Args:
        learned: shares that the method has learned for the boxes of nodes and, under the last node, for the margin.
    """
    propagation, root = method.describe(), len(scene.program.nodes) - 1
    end_to_end = method.optimise == "all" and root in learned
    base = Recorder(Relaxer(method.product, learned[root] if end_to_end else {}))
    proof = _Proof(scene, sets=[base.chosen])

    def sharpen(bounds: Bounds, nodes: Sequence[int], stops: Mapping[int, Stop]) -> dict[int, Box]:
        if nodes[0] not in learned:
            return bounds.boxes_of(nodes, stops)
        first = bounds.nodes[nodes[0]]
        upto = first.inputs[0] if isinstance(first.op, Affine) else nodes[0]
        own = Recorder(Relaxer(method.product, learned[nodes[0]]))
        tuned = bounds.relaxed(own, bounds.dtype, upto=upto)
        proof.own[nodes[0]] = proof.keep(own.chosen)
        return tuned.boxes_of(nodes, tuned.locals)

    with torch.no_grad():
        bounds = bound_nodes(
            scene, region, base, propagation, dtype=torch.float64, sharpen=sharpen, settle=proof.settle
        )
        if propagation.keeps == "boxes":
            proof.margins = margins(bounds, propagation)[0]
            return proof
        _plan(proof, bounds, method)
        last: list[tuple[Tensor, Recorder | None]] = []
        if propagation.margin == "stops":
            last.append((margins(bounds, propagation)[0], None))
        final = [learned[root]] if root in learned else []
        for shares in ([{}, *final] if propagation.margin == "input" else final) if not end_to_end else []:
            own = Recorder(Relaxer(method.product, shares))
            fresh = bounds.relaxed(own, torch.float64)
            last.append(((scene.clean[root] + fresh.margin(fresh.locals))[0], own))
        proof.margins, chosen = max(last, key=lambda found: float(found[0].min().nan_to_num(-math.inf)))
    stops = sorted(bounds.forms) if chosen is None else []
    proof.derive(bounds, [root], stops, proof.keep(chosen.chosen) if chosen else 0, False)
    return proof


def _plan(proof: _Proof, bounds: Bounds, method: Method) -> None:
    """How the walk of `bound_nodes` came by the boxes of its nodes."""
    program, propagation = bounds.scene.program, method.describe()
    needed, keeps = needed_boxes(program), kept_forms(program, propagation)
    groups = together(program, needed | keeps)
    done: set[int] = set()
    forms: set[int] = set()
    for index, node in enumerate(program.nodes):
        if index in done or index not in needed | keeps:
            continue
        known = forms | bounds.locals.keys()
        if index in bounds.locals or (index in keeps and known.issuperset(read(node))):
            proof.push(bounds, index, index in keeps)
            done.add(index)
            forms |= {index} & keeps
            continue
        group = groups[index]
        own = proof.own.get(group[0])
        stops = sorted(forms & stops_at(bounds, index, propagation).keys()) if own is None else []
        proof.derive(bounds, group, stops, own or 0, index in keeps)
        done |= set(group)
        forms |= set(group) & keeps if index in keeps else set()


def kinds(program: Program) -> list[str]:
    """The operations of a program in the words of the schema."""

    def kind(node: Node) -> str:
        if isinstance(node.op, Pool):
            return node.op.kind
        return type(node.op).__name__.lower()

    return [kind(node) for node in program.nodes]


@dataclass(frozen=True)
class Certificate:
    """What was written: the margins that are claimed, per task, and the size of the file."""

    margins: tuple[tuple[float, ...], ...]
    size: int


def certify_to(
    path: str | Path,
    model: Model,
    region: Region,
    eps: float | Sequence[float] | Tensor | None = None,
    method: str | Method = "baseline",
    *,
    label: int | None = None,
) -> Certificate:
    """Prove every task of a region and write the proofs to one file that ``buffet check`` accepts.

    Raises `BuffetError`, and writes nothing, where a task cannot be proven with numbers as they are stored.

    Example:
        >>> import buffet
        >>> model = buffet.load()
        >>> region = buffet.LpBall(model.embed("a gripping , moving film"), words=[2])
        >>> buffet.certify_to("proof.safetensors", model, region, eps=0.01)  # doctest: +SKIP
    """
    return write_certificate(Path(path), model, [sized(region, eps)], method_named(method), label)


def write_certificate(
    path: Path, model: Model, regions: Sequence[Region], method: Method, label: int | None = None
) -> Certificate:
    """Prove every task of some regions of one sentence; the file is written only if the checker accepts it."""
    certificate, content, checkpoint = certify(model, regions, method, label)
    result = judge(content, str(path), checkpoint)
    if not result.accepted:
        raise BuffetError(f"certificate: not written, as the checker rejects it: {result.reason}")
    write_atomically(path, content)
    return certificate


def certify(
    model: Model, regions: Sequence[Region], method: Method, label: int | None = None
) -> tuple[Certificate, bytes, Checkpoint]:
    """The proofs of every task of some regions of one sentence, as the content of a certificate, unchecked."""
    if model.directory is None:
        raise BuffetError("certificate: the model is in memory only; a certificate names the files of a directory")
    try:
        checkpoint = read_checkpoint(model.directory)
    except BadInputError as error:
        raise BuffetError(f"certificate: {error}") from None
    label, _ = clean_answer(model, regions[0], label)
    center = regions[0].center.contiguous()
    tensors: Tensors = {"center": center}
    claims: list[dict[str, object]] = []
    claimed: list[tuple[float, ...]] = []
    tasks = [region.select([task]) for region in regions for task in range(region.tasks)]
    for task, one in enumerate(tasks):
        used, proof = _first_proof(model, one, method, label)
        # rounded down by more than the checker's own rounding can take off
        claimed.append(tuple((proof.margins - 1e-7 * (1 + proof.margins.abs())).tolist()))
        described, extra = _describe(one, task)
        tensors |= {**extra, **proof.tensors(task)}
        claims.append(
            {
                "method": ", ".join((used.propagation, used.product, used.softmax, used.optimise)),
                "graph": _graph(used),
                "nodes": kinds(proof.scene.program),
                "region": described,
                "margins": claimed[-1],
                "derivations": proof.derivations,
            }
        )
    head = {
        "schema": SCHEMA,
        "made": f"buffet {version('buffet')}",
        "model": dict(checkpoint.hashes),
        "input": hashlib.sha256(center.numpy().tobytes()).hexdigest(),
        "label": label,
        "claims": claims,
    }
    stored = {name: value.detach().clone().contiguous() for name, value in tensors.items()}
    content = save(stored, {KEY: json.dumps(head)})
    return Certificate(tuple(claimed), len(content)), content, checkpoint


def _graph(method: Method) -> str:
    if method.describe().keeps == "boxes" or method.softmax == "lse":
        return "plain"
    return method.softmax


def _first_proof(model: Model, region: Region, method: Method, label: int) -> tuple[Method, _Proof]:
    """A proof by the method or one of its rivals, the quick ones first."""
    rivals = method.challengers()
    best = math.nan
    for candidate in (*rivals[:QUICK_RIVALS], method, *rivals[QUICK_RIVALS:]):
        scene = candidate.scene(model.program64, region.center, label)
        learned: dict[int, dict[int, Shares]] = {}
        proof = None
        if candidate.optimise != "tuned":
            proof = prove(scene, region, candidate, {})
        if candidate.optimise != "none" and (proof is None or not _holds(proof)):
            candidate.bound(scene, region, control=Control(learned=learned))
            proof = prove(scene, region, candidate, learned)
        assert proof is not None
        if _holds(proof):
            return candidate, proof
        best = max(float(proof.margins.min()), best) if math.isfinite(best) else float(proof.margins.min())
    words = "+".join(str(i) for i in region.moved[0].tolist())
    raise BuffetError(
        f"certificate: word {words} is not proven (the best margin is {best:.4g}); nothing was written, "
        "try a smaller eps or a tighter method"
    )


def _holds(proof: _Proof) -> bool:
    """Whether what would be claimed is positive."""
    return bool(proven((proof.margins - 2e-7 * (1 + proof.margins.abs()))[None]))


def _describe(region: Region, task: int) -> tuple[dict[str, object], Tensors]:
    """The region of one task in the words of the schema."""
    moved = region.moved[0].tolist()
    if isinstance(region, LpBall):
        assert region.eps is not None
        p = "inf" if math.isinf(region.p) else region.p
        return {"kind": "ball", "moved": moved, "p": p, "eps": float(region.eps[0])}, {}
    if isinstance(region, BoxRegion):
        ends = {f"{task}.region.lower": region.lower[0], f"{task}.region.upper": region.upper[0]}
        return {"kind": "box", "moved": moved}, ends
    assert isinstance(region, CandidateSet)
    rows = region.center.double()[region.moved[0]]
    given = torch.stack([torch.stack([*choices]).double() for choices in _filled(region, rows)])
    described = {"kind": "candidates", "moved": moved, "budget": region.budget}
    return described, {f"{task}.region.rows": given}


def _filled(region: CandidateSet, rows: Tensor) -> list[list[Tensor]]:
    """The candidates of every word, as many for each: words with fewer repeat the original."""
    most = max(len(choices) for choices in region.candidates[0])
    return [
        [*choices.double(), *[row] * (most - len(choices))]
        for choices, row in zip(region.candidates[0], rows, strict=True)
    ]

