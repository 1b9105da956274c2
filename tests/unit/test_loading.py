"""Loading: agreement with a plain reference network, and one clear line for everything that can be wrong."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import buffet.loading.directories as directories
from buffet.errors import BuffetError
from buffet.loading import ModelConfig, available, load
from buffet.loading.checkpoint import write_checkpoint
from buffet.loading.network import build_program
from buffet.loading.tokenizer import Tokenizer, word_level
from checkpoints import CONFIG, WORDS, config_of, random_tensors, refusal, write

# --- agreement with a reference that shares no code with the program ---------------------------------------


def reference(config: ModelConfig, t: dict[str, Tensor], x: Tensor, mask: Tensor) -> Tensor:
    """A BERT classifier written plainly: every row of every layer, an additive mask, no rewriting."""

    def dense(x: Tensor, name: str) -> Tensor:
        return x @ t[f"{name}.weight"].T + t[f"{name}.bias"]

    def norm(x: Tensor, name: str) -> Tensor:
        if config.layer_norm == "no_var":
            return (x - x.mean(-1, keepdim=True)) * t[f"{name}.weight"] + t[f"{name}.bias"]
        return functional.layer_norm(
            x, x.shape[-1:], t[f"{name}.weight"], t[f"{name}.bias"], config.layer_norm_eps
        )

    def activate(x: Tensor) -> Tensor:
        tanh_gelu = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        forms = {
            "relu": x.clamp(min=0),
            "gelu": x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
            "tanh": x.tanh(),
        }
        return forms.get(config.hidden_act, tanh_gelu)

    def attend(x: Tensor, name: str) -> Tensor:
        def heads(part: str) -> Tensor:
            y = dense(x, f"{name}.attention.self.{part}")
            return y.view(*y.shape[:2], config.num_attention_heads, -1).transpose(1, 2)

        q, k, v = heads("query"), heads("key"), heads("value")
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        scores = scores + torch.where(mask, 0.0, -1e30).to(x.dtype)[:, None, None, :]
        return dense((scores.softmax(-1) @ v).transpose(1, 2).flatten(2), f"{name}.attention.output.dense")

    def feed(x: Tensor, name: str) -> Tensor:
        return dense(activate(dense(x, f"{name}.intermediate.dense")), f"{name}.output.dense")

    x = norm(x, "bert.embeddings.LayerNorm")
    for layer in range(config.num_hidden_layers):
        name = f"bert.encoder.layer.{layer}"
        first, second = f"{name}.attention.output.LayerNorm", f"{name}.output.LayerNorm"
        if config.norm_position == "post":
            x = norm(x + attend(x, name), first)
            x = norm(x + feed(x, name), second)
        else:
            x = x + attend(norm(x, first), name)
            x = x + feed(norm(x, second), name)
    if config.norm_position == "pre":
        x = norm(x, "bert.encoder.LayerNorm")
    if config.pooling == "mean":
        x = (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    else:
        x = dense(x[:, 0], "bert.pooler.dense").tanh()
    return dense(x, "classifier")


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("layer_norm", ["standard", "no_var"])
@pytest.mark.parametrize("norm_position", ["post", "pre"])
@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_new", "gelu_pytorch_tanh", "tanh"])
def test_program_agrees_with_a_plain_network(
    layers: int, layer_norm: str, norm_position: str, pooling: str, activation: str
) -> None:
    config = config_of(
        num_hidden_layers=layers,
        layer_norm=layer_norm,
        norm_position=norm_position,
        pooling=pooling,
        hidden_act=activation,
    )
    tensors = random_tensors(config, seed=layers)
    x = torch.randn(4, 6, config.hidden_size, generator=torch.Generator().manual_seed(5))
    mask = torch.arange(6) < torch.tensor([6, 4, 1, 5])[:, None]
    # Without variance nothing bounds the values, so they grow with depth: compare relative to their size.
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        cast = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        expected = reference(config, cast, x.to(dtype), mask)
        got = build_program(config, cast).evaluate(x.to(dtype), mask)
        assert got.dtype == dtype
        assert (got - expected).abs().max() <= tolerance * max(1, expected.abs().max())


def test_a_model_evaluates_in_both_precisions(tmp_path: Path) -> None:
    model = load(write(tmp_path / "m"))
    x = model.embed("a moving film")
    config, tensors = model.config, {name: t.double() for name, t in model.tensors.items()}
    expected = reference(config, tensors, x.double()[None], torch.ones(1, 5, dtype=torch.bool))[0]
    assert torch.allclose(model.logits(x.double()), expected, atol=1e-12, rtol=1e-12)
    assert torch.allclose(model.logits(x).double(), expected, atol=1e-5)
    assert model.logits(x.expand(3, 2, 5, 8)).shape == (3, 2, 3)


# --- text to rows ------------------------------------------------------------------------------------------


def test_tokens_rows_and_flags_line_up(tmp_path: Path) -> None:
    model = load(write(tmp_path / "m"))
    text = "A gripping, unheard-of film"
    assert model.tokens(text) == ["[CLS]", "a", "gripping", ",", "[UNK]", "film", "[SEP]"]
    encoding = model.encode(text)
    assert encoding.special == (True, False, False, False, False, False, True)
    assert encoding.unknown == (False, False, False, False, True, False, False)
    assert model.labels == ("no", "maybe", "yes")
    ids, prefix = list(model.encode(text).ids), "bert.embeddings"
    rows = (
        model.tensors[f"{prefix}.word_embeddings.weight"][ids]
        + model.tensors[f"{prefix}.token_type_embeddings.weight"][0]
        + model.tensors[f"{prefix}.position_embeddings.weight"][: len(ids)]
    )
    assert torch.equal(model.embed(text), rows)


def test_two_sentences_need_token_types(tmp_path: Path) -> None:
    with pytest.raises(BuffetError, match="token types"):
        load(write(tmp_path / "m")).embed("a film", pair="a film")


def test_truncation_and_padding_in_the_tokenizer_file_are_switched_off(tmp_path: Path) -> None:
    inner = word_level([WORDS], size=20, min_count=1)
    inner.enable_truncation(4)
    inner.enable_padding(length=12)
    assert len(Tokenizer.of(inner).encode("a moving film , a film").ids) == 8


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no words"),
        ("   \n", "no words"),
        ("[CLS] [SEP]", "no words"),
        ("a [PAD] film", r"special token \[PAD\]"),
        ("a [SEP] film", r"special token \[SEP\]"),
        ("zyzzyva qwerty", "vocabulary"),
        ("a film " * 4, "10 tokens"),
        ("broken \udcff bytes", "Unicode"),
    ],
)
def test_bad_text_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    model = load(write(tmp_path / "m"))
    for method in (model.tokens, model.embed, model.encode):
        with pytest.raises(BuffetError, match=complaint):
            method(text)


def test_rows_of_the_wrong_width_or_precision_are_refused(tmp_path: Path) -> None:
    model = load(write(tmp_path / "m"))
    with pytest.raises(BuffetError, match="7 wide"):
        model.logits(torch.zeros(3, 7))
    with pytest.raises(BuffetError, match="float32 or float64"):
        model.logits(torch.zeros(3, 8, dtype=torch.float16))


def test_words_as_people_type_them_and_as_a_treebank_writes_them() -> None:
    tokenizer = word_level(["it 's n't mr. 10,000 u.s. ... ?!"], size=100, min_count=1)

    def split(text: str) -> list[str]:
        parts = tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(text))
        return [word for word, _ in parts]

    assert split("It's fun, isn’t it?!") == ["it", "'s", "fun", ",", "is", "n't", "it", "?!"]
    assert split('Mr. X (U.S.) "won"...') == ["mr.", "x", "(", "u.s.", ")", '"', "won", '"', "..."]
    already = "it is n't 10,000 , -lrb- u.s. -rrb- mr. 's ... no ?! 10-year-old 'em ' and/or ."
    assert split(already) == already.split()


# --- configuration -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' (a causal decoder) is not supported; supported: bert, "),
        ({"model_type": "t5"}, "model_type 't5' (an encoder-decoder) is not supported"),
        ({"model_type": "longformer"}, "model_type 'longformer' (sparse attention) is not supported"),
        ({"model_type": "mamba"}, "model_type 'mamba' (a state-space model) is not supported"),
        ({"model_type": "unheard-of"}, "model_type 'unheard-of' is not supported"),
        ({"model_type": ["bert"]}, "model_type ['bert'] is not supported"),
        ({"architectures": ["BertForTokenClassification"]}, "only sequence classifiers are supported"),
        ({"hidden_act": "swish"}, "hidden_act 'swish' is not supported; supported: relu, gelu, gelu_new"),
        ({"num_attention_heads": 3}, "hidden_size 8 is not divisible by num_attention_heads 3"),
        ({"hidden_size": "absent"}, "hidden_size is missing"),
        ({"hidden_size": -8}, "hidden_size is -8"),
        ({"hidden_size": "8"}, "hidden_size is '8'"),
        ({"hidden_size": 10**12}, "hidden_size is 1000000000000"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"vocab_size": 2.5}, "vocab_size is 2.5"),
        ({"intermediate_size": True}, "intermediate_size is True"),
        ({"max_position_embeddings": None}, "max_position_embeddings is None"),
        ({"layer_norm_eps": 0.0}, "layer_norm_eps is 0.0"),
        ({"layer_norm_eps": math.nan}, "layer_norm_eps is nan"),
        ({"layer_norm": "rms"}, "layer_norm is 'rms'"),
        ({"pooling": "max"}, "pooling is 'max'"),
        ({"norm_position": "both"}, "norm_position is 'both'"),
        ({"num_labels": 2}, "num_labels is 2"),
        ({"id2label": {"0": "only"}}, "num_labels is 1: a regression head is not supported"),
        ({"id2label": {"0": "a", "2": "b"}}, "id2label has the keys"),
        ({"pad_token_id": 20}, "pad_token_id 20 is outside vocab_size 20"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ({"is_decoder": True}, "is_decoder is True"),
        ({"is_encoder_decoder": True}, "only encoders are supported"),
        ({"add_cross_attention": True}, "cross attention is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"pruned_heads": {"0": [1]}}, "pruned heads are not supported"),
        ({"problem_type": "multi_label_classification"}, "only single-label classification"),
        ({"problem_type": "regression"}, "only single-label classification"),
        ({"head_act": "swish"}, "head_act is 'swish'"),
        ({"model_type": "roberta", "pad_token_id": 8}, "max_position_embeddings is 9, but positions start"),
    ],
)
def test_bad_config_values_are_refused(tmp_path: Path, changes: dict[str, object], complaint: str) -> None:
    message = refusal(write(tmp_path / "m", **changes))
    assert "config.json" in message
    assert complaint in message


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", "null", "\x00", "[" * 100_000])
def test_a_config_that_is_no_object_is_refused(tmp_path: Path, content: str) -> None:
    directory = write(tmp_path / "m")
    (directory / "config.json").write_text(content)
    assert "config.json" in refusal(directory)


def test_labels_have_names_by_default() -> None:
    assert config_of(id2label=None, num_labels=3).labels == ("LABEL_0", "LABEL_1", "LABEL_2")


# --- files and names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    directory = write(tmp_path / "m")
    (directory / name).unlink()
    assert f"{name}: no such file" in refusal(directory)


def test_a_broken_tokenizer_is_refused(tmp_path: Path) -> None:
    directory = write(tmp_path / "m")
    for content in ("", "{}", "[]", '{"model": 3}'):
        (directory / "tokenizer.json").write_text(content)
        assert "not a tokenizer file" in refusal(directory)


def test_a_tokenizer_with_more_words_than_embeddings_is_refused(tmp_path: Path) -> None:
    directory = write(tmp_path / "m")
    many = " ".join(f"word{i}" for i in range(40))
    word_level([many], size=100, min_count=1).save(str(directory / "tokenizer.json"))
    assert "ids up to 43, the configuration says vocab_size 20" in refusal(directory)


def test_an_unknown_name_lists_the_embedded_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "one")
    monkeypatch.setattr(directories, "MODELS", tmp_path)
    monkeypatch.setattr(directories, "DEFAULT", "one")
    assert available() == ("one",)
    assert load().name == load("one").name == "one"
    for missing in ("two", tmp_path / "two", "two\nlines", "long" * 5000, "nul\0byte"):
        assert "embedded model (one)" in refusal(missing)
    assert "a file, not a checkpoint directory" in refusal(tmp_path / "one" / "config.json")


def test_a_checkpoint_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "out"
    tensors, texts = random_tensors(config_of()), {"config.json": json.dumps(CONFIG)}
    write_checkpoint(out, texts, tensors)
    with pytest.raises(BuffetError, match="not empty"):
        write_checkpoint(out, texts, tensors)
    with pytest.raises(TypeError):
        write_checkpoint(out, {"config.json": 3}, tensors, overwrite=True)  # type: ignore[dict-item]
    assert json.loads((out / "config.json").read_text()) == CONFIG
    write_checkpoint(out, {"config.json": "{}"}, tensors, overwrite=True)
    assert (out / "config.json").read_text() == "{}"
    (out / "thesis.doc").write_text("precious")
    with pytest.raises(BuffetError, match=r"thesis\.doc"):
        write_checkpoint(out, texts, tensors, overwrite=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_the_embedded_model_loads_and_reads() -> None:
    model = load()
    positive, negative = (
        int(model.logits(model.embed(text)).argmax()) for text in ("a gripping , moving film", "dull and bad")
    )
    assert (model.labels[positive], model.labels[negative]) == ("positive", "negative")
