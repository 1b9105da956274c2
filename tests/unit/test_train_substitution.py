"""Certified training for substitutions: its bound holds, it resumes, what it writes is proven."""

from __future__ import annotations

import hashlib
import json
from itertools import product
from pathlib import Path

import pytest
import torch
from test_train import tiny, write_data

import buffet
from buffet.errors import BuffetError
from buffet.loading.directories import MODELS
from buffet.synonyms import checked_synonyms, read_synonyms
from buffet.training import TrainProgress, TrainSettings, train
from buffet.training.corpus import Batch, make_tokenizer
from buffet.training.network import first_weights, new_config
from buffet.training.state import resume_file
from buffet.training.substitution import SubstitutionNetwork, with_substitutes

SYNONYMS = {
    "good": ["fine", "nice"],
    "great": ["superb", "good"],
    "bad": ["poor", "awful"],
    "film": ["movie", "story", "two words"],
    "picture": ["film"],
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_data(tmp_path / "toy")


def settings(data: Path, out: str = "out", **changes: object) -> TrainSettings:
    file = data.parent / "synonyms.json"
    file.write_text(json.dumps(SYNONYMS))
    values: dict[str, object] = {
        "preset": "sst-narrow-1-substitutions",
        "synonyms": file,
        "rate": 0.02,
        "rare_dropout": 0.5,
    }
    return tiny(data, out, **{**values, **changes})


def network(data: Path, classes: int, seed: int, scale: float, **changes: object) -> SubstitutionNetwork:
    """One with random weights of this size, every one of them."""
    asked = settings(data, seed=seed, **changes)
    tokenizer = make_tokenizer(
        ["the film is good", "a bad plot"], asked, lambda words: with_substitutes(words, SYNONYMS)
    )
    config = new_config(asked, classes, tokenizer.size)
    weights = first_weights(config, asked)
    generator = torch.Generator().manual_seed(seed)
    for tensor in weights.values():
        tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=scale)
    counts = torch.ones(tokenizer.size, dtype=torch.long)
    return SubstitutionNetwork(config, weights, tokenizer, counts, SYNONYMS)


def batch(model: SubstitutionNetwork, texts: list[str], labels: list[int]) -> Batch:
    ids = [torch.tensor(model.tokenizer.inner.encode(text).ids) for text in texts]
    inputs = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    mask = torch.arange(inputs.shape[1]) < torch.tensor([len(i) for i in ids])[:, None]
    return Batch(inputs, mask, torch.tensor(labels))


def margins(model: SubstitutionNetwork, given: Batch) -> torch.Tensor:
    logits = model.program.evaluate(model.rows(given), given.mask)
    own = logits.gather(1, given.labels[:, None])
    others = [[o for o in range(logits.shape[1]) if o != y] for y in given.labels.tolist()]
    return own - logits.gather(1, torch.tensor(others))


@pytest.mark.parametrize("scale", [0.0, 0.1, 0.5, 1.5])
@pytest.mark.parametrize("classes", [2, 3])
def test_no_sentence_goes_below_the_bound(data: Path, classes: int, scale: float) -> None:
    for seed in range(4):
        model = network(data, classes, seed, scale)
        given = batch(model, ["the film is good", "bad picture", "unheard words"], [0, 1, classes - 1])
        with torch.no_grad():
            bound = model.worst_margins(given)
            assert scale > 0.5 or bool(bound.isfinite().all())  # weights may underflow: NaN proves nothing
            own = model.choices.own
            for row in range(3):
                options = [sorted(set(own[i].tolist())) for i in given.inputs[row].tolist()]
                inputs = torch.tensor(list(product(*options)))
                count = len(inputs)
                every = Batch(inputs, given.mask[row].expand(count, -1), given.labels[row].expand(count))
                attained = margins(model, every)
                slack = 1e-4 * (1 + attained.abs() + bound[row].abs())
                assert not bool((attained < bound[row] - slack).any())


def test_the_bound_is_the_margin_where_nothing_can_be_exchanged(data: Path) -> None:
    model = network(data, 3, 5, 0.5)
    given = batch(model, ["the plot is a", "the [UNK]"], [2, 0])
    with torch.no_grad():
        torch.testing.assert_close(model.worst_margins(given), margins(model, given), rtol=1e-4, atol=1e-4)


def test_extreme_scores_are_no_proof(data: Path) -> None:
    model = network(data, 2, 0, 0.5)
    given = batch(model, ["the film is good"], [1])
    with torch.no_grad():
        model.tensors["bert.encoder.layer.0.attention.self.query.bias"].fill_(1e6)
        bound = model.worst_margins(given)
        ids = torch.tensor([model.choices.own[i, -1] for i in given.inputs[0].tolist()])
        attained = margins(model, Batch(ids[None], given.mask, given.labels))
    assert not bool((bound > attained + 1e-3).any())
    assert model.score([given]) <= float((attained > 0).all())


def test_the_vocabulary_knows_substitutes_and_what_they_replace(data: Path) -> None:
    model = network(data, 2, 0, 0.0)
    known = model.tokenizer.inner.get_vocab()
    assert {"nice", "movie", "story", "picture", "great"} <= known.keys()
    assert "two words" not in known
    own = {known[w] for w in ("film", "movie", "story")}
    assert set(model.choices.own[known["film"]].tolist()) == own
    generator = torch.Generator().manual_seed(0)
    ids = torch.full((400,), known["film"])
    near = set(model.choices.exchanged(ids, 0.9, generator).tolist())
    assert near == {known[w] for w in ("film", "movie", "story", "picture")}
    plot = torch.full((9,), known["plot"])
    assert torch.equal(model.choices.exchanged(plot, 0.9, generator), plot)


class StopError(Exception):
    pass


def test_what_it_writes_is_proven_and_an_interrupted_run_ends_the_same(data: Path) -> None:
    asked = settings(data, epochs=5)
    summary = train(asked)
    assert summary.dev_certified == max(summary.dev_accuracies) > 0.9
    assert summary.dev_accuracy >= summary.dev_certified

    def stop(now: TrainProgress) -> None:
        assert now.measure == "certified dev accuracy"
        if now.epoch == 2:
            raise StopError

    other = settings(data, "other", epochs=5, save_minutes=0.0)
    with pytest.raises(StopError):
        train(other, stop)
    assert resume_file(other.out).exists()
    assert train(other.model_copy(update={"save_minutes": 5.0})).sha256 == summary.sha256

    card = (summary.out / "README.md").read_text()
    assert "certified accuracy (dev)" in card
    assert "--synonyms synonyms.json" in card
    assert str(data) not in card
    model = buffet.load(summary.out)
    found = buffet.substitutions(model, "the film is good", synonyms=asked.synonyms, most=2)
    assert found.count == 9
    assert found.verify().verdict == "certified"


def test_other_synonyms_are_another_run(data: Path) -> None:
    def stop(now: TrainProgress) -> None:
        raise StopError

    with pytest.raises(StopError):
        train(settings(data, epochs=2, save_minutes=0.0), stop)
    asked = settings(data, epochs=2, save_minutes=0.0)
    assert asked.synonyms is not None
    asked.synonyms.write_text(json.dumps({**SYNONYMS, "bad": ["poor"]}))
    with pytest.raises(BuffetError, match="an unfinished run of other settings"):
        train(asked)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"synonyms": None}, "needs the words: give --synonyms FILE"),
        ({"layers": 2}, "layers is 2.*with layers 1"),
        ({"pooling": "mean"}, "pooling is mean"),
        ({"activation": "gelu"}, "activation is gelu"),
        ({"adversarial": 0.1}, "adversarial is 0.1"),
        ({"preset": "sst-small-1"}, "head is dense"),
    ],
)
def test_what_cannot_be_bounded_is_refused(data: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(BuffetError, match=message):
        settings(data, **changes)


def test_shares_of_classes_are_no_reason_to_prefer_one(data: Path) -> None:
    shares = torch.tensor([0.7, 0.1, 0.2])
    model, other = network(data, 3, 1, 0.3), network(data, 3, 1, 0.3)
    model.shift = shares.log()
    with torch.no_grad():
        other.tensors["classifier.bias"].add_(shares.log())
    asked = settings(data)
    given = batch(model, ["the film is good", "bad picture", "plot"], [0, 1, 2])
    with torch.no_grad():
        loss, wanted = (m.loss(given, asked, torch.Generator().manual_seed(3), 1.0) for m in (model, other))
        torch.testing.assert_close(loss, wanted)
        torch.testing.assert_close(model.worst_margins(given), network(data, 3, 1, 0.3).worst_margins(given))


def test_augmentation_alone_needs_no_bound(data: Path) -> None:
    summary = train(settings(data, epochs=2, worst_case=0.0))
    assert summary.dev_certified is not None


def test_only_the_first_synonyms(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text(json.dumps(SYNONYMS))
    assert read_synonyms(path, 1)["film"] == ["movie"]
    with pytest.raises(BuffetError, match="1 or more"):
        checked_synonyms(SYNONYMS, "synonyms", 0)


def test_the_shipped_model_is_what_its_card_says() -> None:
    asked = TrainSettings.of(
        preset="sst-narrow-1-substitutions",
        data="sst2",
        synonyms="counterfitted_neighbors.json",
        most_synonyms=8,
        out="sst2-substitutions",
    )
    home = MODELS / "sst2-substitutions"
    assert f"    {asked.command()}\n" in (home / "README.md").read_text()
    digest = hashlib.sha256((home / "model.safetensors").read_bytes()).hexdigest()
    assert digest in (home / "README.md").read_text()
    swap = {"gripping": ["captivating", "exciting"], "film": ["movie", "cinema"]}
    found = buffet.substitutions(buffet.load("sst2-substitutions"), "a gripping film", swap=swap)
    assert found.count == 9
    assert found.verify().verdict == "certified"
