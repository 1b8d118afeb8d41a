"""Single ops of hidden values: those that keep tokens apart are run, others refused with the cause."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longstraw.errors import LongstrawError, StaticTokens
from tests.small import WIDTH, Tiny, assert_refused, assert_same, gradients, inputs


class Changed(Tiny):
    """Something is made of the hidden states."""

    def __init__(self, change: Callable[[Changed, Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change
        self.one, self.each = nn.PReLU().double(), nn.PReLU(WIDTH).double()

    def hidden(self, ids: Tensor) -> Tensor:
        """Hidden states `[G, S, W]`."""
        return self.change(self, super().hidden(ids))


@pytest.mark.parametrize(
    "change",
    [
        lambda m, x: F.logsigmoid(x),
        lambda m, x: F.glu(torch.cat([x, m.query(x)], -1)),
        lambda m, x: m.one(x),
        lambda m, x: m.each(x.transpose(1, 2)).transpose(1, 2),
        lambda m, x: m.each(x.flatten(0, 1)).view_as(x),
    ],
    ids=["log_sigmoid", "glu", "prelu", "prelu of channels", "prelu of merged tokens"],
)
def test_ops_within_a_token(change: Callable[[Changed, Tensor], Tensor]) -> None:
    torch._dynamo.reset()
    assert_same(Changed(change), *inputs())


def test_gates_of_other_tokens_are_refused() -> None:
    assert_refused("glu mixes tokens", Changed(lambda m, x: F.glu(x.repeat(1, 2, 1), 1)))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda m, x: x * torch.linspace(0, 1, x.shape[1]).double()[:, None], "torch.linspace"),
        (lambda m, x: torch.take_along_dim(x, x.argsort(-1), -1), "take_along_dim"),
    ],
)
def test_ops_that_make_the_length_a_constant_are_named(change: Callable[[Changed, Tensor], Tensor], line: str) -> None:
    torch._dynamo.reset()
    with pytest.raises(StaticTokens, match=f"{line}(.|\n)*for one size only"):
        assert_same(Changed(change), *inputs())


def test_take_along_dim_of_log_probabilities_says_what_to_write() -> None:
    def step(model: nn.Module, prompt: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
        ids = torch.cat([prompt.expand(responses.shape[0], -1), responses], 1)
        logp = model(ids)[:, prompt.shape[1] - 1 : -1].log_softmax(-1)
        return (torch.take_along_dim(logp, responses[..., None], -1).squeeze(-1) * weights).sum()

    torch._dynamo.reset()
    with pytest.raises(LongstrawError, match=r"take_along_dim(.|\n)*x\.gather"):
        gradients(torch.compile(step, backend="longstraw"), Tiny(), *inputs())
