"""Masks that multiply the scores: what is understood, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from longstraw.errors import LongstrawError
from tests.small import HEADS, KEY_HEADS, Tiny, assert_refused, assert_same, inputs, records, step

Mask = Callable[[Tensor, Tensor], Tensor]
"""`(scores, factor) -> scores`"""


class Multiplied(Tiny):
    """Explicit attention whose scores are masked by a function of a stored triangle, longer than rows are."""

    def __init__(self, mask: Mask, dtype: torch.dtype = torch.float64, *, learns: bool = False) -> None:
        super().__init__()
        self.mask = mask
        factor = torch.ones(1, 1, 32, 32).tril().to(dtype)
        self.factor: Tensor
        if learns:
            self.factor = nn.Parameter(factor)
        else:
            self.register_buffer("factor", factor)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(self.query(x), HEADS), *(self.heads(f(x), KEY_HEADS) for f in (self.key, self.value))
        k, v = (t.repeat_interleave(HEADS // KEY_HEADS, 1) for t in (k, v))
        scores = q @ k.transpose(-1, -2) * 0.3
        return torch.softmax(self.mask(scores, self.factor[:, :, : x.shape[1], : x.shape[1]]), -1) @ v


UNDERSTOOD: dict[str, tuple[Mask, torch.dtype]] = {
    "added": (lambda s, b: s * b + -1e4 * (1 - b), torch.float64),
    "taken away": (lambda s, b: b * s - 1e9 * (1 - b), torch.float64),
    "added first, divided": (lambda s, b: (b - 1) / 1e-5 + s * b, torch.float64),
    "cast": (lambda s, b: s * b.to(s.dtype) + (1.0 - b.double()) * -1e4, torch.int64),
    "of bools": (lambda s, b: s * b + -1e4 * (~b), torch.bool),
    "then a bias": (
        lambda s, b: s * b + -1e4 * (1 - b) + -0.1 * torch.arange(s.shape[-1], dtype=s.dtype),
        torch.float64,
    ),
}


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_a_factor_is_a_mask(name: str) -> None:
    torch._dynamo.reset()
    model = Multiplied(*UNDERSTOOD[name])
    assert_same(model, *inputs())
    branch = records(step, model, *inputs())["insert_state"].branches[0]
    mask = next(mask for mask in branch.masks if mask.dtype == torch.bool)
    assert branch.finite[branch.masks.index(mask)]
    assert bool(mask.zero_or_one) == (UNDERSTOOD[name][1] != torch.bool)


def test_a_triangle_of_ones_needs_no_check() -> None:
    def mask(scores: Tensor, _: Tensor) -> Tensor:
        seen = torch.ones(scores.shape[-2:], dtype=scores.dtype).tril()
        return scores * seen + -1e4 * (1 - seen)

    torch._dynamo.reset()
    assert_same(Multiplied(mask), *inputs())
    assert not records(step, Multiplied(mask), *inputs())["insert_state"].branches[0].masks[0].zero_or_one


@pytest.mark.parametrize(
    ("value", "why"), [(0.5, "other values than 0 and 1"), (float("nan"), "other values"), (1.0, "not causal")]
)
def test_values_are_looked_at_in_every_step(value: float, why: str) -> None:
    torch._dynamo.reset()
    model = Multiplied(UNDERSTOOD["added"][0])
    compiled = torch.compile(step, backend="longstraw", options={"span_tokens": 4, "page_tokens": 2})
    compiled(model, *inputs()).backward()
    model.factor[0, 0, 3, 5] = value
    with pytest.raises(LongstrawError, match=why):
        compiled(model, *inputs())


PAIRS = "reads a mask or bias over pairs of tokens|combines hidden values with a mask|not hugely negative"
REFUSED: dict[str, Mask] = {
    "not low": lambda s, b: s * b + -100 * (1 - b),
    "high": lambda s, b: s * b - -1e4 * (1 - b),
    "not zero where seen": lambda s, b: s * b + -1e4 * (2 - b),
    "scaled": lambda s, b: torch.add(s * b, 1 - b, alpha=-1e4) * 2,
    "of another": lambda s, b: s * b + -1e4 * (1 - b.flip(-1)),
    "multiplied twice": lambda s, b: s * b * b + -1e4 * (1 - b),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_products_are_refused(name: str) -> None:
    assert_refused(PAIRS, Multiplied(REFUSED[name]))


def test_a_factor_that_learns_is_refused() -> None:
    assert_refused("cuts a table that learns", Multiplied(UNDERSTOOD["added"][0], learns=True))


def test_a_factor_that_is_computed_is_refused() -> None:
    def mask(scores: Tensor, factor: Tensor) -> Tensor:
        square = factor.square()
        return scores * square + -1e4 * (1 - square)

    assert_refused("may be other than 0 and 1", Multiplied(mask))


def test_a_token_that_sees_a_key_no_better_than_those_it_does_not_is_refused() -> None:
    def mask(scores: Tensor, factor: Tensor) -> Tensor:
        at = torch.arange(scores.shape[-1])
        return scores * factor + -1e4 * (1 - factor) + torch.where(at < 2, -1e4, 0.0).to(scores.dtype)

    assert_refused("may see no token at all", Multiplied(mask))
