"""The default number of grains: a function of the job alone, 8 for light samples, down to one heavy sample each."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, IterableDataset

import shoal
from shoal.errors import JobError
from shoal.numerics.operators import storage_key
from shoal.planner.profile.profiles import profile
from shoal.training.setup.job_model import (
    features_of,
    grains_of,
    is_convolutional,
    outline,
    positions_of,
    saved_bytes,
    with_grains,
)
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


class Diffusion(nn.Module):
    """A small U-Net of noisy images, which has the layers of its time of noise before those of its images."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.time = nn.Linear(256, width)
        self.stem, self.down = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.middle = nn.Sequential(nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.GroupNorm(4, 2 * width))
        self.up, self.last = nn.ConvTranspose2d(2 * width, width, 2, 2), nn.Conv2d(2 * width, 3, 3, padding=1)

    def forward(self, images: Tensor, times: Tensor) -> Tensor:
        wide = self.stem(images) + self.time(times[:, None].float() * torch.ones(256))[:, :, None, None]
        deep = self.middle(self.down(functional.silu(wide)))
        return self.last(torch.cat([self.up(functional.silu(deep)), wide], 1))


def squares(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    images, times = batch
    return (model(images, times) - images).square().sum(), len(images)


def noisy(side: int = 64, batch: int = 4096, loss: Any = squares, model: Any = Diffusion) -> shoal.Job:
    return replace(job(model, pixels(side), batch), loss=loss)


def test_a_convolutional_sample_weighs_what_autograd_saves() -> None:
    """The planner's profile and a real forward agree. Each layer has positions of its own, and the first has one."""
    one, batch = noisy(), (torch.zeros(2, 3, 64, 64), torch.zeros(2, dtype=torch.long))
    model = Diffusion()
    own = {storage_key(t) for t in (*model.parameters(), *batch)}
    saved: dict[int, Tensor] = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.setdefault(storage_key(t), t), lambda t: t):
        squares(model, batch)
    real = sum(t.untyped_storage().nbytes() for key, t in saved.items() if key not in own) / 2
    planned = profile(Diffusion, squares, lambda n: tuple(t[:1].repeat(n, *[1] * (t.ndim - 1)) for t in batch))
    operations = [operation for unit in planned.units for operation in unit.body.operations]
    assert saved_bytes(squares, Diffusion(), batch) / 2 == real
    assert sum(o.saved_bytes.per_sample for o in operations) == pytest.approx(real, rel=0.02)
    assert real > 12 * 4 * positions_of(model, batch, 2) * features_of(model)
    found = grains_of(one, outline(one))
    assert found.num_grains == 16
    assert found.why == f"default for heavy samples: about {real / 1e6:.3g} MB of activations each"


def test_a_loss_or_a_model_that_reads_values_has_an_estimate_too() -> None:
    def logs(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        total, number = squares(model, batch)
        seen.append(total.item())
        return total, number

    class Reads(Diffusion):
        def forward(self, images: Tensor, times: Tensor) -> Tensor:
            return super().forward(images, times) if images.sum() >= 0 else images

    seen: list[float] = []
    batch = pixels(64)[0][:2], torch.zeros(2, dtype=torch.long)
    assert saved_bytes(logs, Diffusion(), batch) == saved_bytes(squares, Diffusion(), batch) > 0
    assert saved_bytes(squares, Reads(), batch) == 0
    assert (chosen(noisy(loss=logs)), seen) == (16, [])
    assert chosen(noisy(model=Reads)) == 8  # by the outputs of its first layer


def test_no_forward_is_run_for_what_is_light_anyway_or_has_one_convolution_first() -> None:
    def never(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        raise AssertionError("it runs")

    assert chosen(noisy(16, 64, never)) == 8
    patches = nn.Sequential(nn.Conv2d(3, 8, 16, 16), nn.Linear(8, 8))
    assert not is_convolutional(patches)
    assert is_convolutional(Diffusion())


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
