"""Configurations of sweeps: what is refused, which tasks they mean, when a task keeps its key."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from buffet.errors import BuffetError
from buffet.experiments.config import SweepConfig, read_sweep
from buffet.experiments.plan import SweepPlan, choose_words, make_plan
from buffet.loading import load
from tiny_checkpoint import SENTENCES, write_model, write_sentences

BASIC = """
models = ["tiny"]
methods = ["baseline"]
[sentences]
file = "data.tsv"
correct = false
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sweep")
    write_model(directory / "tiny")
    write_sentences(directory / "data.tsv")
    return directory


def config_of(home: Path, text: str = BASIC) -> SweepConfig:
    path = home / "sweep.toml"
    path.write_text(text, encoding="utf-8")
    return read_sweep(path)


def keys(plan: SweepPlan) -> set[str]:
    return {key for unit in plan.units for key in unit.keys}


def test_a_full_configuration(home: Path) -> None:
    config = config_of(
        home,
        """
        models = ["sst2-small", "tiny"]
        methods = ["baseline", { name = "backward", window = 2 }]
        norms = [1, 2.5, "inf"]
        attack = false
        seed = 7
        out = "rows.ndjson"
        sentences = { file = "data.tsv", count = 3, min_words = 2, max_words = 9 }
        words = { count = "all", together = 2 }
        radius = { search = "bisection", tolerance = 0.1 }
        run = { workers = 2, threads = 1, limit = 60, retries = 0, memory = 1000000000 }
        """,
    )
    assert config.models == ("sst2-small", str(home / "tiny"))
    assert [choice.title for choice in config.methods] == ["baseline", "backward[window=2]"]
    assert config.methods[1].method.window == 2
    assert config.norms == (1.0, 2.5, math.inf)
    assert config.sentences.file == home / "data.tsv"
    assert config.out == home / "rows.ndjson"
    assert config.words.count is None
    assert (config.radius.search, config.radius.tolerance) == ("bisection", 0.1)


@pytest.mark.parametrize(
    ("change", "needles"),
    [
        ("models = []", ("models", "at least 1")),
        ("methods = ['bufet']", ("methods", "bufet", "baseline")),
        ("methods = [{name = 'baseline', window = 1}]", ("methods", "window 1", "backward")),
        ("methods = [{name = 'baseline', colour = 1}]", ("methods.0.colour",)),
        ("methods = ['baseline', 'baseline']", ("methods", "twice")),
        ("norms = [0.5]", ("norms", "0.5", "≥ 1")),
        ("norms = ['two']", ("norms.0", "'two'")),
        ("sentences = {}", ("sentences", "file", "texts")),
        ("sentences = {file = 'data.tsv', texts = ['a']}", ("either",)),
        ("sentences = {file = 'data.tsv', count = 0}", ("sentences.count", "0")),
        ("sentences = {file = 'data.tsv', min_words = 9, max_words = 3}", ("min_words is 9", "none fit")),
        ("words = {count = 'some'}", ("words", "'some'", "'all'")),
        ("radius = {search = 'newton'}", ("radius", "'newton'", "secant")),
        ("run = {threads = 0}", ("run.threads", "0")),
        ("colour = 3", ("colour",)),
        ("seed = -1", ("seed", "-1")),
        ("norms = [", ("not a TOML file",)),
        ("norms = " + "[" * 20_000, ("not a TOML file", "recursion")),
        ("norms = " + "9" * 10_000, ("not a TOML file", "digits")),
    ],
)
def test_mistakes_are_named(home: Path, change: str, needles: tuple[str, ...]) -> None:
    base = {
        "models": "models = ['tiny']",
        "methods": "methods = ['baseline']",
        "sentences": "sentences = {file = 'data.tsv'}",
    }
    base[change.split()[0]] = change
    with pytest.raises(BuffetError) as caught:
        config_of(home, "\n".join(base.values()))
    message = str(caught.value)
    assert "\n" not in message
    for needle in ("sweep.toml", *needles):
        assert needle in message


@pytest.mark.parametrize(
    ("change", "needles"),
    [
        ({"models": ("nowhere",)}, ("nowhere", "no such directory")),
        ({"words": {"together": 20}}, ("no sentence", "20")),
        ({"sentences": {"texts": ["zebra"]}}, ("'zebra'", "vocabulary")),
        ({"sentences": {"texts": ["good film"]}, "words": {"together": 3}}, ("'good film'", "2 words", "3")),
    ],
)
def test_what_cannot_be_planned_is_named(
    home: Path, change: dict[str, object], needles: tuple[str, ...]
) -> None:
    config = SweepConfig.model_validate({**config_of(home).model_dump(), **change})
    with pytest.raises(BuffetError) as caught:
        make_plan(config)
    for needle in needles:
        assert needle in str(caught.value)


def test_every_model_sentence_norm_method_and_word_is_a_task(home: Path) -> None:
    text = BASIC.replace('["baseline"]', '["baseline", "interval"]') + "max_words = 5\n"
    plan = make_plan(config_of(home, "norms = [1, 2]\n" + text))
    fitting = [s for s in SENTENCES if len(s.split()) <= 5]
    assert plan.tasks == 4 * sum(len(s.split()) for s in fitting) == len(keys(plan))
    assert {unit.setting.sentence for unit in plan.units} == set(fitting)
    assert all(unit.setting.clean_margin > 0 for unit in plan.units)
    for unit in plan.units:
        setting = unit.setting
        assert [setting.sentence_tokens[i] for (i,) in setting.words] == setting.sentence.split()


def test_only_correctly_classified_sentences(home: Path) -> None:
    plan = make_plan(config_of(home, BASIC.replace("correct = false", "correct = true")))
    model = load(home / "tiny")
    for unit in plan.units:
        answer = int(model.logits(model.embed(unit.setting.sentence)).argmax())
        assert unit.setting.gold == unit.setting.label == answer
    assert 0 < len(plan.units) < len(SENTENCES)


def test_words_outside_the_vocabulary_stay(home: Path) -> None:
    plan = make_plan(config_of(home, BASIC.split("[sent")[0] + "sentences = {texts = ['a zebra film']}"))
    assert plan.units[0].setting.words == ((1,), (3,))


def test_asking_for_more_keeps_what_was_chosen(home: Path) -> None:
    def chosen(sentences: int, words: int, seed: int = 0) -> set[str]:
        text = f"seed = {seed}\n{BASIC}count = {sentences}\n[words]\ncount = {words}\n"
        return keys(make_plan(config_of(home, text)))

    assert len(chosen(3, 2)) == 6
    assert chosen(3, 2) == chosen(3, 2)
    assert chosen(3, 2) < chosen(5, 3)
    assert chosen(3, 2) != chosen(3, 2, seed=1)
    plan = make_plan(config_of(home, f"{BASIC}count = 99\n"))
    assert "only 12 of 99" in plan.notes[0]


def test_sets_of_words() -> None:
    assert choose_words([1, 2, 4], None, 2, "") == ((1, 2), (1, 4), (2, 4))
    drawn = choose_words(list(range(30)), 50, 3, "seed")
    assert len(set(drawn)) == 50
    assert all(sorted(set(task)) == list(task) for task in drawn)
    assert set(choose_words(list(range(30)), 20, 3, "seed")) < set(drawn)
    assert len(choose_words([1, 2, 3, 4], 5, 2, "seed")) == 5  # all but one
    with pytest.raises(BuffetError, match=r"words\.count"):
        choose_words(list(range(50)), None, 6, "")


MEANINGS = {
    "seed": "seed = 1\n" + BASIC,
    "norm": "norms = [1]\n" + BASIC,
    "method": BASIC.replace("baseline", "lse"),
    "part": BASIC.replace('"baseline"', '{name = "baseline", softmax = "lse"}'),
    "attack": "attack = false\n" + BASIC,
    "tolerance": "radius = {tolerance = 0.01}\n" + BASIC,
    "search": "radius = {search = 'bisection'}\n" + BASIC,
    "together": BASIC + "[words]\ntogether = 2\n",
}


def test_a_key_is_the_meaning_of_its_task(home: Path) -> None:
    base = keys(make_plan(config_of(home)))
    found = {name: keys(make_plan(config_of(home, text))) for name, text in MEANINGS.items()}
    found["base"] = base
    write_model(home / "other", seed=4)
    found["model"] = keys(make_plan(config_of(home, BASIC.replace("tiny", "other"))))
    names = list(found)
    for place, name in enumerate(names):
        for other in names[:place]:
            assert not found[name] & found[other], (name, other)
    same = config_of(
        home, "norms = [1, 2]\n" + BASIC.replace('["base', '["lse", "base') + "[run]\nlimit = 9\n"
    )
    assert base < keys(make_plan(same))
