"""Answers and rows to make pages of, with sentences that try to break out of them."""

from __future__ import annotations

import json
import math
import random
import re
from typing import Any

from buffet.evaluation import Evaluation, Exchanges, SentenceRow
from buffet.evaluation.rows import Counterexample, LevelAnswer
from buffet.experiments.rows import Row
from buffet.report import CertifyReport, ModelInfo, Picture, QueryInfo, TaskResult, Token, Versions, together
from buffet.report.words import FewerWords, Offer, WordResult, WordsReport
from buffet.words.answer import Flip
from buffet.words.reading import LeftOut

HOSTILE = "</script><script>alert(1)</script> <img src=x onerror=alert(1)> \"film\" & 'co' \u2028 {{ 7 * 7 }}"
"""A sentence that a careless page would run."""
VERSIONS = Versions.current()
NAMES = ("[CLS]", "a", "<script>alert(1)</script>", "film", "[SEP]")


def task(words: tuple[int, ...], certified: float, attacked: float | None, **changes: object) -> TaskResult:
    """One task of the sentence `NAMES`."""
    values = {
        "words": words,
        "tokens": tuple(NAMES[i] for i in words),
        "verdict": "certified" if certified > 0 else "unknown",
        "certified": certified,
        "attacked": attacked,
        "margin": 0.5 if certified > 0 else None,
        "margins": None,
        "counterexample": None,
        "evaluations": 7,
    }
    return TaskResult.model_validate({**values, **changes})


def answer(*tasks: TaskResult, eps: float | None = None, **changes: object) -> CertifyReport:
    """A report about the sentence `NAMES`."""
    attacked = [t.attacked for t in tasks if t.attacked is not None]
    values = {
        "text": 'a <script>alert(1)</script> "film" & co',
        "tokens": [
            Token(index=i, token=name, special=i in (0, 4), unknown=False) for i, name in enumerate(NAMES)
        ],
        "model": ModelInfo(name="tiny", labels=("negative", "positive"), layers=3, width=8),
        "query": QueryInfo(
            norm=2.0,
            eps=eps,
            method="baseline",
            propagation="baf",
            product="zero",
            softmax="decomposed",
            optimise="none",
            steps=None,
            rate=None,
            start=None,
            window=None,
            search="secant",
            budget=None,
            label=1,
            attack=True,
            seed=0,
            threads=1,
            memory=1 << 30,
        ),
        "answer": 1,
        "logits": (-1.0, 1.0),
        "clean_margin": 2.0,
        "verdict": together([t.verdict for t in tasks]),
        "certified": min(t.certified for t in tasks),
        "attacked": min(attacked, default=None),
        "tasks": tasks,
        "evaluations": 9,
        "seconds": 0.5,
        "attack_seconds": 0.1,
        "command": "buffet certify --method baseline 'a <b>'",
        "versions": Versions(buffet="0", torch="1", python="2"),
    }
    return CertifyReport.model_validate({**values, **changes})


RADII = answer(task((1,), 0.30001, 0.4), task((2,), 0.1, None), task((3,), 0.2, 0.29999))
AT_EPS = answer(
    task((1,), 0.05, None, margins={"negative": 0.5}),
    task((2,), 0.0, 0.05, verdict="falsified", margins={"negative": -3.0}, margin=-3.0),
    task((3,), 0.0, None, margins={"negative": None}),
    eps=0.05,
    attack_seconds=None,
)

IMAGE = answer(
    task((1,), 0.3, 0.4, tokens=("(0,0)",)),
    task((4,), 0.1, None, tokens=("(1,1)",)),
    text="digits:17",
    tokens=[
        Token(index=i, token=name, special=i == 0, unknown=False)
        for i, name in enumerate(("[CLASS]", "(0,0)", "(0,1)", "(1,0)", "(1,1)"))
    ],
    # Four patches of one red, green, blue and grey pixel.
    picture=Picture(side=2, patch=1, channels=3, pixels="/wAAAP8AAAD/gICA"),
)


def swaps(**changes: object) -> WordsReport:
    """A report about substitutions, proven unless something else is said."""
    offers = tuple(Offer(text=t, source="synonyms", tokens=1, unknown=t == "<b>") for t in ("dull", "<b>"))
    values = {
        "text": "a <script>alert(1)</script> film",
        "pair": None,
        "model": ModelInfo(name="tiny", labels=("negative", "positive"), layers=3, width=8),
        "method": "buffet",
        "at_most": 1,
        "label": 1,
        "answer": 1,
        "clean_margin": 2.0,
        "words": (
            WordResult(word="a", rows=(1,), substitutes=()),
            WordResult(word="<script>alert(1)</script>", rows=(2, 3), substitutes=offers),
            WordResult(word="film", rows=(4,), substitutes=offers[:1] * 9),
        ),
        "ignored": (LeftOut(word="film", text="films", reason="the same tokens as 'dull'"),),
        "sentences": 1234,
        "shapes": 1,
        "verdict": "certified",
        "margin": 0.25,
        "flip": None,
        "unknown": 0,
        "seconds": 0.5,
        "command": "buffet certify --swap film=dull 'a <b> film'",
        "versions": Versions(buffet="0", torch="1", python="2"),
    }
    return WordsReport.model_validate({**values, **changes})


FLIPPED = swaps(
    verdict="falsified",
    margin=None,
    at_most=2,
    fewer=(
        FewerWords(
            at_most=1,
            sentences=12,
            shapes=1,
            verdict="certified",
            margin=0.5,
            flip=None,
            unknown=0,
            seconds=1.0,
        ),
    ),
    flip=Flip(
        sentence="a <script>alert(1)</script> dull", changes=(("film", "dull"),), answer=0, margin=-1.5
    ),
)


def row(key: str, **changes: Any) -> Row:
    """A row of a sweep."""
    values: dict[str, Any] = dict.fromkeys(Row.model_fields)
    values |= {"key": key, "status": "ok", "model": "m", "model_digest": "0", "sentence": "a film"}
    values |= {"sentence_tokens": ("a", "film"), "label": 1, "label_name": "positive", "clean_margin": 1.5}
    values |= {"words": (1,), "tokens": ("film",), "norm": "2", "method": "baseline", "what": "radius"}
    values |= {"parts": {"propagation": "baf", "window": None}, "batch": 1, "seed": 0, "threads": 1}
    values |= {"config": "0", "finished": "2026-01-01T00:00:00+00:00", "versions": VERSIONS}
    return Row.model_validate(values | {"certified": 0.1, "task_seconds": 1.0, "seconds": 1.0} | changes)


GAINS = {"baseline": 1.0, "lse": 1.3, "o-buffet": 1.1, "interval": 0.001}
"""Invented methods' radii, as multiples of the baseline's."""


def sweep_rows(sentences: int = 4, words: int = 4, hostile: bool = True) -> list[Row]:
    """A sweep of two models, norms 2 and inf and four methods, with a failure."""
    texts = [f"film number {n} is a moving and honest one"[: 24 + n % 15] for n in range(sentences)]
    if hostile:
        texts[0] = HOSTILE
    draw = random.Random(0)
    rows = [
        _radius(draw, model, text, norm, method, word, f"{model} {n} {norm} {method} {word}")
        for model in ("small", "large")
        for n, text in enumerate(texts)
        for norm in ("2", "inf")
        for method in GAINS
        for word in range(1, min(words, len(text.split())) + 1)
    ]
    rows[-1] = rows[-1].model_copy(
        update={"status": "timeout", "reason": "took longer than 5 s <b>", "certified": None}
    )
    return rows


def _radius(draw: random.Random, model: str, text: str, norm: str, method: str, word: int, key: str) -> Row:
    tokens = ("[CLS]", *text.split(), "[SEP]")
    size = random.Random(f"{model} {text} {norm} {word}").lognormvariate(0, 0.5) * (1 if norm == "2" else 0.1)
    return row(
        key,
        model=model,
        model_digest=model,
        sentence=text,
        sentence_tokens=tokens,
        words=(word,),
        tokens=(tokens[word],),
        norm=norm,
        method=method,
        certified=size * GAINS[method] * (1 if method == "baseline" else math.exp(draw.gauss(0, 0.1))),
        attacked=None if word == 3 else size * 2.1,
        attack_seconds=1.0,
        task_seconds={"o-buffet": 8.0}.get(method, 1.0) * (1 + word / 10),
    )


def evaluation(total: int = 60) -> Evaluation:
    """Sentences under synonyms, with every outcome there is; the first would break out of a careless page."""
    levels = (1.0, 2.0, math.inf)
    rows = [_evaluated(number, levels) for number in range(30)]
    return Evaluation(
        Exchanges(levels, {"a": ["b"]}), ("negative", "positive"), "data.tsv", total, tuple(rows), 12.0
    )


def _evaluated(number: int, levels: tuple[float, ...]) -> SentenceRow:
    """By turns proven, broken by one word, broken by two, open, misclassified, refused."""
    kind = number % 6
    broken = levels[kind - 1] if kind in (1, 2) else math.inf
    verdicts = ["falsified" if level >= broken and kind in (1, 2) else "certified" for level in levels]
    answers = [
        LevelAnswer(
            level=None if math.isinf(level) else level,
            verdict="unknown" if kind == 3 and level > 1 else verdict,
            margin=0.5 if verdict == "certified" and (kind != 3 or level == 1) else None,
        )
        for level, verdict in zip(levels, verdicts, strict=True)
    ]
    text = HOSTILE if number == 1 else f"film number {number} is a moving one"
    flip = Counterexample(
        level=broken, words=("film",), into=(HOSTILE,), sentence=text, answer=0, margin=-0.1 * number
    )
    values: dict[str, Any] = dict.fromkeys(SentenceRow.model_fields)
    values |= {"key": str(number), "status": "ok", "model": "m", "model_digest": "0", "sentence": text}
    values |= {"gold": 1, "answer": int(kind != 4), "clean_margin": -1.0 if kind == 4 else 1.0 + number / 10}
    values |= {
        "kind": "at_most",
        "asked": "words",
        "levels": answers if kind < 4 else (),
        "method": "buffet",
        "left_out": 0,
    }
    values |= {"counterexample": flip if kind in (1, 2) else None, "parts": {}, "seed": 0, "seconds": 0.2}
    values |= {"finished": "2026-01-01T00:00:00+00:00", "versions": VERSIONS}
    if kind == 5:
        values |= {"refused": "the text has no words <b>", "answer": None, "clean_margin": None}
    return SentenceRow.model_validate(values)


def data_of(page: str) -> dict[str, Any]:
    """What is embedded in a page."""
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert match
    return json.loads(match[1])
