"""Backward leaves out what adds nothing: padding at the ends of rows, rows whose advantage is zero."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from longstraw.runtime import needed
from longstraw.runtime.prefix_tree import Node
from longstraw.runtime.spans import Runner
from tests.small import Tiny, assert_same, gradients, inputs, step

PROMPT, RESPONSE, PAGE = 9, 24, 4


@pytest.fixture
def tokens_run(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of every span that is run with autograd, for all its rows, from the responses' first on."""
    found: list[int] = []
    record = Runner.record

    def counted(self: Runner, where: object, leaves: object, *, appends: bool) -> object:
        if where.lo >= PROMPT - 1:
            found.append((where.hi - where.lo) * len(where.rows))
        return record(self, where, leaves, appends=appends)

    monkeypatch.setattr(Runner, "record", counted)
    return found


def weighted(lengths: list[int]) -> tuple[Tensor, ...]:
    """Prompt, responses and weights that are zero after so many tokens of each response."""
    prompt, responses, weights = inputs(PROMPT, RESPONSE, len(lengths))
    return prompt, responses, weights * (torch.arange(RESPONSE) < torch.tensor(lengths)[:, None])


@pytest.mark.parametrize("lengths", [[24, 3, 11, 0], [1, 24, 24, 2], [7, 7, 7, 7], [0, 0, 0, 0]])
@pytest.mark.parametrize("rows", [1, 2])
def test_padding_is_not_replayed(tokens_run: list[int], lengths: list[int], rows: int) -> None:
    torch._dynamo.reset()
    assert_same(Tiny(), *weighted(lengths), replay_rows=rows, page_tokens=PAGE, prompt_grad="exact")
    # The last prompt token, which predicts the first one, is run beside them where they have a node of their own.
    pages = [-(-n // PAGE) * PAGE for n in lengths]
    assert sum(lengths) <= sum(tokens_run) <= sum(pages) + len(lengths) + (not any(lengths))


@pytest.mark.parametrize("prompt_grad", ["exact", "none"])
def test_rows_with_states_of_their_own_stay_together(prompt_grad: str) -> None:
    """Prompts that differ: the nodes of their responses hang from nodes of several rows."""
    torch._dynamo.reset()
    model, (_, responses, weights) = Tiny(), weighted([24, 3, 11, 0])
    prompts = torch.randint(50, (4, PROMPT), generator=torch.Generator().manual_seed(3))

    def rows(model: nn.Module, prompts: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
        logits = model(torch.cat([prompts, responses], 1))[:, prompts.shape[1] - 1 : -1]
        return (torch.log_softmax(logits, -1).gather(-1, responses[..., None]).squeeze(-1) * weights).sum()

    if prompt_grad == "exact":
        assert_same(model, prompts, responses, weights, function=rows, replay_rows=3)
        return
    apart = torch.compile(rows, backend="longstraw", options={"prompt_grad": "none", "replay_rows": 1})
    _, expected = gradients(apart, model, prompts, responses, weights)
    expected = {name: None if grad is None else grad.clone() for name, grad in expected.items()}
    torch._dynamo.reset()
    together = torch.compile(rows, backend="longstraw", options={"prompt_grad": "none", "replay_rows": 3})
    _, found = gradients(together, model, prompts, responses, weights)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_a_result_that_is_not_finite_is_replayed() -> None:
    """Zero times infinity is no number, in eager and here."""

    def masked(model: nn.Module, prompt: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
        logits = model(torch.cat([prompt.expand(4, -1), responses], 1))[:, prompt.shape[1] - 1 : -1]
        logp = torch.log_softmax(logits, -1).gather(-1, responses[..., None]).squeeze(-1)
        return torch.where(weights != 0, logp * weights, 0).sum()

    class Infinite(Tiny):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) / (ids != 7)[..., None]

    model, (prompt, responses, weights) = Infinite(), weighted([24, 3, 11, 5])
    prompt[prompt == 7] = 8
    responses[responses == 7] = 8
    responses[1, 20] = 7
    torch._dynamo.reset()
    _, expected = gradients(masked, model, prompt, responses, weights)
    assert any(grad is not None and grad.isnan().any() for grad in expected.values())
    expected = {name: None if grad is None else grad.isnan() for name, grad in expected.items()}
    run = torch.compile(masked, backend="longstraw", options={"replay_rows": 1, "span_tokens": 4})
    _, found = gradients(run, model, prompt, responses, weights)
    del expected["table.weight"]  # eager's also has one for the last token, which nothing is computed from
    assert all(grad is None or torch.equal(found[name].isnan(), grad) for name, grad in expected.items())


def test_gradients_that_are_zero_are_there() -> None:
    torch._dynamo.reset()
    run = torch.compile(step, backend="longstraw", options={"replay_rows": 1, "span_tokens": 4})
    _, found = gradients(run, Tiny(), *weighted([0, 0]))
    assert all(grad is not None and not grad.any() for grad in found.values())


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=12), st.integers(1, 8), st.integers(1, 5))
def test_rows_are_run_to_their_ends_and_less_than_a_page_further(lengths: list[int], page: int, size: int) -> None:
    start = 5
    leaves = [
        Node(list(range(i, min(i + size, len(lengths)))), start, start + 30, False)
        for i in range(0, len(lengths), size)
    ]
    found = needed.shortened(leaves, [start + n if n else 0 for n in lengths], page=page, batch=lambda tokens: size)
    run = {row: node.stop - start for node in found for row in node.rows}
    assert run.keys() == {row for row, n in enumerate(lengths) if n}
    assert all(lengths[row] <= n < lengths[row] + page for row, n in run.items())
    assert all(len(node.rows) <= size for node in found)
