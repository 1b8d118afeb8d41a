"""Values written into hidden values and logits by index, slice or mask, as when tokens are banned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.small import VOCABULARY, Tiny, assert_refused, assert_same, inputs

Edit = Callable[[Tensor], Tensor]


class Edited(Tiny):
    """Logits pass through a function."""

    def __init__(self, edit: Edit) -> None:
        super().__init__()
        self.edit = edit

    def forward(self, ids: Tensor) -> Tensor:
        return self.edit(super().forward(ids))


def written(place: Any, value: Any, *, into_a_copy: bool = True) -> Edit:
    """A function that writes a value to a place; both may be computed of the logits."""

    def edit(logits: Tensor) -> Tensor:
        logits = logits.clone() if into_a_copy else logits
        logits[place(logits) if callable(place) else place] = value(logits) if callable(value) else value
        return logits

    return edit


def step(model: nn.Module, prompt: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
    """Of log-probabilities of tokens that no test bans."""
    ids = torch.cat([prompt.expand(responses.shape[0], -1), responses], 1)
    logp = torch.log_softmax(model(ids)[:, prompt.shape[1] - 1 : -1], -1)
    return (logp.gather(-1, responses.clamp(10, 40)[..., None]).squeeze(-1) * weights).sum()


EDITS: dict[str, Edit] = {
    "one class": written((..., 0), -float("inf")),
    "one class, in place": written((..., 0), -1.0, into_a_copy=False),
    "a range of classes": written((..., slice(45, None)), -1e9),
    "a range from another": written((..., slice(45, None)), lambda x: x[..., :5]),
    "listed classes": written((..., [3, 4]), -1e9),
    "listed classes, all dims": written((slice(None), slice(None), [3, 4]), -1e9),
    "classes of a tensor": written((..., torch.tensor([3, 4])), -1e9),
    "classes from others": written((..., [3, 4]), lambda x: x[..., [5, 6]]),
    "classes from one other": written((..., [3, 4]), lambda x: x[..., [5]]),
    "classes of a matrix": written((..., [[3, 4], [5, 6]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]).double()),
    "one number for each row": written((..., 3), lambda x: torch.arange(x.shape[0]).double()[:, None]),
    "added to": written((..., [3, 4]), lambda x: x[..., [3, 4]] + 1),
    "index_fill": lambda x: x.index_fill(-1, torch.tensor([3, 4]), -1e9),
    "index_fill_": lambda x: x.clone().index_fill_(-1, torch.tensor([3, 4]), -1e9),
    "index_copy": lambda x: x.index_copy(-1, torch.tensor([3, 4]), 2 * x[..., :2]),
    "index_add": lambda x: x.index_add(-1, torch.tensor([3, 4]), 2 * x[..., :2]),
    "all": written(slice(None), lambda x: x.masked_fill(x < -1, -1.0)),
    "where they are low": written(lambda x: x < -1, -1.0),
    "where they are low, in place": written(lambda x: x < -1, -1.0, into_a_copy=False),
    "nowhere": written(torch.isnan, 0.0),
    "whole tokens": written(lambda x: x.sum(-1) > 0, 0.25),
}


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("span_tokens", [3, 100])
def test_written_values_are_exact(name: str, span_tokens: int) -> None:
    torch._dynamo.reset()
    assert_same(Edited(EDITS[name]), *inputs(), function=step, span_tokens=span_tokens)


def classes_by_mask(model: nn.Module, prompt: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
    banned = torch.arange(VOCABULARY) < 3

    def edit(logits: Tensor) -> Tensor:
        logits[:, :, banned] = -3.0
        return logits

    model.edit = edit
    return step(model, prompt, responses, weights)


def values_of_each_token(model: nn.Module, prompt: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
    ids = torch.cat([prompt.expand(responses.shape[0], -1), responses], 1)
    logp = torch.log_softmax(model(ids)[:, prompt.shape[1] - 1 : -1], -1).gather(-1, responses[..., None]).squeeze(-1)
    logp[weights < 0] = 0.0
    logp[:, 0] = 2 * logp[:, 1]
    logp[:, [2]] = 0.5
    return (logp * weights).sum()


def whole_numbers(model: nn.Module, prompt: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
    """What is written becomes a value of the dtype that it is written to."""
    ids = torch.cat([prompt.expand(responses.shape[0], -1), responses], 1)
    ids[ids > 30] = torch.tensor(7.9)
    counted = (model(ids) > 0).long()
    counted[counted == 0] = torch.tensor(2.5)
    logp = torch.log_softmax(model(ids) * counted, -1)[:, prompt.shape[1] - 1 : -1]
    return (logp.gather(-1, responses[..., None]).squeeze(-1) * weights).sum()


@pytest.mark.parametrize("function", [classes_by_mask, values_of_each_token, whole_numbers])
def test_a_mask_of_classes_or_of_tokens(function: Callable[..., Tensor]) -> None:
    torch._dynamo.reset()
    assert_same(Edited(lambda x: x), *inputs(), function=function)


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (written((slice(None), [0, 1]), 1.0), r"(?s)mixes tokens: it writes.*torch\.where"),
        (written((slice(None), slice(None, 2), 1), 1.0), "mixes tokens: it writes a part of that dim"),
        (written([0], 1.0), "mixes rows: it writes"),
    ],
    ids=["tokens", "first tokens", "rows"],
)
def test_writing_to_some_tokens_or_rows_is_refused(edit: Edit, why: str) -> None:
    assert_refused(why, Edited(edit))
