"""Parts of a batch that are empty, sparse or nested batches, padding, metrics that count nothing."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import default_collate

from benchmarks.habits.plain import Points, cross_entropy, mlp, points, train
from benchmarks.habits.program import habit


def few_positives():
    """One sample in 16 has a label."""
    x, y = points()
    return x, torch.where(torch.arange(64) % 16 == 5, y, -1)


@habit("empty parts")
def positives_only():
    """A detection loss of labelled samples alone; most parts of a batch have none and return a constant zero."""

    def loss(model, batch):
        on = batch[1] >= 0
        if not on.any():
            return torch.zeros(()), 0
        return F.cross_entropy(model(batch[0][on]), batch[1][on], reduction="sum"), int(on.sum())

    return {"train_data": few_positives, "loss": loss}


class Holes(Points):
    def __getitem__(self, i):
        return None if i % 16 < 7 or i % 3 == 0 else super().__getitem__(i)


def drop_none(items):
    return default_collate([item for item in items if item is not None])


@habit("empty parts")
def items_left_out():
    """Files that cannot be read are None; the collate function leaves them out, and some grains have no other."""
    return {"train_data": Holes, "collate": drop_none}


def drop_none_or_empty(items):
    items = [item for item in items if item is not None]
    return default_collate(items) if items else (torch.zeros(0, 16), torch.zeros(0, dtype=torch.long))


@habit("empty parts")
def empty_batches():
    """The collate function gives a batch of no rows where all items of a part are None."""
    return {"train_data": Holes, "collate": drop_none_or_empty}


@habit("empty parts")
def all_ignored():
    """Most labels are ignored: the loss of a part without any is a sum of nothing."""

    def loss(model, batch):
        total = F.cross_entropy(model(batch[0]), batch[1], ignore_index=-1, reduction="sum")
        return total, (batch[1] != -1).sum()

    return {"train_data": few_positives, "loss": loss, "eval_data": few_positives}


@habit("empty parts")
def weight_zero():
    """Samples carry weights, which are zero for whole parts of a batch."""

    def data():
        x, y = points()
        return x, y, (torch.arange(64) % 16 > 11).float()

    def loss(model, batch):
        each = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return (each * batch[2]).sum(), batch[2].sum()

    return {"train_data": data, "loss": loss}


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.label, self.box = nn.Linear(16, 16), nn.Linear(16, 4), nn.Linear(16, 2)

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return self.label(h), self.box(h)


@habit("empty parts")
def head_of_some_samples():
    """A head takes part only where a batch has a positive sample."""

    def loss(model, batch):
        label, box = model(batch[0])
        total, on = F.cross_entropy(label, batch[1], reduction="sum"), batch[1] == 3
        if on.any():
            total = total + (box[on] - batch[0][on][:, :2]).abs().sum()
        return total, len(label)

    return {"model": TwoHeads, "loss": loss}


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.route, self.experts = nn.Linear(16, 4), nn.ModuleList(nn.Linear(16, 4) for _ in range(4))

    def forward(self, x):
        p = self.route(x).softmax(1)
        chosen, y = p.argmax(1), torch.zeros(len(x), 4)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero()[:, 0]
            if len(rows):
                y = y.index_add(0, rows, expert(x[rows]) * p[rows, i : i + 1])
        return y


@habit("empty parts")
def expert_without_samples():
    """A mixture calls an expert only where a sample goes to it."""
    return {"model": Routed}


@habit("empty parts")
def no_gradient_in_a_part():
    """The loss of a part may be a constant of weight one: nothing of it is learnt."""

    def loss(model, batch):
        hard = batch[1] == 0
        if not hard.any():
            return torch.tensor(0.0), len(batch[1])
        return F.cross_entropy(model(batch[0][hard]), batch[1][hard], reduction="sum"), len(batch[1])

    def data():
        x, y = points()
        return x, torch.where(torch.arange(64) % 8 == 1, 0, y.clamp(min=1))

    return {"train_data": data, "loss": loss}


# ------------------------------------------------------------------------------------------------ sparse and nested


class Rectified(Points):
    def __getitem__(self, i):
        return F.relu(self.x[i]), self.y[i]


def sparse_batches(convert):
    def collate(items):
        x, y = default_collate(items)
        return convert(x), y

    return collate


def sparse_loss(model, batch):
    logits = torch.sparse.mm(batch[0], model.weight.T) + model.bias
    return F.cross_entropy(logits, batch[1], reduction="sum"), len(batch[1])


@habit("sparse and nested")
def coo_batch():
    """Inputs are sparse in coordinates."""
    collate = sparse_batches(torch.Tensor.to_sparse_coo)
    return {"model": lambda: nn.Linear(16, 4), "train_data": Rectified, "collate": collate, "loss": sparse_loss}


@habit("sparse and nested")
def csr_batch():
    """Inputs are sparse in compressed rows."""
    collate = sparse_batches(torch.Tensor.to_sparse_csr)
    return {"model": lambda: nn.Linear(16, 4), "train_data": Rectified, "collate": collate, "loss": sparse_loss}


class Lengths(Points):
    """Sequences of 2 to 5 steps of 3 numbers."""

    def __getitem__(self, i):
        return self.x[i, : 3 * (2 + i % 4)].view(-1, 3), self.y[i]


def nested(items):
    x = torch.nested.nested_tensor([item[0] for item in items], layout=torch.jagged)
    return x, torch.stack([item[1] for item in items])


@habit("sparse and nested")
def nested_batch():
    """Sequences are a nested tensor."""

    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 16), nn.Linear(16, 4)

        def forward(self, x):
            h = torch.tanh(self.a(x))
            return self.b(torch.stack([part.sum(0) for part in h.unbind()]))

    return {"model": Sums, "train_data": Lengths, "collate": nested}


class Words(nn.Module):
    def __init__(self, sparse=False):
        super().__init__()
        self.table, self.head = nn.Embedding(20, 8, sparse=sparse), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.table((x.abs() * 8).long().clamp(0, 19)).sum(1))


@habit(
    "sparse and nested",
    "either",
    why="sums of sparse gradients are not those of dense ones in every layout",
    names=("table",),
)
def sparse_gradients():
    """An embedding gives sparse gradients."""
    return {"model": lambda: Words(True)}


def ragged(items):
    """Rows of other lengths one after another, with the places where they begin."""
    ids = [(row.flatten().abs() * 8).long().clamp(0, 19) for row, _ in items]
    starts = torch.tensor([0, *[len(part) for part in ids[:-1]]]).cumsum(0)
    return {"ids": torch.cat(ids), "starts": starts, "y": torch.stack([y for _, y in items])}


@habit("sparse and nested")
def embedding_bag():
    """Bags of words with offsets: a batch's tensors have no common first dim."""

    class Bags(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag, self.head = nn.EmbeddingBag(20, 8, mode="sum"), nn.Linear(8, 4)

        def forward(self, ids, starts):
            return self.head(self.bag(ids, starts))

    def loss(model, batch):
        return F.cross_entropy(model(batch["ids"], batch["starts"]), batch["y"], reduction="sum"), len(batch["y"])

    return {"model": Bags, "train_data": Lengths, "collate": ragged, "loss": loss}


# ---------------------------------------------------------------------------------------------------------- padding


def padded(items):
    return pad_sequence([x for x, _ in items], batch_first=True), torch.stack([y for _, y in items])


def padded_with_lengths(items):
    x, y = padded(items)
    return x, y, torch.tensor([len(row) for row, _ in items])


LONGEST = "a sample's value depends on the longest sample of its grain, as batch norm's on its grain: so, or refused"


def padded_by_grain(**pieces):
    """The plain loop with eight grains a batch, each padded to its own longest sample."""
    collate, loss = pieces["collate"], pieces["loss"]

    def grains(items):
        return [collate(items[i : i + 2]) for i in range(0, len(items), 2)]

    def summed(model, parts):
        each = [loss(model, part) for part in parts]
        return sum(total for total, _ in each), sum(weight for _, weight in each)

    return train(**{**pieces, "collate": grains, "loss": summed})


class BothWays(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(3, 8, batch_first=True, bidirectional=True), nn.Linear(16, 4)

    def forward(self, x, lengths=None):
        if lengths is None:
            return self.head(self.rnn(x)[0][:, 0])
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.rnn(packed)[1][0].transpose(0, 1).flatten(1))


@habit("padding", "either", reference=padded_by_grain, why=LONGEST, names=("pad",))
def padded_both_ways():
    """A recurrent net reads padded sequences backwards."""
    return {"model": BothWays, "train_data": Lengths, "collate": padded}


@habit("padding")
def packed_sequences():
    """The same by packed sequences."""

    def loss(model, batch):
        return F.cross_entropy(model(batch[0], batch[2]), batch[1], reduction="sum"), len(batch[1])

    return {"model": BothWays, "train_data": Lengths, "collate": padded_with_lengths, "loss": loss}


@habit("padding")
def padded_to_one_length():
    """The same, padded to one length for all."""

    def collate(items):
        return torch.stack([F.pad(x, (0, 0, 0, 5 - len(x))) for x, _ in items]), torch.stack([y for _, y in items])

    return {"model": BothWays, "train_data": Lengths, "collate": collate}


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)).mean(1))


@habit("padding", "either", reference=padded_by_grain, why=LONGEST, names=("pad",))
def mean_over_padding():
    """A mean over time counts padded steps."""
    return {"model": Mean, "train_data": Lengths, "collate": padded}


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(3, 8), nn.Linear(8, 4)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x, lengths):
        hidden = torch.arange(x.shape[1])[None] >= lengths[:, None]
        h = self.embed(x)
        h, _ = self.attention(h, h, h, key_padding_mask=hidden)
        return self.head(h.masked_fill(hidden[..., None], 0).sum(1) / lengths[:, None])


@habit("padding")
def attention_with_mask():
    """Attention over padded sequences with a mask."""

    def loss(model, batch):
        return F.cross_entropy(model(batch[0], batch[2]), batch[1], reduction="sum"), len(batch[1])

    return {"model": Attends, "train_data": Lengths, "collate": padded_with_lengths, "loss": loss}


@habit("padding")
def tokens_padded():
    """A loss of tokens with padding that is ignored: its weight is the number of tokens."""

    class Tokens(Points):
        def __getitem__(self, i):
            return (self.x[i].abs() * 8).long().clamp(0, 19)[: 4 + 3 * i % 12]

    class Next(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)

        def forward(self, ids):
            return self.head(self.table(ids.clamp(min=0)))

    def collate(items):
        return pad_sequence(items, batch_first=True, padding_value=-100)

    def loss(model, ids):
        y = ids[:, 1:]
        total = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum")
        return total, (y != -100).sum()

    return {"model": Next, "train_data": Tokens, "collate": collate, "loss": loss, "eval_data": Tokens}


# ---------------------------------------------------------------------------------------------------------- metrics


@habit("metrics")
def metric_is_nan():
    """A metric divides by what is zero for the whole evaluation set."""

    def share(model, batch):
        on = batch[1] == 9
        return (model(batch[0])[on].argmax(1) == 9).float().mean() * 1.0, len(batch[1])

    return {"eval_data": points, "metrics": {"share": share}}


@habit("metrics")
def metric_counts_nothing():
    """A metric counts samples of a class that the evaluation set lacks."""

    def recall(model, batch):
        on = batch[1] == 9
        return (model(batch[0])[on].argmax(1) == 9).sum(), on.sum()

    return {"eval_data": points, "metrics": {"recall": recall}}


@habit("metrics")
def evaluation_loss_is_nan():
    """One evaluation sample is NaN, and so the evaluation's loss."""

    def data():
        x, y = points()
        x[9, 3] = float("nan")
        return x, y

    return {"eval_data": data, "model": mlp, "loss": cross_entropy}


@habit("metrics")
def metric_of_some_batches():
    """A metric counts in some batches alone."""

    def recall(model, batch):
        on = batch[1] == 3
        return (model(batch[0])[on].argmax(1) == 3).sum(), on.sum()

    return {"eval_data": points, "metrics": {"recall": recall}}
