"""What the structure of a model says: repeated blocks, where stages may begin, heads, widths and sequences."""

from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shoal.parallel.model.structure import facts_of, sequence_of
from shoal.plans.legal import ModelFacts


class Attention(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.mix = nn.Linear(16, 48)


class Block(nn.Module):
    """With a Sequential of its own and experts, which are no blocks of the model."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.attention = Attention(heads)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3))


class Inner(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.h = nn.ModuleList(Block() for _ in range(depth))
        self.norm = nn.LayerNorm(16)


class Language(nn.Module):
    """Blocks two levels down, as in most published models."""

    def __init__(self, depth: int = 5) -> None:
        super().__init__()
        self.transformer = Inner(depth)
        self.head = nn.Linear(16, 11)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(width, width, 3), nn.Conv2d(width, width, 3)


class ResNet(nn.Sequential):
    def __init__(self) -> None:
        stages = {f"stage{i}": nn.Sequential(Residual(8 * i), Residual(8 * i)) for i in (1, 2, 3)}
        super().__init__(OrderedDict(stem=nn.Conv2d(3, 8, 3), relu=nn.ReLU(), **stages, linear=nn.Linear(24, 10)))


def facts(model: nn.Module, batch: object = None) -> ModelFacts:
    return facts_of(model, batch, num_grains=8, grain_size=4)


def test_blocks_of_a_language_model_on_meta() -> None:
    with torch.device("meta"):
        found = facts(Language())
    assert found.blocks == tuple(f"transformer.h.{i}" for i in range(5))
    assert len(found.blocks) == 5
    assert found.cuts == (*found.blocks, "transformer.norm", "head")
    assert (found.num_heads, found.num_kv_heads, found.widths, found.sequence) == (4, 4, (11, 16, 32, 48), None)
    assert (found.num_grains, found.grain_size) == (8, 4)


def test_blocks_of_a_resnet_lie_in_several_places() -> None:
    found = facts(ResNet())
    assert found.blocks == tuple(f"stage{i}.{k}" for i in (1, 2, 3) for k in (0, 1))
    assert found.cuts == ("relu", *found.blocks, "linear")
    assert found.num_heads is None


@pytest.mark.parametrize(
    ("model", "blocks", "cuts"),
    [
        (nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), ("0", "2"), ("1", "2")),
        (
            nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))),
            ("0.0", "1.0"),
            ("0.1", "1.0", "1.1"),
        ),
        (Residual(4), ("first", "second"), ("second",)),
        (nn.Linear(2, 2), (), ()),
        (nn.Sequential(), (), ()),
    ],
)
def test_models_without_blocks(model: nn.Module, blocks: tuple[str, ...], cuts: tuple[str, ...]) -> None:
    found = facts(model)
    assert (found.blocks, found.cuts) == (blocks, cuts)


def test_heads_of_a_config_come_before_attributes() -> None:
    model = Language()
    model.config = SimpleNamespace(num_attention_heads=32, num_key_value_heads=8, n_positions=512, use=True)
    found = facts(model)
    assert (found.num_heads, found.num_kv_heads, found.sequence) == (32, 8, 512)


@pytest.mark.parametrize("name", ["num_attention_heads", "n_head", "num_heads", "heads"])
def test_the_names_of_heads(name: str) -> None:
    model = nn.Linear(2, 2)
    model.config = SimpleNamespace(**{name: 6})
    assert facts(model).num_heads == 6
    model.config = SimpleNamespace(**{name: [2, 4]}, text=SimpleNamespace(hidden_size=8, **{name: 12}))
    assert facts(model).num_heads == 12
    assert facts(nn.ModuleList([Attention(6), Attention(9)])).num_heads == 3  # what divides all of them


def test_heads_are_read_off_the_width_of_one() -> None:
    model = nn.Module()
    model.query, model.head_dim = nn.Linear(32, 32), 8
    assert facts(model).num_heads == 4
    model.head_dim = 5
    assert facts(model).num_heads is None


@pytest.mark.parametrize(
    ("batch", "length"),
    [
        (None, None),
        (torch.zeros(2, 7, dtype=torch.long), 7),
        ((torch.zeros(2, 3), torch.zeros(2, 9, dtype=torch.int32)), 9),
        ({"mask": torch.zeros(2, 5, dtype=torch.bool), "input_ids": [torch.zeros(2, 6, dtype=torch.long)]}, 6),
        ((torch.zeros(2, 3), torch.zeros(2, dtype=torch.long)), None),
        ("text", None),
    ],
)
def test_the_sequence_of_a_batch(batch: object, length: int | None) -> None:
    assert sequence_of(batch, nn.Linear(1, 1)) == length
