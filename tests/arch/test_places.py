"""Orders of entries by expert, and counts per expert: exact where a span's own do, refused anywhere else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  # defines the grouped product
from torch import Tensor, nn

from tests.small import WIDTH, Tiny, assert_refused, assert_same, inputs

EXPERTS = 4


class Routed(Tiny):
    """`layer(self, x, ids)` is added to the hidden states: x has entries of all tokens in one dim."""

    def __init__(self, layer: Callable[[Routed, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = layer
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) * 0.2)
        self.places = nn.Parameter(torch.randn(64, WIDTH))
        self.double()

    def hidden(self, ids: Tensor) -> Tensor:
        """Hidden states `[G, S, W]`."""
        x = super().hidden(ids)
        return x + self.layer(self, x.reshape(-1, WIDTH), ids.reshape(-1)).view_as(x)

    def expert(self, x: Tensor) -> Tensor:
        """The expert of each entry."""
        return self.router(x).argmax(-1)

    def two_experts(self, x: Tensor) -> Tensor:
        """Experts of two entries for each token, side by side."""
        return self.router(x).topk(2, -1).indices.reshape(-1)


def counts(values: Tensor) -> Tensor:
    """How many entries each expert gets."""
    return torch.histc(values.double(), bins=EXPERTS, min=0, max=EXPERTS - 1)


def grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """One matrix per group."""
    return torch.ops.transformers.grouped_mm_fallback(x, weight, ends.int())


def sorted_by(order: Tensor, y: Tensor) -> Tensor:
    """Values back in the order of tokens."""
    return y[order.argsort()]


def both(y: Tensor) -> Tensor:
    """Sums of the two entries of each token."""
    return y.view(-1, 2, y.shape[-1]).sum(1)


def ends_of_counts(m: Routed, x: Tensor, ids: Tensor) -> Tensor:
    values, order = m.expert(x).sort()
    return sorted_by(order, grouped(x[order], m.experts, counts(values).cumsum(0)))


def ends_after_a_zero(m: Routed, x: Tensor, ids: Tensor) -> Tensor:
    chosen = m.expert(x)
    order = chosen.argsort()
    return sorted_by(order, grouped(x[order], m.experts, F.pad(counts(chosen).cumsum(0), (1, 0))[1:]))


def token_of_entry(m: Routed, x: Tensor, ids: Tensor) -> Tensor:
    order = m.two_experts(x).argsort()
    return both(sorted_by(order, x[order // 2].tanh() * (1 + order % 2)[:, None]))


def token_listed(m: Routed, x: Tensor, ids: Tensor) -> Tensor:
    order = m.two_experts(x).argsort()
    listed = torch.arange(len(x))[:, None].expand(-1, 2).reshape(-1)
    return both(sorted_by(order, x[listed[order]].tanh()))


def weights_in_order(m: Routed, x: Tensor, ids: Tensor) -> Tensor:
    order = m.expert(x).argsort()
    return sorted_by(order, x[order].tanh() * (ids % 3)[order][:, None])


def undone_by_sort(m: Routed, x: Tensor, ids: Tensor) -> Tensor:
    order = m.expert(x).argsort()
    return x[order].tanh()[order.sort().indices]


def positions_shared(m: Routed, x: Tensor, ids: Tensor) -> Tensor:
    order, at = m.expert(x).argsort(), torch.arange(len(x))
    inverse = torch.empty_like(order)
    inverse[order] = at
    return x[order].tanh()[inverse] * (x.sum(-1) * at)[:, None]


@pytest.mark.parametrize(
    "layer",
    [
        ends_of_counts,
        ends_after_a_zero,
        token_of_entry,
        token_listed,
        weights_in_order,
        undone_by_sort,
        positions_shared,
    ],
)
def test_what_is_exact_with_the_orders_of_spans(layer: Callable[..., Tensor]) -> None:
    torch._dynamo.reset()
    assert_same(Routed(layer), *inputs())


def capacity(m: Routed, x: Tensor, ids: Tensor) -> Tensor:
    chosen = m.expert(x)
    order = chosen.argsort(stable=True)
    count = counts(chosen).long()
    at = torch.arange(len(x)) - (count.cumsum(0) - count)[chosen[order]]
    return sorted_by(order, x[order].tanh() * (at < 5)[:, None])


def load(m: Routed, x: Tensor, ids: Tensor) -> Tensor:
    chosen = m.expert(x)
    return x.tanh() / counts(chosen)[chosen][:, None]


def most_loaded(m: Routed, x: Tensor, ids: Tensor) -> Tensor:
    return x.tanh() * counts(m.expert(x)).max()


def logits_by_load(m: Routed, x: Tensor, ids: Tensor) -> Tensor:
    return (m.router(x) * counts(m.expert(x))) @ m.router.weight


def matrix_times_load(m: Routed, x: Tensor, ids: Tensor) -> Tensor:
    return x * (m.router.weight.T @ counts(m.expert(x)))


def scattered_load(m: Routed, x: Tensor, ids: Tensor) -> Tensor:
    ones = torch.ones_like(x[:, 0])
    return (m.router(x) * x.new_zeros(EXPERTS).scatter_add(0, m.expert(x), ones)) @ m.router.weight


def mean_of_expert(m: Routed, x: Tensor, ids: Tensor) -> Tensor:
    sums = torch.zeros(EXPERTS, WIDTH).double().index_add(0, m.expert(x), x)
    return m.router(x) @ sums


def range_of_data(m: Routed, x: Tensor, ids: Tensor) -> Tensor:
    values, order = m.expert(x).sort()
    ends = torch.histc(values.double(), bins=EXPERTS).cumsum(0)
    return sorted_by(order, grouped(x[order], m.experts, ends))


def below_the_range(m: Routed, x: Tensor, ids: Tensor) -> Tensor:
    values, order = (m.expert(x) - 1).sort()
    return sorted_by(order, grouped(x[order], m.experts, counts(values).cumsum(0)))


def without_the_first(m: Routed, x: Tensor, ids: Tensor) -> Tensor:
    values, order = m.expert(x).sort()
    return sorted_by(order, grouped(x[order], m.experts, F.pad(counts(values)[1:].cumsum(0), (1, 0))))


def by_other_values(m: Routed, x: Tensor, ids: Tensor) -> Tensor:
    order = m.expert(x).argsort()
    return sorted_by(order, grouped(x[order], m.experts, counts(m.router(x).argmin(-1)).cumsum(0)))


def from_the_highest(m: Routed, x: Tensor, ids: Tensor) -> Tensor:
    values, order = m.expert(x).sort(descending=True)
    return sorted_by(order, grouped(x[order], m.experts, counts(values).cumsum(0)))


def not_sorted(m: Routed, x: Tensor, ids: Tensor) -> Tensor:
    return grouped(x, m.experts, counts(m.expert(x)).cumsum(0))


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (capacity, "tokens per expert"),
        (load, "tokens per expert"),
        (most_loaded, "tokens per expert"),
        (logits_by_load, "tokens per expert"),
        (matrix_times_load, "tokens per expert"),
        (scattered_load, "what several tokens say to one place"),
        (mean_of_expert, "adds up what several tokens write"),
        (range_of_data, "without min and max"),
        (below_the_range, "below its min"),
        (without_the_first, "tokens per expert"),
        (by_other_values, "the groups it takes"),
        (from_the_highest, "the groups it takes"),
        (not_sorted, "the groups it takes"),
    ],
)
def test_counts_of_all_tokens_are_refused(layer: Callable[..., Tensor], why: str) -> None:
    assert_refused(why, Routed(layer))


def weights_of_tokens(m: Routed, x: Tensor, ids: Tensor) -> Tensor:
    order = m.expert(x).argsort()
    return sorted_by(order, x[order].tanh() * (ids % 3)[:, None])


def positions_in_order(m: Routed, x: Tensor, ids: Tensor) -> Tensor:
    order = m.expert(x).argsort()
    return sorted_by(order, x[order] * torch.arange(len(x))[:, None])


def column_of_tokens(m: Routed, x: Tensor, ids: Tensor) -> Tensor:
    order = m.expert(x).argsort()
    y = x[order] * 2
    y[:, 3] = x[:, 3]
    return sorted_by(order, y)


def columns_of_tokens(m: Routed, x: Tensor, ids: Tensor) -> Tensor:
    order = m.expert(x).argsort()
    y = x[order] * 2
    y[:, :4] = x[:, :4]
    return sorted_by(order, y)


def entry_by_token(m: Routed, x: Tensor, ids: Tensor) -> Tensor:
    order = m.expert(x).argsort()
    return sorted_by(order, x[order] + x[order].gather(1, ids[:, None] % WIDTH))


@pytest.mark.parametrize(
    "layer", [weights_of_tokens, positions_in_order, column_of_tokens, columns_of_tokens, entry_by_token]
)
def test_values_in_two_orders_are_refused(layer: Callable[..., Tensor]) -> None:
    assert_refused("values that were put in an order", Routed(layer))


def numbers(m: Routed, x: Tensor, ids: Tensor) -> Tensor:
    order = m.expert(x).argsort()
    return sorted_by(order, x[order] * (order % 7 == 0)[:, None])


def ranks(m: Routed, x: Tensor, ids: Tensor) -> Tensor:
    return x * m.router(x)[:, 0].argsort().argsort()[:, None]


def tokens_as_values(m: Routed, x: Tensor, ids: Tensor) -> Tensor:
    order = m.two_experts(x).argsort()
    return both(sorted_by(order, x[order // 2] * (order // 2).double()[:, None]))


def table_of_places(m: Routed, x: Tensor, ids: Tensor) -> Tensor:
    order = m.expert(x).argsort()
    return sorted_by(order, x[order] * m.places[order])


def undone_backwards(m: Routed, x: Tensor, ids: Tensor) -> Tensor:
    order = m.expert(x).argsort()
    return x[order].tanh()[order.argsort(descending=True)]


def entries_of_the_sorted(m: Routed, x: Tensor, ids: Tensor) -> Tensor:
    order = m.two_experts(x).argsort()
    again = x[order // 2].sum(-1).argsort()
    return both(sorted_by(order, x[order // 2] * x[again // 2]))


def entries_apart(m: Routed, x: Tensor, ids: Tensor) -> Tensor:
    order = m.router(x).topk(2, -1).indices.T.reshape(-1).argsort()
    return sorted_by(order, x[order // 2].tanh()).view(2, -1, WIDTH).sum(0)


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (numbers, "numbers of an order"),
        (ranks, "numbers of an order"),
        (tokens_as_values, "numbers of an order"),
        (table_of_places, "by the places of entries"),
        (undone_backwards, "cut through the token or row dim"),
        (entries_of_the_sorted, "an order that is not undone"),
        (entries_apart, "an order that is not undone"),
    ],
)
def test_numbers_of_an_order_are_no_values(layer: Callable[..., Tensor], why: str) -> None:
    assert_refused(why, Routed(layer))
