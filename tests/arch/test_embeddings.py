"""What the options of a table of embeddings change in its gradient, and in the table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.small import VOCABULARY, WIDTH, Tiny, assert_refused, assert_same, gradients, inputs, step


class Table(Tiny):
    """Its embedding is given options."""

    def __init__(self, *, frozen: bool = False, **options: Any) -> None:
        super().__init__()
        table = nn.Embedding(VOCABULARY, WIDTH, **options).double()
        table.load_state_dict(self.table.state_dict())
        self.table = table.requires_grad_(not frozen)


def test_gradients_divided_by_how_often_a_token_stands_in_the_batch_are_refused() -> None:
    assert_refused("how often a token stands in the whole batch", Table(scale_grad_by_freq=True))


@pytest.mark.parametrize("options", [{"scale_grad_by_freq": True}, {"max_norm": 1.0}])
def test_options_of_frozen_tables_change_no_gradient(options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    assert_same(Table(frozen=True, **options), *inputs())


def test_a_table_that_learns_is_not_renormed() -> None:
    assert_refused("changes one of the step's inputs", Table(max_norm=1.0))


def test_renorming_a_frozen_table_writes_to_it() -> None:
    torch._dynamo.reset()
    ours, eager = Table(frozen=True, max_norm=1.0), Table(frozen=True, max_norm=1.0)
    torch.compile(step, backend="longstraw")(ours, *inputs())
    step(eager, *inputs())
    torch.testing.assert_close(ours.table.weight, eager.table.weight, rtol=0, atol=0)


def test_sparse_gradients_have_eagers_values() -> None:
    torch._dynamo.reset()
    model = Table(sparse=True)
    _, eager = gradients(step, model, *inputs())
    expected = eager["table.weight"]
    compiled = torch.compile(step, backend="longstraw", options={"span_tokens": 4, "page_tokens": 2})
    found = gradients(compiled, model, *inputs())[1]["table.weight"]
    assert expected is not None and found is not None and found.is_sparse
    torch.testing.assert_close(found.to_dense(), expected.to_dense(), rtol=1e-11, atol=1e-12)
