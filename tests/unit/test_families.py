"""Every family against `transformers`: random tiny models, saved, loaded, and compared in their logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import buffet
from buffet.errors import BuffetError
from buffet.loading import Model, ModelConfig, load, sources
from buffet.loading.network import build_program
from buffet.network import Program
from family_models import FAMILIES, classifier, saved

transformers = pytest.importorskip("transformers")


def sentences(model: Model) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, model.config.vocab_size, (5, 9), generator=generator)
    mask = torch.arange(9) < torch.tensor([9, 6, 1, 3, 8])[:, None]
    return ids.where(mask, model.config.pad_token_id), mask


def difference(model: Model, module: Any) -> float:
    """The largest difference in logits, with and without padding, in double precision too."""
    ids, mask = sentences(model)
    whole = ids[:1]
    rows, one = model.embeddings.rows(ids), model.embeddings.rows(whole)
    with torch.no_grad():
        pairs = [
            (model.logits(rows, mask), module(ids, attention_mask=mask).logits),
            (model.logits(one), module(whole).logits),
        ]
        module.double()
        pairs.append((model.logits(rows.double(), mask), module(ids, attention_mask=mask).logits))
        module.float()
    return max(float((ours - theirs).abs().max()) for ours, theirs in pairs)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_agree_with_transformers(tmp_path: Path, family: str) -> None:
    module = classifier(family)
    model = load(saved(module, tmp_path / "m"), check=True)
    assert difference(model, module) <= 1e-4
    assert model.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    again = load(module)
    assert set(again.tensors) == set(model.tensors)
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in model.tensors.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_those_of_transformers_to_the_last_bit(family: str) -> None:
    """What is proven of a sentence is proven of the rows that the deployed model computes for it."""
    module = classifier(family)
    model = load(module)
    ids = sentences(model)[0][:1]
    seen: list[torch.Tensor] = []
    norm = module.base_model.embeddings.LayerNorm
    with torch.no_grad():
        norm.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        module(ids)
    assert torch.equal(model.embeddings.rows(ids), seen[0])


@pytest.mark.parametrize("family", ["bert", "distilbert", "roberta", "electra, projected"])
def test_a_pytorch_file_of_every_family_is_read(tmp_path: Path, family: str) -> None:
    module = classifier(family)
    directory = saved(module, tmp_path / "m")
    (directory / "model.safetensors").unlink()
    torch.save(module.state_dict(), directory / "pytorch_model.bin")
    assert difference(load(directory), module) <= 1e-4


def test_the_longest_sentence_uses_every_position() -> None:
    for family, longest in (("bert", 20), ("distilbert", 20), ("roberta", 18), ("electra", 20)):
        module = classifier(family)
        model = load(module)
        assert model.config.max_position_embeddings == longest
        ids = torch.full((1, longest), 7)
        with torch.no_grad():
            expected = module(ids).logits
        assert (model.logits(model.embeddings.rows(ids)) - expected).abs().max() <= 1e-4


def test_the_check_would_notice_each_family_specific_part() -> None:
    """What makes a family its own changes the logits of these models by far more than the tolerance."""
    roberta = load(classifier("roberta"))
    ids, mask = sentences(roberta)
    rows = roberta.embeddings.rows(ids)
    shifted = rows - roberta.embeddings.positions[:9] + roberta.embeddings.positions[1:10]
    assert (roberta.logits(rows, mask) - roberta.logits(shifted, mask)).abs().max() > 1e-2
    for family, other in (("electra", "tanh"), ("distilbert", "gelu"), ("bert", "relu")):
        model = load(classifier(family))
        changed = model.config.model_copy(update={"head_act": other})
        program = build_program(changed, model.tensors)
        rows = model.embeddings.rows(ids)
        assert (model.logits(rows, mask) - program.evaluate(rows, mask)).abs().max() > 1e-3


# --- modules in memory -------------------------------------------------------------------------------------


def test_a_module_in_memory_is_left_as_it_was() -> None:
    module = classifier("bert").train()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    model = load(module)
    assert module.training
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    with torch.no_grad():
        next(module.parameters()).zero_()
    assert torch.equal(model.embeddings.words, before["bert.embeddings.word_embeddings.weight"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_become_float32(dtype: torch.dtype) -> None:
    module = classifier("bert").to(dtype)
    assert load(module).program.nodes[-1].op.weight.dtype == torch.float32
    assert next(module.parameters()).dtype == dtype


def test_a_module_in_double_precision_is_taken_only_where_nothing_is_rounded() -> None:
    module = classifier("bert").double()
    load(module)
    with torch.no_grad():
        module.classifier.weight[0, 0] += 2**-50
    with pytest.raises(BuffetError, match=r"tensor classifier\.weight is float64, and float32 would round 1"):
        load(module)
    load(module.float())


def test_a_module_of_several_precisions_is_taken() -> None:
    module = classifier("bert")
    module.classifier.to(torch.bfloat16)
    assert load(module).tensors["classifier.weight"].equal(module.classifier.weight.float())


def test_a_module_that_computes_something_else_is_refused() -> None:
    class Doubled(transformers.BertForSequenceClassification):  # type: ignore[misc, name-defined]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = 2 * output.logits
            return output

    module = Doubled(classifier("bert").config)
    with pytest.raises(BuffetError, match=r"Doubled: computes other logits than its program"):
        load(module)


def test_what_is_no_supported_module_is_refused_in_one_line() -> None:
    tiny = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    gpt = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=20, n_positions=8)
    t5 = transformers.T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=20)
    longformer = transformers.LongformerConfig(**tiny, vocab_size=20, attention_window=4)
    llama = transformers.LlamaConfig(**tiny, vocab_size=20, num_key_value_heads=2)
    mamba = transformers.MambaConfig(hidden_size=8, num_hidden_layers=1, vocab_size=20, state_size=2)
    bert = classifier("bert").config
    refused = {
        "'gpt2' (a causal decoder)": transformers.GPT2ForSequenceClassification(gpt),
        "'llama' (a causal decoder)": transformers.LlamaForSequenceClassification(llama),
        "'t5' (an encoder-decoder)": transformers.T5ForSequenceClassification(t5),
        "'longformer' (sparse attention)": transformers.LongformerForSequenceClassification(longformer),
        "'mamba' (a state-space model)": transformers.MambaModel(mamba),
        "without its classification head": transformers.BertModel(bert),
        "only sequence classifiers": transformers.BertForTokenClassification(bert),
        "supported modules are": torch.nn.TransformerEncoder(
            torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 1
        ),
        "regression head": classifier("bert", num_labels=1),
        "single-label": classifier("bert", problem_type="multi_label_classification"),
        "hidden_act 'silu' is not supported": classifier("bert", hidden_act="silu"),
    }
    for complaint, module in refused.items():
        with pytest.raises(BuffetError) as caught:
            load(module)
        assert complaint in str(caught.value)
        assert "\n" not in str(caught.value)


def test_quantised_modules_are_refused() -> None:
    module = classifier("bert")
    weight = torch.randint(-128, 128, (24, 24), dtype=torch.int8)
    module.bert.pooler.dense.weight = torch.nn.Parameter(weight, requires_grad=False)
    with pytest.raises(BuffetError, match=r"quantised weights are not supported"):
        load(module)


def test_a_directory_is_compared_with_what_transformers_makes_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = saved(classifier("bert"), tmp_path / "m")
    build = sources.build_program

    def wrong(config: ModelConfig, tensors: dict[str, Tensor]) -> Program:
        return build(config, {name: 1.01 * tensor for name, tensor in tensors.items()})

    monkeypatch.setattr(sources, "build_program", wrong)
    with pytest.raises(BuffetError, match="other logits"):
        load(directory)
    assert load(directory, check=False).config.layer_norm == "standard"
    # What transformers cannot run is loaded without it.
    (directory / "config.json").write_text(
        (directory / "config.json").read_text().replace('"model_type"', '"auto_map": 3, "model_type"')
    )
    assert load(directory).config.layer_norm == "standard"


def test_our_own_variants_cannot_be_checked_by_transformers() -> None:
    with pytest.raises(BuffetError, match=r"has no layer_norm no_var"):
        load(check=True)


# --- the hub -----------------------------------------------------------------------------------------------


def test_the_hub_by_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the Hub out of reach its cache answers; what is not in it is one line."""
    constants = pytest.importorskip("huggingface_hub").constants
    commit = "0123456789012345678901234567890123456789"
    for name in ("tiny", "gpt"):
        cached = tmp_path / "cache" / f"models--owner--{name}"
        (cached / "refs").mkdir(parents=True)
        (cached / "refs" / "main").write_text(commit)
        saved(classifier("bert"), cached / "snapshots" / commit)
    (cached / "snapshots" / commit / "config.json").write_text('{"model_type": "gpt2"}')
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    model = load("owner/tiny")
    assert model.name == "owner/tiny"
    assert model.tokens("a film") == ["[CLS]", "a", "film", "[SEP]"]
    for name, complaint in (
        ("owner/gpt", "a causal decoder"),
        ("owner/absent", "cannot be reached"),
    ):
        with pytest.raises(BuffetError) as caught:
            load(name)
        assert complaint in str(caught.value)
        assert "\n" not in str(caught.value)


# --- certified end to end ----------------------------------------------------------------------------------


EPS = 0.01


@pytest.mark.parametrize("family", ["bert", "distilbert", "roberta", "electra, projected"])
def test_a_loaded_model_is_certified(tmp_path: Path, family: str) -> None:
    """A verdict from the program holds on the source: no sampled point of the region changes its answer."""
    module = classifier(family)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.5)
    model = load(saved(module, tmp_path / "m"))
    x = model.embed("a moving film")
    region = buffet.LpBall(x, words=[2], p=2)
    result = buffet.verify(model, region, eps=EPS, method="baseline", falsify=False)
    assert result.verdict == "certified"
    label = int(model.logits(x).argmax())
    generator = torch.Generator().manual_seed(3)
    step = torch.randn(200, x.shape[1], generator=generator)
    step = EPS * step / step.norm(dim=1, keepdim=True)
    moved = x.repeat(200, 1, 1)
    moved[:, 2] += step
    # The source adds positions and token types itself: give it the difference from them.
    zero = model.embed("a moving film") - model.embeddings.words[list(model.encode("a moving film").ids)]
    with torch.no_grad():
        logits = module(inputs_embeds=moved - zero).logits
    assert bool((logits.argmax(-1) == label).all())
    others = torch.cat([logits[:, :label], logits[:, label + 1 :]], 1)
    margins = logits[:, label] - others.max(1).values
    assert float(margins.min()) >= float(result.margin) - 1e-4
