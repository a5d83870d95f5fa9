"""The default number of grains: a function of the job alone, 8 for light samples, down to one heavy sample each."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

import shoal
from shoal.errors import JobError
from shoal.training.setup.default_grains import features_of, grains_of, outline, positions_of, with_grains
from shoal.training.setup.preflight import judged

TOKENS = 4096


class Decoder(nn.Module):
    """The linear layers of a decoder, which is all that the rule reads."""

    def __init__(self, layers: int, width: int, hidden: int, vocabulary: int = 32000) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        block = [(width, width)] * 4 + [(width, hidden)] * 2 + [(hidden, width)]
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for _ in range(layers) for a, b in block)
        self.head = nn.Linear(width, vocabulary, bias=False)


def seven_billion() -> nn.Module:
    return Decoder(32, 4096, 11008)


def small() -> nn.Module:
    return Decoder(2, 64, 128, 256)


class Images(nn.Module):
    def __init__(self, norm: type[nn.Module] = nn.Identity) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 7, stride=2)
        self.norm = norm(64)
        self.layers = nn.Sequential(*(nn.Conv2d(512, 512, 3) for _ in range(50)))


class Ragged(Dataset[Tensor]):
    """Only its middle is long."""

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(TOKENS if index == 40 else 1, dtype=torch.long)


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.zeros(TOKENS, dtype=torch.long)] * 4)


def job(model: Any, data: Any, batch: int = 2048, **fields: Any) -> shoal.Job:
    return shoal.Job(
        model=model,
        loss=lambda model, batch: (model(batch).sum(), len(batch)),
        optimizer=lambda parameters: torch.optim.SGD(parameters),
        train_data=data,
        global_batch=batch,
        **fields,
    )


def chosen(one: shoal.Job) -> int:
    return grains_of(one, outline(one)).num_grains


def tokens(count: int, length: int = TOKENS) -> tuple[Tensor, Tensor]:
    return torch.zeros(count, length, dtype=torch.long), torch.zeros(count, dtype=torch.long)


def pixels(side: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(8, 3, side, side), torch.zeros(8, dtype=torch.long)


def test_a_sample_of_seven_billion_parameters_is_a_grain() -> None:
    one = job(seven_billion, tokens(8))
    found = grains_of(one, outline(one))
    assert found.num_grains == 2048
    assert found.why == "default for heavy samples: about 22.9 GB of activations each"


def test_light_samples_make_eight_grains() -> None:
    assert chosen(job(small, tokens(8, 32))) == 8
    assert chosen(job(partial(nn.Linear, 784, 10), (torch.zeros(8, 784), torch.zeros(8)), 256)) == 8


def test_between_them_a_grain_is_as_many_samples_as_are_light_together() -> None:
    gpt2 = partial(Decoder, 12, 768, 3072, 50257)
    grains = {length: chosen(job(gpt2, tokens(8, length), 512)) for length in (16, 64, 256, 1024)}
    assert grains == {16: 8, 64: 32, 256: 128, 1024: 512}


def test_batch_statistics_need_samples() -> None:
    without, within = (job(partial(Images, norm), pixels(224), 256) for norm in (nn.Identity, nn.BatchNorm2d))
    assert chosen(without) > 8
    found = grains_of(within, outline(within))
    assert (found.num_grains, found.why) == (8, "default where batch statistics need samples (norm)")


def test_a_loss_that_compares_samples_keeps_them_together() -> None:
    assert chosen(job(seven_billion, tokens(8), fuse=False)) == 8


def test_a_ragged_sample_counts_wherever_it_is() -> None:
    def longest(samples: list[Tensor]) -> Tensor:
        return nn.utils.rnn.pad_sequence(samples, batch_first=True)

    assert chosen(job(seven_billion, Ragged(), collate=longest)) == 2048


def test_a_stream_is_looked_at_where_it_begins_again() -> None:
    assert chosen(job(seven_billion, Stream())) == 2048
    once = iter([torch.zeros(TOKENS, dtype=torch.long)] * 4)
    assert chosen(job(seven_billion, once)) == 8
    assert len(list(once)) == 4, "nothing of it was read"


def test_a_model_that_computes_with_its_values_is_outlined_too() -> None:
    def looks() -> nn.Module:
        model = Decoder(4, 512, 2048, 256)
        assert float(next(model.parameters()).detach().sum()) != 0.0
        return model

    one = job(looks, tokens(8))
    assert outline(one) is None
    assert "heavy samples" in grains_of(one, None).why


def test_what_cannot_be_read_is_left_to_the_step_that_reads_it() -> None:
    class Broken(Ragged):
        def __getitem__(self, index: int) -> Tensor:
            raise ValueError("not here")

    assert chosen(job(seven_billion, Broken())) == 8


def test_labels_of_pixels_are_no_tokens() -> None:
    batch = torch.zeros(2, 3, 224, 224), torch.zeros(2, 224, 224, dtype=torch.long)
    assert positions_of(Images(), batch, 2) == 3 * 224 * 224 // (3 * 4)
    assert positions_of(nn.Linear(784, 10), (torch.zeros(2, 784), torch.zeros(2, dtype=torch.long)), 2) == 1
    assert positions_of(nn.Linear(80, 10), torch.zeros(2, 1500, 80), 2) == 1500


def test_features_are_the_outputs_of_modules() -> None:
    assert features_of(nn.Sequential(nn.Embedding(1000, 8), nn.Linear(8, 32), nn.LayerNorm(32))) == 8 + 32 + 32
    assert features_of(nn.LSTM(8, 16)) == 2 * 4 * 16


def test_the_generators_are_left_alone() -> None:
    before = torch.get_rng_state()
    chosen(job(seven_billion, Ragged(), 8, collate=lambda samples: samples[0]))
    assert torch.equal(before, torch.get_rng_state())


def test_what_the_job_says_holds() -> None:
    said = job(seven_billion, tokens(8), grains=16)
    assert chosen(said) == 16
    assert with_grains(said) is said
    assert judged(said, shoal.Plan()).why_grains == "as the job says"


def test_the_number_is_asked_for_once_and_an_open_one_is_refused() -> None:
    one = job(seven_billion, tokens(8))
    with pytest.raises(JobError, match=r"Job\(grains=None\)"):
        one.num_grains  # noqa: B018
    assert with_grains(one).num_grains == 2048
    found = judged(one, shoal.Plan().with_sections(layout={"data": 64}))
    assert (found.num_grains, found.grain_size) == (2048, 1)
    assert found.plan.batch.grains_per_microbatch == 32
    assert replace(one, grains=found.num_grains).describe()["grains"] == 2048
