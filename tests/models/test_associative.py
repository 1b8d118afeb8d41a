"""Models that call `associative_scan`, against eager, in float64."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan

import longstraw
from longstraw.arch import associative
from longstraw.errors import LongstrawError
from tests.small import Tiny, assert_same, gradients, inputs, step
from tests.sweeps import sweep


class Scanning(Tiny):
    """Beside attention a scan of hidden values."""

    scan: Callable[[Scanning, Tensor], Tensor]

    def __init__(self, scan: Callable[[Scanning, Tensor], Tensor]) -> None:
        super().__init__()
        self.scan = scan
        self.gates, self.learned = nn.Linear(16, 16).double(), nn.Parameter(torch.rand(16).double())

    def attend(self, x: Tensor) -> Tensor:
        return super().attend(x + torch.tanh(self.scan(self, x)))


def scan(function: Callable[[Any, Any], Any], xs: Any, dim: int = 1, **kwargs: Any) -> Any:
    return associative_scan(function, xs, dim, combine_mode="generic", **kwargs)


def affine(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return left[0] * right[0], left[1] * right[0] + right[1]


def recurrence(m: Scanning, x: Tensor) -> Tensor:
    return scan(affine, (torch.sigmoid(m.gates(x)), x))[1]


def of_complex_numbers(m: Scanning, x: Tensor) -> Tensor:
    turn = torch.polar(torch.sigmoid(m.gates(x)), x)
    return scan(affine, (turn, torch.complex(x, 0 * x)))[1].real


def of_matrices(m: Scanning, x: Tensor) -> Tensor:
    """A product of matrices has an order."""
    return scan(lambda left, right: right @ left, torch.sigmoid(x).unflatten(-1, (4, 4)) / 2).flatten(2)


def of_sizes_that_differ(m: Scanning, x: Tensor) -> Tensor:
    def combine(left: dict[str, Tensor], right: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            "rate": left["rate"] * right["rate"],
            "state": left["state"] * right["rate"][..., None, None] + right["state"],
        }

    outer = x[..., :4, None] * x[..., None, 4:8]
    return scan(combine, {"rate": torch.sigmoid(x[..., 0]), "state": outer})["state"].flatten(2)


def checkpointed(m: Scanning, x: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(recurrence, m, x, use_reentrant=False)


EXACT: dict[str, Callable[[Scanning, Tensor], Tensor]] = {
    "in a checkpointed region": checkpointed,
    "sum": lambda m, x: scan(lambda left, right: left + right, x),
    "product": lambda m, x: scan(lambda left, right: left * right, torch.sigmoid(x)),
    "largest": lambda m, x: scan(torch.maximum, x),
    "last": lambda m, x: scan(lambda left, right: right, x),
    "tokens last": lambda m, x: scan(torch.maximum, x.mT, 2).mT,
    "dim from the end": lambda m, x: scan(torch.maximum, x, -2),
    "linear recurrence": recurrence,
    "log of sums": lambda m, x: scan(torch.logaddexp, x),
    "complex numbers": of_complex_numbers,
    "matrices": of_matrices,
    "a dict of sizes that differ": of_sizes_that_differ,
    "learned, in the combine function": lambda m, x: scan(
        lambda left, right: left + right + m.learned * left * right, 0.1 * x
    ),
}


def compiled() -> Callable[..., Tensor]:
    return torch.compile(step, backend="longstraw", options={"span_tokens": 4, "page_tokens": 2})


SOONER = ("in a checkpointed region", "linear recurrence", "complex numbers", "a dict of sizes that differ", "matrices")


@pytest.mark.parametrize("name", sweep(EXACT, always=SOONER))
def test_scans_along_tokens_are_exact(name: str) -> None:
    torch._dynamo.reset()
    assert_same(Scanning(EXACT[name]), *inputs())


def test_many_spans_and_other_lengths_compile_once() -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    model, run = Scanning(recurrence), compiled()
    gradients(run, model, *inputs())
    graphs = counters["stats"]["unique_graphs"]
    for prompt, response in ((20, 7), (33, 2)):
        given = inputs(prompt, response)
        loss, grads = gradients(run, model, *given)
        grads = {name: None if grad is None else grad.clone() for name, grad in grads.items()}
        expected_loss, expected = gradients(step, model, *given)
        torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
        torch.testing.assert_close(grads, expected, rtol=1e-10, atol=1e-12)
    assert counters["stats"]["unique_graphs"] == graphs


WRONG: dict[str, tuple[str, Callable[[Scanning, Tensor], Tensor]]] = {
    "backwards": ("tokens", lambda m, x: scan(torch.maximum, x, reverse=True)),
    "over rows": ("rows", lambda m, x: scan(torch.maximum, x, 0)),
    "not associative": ("must be associative", lambda m, x: scan(lambda left, right: left - 2 * right, x)),
    "mixes rows": ("treat rows independently", lambda m, x: scan(lambda left, right: left + right.sum(0), x)),
    "reads all tokens": ("differs from token to token", lambda m, x: scan(lambda left, right: left + x.mean(1), x)),
    "of integers": ("neither real", lambda m, x: scan(torch.maximum, (8 * x).long()).to(x.dtype) * x),
    "reads the number of rows": ("reads a size", lambda m, x: scan(lambda left, right: left + right * len(left), x)),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_scan_along_tokens_is_refused(name: str) -> None:
    message, function = WRONG[name]
    torch._dynamo.reset()
    with pytest.raises(LongstrawError, match=message) as refused:
        assert_same(Scanning(function), *inputs())
    assert "test_associative.py" in str(refused.value)


def test_the_loss_may_scan_too() -> None:
    """Discounted returns, from the last token to the first."""

    def objective(logp: Tensor, rewards: Tensor) -> Tensor:
        rates = torch.full_like(rewards, 0.9)
        returns = scan(affine, (rates, rewards), reverse=True)[1]
        return -(logp * returns).mean()

    def run(model: nn.Module, prompt: Tensor, responses: Tensor, rewards: Tensor) -> Tensor:
        ids = torch.cat([prompt.expand(responses.shape[0], -1), responses], 1)
        logits = model(ids)[:, prompt.shape[1] - 1 : -1]
        return objective(-F.cross_entropy(logits.mT, responses, reduction="none"), rewards)

    torch._dynamo.reset()
    model, (prompt, responses, *_) = Scanning(recurrence), inputs()
    rewards = torch.rand(responses.shape, dtype=torch.float64)
    parity = longstraw.verify(run, model, prompt, responses, rewards)
    assert parity.ok and parity.loss_error < 1e-12


@pytest.mark.parametrize("where", ["model", "loss"])
def test_an_attribute_of_a_side_is_read_at_each_token(where: str) -> None:
    """Before 2.14, Dynamo takes it out of the combine function, as if it were the same for every token."""

    def combine(left: Tensor, right: Tensor) -> Tensor:
        return left * right.real

    def in_loss(model: nn.Module, prompt: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
        return step(model, prompt, responses, scan(combine, weights))

    model = Scanning(lambda m, x: scan(combine, x)) if where == "model" else Tiny()
    kept_inside = torch.__version__ >= (2, 14)
    torch._dynamo.reset()
    with contextlib.nullcontext() if kept_inside else pytest.raises(LongstrawError, match="attribute of a value"):
        assert_same(model, *inputs(), function=in_loss if where == "loss" else step)


def test_a_scan_in_bfloat16_is_no_contradiction() -> None:
    torch._dynamo.reset()
    narrow = Scanning(lambda m, x: scan(affine, (torch.sigmoid(x), x))[1]).bfloat16()
    loss = compiled()(narrow, *inputs())
    torch.testing.assert_close(loss, step(narrow, *inputs()), rtol=0.05, atol=0.05)


def test_other_graphs_of_the_step_may_scan_too() -> None:
    """A graph without a model is left to the inner backend."""

    def normalised(rewards: Tensor) -> Tensor:
        return scan(torch.maximum, rewards, 0) + scan(lambda left, right: left + right, rewards[None], 1)[0]

    torch._dynamo.reset()
    rewards = torch.randn(5, dtype=torch.float64)
    expected = normalised(rewards)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(normalised, backend="longstraw")(rewards), expected)


def test_one_scan_for_one_combine_function() -> None:
    torch._dynamo.reset()
    gradients(compiled(), Scanning(recurrence), *inputs())
    made = len(associative.RULES)
    torch._dynamo.reset()
    gradients(compiled(), Scanning(recurrence), *inputs())
    assert len(associative.RULES) == made
