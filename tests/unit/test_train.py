"""Training: it learns, it repeats exactly, and what it writes loads."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tokenizers
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from buffet.data import read_data, read_tsv
from buffet.errors import BuffetError
from buffet.loading import load
from buffet.loading.directories import MODELS
from buffet.training import TrainProgress, TrainSettings, preset_names, preset_values, train
from buffet.training.corpus import encode, make_batches, word_pieces
from buffet.training.run import start_network

GOOD, BAD = ("good", "fine", "great", "warm"), ("bad", "dull", "poor", "cold")
NOUNS = ("film", "story", "cast", "plot", "score", "scene")


def write_data(directory: Path) -> Path:
    """A toy language in which one word decides the label."""
    directory.mkdir()
    rows = [
        f"the {noun} is {'very ' * very}{word}\t{label}"
        for label, words in enumerate((BAD, GOOD))
        for word in words
        for noun in NOUNS
        for very in range(3)
    ]
    for name, part in (("train", rows), ("dev", rows[::5]), ("test", rows[2::7])):
        text = [row.replace("the ", "a ") for row in part] if name != "train" else part
        (directory / f"{name}.tsv").write_text("\n".join(["sentence\tlabel", *text, ""]))
    return directory


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_data(tmp_path / "toy")


def tiny(data: Path, out: str = "out", **changes: object) -> TrainSettings:
    small = {"layers": 1, "heads": 2, "width": 8, "inner": 8, "max_tokens": 12, "epochs": 6, "batch": 16}
    # Eight dimensions have nothing to spare for dropout, and a few dozen steps no time to grow.
    quick = {
        "rate": 0.03,
        "weight_decay": 0.0,
        "word_dropout": 0.1,
        "min_count": 1,
        "embedding_dropout": 0.0,
        "embedding_scale": 0.3,
    }
    values = {"data": data, "out": data.parent / out, **small, **quick, **changes}
    return TrainSettings.of(**values)


def test_it_learns_and_the_result_loads(data: Path) -> None:
    reports: list[TrainProgress] = []
    summary = train(tiny(data, epochs=14, patience=14), reports.append)
    assert summary.losses[-1] < summary.losses[0] / 2
    assert summary.dev_accuracy > 0.9
    assert [report.dev_accuracy is not None for report in reports] == [True] * len(summary.losses)
    assert reports[-1].step <= reports[-1].steps
    model = load(summary.out)
    assert model.labels == ("negative", "positive")
    examples = read_tsv(data / "dev.tsv")
    right = [int(model.logits(model.embed(e.sentence)).argmax()) == e.label for e in examples]
    assert sum(right) / len(right) == pytest.approx(summary.dev_accuracy)
    assert hashlib.sha256((summary.out / "model.safetensors").read_bytes()).hexdigest() == summary.sha256


@pytest.mark.parametrize("layer_norm", ["standard", "no_var"])
@pytest.mark.parametrize("norm_position", ["post", "pre"])
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_every_kind_of_network_trains(data: Path, layer_norm: str, norm_position: str, pooling: str) -> None:
    kind = {"layer_norm": layer_norm, "norm_position": norm_position, "pooling": pooling}
    summary = train(tiny(data, epochs=3, activation="gelu", layers=2, adversarial=0.1, **kind))
    assert summary.losses[-1] < summary.losses[0]
    assert load(summary.out).config.pooling == pooling


def test_adversarial_moves_one_word_per_sentence_and_raises_the_loss(data: Path) -> None:
    settings = tiny(data, embedding_scale=1.0, word_dropout=0.0)
    splits = read_data(data)
    network = start_network(settings, splits)
    batch = make_batches(encode(splits.dev, network.tokenizer, 12), 64, network.pad)[0]
    x = network.embeddings.rows(batch.inputs).detach()
    move = network.worst_move(x.clone(), batch, 0.01)
    sizes = move.norm(dim=-1)
    torch.testing.assert_close(sizes.sum(-1), torch.full((len(batch.labels),), 0.01))
    assert ((sizes > 0).sum(-1) == 1).all()
    assert not sizes[~batch.mask].any()
    before, after = (
        torch.nn.functional.cross_entropy(network.program.evaluate(rows, batch.mask), batch.labels)
        for rows in (x, x + move)
    )
    assert after > before
    generator = torch.Generator()
    harder = network.loss(batch, settings.model_copy(update={"adversarial": 0.01}), generator, 0.0)
    assert harder.item() == pytest.approx(after.item(), rel=1e-5)


def test_the_seed_decides_the_weights(data: Path) -> None:
    state = torch.random.get_rng_state()
    first, again, other = (
        train(tiny(data, out=name, epochs=2, adversarial=0.1, seed=seed)).sha256
        for name, seed in (("one", 3), ("two", 3), ("three", 4))
    )
    assert first == again != other
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_card_tells_how_to_repeat_it(data: Path) -> None:
    summary = train(tiny(data, epochs=1, word_dropout=0.25))
    card = (summary.out / "README.md").read_text()
    assert summary.sha256 in card
    assert f"{summary.dev_accuracy:.2%}" in card
    assert "buffet train --data DATA/toy --out out" in card
    assert "--word-dropout 0.25" in card
    assert "--warmup" not in card
    assert str(data.parent) not in card


def test_early_stopping_keeps_the_best_epoch(data: Path) -> None:
    summary = train(tiny(data, epochs=40, patience=2, rate=0.05))
    assert len(summary.losses) < 40
    assert summary.best_epoch == len(summary.losses) - 2


def test_nothing_is_left_behind_when_training_stops_before_its_first_snapshot(data: Path) -> None:
    def stop(_: TrainProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tiny(data), stop)
    assert [entry.name for entry in data.parent.iterdir()] == ["toy"]


def test_an_output_that_is_taken_is_refused_before_training(data: Path) -> None:
    (data.parent / "out").mkdir()
    (data.parent / "out" / "notes").write_text("mine")
    with pytest.raises(BuffetError, match="not empty"):
        train(tiny(data))
    with pytest.raises(BuffetError, match="notes"):
        train(tiny(data, overwrite=True))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"width": 10, "heads": 4}, "width 10 is not divisible by heads 4"),
        ({"layers": 0}, "layers is 0"),
        ({"rate": float("nan")}, "rate is nan"),
        ({"word_dropout": 1.5}, "word_dropout is 1.5"),
        ({"activation": "swish"}, "activation is 'swish'"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_bad_settings_are_refused_in_one_line(data: Path, changes: dict[str, object], complaint: str) -> None:
    with pytest.raises(BuffetError, match=complaint) as caught:
        tiny(data, **changes)
    assert "\n" not in str(caught.value)


def test_divergence_is_an_error_and_not_a_model(data: Path) -> None:
    with pytest.raises(BuffetError, match="diverged"):
        train(tiny(data, rate=1e6, layers=6, epochs=30, warmup=0.0))
    assert not (data.parent / "out").exists()


# --- presets -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", preset_names())
def test_the_command_of_a_preset_is_its_name(preset: str) -> None:
    if preset == "finetune":
        settings = TrainSettings.of(data="sst2", pretrained="models/encoder")
        assert settings.command() == "buffet train finetune --data DATA/sst2 --out finetune --from encoder"
        return
    if preset == "digits-vit":  # brings its data along
        assert TrainSettings.of(preset=preset).command() == "buffet train digits-vit --out digits-vit"
        return
    settings = TrainSettings.of(preset=preset, data="sst2")
    named = "" if preset == "sst2-small" else f"{preset} "
    assert settings.command() == f"buffet train {named}--data DATA/sst2 --out {preset}"


def test_a_preset_is_data_architecture_and_variants() -> None:
    small = TrainSettings.of(preset="yelp-small-3-standard-gelu", data="yelp")
    assert (small.layers, small.width, small.inner, small.heads) == (3, 128, 128, 4)
    assert (small.layer_norm, small.activation, small.max_tokens) == ("standard", "gelu", 32)
    assert (small.weight_decay, TrainSettings.of(preset="sst-3", data="sst2").weight_decay) == (2.0, 0.1)
    paper = TrainSettings.of(preset="sst-6", data="sst2", layers=5)
    assert (paper.layers, paper.width, paper.inner, paper.heads) == (5, 512, 512, 8)
    assert (paper.layer_norm, paper.activation) == ("no_var", "relu")
    assert paper.command() == "buffet train sst-6 --data DATA/sst2 --out sst-6 --layers 5"
    tiny_bert = preset_values("sst-tinybert")
    assert [tiny_bert[k] for k in ("layers", "width", "inner", "heads")] == [4, 312, 1200, 12]


@pytest.mark.parametrize("preset", [name for name in preset_names() if name.startswith("sst")])
def test_no_depth_starts_with_a_saturated_pooler(data: Path, preset: str) -> None:
    """LayerNorm without variance keeps every scale: what grows in one block grows in all that follow."""
    settings = TrainSettings.of(preset=preset, data=data)
    network = start_network(settings, read_data(str(data)))
    batch = make_batches([(list(range(3, 15)), 1)], 1, network.pad)[0]
    with torch.no_grad():
        rows = network.embeddings.rows(batch.inputs)
        values = network.program.values(rows, batch.mask)
    *_, pooled, logits = values
    assert pooled.shape[-1] == settings.width
    assert pooled.abs().max() < 0.5
    streams = [v for v in values if v.shape == rows.shape]
    assert max(float(v.norm()) for v in streams) < 2 * float(rows.norm())
    assert logits.abs().max() < 0.5


def test_the_default_is_how_the_embedded_model_was_made() -> None:
    settings, config = TrainSettings.of(data="sst2"), load("sst2-small").config
    assert f"    {settings.command()}\n" in (MODELS / "sst2-small" / "README.md").read_text()
    assert (settings.layers, settings.width) == (config.num_hidden_layers, config.hidden_size)


@pytest.mark.parametrize(
    ("preset", "complaint"),
    [
        ("sst-4", "did you mean sst-"),
        ("sst-small-3-swish", "did you mean sst-small-3"),
        ("imdb", "choose one"),
    ],
)
def test_an_unknown_preset_is_refused(preset: str, complaint: str) -> None:
    with pytest.raises(BuffetError, match=complaint) as caught:
        TrainSettings.of(preset=preset, data="x")
    assert "gelu" in str(caught.value)
    assert "\n" not in str(caught.value)


# --- vocabularies ------------------------------------------------------------------------------------------


def test_word_pieces_repeat_exactly_and_spell_unseen_words() -> None:
    sentences = [f"the {noun} was {word}ly {word}" for noun in NOUNS for word in (*GOOD, *BAD)]
    first = word_pieces(sentences, 90, 2)
    for other in (word_pieces(sentences, 90, 2), word_pieces(sentences[::-1], 90, 2)):
        assert other.to_str() == first.to_str()
    assert first.get_vocab_size() <= 90
    encoding = first.encode("Warmly plotted")
    assert encoding.tokens[0] == "[CLS]"
    assert encoding.tokens[-1] == "[SEP]"
    assert "".join(t.removeprefix("##") for t in encoding.tokens[1:-1]) == "warmlyplotted"
    assert first.encode("x").tokens == ["[CLS]", "[UNK]", "[SEP]"]


def test_a_model_of_word_pieces_loads(data: Path) -> None:
    summary = train(tiny(data, epochs=2, tokenizer="wordpiece", vocabulary=60, max_tokens=24))
    model = load(summary.out)
    assert any(token.startswith("##") for token in model.tokens("the storyteller is warm"))
    assert "WordPieces" in (summary.out / "README.md").read_text()


# --- interruption ------------------------------------------------------------------------------------------


def test_a_killed_run_goes_on_to_the_very_same_weights(data: Path) -> None:
    settings = tiny(data, epochs=16, patience=16, save_minutes=0)
    plain = train(tiny(data, out="plain", epochs=16, patience=16))
    options = [
        word
        for name, value in settings
        if name not in ("preset", "overwrite", "restart", "pretrained")
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    program = "import sys; from buffet.cli import main; sys.exit(main(sys.argv[1:]))"
    running = subprocess.Popen(
        [sys.executable, "-c", program, "train", *options], stderr=subprocess.DEVNULL, env=_environment()
    )
    store = settings.out.with_name("out.resume.safetensors")
    while running.poll() is None and not (store.exists() and _step(store) >= 5):
        time.sleep(0.01)
    running.kill()
    assert running.wait() != 0, "the run ended before it was killed"
    steps: list[int] = []
    again = train(settings, lambda now: steps.append(now.step))
    assert steps[0] > 5
    assert again.sha256 == plain.sha256
    assert (again.losses, again.dev_accuracies) == (plain.losses, plain.dev_accuracies)
    assert sorted(entry.name for entry in data.parent.iterdir()) == ["out", "plain", "toy"]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}


def _step(store: Path) -> int:
    with safe_open(str(store), framework="pt") as file:
        return int(json.loads(file.metadata()["at"])["step"])


@pytest.mark.parametrize(("save_minutes", "epoch"), [(0, 1), (0, 3), (5, 3)])
def test_a_run_stopped_at_the_end_of_an_epoch_goes_on(data: Path, save_minutes: float, epoch: int) -> None:
    def stop(now: TrainProgress) -> None:
        if now.epoch == epoch:
            raise KeyboardInterrupt

    settings = tiny(data, epochs=4, save_minutes=save_minutes, adversarial=0.1)
    with pytest.raises(KeyboardInterrupt):
        train(settings, stop)
    assert not settings.out.exists()
    assert train(settings).sha256 == train(tiny(data, out="plain", epochs=4, adversarial=0.1)).sha256


def test_an_unfinished_run_of_other_settings_is_not_continued(data: Path) -> None:
    def stop(now: TrainProgress) -> None:
        if now.epoch == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tiny(data), stop)
    with pytest.raises(BuffetError, match=r"other settings \(batch 16, now 8\).*--restart"):
        train(tiny(data, batch=8))
    assert train(tiny(data, batch=8, epochs=1, restart=True)).best_epoch == 1
    store = data.parent / "other.resume.safetensors"
    store.write_bytes(b"nothing of the kind")
    with pytest.raises(BuffetError, match="cannot be continued"):
        train(tiny(data, out="other"))


# --- from a pretrained encoder -----------------------------------------------------------------------------


@pytest.fixture
def encoder(data: Path) -> Path:
    """A trained checkpoint turned into what encoders look like: no head, names without their prefix."""
    out = train(tiny(data, out="encoder", epochs=12, layer_norm="standard", activation="gelu")).out
    tensors = load_file(out / "model.safetensors")
    bare = {name.removeprefix("bert."): value for name, value in tensors.items() if name[:4] == "bert"}
    save_file({**bare, "embeddings.position_ids": torch.arange(12)[None]}, out / "model.safetensors")
    return out


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_fine_tuning_keeps_the_encoder_and_learns_a_head(data: Path, encoder: Path, pooling: str) -> None:
    settings = TrainSettings.of(
        data=data,
        out=data.parent / "tuned",
        pretrained=encoder,
        pooling=pooling,
        rate=0.02,
        epochs=12,
        batch=16,
    )
    summary = train(settings)
    assert summary.dev_accuracy > 0.9
    model = load(summary.out)
    assert (model.config.pooling, model.config.layer_norm) == (pooling, "standard")
    assert model.tokens("the film is good") == load_tokens(encoder, "the film is good")
    card = (summary.out / "README.md").read_text()
    assert "the pretrained encoder `encoder`" in card
    assert "--from encoder" in card


def load_tokens(directory: Path, text: str) -> list[str]:
    return tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json")).encode(text).tokens


def test_an_encoder_that_does_not_fit_is_refused(data: Path, encoder: Path) -> None:
    def start(**changes: object) -> None:
        train(TrainSettings.of(data=data, out=data.parent / "tuned", pretrained=encoder, **changes))

    with pytest.raises(BuffetError, match="the pretrained encoder decides layers"):
        start(layers=2)
    with pytest.raises(BuffetError, match="needs a pretrained encoder"):
        TrainSettings.of(preset="finetune", data=data)
    tensors = load_file(encoder / "model.safetensors")
    name = "encoder.layer.0.output.dense.weight"
    for broken, complaint in (
        ({name: tensors[name][:, 1:].contiguous()}, "has shape"),
        ({name: torch.full_like(tensors[name], torch.nan)}, "non-finite"),
    ):
        save_file({**tensors, **broken}, encoder / "model.safetensors")
        with pytest.raises(BuffetError, match=complaint):
            start()
    save_file({k: v for k, v in tensors.items() if k != name}, encoder / "model.safetensors")
    with pytest.raises(BuffetError, match=f"bert.{name}"):
        start()
    (encoder / "model.safetensors").unlink()
    with pytest.raises(BuffetError, match="no such file"):
        start()
