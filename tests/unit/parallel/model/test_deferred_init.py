"""A deferred model's values are those of plain construction, bit for bit, and cost their memory only when asked for."""

import copy
import itertools
import math
import os
import random
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from examples.models import GPT, LeNet, ResNet18
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from shoal.numerics.generators import all_generators, seed_everything
from shoal.parallel.model.deferred_init import Values, deferred

KEY = 11
Make = Callable[[], nn.Module]


@pytest.fixture(autouse=True)
def kept_generators() -> Iterator[None]:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    yield
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


def named(model: nn.Module) -> dict[str, Tensor]:
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])


def same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    flat = [t.detach().contiguous().flatten() for t in (a, b)]
    return a.numel() == 0 or torch.equal(*(t.view(torch.uint8) for t in flat))


def exact(make: Make) -> tuple[nn.Module, nn.Module, Values]:
    """Plain and deferred construction of the same, after comparing all that they share."""
    seed_everything(KEY)
    plain = make()
    after = all_generators()
    model, values = deferred(make, KEY)
    assert all_generators() == after
    want, have = named(plain), named(model)
    assert list(have) == list(want)
    with pytest.raises(KeyError):
        values.whole("no such name")
    for name in sorted(want, key=lambda n: n[::-1]):  # not the order of construction
        assert have[name].is_meta
        assert type(have[name]) is type(want[name])
        assert (have[name].shape, have[name].dtype) == (want[name].shape, want[name].dtype)
        assert have[name].requires_grad == want[name].requires_grad
        assert same_bits(values.whole(name), want[name]), name
    assert all_generators() == after
    return plain, model, values


def tensor_module(**tensors: Any) -> nn.Module:
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    return module


# ------------------------------------------------------------------------------------------------------- constructors
def per_gate_lstm() -> nn.Module:
    lstm = nn.LSTM(6, 5, num_layers=2, bidirectional=True)
    for name, parameter in lstm.named_parameters():
        if "weight_hh" in name:
            for gate in parameter.chunk(4, 0):
                nn.init.orthogonal_(gate)
        elif "bias" in name:
            nn.init.zeros_(parameter)
            parameter.data[5:10].fill_(1.0)
    return lstm


def every_init() -> nn.Module:
    sizes: dict[str, tuple[int, ...]] = {"eye_": (4, 6), "dirac_": (4, 4, 3)}
    inits = ["uniform_", "normal_", "trunc_normal_", "ones_", "zeros_", "eye_", "dirac_", "xavier_uniform_"]
    inits += ["xavier_normal_", "kaiming_uniform_", "kaiming_normal_", "orthogonal_"]
    module = nn.ParameterDict({name: nn.Parameter(torch.empty(sizes.get(name, (17, 9)))) for name in inits})
    for name in inits:
        getattr(nn.init, name)(module[name])
    module["sparse_"] = nn.Parameter(nn.init.sparse_(torch.empty(9, 7), sparsity=0.3))
    module["narrow"] = nn.Parameter(nn.init.trunc_normal_(torch.empty(300, 50), std=1.0, a=-1.0, b=1.0))
    return module


def slices_and_copies() -> nn.Module:
    a, b = nn.Linear(8, 8), nn.Linear(8, 8)
    embedding = nn.Embedding(10, 8, padding_idx=3)
    with torch.no_grad():
        a.weight[:, 2:5].normal_(0, 3)
        a.weight.t()[1].uniform_()
        embedding.weight[4].fill_(2)
        b.weight.copy_(a.weight)
        a.weight.mul_(2).add_(torch.eye(8))
        b.bias[::2] = a.bias[::2] * torch.tensor([1.0, 2.0, 3.0, 4.0])
        b.bias.copy_(b.bias)
    return nn.ModuleList([a, b, embedding])


def cloned_and_applied() -> nn.Module:
    layer = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model = nn.ModuleList(copy.deepcopy(layer) for _ in range(3))

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.xavier_normal_(module.weight)

    model[1].apply(init)
    return model


def other_dtypes() -> nn.Module:
    model = nn.ModuleList([nn.Linear(5, 3).half(), nn.Linear(5, 3).to(torch.bfloat16), nn.Linear(5, 3).double()])
    model.append(nn.Linear(3, 3, dtype=torch.complex64))
    model.append(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last))
    return model.to("cpu")


def buffers() -> nn.Module:
    position = torch.arange(12).unsqueeze(1)
    table = torch.zeros(12, 6)
    table[:, 0::2] = torch.sin(position * torch.exp(torch.arange(0, 6, 2) * (-math.log(1e4) / 6)))
    table[:, 1::2] = torch.cos(position * torch.arange(0, 6, 2, device="cpu"))
    module = tensor_module(table=table, mask=torch.tril(torch.ones(4, 4)).bool(), grid=torch.linspace(0, 1, 7))
    module.register_buffer("hidden", torch.full((3,), float("-inf")), persistent=False)
    module.register_buffer("order", torch.randperm(20))
    module.register_buffer("keep", torch.bernoulli(torch.rand(30)))
    module.register_buffer("counts", torch.tensor([1, 2, 3]).cumsum(0))
    module.register_buffer("outside", torch.ones(3) * torch.from_numpy(np.arange(3.0)))
    module.register_buffer("random", torch.rand_like(table) + torch.randint_like(table, 3) + torch.randn(6))
    return module


def own_generator() -> nn.Module:
    generator = torch.Generator().manual_seed(5)
    return tensor_module(
        a=torch.randn(20, generator=generator), b=torch.empty(9).normal_(generator=generator), c=torch.rand(4)
    )


def forked_generator() -> nn.Module:
    a = torch.rand(3)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        b = torch.randn(40)
    return tensor_module(a=a, b=b, c=torch.rand(3))


def dry_run() -> nn.Module:
    features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten())
    width = features(torch.randn(2, 1, 8, 8)).shape[1]
    return nn.Sequential(features, nn.Linear(width, 3))


def parametrized() -> nn.Module:
    layers = [parametrizations.weight_norm(nn.Linear(4, 5)), parametrizations.spectral_norm(nn.Linear(5, 6))]
    return nn.Sequential(*layers, parametrizations.orthogonal(nn.Linear(6, 7)), nn.Linear(7, 7))


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 5)), nn.Linear(5, 5))


def reads_values() -> nn.Module:
    layer = nn.Linear(6, 6)
    scale = layer.weight.abs().max().item()
    if layer.weight.sum() > 0:
        nn.init.ones_(layer.bias)
    model = nn.Sequential(layer, *(nn.Dropout(p) for p in torch.linspace(0, 0.5, 3).tolist()))
    model.register_buffer("scale", torch.tensor(scale))
    model.register_buffer("large", layer.weight[layer.weight > 0.1].detach())
    return model


def singular() -> nn.Module:
    matrix = torch.zeros(3, 3)
    try:
        matrix = torch.linalg.inv(matrix)
    except torch.linalg.LinAlgError:
        matrix = torch.eye(3)
    return tensor_module(matrix=matrix)


def reads_device() -> nn.Module:
    layer = nn.Linear(3, 3)
    if layer.weight.is_meta or layer.weight.device.type != "cpu" or "meta" in layer.weight.type():
        return nn.Linear(4, 4)
    layer.extra = nn.Parameter(torch.rand(3, device=layer.weight.device))  # type: ignore[assignment]
    return layer


def tied() -> nn.Module:
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    b.weight = a.weight
    b.bias.data = a.bias.data  # two parameters on one storage
    nn.init.normal_(b.bias)
    return nn.ModuleList([a, b])


def aliased_move() -> nn.Module:
    layer = nn.Linear(3, 3)
    layer.weight.data.to("cpu").fill_(7)
    layer.bias.data.cpu().type_as(layer.weight).uniform_(2, 3)
    return layer


def from_numpy() -> nn.Module:
    layer = nn.Linear(3, 3)
    layer.weight.data = torch.from_numpy(np.random.rand(3, 3).astype(np.float32))
    return layer


FOLLOWED: list[Make] = [
    LeNet,
    ResNet18,
    GPT,
    lambda: nn.Transformer(16, 2, 1, 1, 32, batch_first=True),
    lambda: nn.LSTM(5, 6, 2),
    lambda: nn.GRU(5, 6, bidirectional=True),
    lambda: nn.MultiheadAttention(8, 2),
    per_gate_lstm,
    every_init,
    slices_and_copies,
    cloned_and_applied,
    other_dtypes,
    buffers,
    own_generator,
    forked_generator,
    dry_run,
    parametrized,
    old_weight_norm,
    reads_values,
    from_numpy,
    reads_device,
    tied,
    aliased_move,
]


@pytest.mark.parametrize("make", FOLLOWED)
def test_values_are_those_of_plain_construction(make: Make) -> None:
    assert exact(make)[2].note is None


# -------------------------------------------------------------------------------------------------------- falling back
def through_numpy() -> nn.Module:
    layer = nn.Linear(3, 3)
    layer.weight.detach().numpy()[:] = 4
    return layer


def caught() -> nn.Module:
    layer = nn.Linear(3, 3)
    try:
        layer.weight.detach().numpy()[:] = 4
    except RuntimeError:
        nn.init.zeros_(layer.weight)
    return layer


def changed_source() -> nn.Module:
    layer = nn.Linear(3, 3)
    source = torch.nonzero(torch.tensor([1, 0, 2])).float().flatten()
    layer.bias.data[:2] = source
    source.mul_(5)
    layer.weight.data[0, :2] = source
    return layer


def shared_deepcopy() -> nn.Module:
    whole = torch.rand(4)
    module = copy.deepcopy(tensor_module(a=whole, b=whole[1:]))
    module.a.fill_(3)  # type: ignore[operator]
    return module


def hidden_view() -> nn.Module:
    layer = nn.Linear(3, 3)
    layer.first = layer.weight.data[0]  # type: ignore[assignment]
    return layer


@pytest.mark.parametrize("make", [singular, through_numpy, caught, changed_source, shared_deepcopy, hidden_view])
def test_what_cannot_be_followed_is_constructed_plainly(make: Make) -> None:
    values = exact(make)[2]
    assert values.note is not None
    assert "\n" not in values.note


def test_real_parameters_are_held_and_go_to_meta() -> None:
    def make() -> nn.Module:
        module = nn.Linear(2, 2)
        module.held = nn.Parameter(torch.from_numpy(np.ones(3)), requires_grad=False)
        return module

    assert exact(make)[2].note is None


def test_an_error_of_the_constructor_is_its_own() -> None:
    def make() -> nn.Module:
        nn.Linear(2, 2)
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        deferred(make, KEY)


def test_operations_that_only_fail_when_they_run_are_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    seed_everything(KEY)
    want = buffers()
    model, values = deferred(buffers, KEY)
    monkeypatch.setattr("shoal.parallel.model.deferred_init.TensorRef.same_place", lambda *_: False)
    after = all_generators()
    assert same_bits(values.whole("keep"), want.keep)  # type: ignore[arg-type]
    assert values.note is not None
    assert all_generators() == after
    assert model.keep.is_meta  # type: ignore[union-attr]


# ----------------------------------------------------------------------------------------------------------- contract
def test_values_do_not_depend_on_order_number_or_surroundings() -> None:
    seed_everything(KEY)
    want = named(LeNet())
    values = deferred(LeNet, KEY)[1]
    torch.manual_seed(99)
    for name in ["linear2.bias", "conv1.weight", "linear2.bias"]:
        value = values.whole(name)
        assert same_bits(value, want[name])
        value.fill_(0)
    with torch.device("meta"), torch.autocast("cpu"), torch.inference_mode():
        assert same_bits(values.whole("conv2.weight"), want["conv2.weight"])
    with pytest.raises(KeyError):
        values.whole("absent")


def test_plain_tensor_attributes_are_real_again_in_place() -> None:
    def make() -> nn.Module:
        module = nn.Linear(3, 3)
        base = torch.arange(6.0)
        module.freqs = base  # type: ignore[assignment]
        module.nested = {"a": [torch.rand(2), (base[1:3],)]}  # type: ignore[assignment]
        module.config = SimpleNamespace(scale=module.weight.detach() * 2)  # type: ignore[assignment]
        return module

    plain, model, values = exact(make)
    assert values.note is None
    for a, b in [
        (plain.freqs, model.freqs),
        (plain.nested["a"][0], model.nested["a"][0]),  # type: ignore[index]
        (plain.nested["a"][1][0], model.nested["a"][1][0]),  # type: ignore[index]
        (plain.config.scale, model.config.scale),  # type: ignore[union-attr]
    ]:
        assert same_bits(a, b)  # type: ignore[arg-type]
    model.freqs.fill_(9)  # type: ignore[operator,union-attr]
    assert model.nested["a"][1][0].tolist() == [9, 9]  # type: ignore[index]


def test_a_deferred_model_trains_once_it_has_its_values() -> None:
    plain, model, values = exact(LeNet)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values.whole(name))
    images = torch.rand(2, 1, 28, 28)
    for m in (plain, model):
        F.cross_entropy(m(images), torch.tensor([3, 4])).backward()
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("kind", ["Llama", "GPT2", "Bert", "ViT"])
def test_transformers_models(kind: str) -> None:
    t = pytest.importorskip("transformers", reason="transformers is not installed")
    common = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    makes: dict[str, Make] = {
        "Llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(vocab_size=64, num_key_value_heads=2, **common)),
        "GPT2": lambda: t.GPT2LMHeadModel(
            t.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
        ),
        "Bert": lambda: t.BertForMaskedLM(t.BertConfig(vocab_size=64, **common)),
        "ViT": lambda: t.ViTForImageClassification(t.ViTConfig(image_size=32, patch_size=8, **common)),
    }
    assert exact(makes[kind])[2].note is None


_CALLS = itertools.count(0, 256)


def _drawn(generator: torch.Generator | None) -> nn.Module:
    module = nn.Linear(3, 3)
    nn.init.normal_(module.weight, generator=generator)
    return module


def _held() -> nn.Module:
    module = nn.Linear(3, 3)
    module.register_buffer("held", torch.from_numpy(np.random.default_rng().permutation(64)))  # of one sum
    return module


def _drawn_before() -> nn.Module:
    torch.rand(1 + os.urandom(1)[0] + next(_CALLS))
    return nn.Linear(3, 3)


def _filled() -> nn.Module:
    module = nn.Linear(3, 3)
    nn.init.constant_(module.weight, int.from_bytes(os.urandom(2), "little"))
    return module


@pytest.mark.parametrize(
    ("make", "follows"),
    [
        (lambda: _drawn(None), True),
        (lambda: _drawn(torch.Generator().manual_seed(3)), True),
        (lambda: _drawn(torch.Generator().manual_seed(int.from_bytes(os.urandom(4), "little"))), False),
        (_held, False),
        (_drawn_before, False),
        (_filled, False),
    ],
)
def test_sources_are_equal_where_values_follow_from_the_seed(make: Callable[[], nn.Module], follows: bool) -> None:
    first, second = (deferred(make, 7)[1].sources_checksum() for _ in range(2))
    assert (first == second) is follows
