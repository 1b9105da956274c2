"""What the paper says and what we found, claim by claim; every number of ours comes from the records."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from buffet.lab.reproduce import paper
from buffet.lab.reproduce.records import ModelRecord
from buffet.lab.reproduce.results import Results
from buffet.lab.reproduce.scales import CURVES, OURS, PUBLISHED
from buffet.lab.reproduce.tables import Table, ratio
from buffet.printing import counted

NEAR = 0.9
"""A number of ours confirms a larger one of the paper that it reaches to this share."""
POINT = 0.01
"""An accuracy confirms a range that it misses by less."""
DEPTHS = 3
"""So many numbers of layers make a trend in depth."""
OPEN = "not measured yet"


@dataclass(frozen=True)
class Finding:
    """A claim, what we found about it, and what follows."""

    claim: str
    found: str
    verdict: str
    why: str = ""


def claims_page(results: Results) -> str:
    """The page in Markdown."""
    findings = _findings(results)
    lines = [(f.claim, f.found, f.verdict) for f in findings]
    table = Table("claims", "", ("the paper says", "we found", "so it is"), tuple(lines), labels=3)
    why = [f"- **{f.claim}** {f.why}" for f in findings if f.why and f.verdict != OPEN]
    return (
        "\n\n".join(
            [
                "# The paper's claims",
                "What the BuFFeT paper says, and what came out here, at the scale "
                f"*{results.records.run.scale}*, in {_norm(results)}, from the tasks that are done "
                "([their tables and figures](index.md)). The paper compares with CROWN-BaF as published, "
                f"`{PUBLISHED}`. *Confirmed*: ours reaches the number to within a tenth (an accuracy: to "
                "within a point). *In part*: the direction is right, the size is not.",
                progress(results),
                table.markdown().rstrip("\n"),
                *(["## Why", "\n".join(why)] if why else []),
                "## Beyond the paper",
                _beyond(results),
            ]
        )
        + "\n"
    )


def progress(results: Results) -> str:
    """How many tasks of every model are done."""
    parts = []
    for m in results.records.models:
        done = len(results.answered(m.model, PUBLISHED))
        wanted = f"{m.tasks}" if m.first == m.tasks else f"{m.tasks}, of which {m.first} come first"
        parts.append(f"{m.model} {done} (of {wanted})")
    return (
        "Tasks are done in a random order that is fixed, all models advancing alike, so those that are "
        f"done are a fair sample: {', '.join(parts)}."
    )


def _findings(results: Results) -> list[Finding]:
    return [
        *(_accuracy(results, data) for data in paper.ACCURACY),
        _gain(
            results,
            f"r-BuFFeT multiplies the radius by up to {paper.RULE_GAIN:g} at six layers.",
            "crown-baf+r",
            "6 layers",
            paper.RULE_GAIN,
            "The rule as it is printed is a tie for every product, so that rounding chooses "
            "([Methods](../methods.md#crown-baf-as-published)); ours bounds the same expression as a "
            "linear form of the input, and the planes it takes then are not reliably better.",
        ),
        _gain(
            results,
            f"o-BuFFeT multiplies it by up to {paper.LEARNED_GAIN:g} at six layers.",
            "crown-baf+o",
            "6 layers",
            paper.LEARNED_GAIN,
        ),
        _gain(
            results,
            f"o-BuFFeT multiplies it by up to {paper.TINYBERT_GAIN:g} on TinyBERT.",
            "crown-baf+o",
            "tinybert",
            paper.TINYBERT_GAIN,
            "Ours has TinyBERT's architecture and is trained from random weights: the paper's is "
            "distilled from BERT.",
        ),
        _depth(results),
        _time(results, "r-BuFFeT", "crown-baf+r", paper.RULE_TIME, ""),
        _time(
            results,
            "o-BuFFeT",
            "crown-baf+o",
            paper.LEARNED_TIME,
            "Ours does not learn anew at every ε: ε follows the margin's zero while α are learned, and "
            "what was learned for one ε serves the next.",
        ),
        _learning(results),
        _together(results),
    ]


def _accuracy(results: Results, data: str) -> Finding:
    low, high = paper.ACCURACY[data]
    found = [m.accuracy.test for m in results.records.models if m.accuracy and m.model.startswith(f"{data}-")]
    title = {"sst": "SST-2", "yelp": "Yelp"}[data]
    claim = f"The models classify {low:.1%} to {high:.1%} of {title}'s test sentences correctly."
    if not found:
        return Finding(claim, "", OPEN)
    inside = min(found) >= low - POINT and max(found) <= high + POINT
    told = f"{min(found):.1%} to {max(found):.1%} ({counted(len(found), 'model')})"
    if data == "yelp":
        return Finding(claim, told, "confirmed" if inside else "not comparable", paper.YELP)
    return Finding(claim, told, "confirmed" if inside else "not confirmed")


def _gain(results: Results, claim: str, method: str, kind: str, size: float, why: str = "") -> Finding:
    means, most, counts = [], [], []
    for m in results.models:
        if _kind(m) == kind and (values := results.ratios(m.model, method)):
            means.append((m.model, statistics.fmean(values)))
            most.append(max(values))
            counts.append(len(values))
    if not means:
        return Finding(claim, "", OPEN)
    told = ", ".join(f"{model} {ratio(mean)} ×" for model, mean in means)
    found = f"on average {told}; at most {ratio(max(most))} × ({sum(counts)} tasks)"
    return Finding(claim, found, _size(max(mean for _, mean in means), size), why)


def _kind(model: ModelRecord) -> str:
    """Which of the paper's architectures a model is of."""
    if "tinybert" in model.model:
        return "tinybert"
    return f"{model.accuracy.layers} layers" if model.accuracy else ""


def _size(found: float, claimed: float) -> str:
    if found >= NEAR * claimed:
        return "confirmed"
    return "in part" if found > 1 else "not confirmed"


def _depth(results: Results) -> Finding:
    claim = "The deeper the model, the more o-BuFFeT gains."
    told, grows = [], []
    for data in results.data:
        numbered = sorted(
            (m.accuracy.layers, mean)
            for m in results.about(data)
            if m.accuracy and _kind(m) != "tinybert"
            if (mean := results.mean_ratio(m.model, "crown-baf+o")) is not None
        )
        if len(numbered) >= DEPTHS:
            told.append(f"{data}: " + ", ".join(f"{ratio(mean)} × at {layers}" for layers, mean in numbered))
            grows.append(numbered[-1][1] > numbered[0][1])
    if not told:
        return Finding(claim, "", OPEN)
    verdict = "confirmed" if all(grows) else "in part" if any(grows) else "not confirmed"
    return Finding(claim, "; ".join(told), verdict)


def _time(results: Results, name: str, method: str, claimed: tuple[float, float], why: str) -> Finding:
    claim = f"{name} takes {claimed[0]:g} to {claimed[1]:g} times as long as CROWN-BaF."
    found = [t for m in results.models if (t := results.time_ratio(m.model, method)) is not None]
    if not found:
        return Finding(claim, "", OPEN)
    low, high = min(found), max(found)
    inside = low >= NEAR * claimed[0] and high <= claimed[1] / NEAR
    verdict = "confirmed" if inside else "quicker here" if high < claimed[1] else "not confirmed"
    return Finding(claim, f"{low:.1f} to {high:.1f} times", verdict, why if verdict != "confirmed" else "")


def _learning(results: Results) -> Finding:
    claim = "Learning α raises the margin above the baseline's, often above 0."
    told, better, proven, count = [], 0, 0, 0
    for method, against in CURVES.items():
        curves = [c for m in results.models for c in results.learning(m.model, method)]
        best = [max((s for s in c.steps if s is not None), default=float("nan")) for c in curves]
        up = sum(b > (c.reference or 0.0) for b, c in zip(best, curves, strict=True))
        if curves:
            above = sum(b > 0 for b in best)
            told.append(f"{method}: {up} of {len(curves)} above {against}'s, {above} above 0")
            better, proven, count = better + up, proven + above, count + len(curves)
    if not count:
        return Finding(claim, "", OPEN)
    verdict = (
        "confirmed" if better == count and 2 * proven >= count else "in part" if better else "not confirmed"
    )
    return Finding(claim, "; ".join(told), verdict)


def _together(results: Results) -> Finding:
    claim = "Log-sum-exp bounds and o-BuFFeT together prove more than either alone."
    wins = count = 0
    for m in results.models:
        for method in ("lse", "o-buffet"):
            pairs = results.pairs(m.model, "lse+o-buffet", method)
            wins += sum(p.certified >= p.reference for p in pairs)
            count += len(pairs)
    if not count:
        return Finding(claim, "", OPEN)
    verdict = "confirmed" if wins >= NEAR * count else "in part" if 2 * wins > count else "not confirmed"
    return Finding(claim, f"at least as large a radius in {wins} of {count} comparisons", verdict)


def _beyond(results: Results) -> str:
    methods = (OURS, "o-buffet", "lse+o-buffet", "buffet")
    rows = [
        (m.model, *(ratio(results.mean_ratio(m.model, method)) for method in ("crown-baf+o", *methods)))
        for m in results.models
    ]
    table = Table("beyond", "", ("model", "crown-baf+o", *methods), tuple(rows))
    return (
        f"Mean radius against `{PUBLISHED}` of the paper's best method on it, and of ours, which add "
        "residual and "
        f"attention before the norm is taken (`{OURS}`), learn on top of that, bound softmax as a whole, or "
        f"substitute backward everywhere (`buffet`, on the first tasks).\n\n{table.markdown()}".rstrip("\n")
    )


def _norm(results: Results) -> str:
    return f"L{results.records.run.norm}".replace("inf", "∞")
