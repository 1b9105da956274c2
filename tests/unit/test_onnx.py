"""ONNX files: the same outputs as their source, the same bounds as the native loader, and what is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

import buffet
from buffet import BuffetError, OnnxModel
from buffet.loading.onnx import compare, run_onnx
from onnx_networks import FAMILIES, PLAIN, export, shaken, wrapped

EXPORTERS = pytest.mark.parametrize("dynamo", [False, True], ids=["trace", "dynamo"])


def read(path: Path, **given: Any) -> OnnxModel:
    model = buffet.load(path, **given)
    assert isinstance(model, OnnxModel)
    return model


def agrees(model: OnnxModel, module: torch.nn.Module, x: Tensor) -> None:
    """With its source and with onnxruntime, on a few inputs."""
    flat = torch.randn(3, x.numel(), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = torch.stack([module(one.reshape(x.shape)).flatten() for one in flat])
    torch.testing.assert_close(model.outputs_of(flat).float(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(run_onnx(model, flat).float(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.flat_of(model.rows_of(flat)), flat)


@EXPORTERS
@pytest.mark.parametrize("name", FAMILIES)
def test_classifiers_of_transformers(name, dynamo, tmp_path: Path):
    """Agreement with the source, and the margins of the native loader."""
    source = FAMILIES[name]()
    module, x = wrapped(source)
    model = read(export(module, x, tmp_path / "model.onnx", dynamo=dynamo), check=True)
    agrees(model, module, x)
    native = buffet.load(source)
    rows, eps, moved = model.rows_of(x.flatten()), 0.02, [2]
    if name == "vit":  # whose program begins with pixels in [0, 1], before they are normalised
        theirs, scale = native.embed(0.5 * x[0] + 0.5), 0.5
    else:
        skipped = source.base_model.embeddings.position_embeddings.weight
        start = 2 if name == "roberta" else 0
        theirs = x[0] + skipped[start : start + 5].detach()
        kinds = getattr(source.base_model.embeddings, "token_type_embeddings", None)
        theirs, scale = theirs if kinds is None else theirs + kinds.weight[0].detach(), 1.0
    ours = buffet.verify(model, buffet.LpBall(rows, moved, 2), eps, "lse", falsify=False)
    expected = buffet.verify(native, buffet.LpBall(theirs, moved, 2), scale * eps, "lse", falsify=False)
    assert ours.label == expected.label
    torch.testing.assert_close(ours.margins, expected.margins, rtol=1e-6, atol=1e-6)
    assert bool(ours.margins.isfinite().all())


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("form", ["opset 16", "opset 20", "dynamo"])
def test_plain_modules(name, form, tmp_path: Path):
    """LayerNorm and GELU spelled out (opset 16), as operations (20), and by the other exporter."""
    make, shape = PLAIN[name]
    module, x = shaken(make()), torch.randn(shape, generator=torch.Generator().manual_seed(1))
    dynamo = form == "dynamo"
    opset = None if dynamo else int(form.split()[1])
    path = export(module, x, tmp_path / "model.onnx", dynamo=dynamo, opset=opset)
    model = read(path, check=True)
    agrees(model, module, x)
    assert model.input_shape == shape
    assert model.outputs == module(x).numel()
    assert f"{model.outputs} outputs" in repr(model)
    box = model.box(x.flatten().double() - 0.01, x.flatten().double() + 0.01)
    found = buffet.verify(model, box, method="lse", falsify=False)
    samples = box.points(box.sample(50, torch.Generator().manual_seed(0)))[:, 0]
    outputs = model.program64.evaluate(samples)
    others = [c for c in range(model.outputs) if c != found.label]
    attained = (outputs[:, found.label, None] - outputs[:, others]).amin(0)
    assert bool((found.margins[0] <= attained).all())


def test_a_box_moves_only_what_may_move(tmp_path: Path):
    make, shape = PLAIN["pixels"]
    x = torch.rand(shape)
    model = read(export(shaken(make()), x, tmp_path / "m.onnx"))
    assert (model.layout[0] == -1).all()  # the class token
    low, high = x.flatten().double(), x.flatten().double().clone()
    high[17] += 0.1  # line 2, column 1: the first patch
    box = model.box(low, high)
    assert box.moved.tolist() == [[1]]
    assert torch.equal(model.flat_of(box.center), low + (high - low) / 2)
    still = model.box(low, low)
    assert still.moved.shape == (1, 1)
    assert torch.equal(still.lower, still.upper)


# --- graphs made by hand ------------------------------------------------------------------------------------


def graph(
    nodes: list[Any], constants: dict[str, Any], shape: Any = (1, 3, 4), output: str = "y", **changes: Any
) -> onnx.ModelProto:
    """A model of one input x and one output."""
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    made = helper.make_graph(
        nodes,
        "graph",
        changes.pop("inputs", [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]),
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)],
        tensors,
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def saved(model: onnx.ModelProto, tmp_path: Path) -> Path:
    path = tmp_path / "made.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def node(op: str, inputs: str, output: str = "y", **attributes: Any) -> Any:
    return helper.make_node(op, inputs.split(), output.split(), name=f"the_{op}", **attributes)


W = np.arange(8, dtype=np.float32).reshape(4, 2) / 8
HEAD = [node("ReduceMean", "h", "m", axes=[1], keepdims=0), node("MatMul", "m w", "y")]


@pytest.mark.parametrize(
    ("nodes", "complaint"),
    [
        ([node("Sin", "x", "h"), *HEAD], "node 'the_Sin' (Sin): not supported; supported: Conv"),
        ([node("Sigmoid", "x", "s"), node("Mul", "x s", "h"), *HEAD], "node 'the_Sigmoid' (Sigmoid)"),
        ([node("Mul", "x x", "h"), *HEAD], "node 'the_Mul' (Mul): a product of two values"),
        ([node("Softmax", "x", "h", axis=1), *HEAD], "(Softmax): only a softmax along the last"),
        ([node("ReduceMean", "x", "h", axes=[1]), node("Softmax", "h", "y")], "a softmax that is not one of"),
        ([node("Where", "mask x big", "h"), *HEAD], "(Where): it masks other things than attention scores"),
        ([node("Where", "mask x one", "h"), *HEAD], "(Where): it picks entries by a mask"),
        ([node("MatMul", "x w", "y")], "several tokens"),
        ([node("ReduceMean", "x", "y", axes=[1, 2])], "averages other things"),
        ([node("Add", "x gone", "h"), *HEAD], "reads 'gone'"),
        ([node("Reshape", "x huge", "h"), *HEAD], "(Reshape): malformed"),
        ([node("Expand", "x huge", "h"), *HEAD], "(Expand)"),
        (
            [node("ConstantOfShape", "huge", "c"), node("Add", "x c", "h"), *HEAD],
            "it makes a tensor of shape",
        ),
        ([node("Identity", "x", "x")], "given twice"),
        ([node("Identity", "w", "y")], "output is constant"),
        ([node("Identity", "x", "z")], "no node gives the output 'y'"),
        (
            [node("Gather", "w ids", "h", axis=0), node("Gather", "w x", "y")],
            "export the network from embedding",
        ),
        ([node("Concat", "x w", "h", axis=1), *HEAD], "node 'the_Concat' (Concat)"),
        ([node("Transpose", "x", "h", perm=[0, 1, 7]), *HEAD], "(Transpose): malformed"),
    ],
)
def test_what_cannot_be_expressed_is_refused_in_one_line(nodes, complaint, tmp_path: Path):
    constants = {
        "w": W,
        "big": np.float32(-1e30),
        "one": np.float32(1),
        "mask": np.array([[True, False, True, True]]),
        "huge": np.array([1 << 20, 1 << 20, 1 << 20], np.int64),
        "ids": np.array([0, 1]),
    }
    with pytest.raises(BuffetError) as error:
        buffet.load(saved(graph(nodes, constants), tmp_path))
    assert complaint in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"shape": (1, "tokens", 4)}, "1 × ? × 4: all axes but the batch must have fixed sizes"),
        ({"shape": (1, 1 << 20, 1 << 20)}, "too many"),
        ({"shape": (1, 3, 1 << 21)}, "too many"),  # took a quarter of a minute to be refused elsewhere
        ({"inputs": []}, "expected one input, found none"),
        (
            {
                "inputs": [
                    helper.make_tensor_value_info(n, TensorProto.FLOAT, (1, 3, 4)) for n in ("x", "mask")
                ]
            },
            "expected one input, found 'x', 'mask'",
        ),
        ({"inputs": [helper.make_tensor_value_info("x", TensorProto.INT64, (1, 3))]}, "inputs_embeds"),
    ],
)
def test_inputs_that_are_refused(changes, complaint, tmp_path: Path):
    with pytest.raises(BuffetError) as error:
        buffet.load(saved(graph([node("Relu", "x", "h"), *HEAD], {"w": W}, **changes), tmp_path))
    assert complaint in str(error.value)


def test_any_batch_is_a_batch_of_one(tmp_path: Path):
    model = read(saved(graph([node("Relu", "x", "h"), *HEAD], {"w": W}, shape=("batch", 3, 4)), tmp_path))
    assert model.input_shape == (1, 3, 4)
    assert compare(model) < 1e-6


def test_truncated_and_damaged_files_get_one_line(tmp_path: Path):
    whole = graph([node("Relu", "x", "h"), *HEAD], {"w": W}).SerializeToString()
    path = tmp_path / "cut.onnx"
    for end in range(0, len(whole), 3):
        path.write_bytes(whole[:end])
        with pytest.raises(BuffetError) as error:
            buffet.load(path)
        assert "\n" not in str(error.value)
    generator = np.random.default_rng(0)
    for _ in range(60):
        bytes_ = bytearray(whole)
        for place in generator.integers(0, len(whole), 3):
            bytes_[place] = int(generator.integers(0, 256))
        path.write_bytes(bytes(bytes_))
        with contextlib.suppress(BuffetError):
            buffet.load(path, check=False)
    with pytest.raises(BuffetError, match="cannot be read"):
        buffet.load(tmp_path / "nothing.onnx")


def _external(location: str, **more: str) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        tensor = model.graph.initializer[0]
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in {"location": location, **more}.items():
            tensor.external_data.add(key=key, value=value)

    return change


def _dims(*sizes: int) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        model.graph.initializer[0].dims[:] = sizes

    return change


def _function(model: onnx.ModelProto) -> None:
    model.functions.add(name="mine", domain="mine")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (_dims(1 << 31, 1 << 31), "but 32 bytes: truncated or damaged"),
        (_dims(-1, 2), "has the shape (-1, 2)"),
        (_external("../secret.bin"), "only files beside the model"),
        (_external("/etc/passwd"), "only files beside the model"),
        (_external("link.bin"), "only files beside the model"),
        (_external(""), "only files beside the model"),
        (_external("near.bin", offset="8"), "does not have them"),
        (_external("near.bin", offset="-4"), "does not have them"),
        (_external("near.bin", offset="x"), "is stored at offset 'x'"),
        (_external("none.bin"), "cannot be read"),
        (_function, "functions of its own, such as 'mine'"),
    ],
)
def test_hostile_files_are_refused(change, complaint, tmp_path: Path):
    (tmp_path / "secret.bin").write_bytes(bytes(64))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "near.bin").write_bytes(W.tobytes())
    (folder / "link.bin").symlink_to(tmp_path / "secret.bin")
    model = graph([node("Relu", "x", "h"), *HEAD], {"w": W})
    change(model)
    with pytest.raises(BuffetError) as error:
        buffet.load(saved(model, folder))
    assert complaint in str(error.value)


def test_data_beside_the_file_is_read(tmp_path: Path):
    (tmp_path / "near.bin").write_bytes(W.tobytes())
    model = graph([node("Relu", "x", "h"), *HEAD], {"w": W})
    _external("near.bin")(model)
    loaded = read(saved(model, tmp_path), check=True)
    torch.testing.assert_close(loaded.program.nodes[-1].op.weight, torch.from_numpy(W.T.copy()))


def test_a_network_that_differs_from_onnxruntime_is_refused(tmp_path: Path, monkeypatch):
    from buffet.loading.onnx import model as module

    path = saved(graph([node("Relu", "x", "h"), *HEAD], {"w": W}), tmp_path)
    monkeypatch.setattr(module, "run_onnx", lambda model, flat: run_onnx(model, flat) + 0.01)
    with pytest.raises(BuffetError, match="computes other logits"):
        buffet.load(path)
    assert isinstance(buffet.load(path, check=False), OnnxModel)


def test_commands_for_texts_say_that_they_read_no_onnx_files(tmp_path: Path):
    path = saved(graph([node("Relu", "x", "h"), *HEAD], {"w": W}), tmp_path)
    with pytest.raises(BuffetError, match="a file, not a checkpoint directory"):
        buffet.loading.load_checkpoint(path)
