"""A Keras model as a module: names, training flag, dtypes, batch statistics and randomness by grain."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal.errors import JobError
from shoal.numerics.generators import seed_everything
from shoal.numerics.grain_randomness import GrainScope, NotFusibleError
from shoal.parallel.model.adapters import adapted
from shoal.parallel.model.trial import twin
from shoal.plans.grains import Grain

pytestmark = pytest.mark.skipif(find_spec("keras") is None, reason="keras is not installed: pip install 'shoal[keras]'")


@pytest.fixture
def keras(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Keras on torch, which writes its settings where nobody minds."""
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    for name in ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "TF_FORCE_GPU_ALLOW_GROWTH"):  # what importing it sets
        monkeypatch.setenv(name, os.environ.get(name, ""))
    import keras

    if keras.backend.backend() != "torch":
        pytest.skip("keras was imported with another backend")
    return keras


def cnn(keras: Any, *more: Any) -> Any:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((6, 6, 1)),
            layers.Conv2D(3, 3, activation="relu"),
            *more,
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(4),
            layers.Dense(2),
        ]
    )


def images(num_samples: int = 8) -> torch.Tensor:
    return torch.randn(num_samples, 6, 6, 1, generator=torch.Generator().manual_seed(1))


def grains(*sizes: int) -> list[Grain]:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [Grain(i, start, size) for i, (start, size) in enumerate(zip(starts, sizes, strict=True))]


NAMES = ["conv2d.kernel", "conv2d.bias", "dense.kernel", "dense.bias", "dense_1.kernel", "dense_1.bias"]


def test_names_are_those_of_the_layers_however_often_it_is_built(keras: Any) -> None:
    for _ in range(2):
        model = adapted(cnn(keras))
        assert [name for name, _ in model.named_parameters()] == NAMES
        assert [name for name, _ in model.named_modules()] == [
            "",
            "conv2d",
            "max_pooling2d",
            "flatten",
            "dense",
            "dense_1",
        ]
        assert model.get_parameter("dense.bias") is dict(model.named_parameters())["dense.bias"]


def test_parameters_stay_the_same_objects_and_the_output_the_same(keras: Any) -> None:
    model = cnn(keras)
    before, output = {id(p) for p in model.parameters()}, model(images(), training=False)
    assert adapted(model) is model
    assert adapted(model) is model
    assert {id(p) for p in model.parameters()} == before
    assert torch.equal(model.eval()(images()), output)


def test_what_is_no_weight_is_a_buffer(keras: Any) -> None:
    model = adapted(cnn(keras, keras.layers.BatchNormalization(), keras.layers.Dropout(0.5, seed=3)))
    assert [name for name, _ in model.named_buffers()] == [
        "batch_normalization.moving_mean",
        "batch_normalization.moving_variance",
    ]
    assert all(p.requires_grad for p in model.parameters())


def test_layers_use_whatever_their_module_holds(keras: Any) -> None:
    """A tensor that replaces a parameter is the variable's value, as after a move from the meta device."""
    model = adapted(cnn(keras)).eval()
    bias = torch.full((2,), 5.0)
    model.dense_1._parameters["kernel"] = nn.Parameter(torch.zeros(4, 2))
    model.dense_1._parameters["bias"] = nn.Parameter(bias)
    assert torch.equal(model(images(3)), bias.expand(3, 2))
    state = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    assert model.dense_1.bias.value.tolist() == [1.0, 1.0]


def test_training_is_the_modules(keras: Any) -> None:
    model = adapted(cnn(keras, keras.layers.Dropout(0.5)))
    whole = model.eval()(images())
    assert torch.equal(model(images()), whole)
    assert not torch.equal(model.train()(images()), whole)
    assert torch.equal(model(images(), training=False), whole)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_it_computes_in_its_parameters_dtype(keras: Any, dtype: torch.dtype) -> None:
    model = adapted(cnn(keras, keras.layers.BatchNormalization())).eval()
    wanted = model(images())
    found = model.to(dtype)(images().to(dtype))
    assert found.dtype == dtype
    assert torch.allclose(found.float(), wanted, atol=1e-6 if dtype == torch.float64 else 0.1)
    assert model.float()(images()).dtype == torch.float32


def test_a_mixed_policy_stays(keras: Any) -> None:
    model = adapted(keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, dtype="mixed_bfloat16")]))
    assert model(torch.ones(1, 4)).dtype == torch.bfloat16
    assert model.dense.kernel.value.dtype == torch.float32


def test_autocast(keras: Any) -> None:
    model = adapted(cnn(keras))
    wide = model(images())
    with torch.autocast("cpu", torch.bfloat16):
        narrow = model(images())
    assert not torch.equal(narrow, wide)
    torch.testing.assert_close(narrow.float(), wide, atol=0.05, rtol=0.05)


def fused_and_apart(model: Any, inputs: torch.Tensor, cut: list[Grain]) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of the same grains in one forward, and one by one from the same buffers; buffers are left to the mean."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with GrainScope(0, 0, cut) as scope:
        fused = model(inputs)
        assert not scope.leaked()
    moved = {name: buffer.clone() for name, buffer in model.named_buffers()}
    sums = {name: torch.zeros_like(buffer) for name, buffer in buffers.items()}
    parts = []
    for grain, rows in zip(cut, inputs.split([g.size for g in cut]), strict=True):
        model.load_state_dict(buffers, strict=False)
        with GrainScope(0, 0, [grain]):
            parts.append(model(rows))
        for name, buffer in model.named_buffers():
            sums[name] += buffer * (grain.size / len(inputs))
    for name, value in sums.items():
        torch.testing.assert_close(moved[name], value)
        assert not torch.equal(value, buffers[name])
    return fused, torch.cat(parts)


@pytest.mark.parametrize("rate", [0.5, 0.1])
def test_masks_belong_to_the_grain(keras: Any, rate: float) -> None:
    for seed in (None, 3):
        model = adapted(cnn(keras, keras.layers.Dropout(rate, seed=seed)))
        torch.testing.assert_close(*fused_and_apart(model, images(), grains(3, 3, 2)))


def test_batch_statistics_belong_to_the_grain(keras: Any) -> None:
    model = adapted(cnn(keras, keras.layers.BatchNormalization()))
    fused, apart = fused_and_apart(model, images(), grains(3, 3, 2))
    torch.testing.assert_close(fused, apart)
    with torch.no_grad():
        assert not torch.allclose(fused, model(images()), atol=1e-4)  # without a scope: over the whole batch, as Keras


def noise(keras: Any) -> Any:
    class Noise(keras.layers.Layer):  # type: ignore[misc]
        def call(self, inputs: Any, training: bool | None = None) -> Any:
            return inputs + keras.random.normal(inputs.shape) if training else inputs

    return Noise()


@pytest.mark.parametrize("make", [noise, lambda keras: keras.layers.GaussianNoise(0.5, seed=1)])
def test_other_draws_are_those_of_the_global_generators(keras: Any, make: Callable[[Any], Any]) -> None:
    """Keras' own counters, which go on from call to call, say nothing; the engine then computes grain by grain."""
    model = adapted(cnn(keras, make(keras)))
    outputs = []
    for seed in (1, 2, 1):
        seed_everything(seed)
        outputs.append(model(images()))
    assert torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], outputs[1])
    with pytest.raises(NotFusibleError), GrainScope(0, 0, grains(4, 4)):
        model(images())


def test_functional_with_a_shared_layer(keras: Any) -> None:
    x = keras.Input((4,))
    dense = keras.layers.Dense(4)
    model = adapted(keras.Model(x, keras.layers.Dense(2)(keras.layers.Add()([dense(dense(x)), x]))))
    assert [name for name, _ in model.named_parameters()] == [
        "dense.kernel",
        "dense.bias",
        "dense_1.kernel",
        "dense_1.bias",
    ]
    model(torch.ones(2, 4)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_model_with_layers_of_its_own(keras: Any) -> None:
    class Model(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first = keras.layers.Dense(4)
            self.blocks = [keras.layers.Dense(4), keras.layers.Dropout(0.5)]
            self.inner = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
            self.own = keras.layers.TorchModuleWrapper(nn.Linear(4, 2))
            self.gain = self.add_weight(shape=(4,), initializer="ones", name="gain")

        def call(self, x: Any) -> Any:  # without the argument `training`, which its Dropout still gets
            x = self.first(x) * self.gain
            for block in self.blocks:
                x = block(x)
            return self.own(self.inner(x))

    model = Model()
    with pytest.raises(JobError, match="have no weights yet"):
        adapted(model)
    model(torch.zeros(1, 4))
    names = [name for name, _ in adapted(model).named_parameters()]
    assert sorted(names) == sorted(
        [
            "gain",
            "first.kernel",
            "first.bias",
            "dense.kernel",
            "dense.bias",
            "inner.dense.kernel",
            "inner.dense.bias",
            "own.module.weight",
            "own.module.bias",
        ]
    )
    whole = model.eval()(torch.ones(8, 4))
    assert not torch.allclose(model.train()(torch.ones(8, 4)), whole)


def test_single_layers_can_be_copied(keras: Any) -> None:
    """As verify does where a float64 copy of the whole model does not fit."""
    model = adapted(cnn(keras, keras.layers.BatchNormalization()))
    own = copy.deepcopy(model.dense).double()
    found = own(torch.ones(1, 12, dtype=torch.float64))
    assert found.dtype == torch.float64
    torch.testing.assert_close(found.float(), model.dense(torch.ones(1, 12)))
    copy.deepcopy(model.batch_normalization)(torch.randn(4, 4, 4, 3))
    assert float(model.batch_normalization.moving_mean.value.abs().sum()) == 0.0


def branches(keras: Any) -> Any:
    """A graph with a layer called twice, and an operation that is no layer."""
    x = keras.Input((6, 6, 1))
    flat, dense = keras.layers.Flatten()(x), keras.layers.Dense(36)
    return keras.Model(x, keras.layers.Dense(2)(dense(dense(flat)) + flat))


@pytest.mark.parametrize(
    "make", [lambda keras: cnn(keras, keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)), branches]
)
def test_a_copy_shares_no_module_or_value(keras: Any, make: Callable[[Any], Any]) -> None:
    """As the axes that divide a model follow its loss on one."""
    model = adapted(make(keras)).eval()
    own = copy.deepcopy(model)
    wanted = model(images())
    assert torch.equal(own(images()), wanted)
    assert [name for name, _ in own.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert {id(m) for m in own.modules()}.isdisjoint(id(m) for m in model.modules())
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.zero_()
    assert torch.equal(model(images()), wanted)
    assert not own(images()).any()
    assert own.train().double()(images().double()).dtype == torch.float64


def test_long_models_are_copied_too(keras: Any) -> None:
    """Layers, calls and symbols refer to each other all along a graph, deeper than Python calls."""
    layers = [keras.layers.Dense(2) for _ in range(200)]
    model = adapted(keras.Sequential([keras.Input((2,)), *layers]))
    assert len(list(copy.deepcopy(model).parameters())) == 400


def test_a_tensor_by_a_parameters_name_replaces_it(keras: Any) -> None:
    """As fully_shard does; what the layers use stays Keras' variable, which follows the dtype policy."""
    model = adapted(cnn(keras))
    for name in ("kernel", "bias"):
        held = nn.Parameter(torch.zeros_like(model.dense.get_parameter(name)))
        setattr(model.dense, name, held)
        assert model.dense.get_parameter(name) is held
        assert getattr(model.dense, name).value is held


def test_the_meta_device_computes_what_depends_on_what(keras: Any) -> None:
    whole = adapted(cnn(keras, keras.layers.BatchNormalization()))
    model = twin(whole, lambda _, tensor: tensor.detach().to("meta"))
    output = model(images().to("meta"))
    assert output.is_meta
    output.sum().backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


def test_a_stage_is_where_its_input_is(keras: Any) -> None:
    """Of a pipeline: the other stages' parameters have no data, and are never taken for numbers."""
    model = adapted(cnn(keras)).to("meta")
    with pytest.raises((RuntimeError, NotImplementedError)):
        model(images())
    assert torch.equal(model.flatten(images()), images().flatten(1))
    model.conv2d.forward = lambda inputs, **_: inputs[:, :4, :4].expand(-1, -1, -1, 3)  # as a stub of a stage before
    model.dense.forward = lambda inputs, **_: inputs[:, :4]
    model.dense_1.forward = lambda inputs, **_: inputs[:, :2]
    assert not model(images()).is_meta


def outputs(layer: Any) -> Any:
    return type(layer).tensor_outputs(layer)


def test_products_are_cut_along_their_outputs(keras: Any) -> None:
    """A layer with slices of its parameters gives that slice of its output."""
    layers = keras.layers
    model = adapted(keras.Sequential([keras.Input((6, 6, 2)), layers.Conv2D(4, 3, activation="gelu"), layers.Dense(6)]))
    whole = {"conv2d": torch.randn(2, 6, 6, 2), "dense": torch.randn(2, 3, 4)}
    for name, inputs in whole.items():
        layer = getattr(model, name)
        told, wanted = outputs(layer), layer(inputs)
        assert told.size == wanted.shape[told.feature_dim]
        part = copy.deepcopy(layer)
        for key, dim in told.dims.items():
            part._parameters[key] = nn.Parameter(layer._parameters[key].detach().narrow(dim, 1, 2).clone())
        part.keep_outputs(2)
        torch.testing.assert_close(part(inputs), wanted.narrow(told.feature_dim, 1, 2))


def test_what_is_no_plain_product_is_not_cut(keras: Any) -> None:
    layers = keras.layers

    class Own(layers.Dense):  # type: ignore[misc]
        def call(self, inputs: Any, training: bool | None = None) -> Any:
            return super().call(inputs) * self.kernel.value.sum()

    kinds = [layers.Dense(4, activation="softmax"), layers.Conv2D(4, 3, groups=2), Own(4)]
    for layer in kinds:
        model = adapted(keras.Sequential([keras.Input((6, 6, 2)), layer]))
        assert outputs(next(model.children())) is None


def test_others_are_left_alone() -> None:
    module = nn.Linear(2, 2)
    assert adapted(module) is module
    assert adapted("not a module") == "not a module"
