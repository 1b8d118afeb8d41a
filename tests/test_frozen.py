"""Frozen parameters: no gradient for them, and no run of a span that only they would need."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from longstraw.runtime.spans import Runner
from tests.equality import assert_equal, compare
from tests.models import zoo
from tests.small import WIDTH, Tiny, assert_same, inputs, records, step
from tests.steps import STEPS
from tests.sweeps import sweep

PROMPT = 13
LAST = PROMPT - 1  # the last prompt token has a result: it belongs to the responses


class Deep(Tiny):
    """Two layers, each with its own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.second = Tiny()

    def hidden(self, ids: Tensor) -> Tensor:
        x, layer = super().hidden(ids), self.second
        x = x + layer.out(layer.attend(x).transpose(1, 2).reshape(x.shape))
        return x + layer.down(torch.tanh(layer.up(x)))


def train_only(model: nn.Module, names: Sequence[str]) -> nn.Module:
    """Freeze all parameters but those whose name contains one of `names`."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in names))
    return model


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Tokens of every span that was run with autograd."""
    spans: list[tuple[int, int]] = []
    record = Runner.record

    def noted(self, where, *args, **kwargs):
        spans.append((where.lo, where.hi))
        return record(self, where, *args, **kwargs)

    monkeypatch.setattr(Runner, "record", noted)
    return spans


def in_prompt(spans: Sequence[tuple[int, int]]) -> int:
    """How many of the prompt's tokens were run with autograd."""
    return sum(hi - lo for lo, hi in spans if hi <= LAST)


@pytest.mark.parametrize(
    "names",
    [["head"], ["second.out"], ["second.query"], ["second.up", "second.down", "head"]],
    ids=["head", "last output projection", "last queries", "last feed-forward and head"],
)
def test_prompt_is_not_unwound_where_its_state_does_not_learn(names: list[str], recorded: list) -> None:
    model = train_only(Deep(), names)
    assert not records(step, model, *inputs(prompt=PROMPT))["insert_state"].branches[0].state_learns
    assert_same(model, *inputs(prompt=PROMPT))
    assert recorded and in_prompt(recorded) == 0


@pytest.mark.parametrize(
    ("names", "span_tokens"),
    sweep(
        [(["second.key"], 1), (["second.value"], 5), (["query"], 5), (["table"], 100)],
        always=[(["second.value"], 5), (["query"], 5)],
    ),
)
def test_prompt_is_unwound_once_where_its_state_learns(names: list[str], span_tokens: int, recorded: list) -> None:
    assert_same(train_only(Deep(), names), *inputs(prompt=PROMPT), span_tokens=span_tokens)
    assert in_prompt(recorded) == LAST


def test_only_the_state_that_learns_has_gradients() -> None:
    (branch,) = records(step, train_only(Deep(), ["second.value"]), *inputs())["insert_state"].branches
    assert [slot.learns for slot in branch.slots] == [False, False, False, True]


def test_prompt_with_results_is_run_for_them() -> None:
    """Without a window the prompt's tokens have results of their own."""

    def all_tokens(model: nn.Module, prompt: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
        ids = torch.cat([prompt.expand(responses.shape[0], -1), responses], 1)
        logp = torch.log_softmax(model(ids)[:, :-1], -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        return (logp.sin() * weights.mean()).sum()

    assert_same(train_only(Deep(), ["second.out"]), *inputs(prompt=PROMPT), function=all_tokens)


def test_common_beginning_of_responses_is_run_and_the_prompt_is_not(recorded: list) -> None:
    prompt, responses, weights = inputs(prompt=PROMPT, response=9)
    responses[:, :6] = responses[:1, :6].clone()
    assert_same(train_only(Deep(), ["second.out"]), prompt, responses, weights)
    assert recorded and min(lo for lo, _ in recorded) >= PROMPT - 4, "at most the span that the results begin in"


def test_keys_learn_without_values() -> None:
    assert_same(train_only(Tiny(), ["key"]), *inputs(prompt=PROMPT))


def test_pass_without_gradients_keeps_nothing_for_a_backward(recorded: list) -> None:
    def with_old_policy(model: nn.Module, *args: Tensor) -> Tensor:
        with torch.no_grad():
            old = step(model, *args)
        return step(model, *args) * old

    assert_same(Deep(), *inputs(prompt=PROMPT), function=with_old_policy)
    assert in_prompt(recorded) == LAST, "of the two passes one is unwound"


@pytest.mark.parametrize("name", ["qwen3_5_text", "lfm2"])
@pytest.mark.parametrize("part", sweep(["lm_head", "layers.1"], always=["layers.1"]))
def test_recurrent_model_with_a_frozen_beginning_equals_eager(name: str, part: str) -> None:
    model = train_only(zoo.build(name, tie_word_embeddings=False), [part])
    grpo = STEPS["grpo"]
    assert_equal(compare(grpo, model, grpo.inputs(model), options={"span_tokens": 7, "page_tokens": 4}))


def test_parameters_that_reach_the_loss_under_no_grad_only_have_no_gradient() -> None:
    """`assert_same` tells None from zero."""

    class Gated(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.lost = nn.Linear(16, 16).double(), nn.Linear(16, 16).double()

        def hidden(self, ids: Tensor) -> Tensor:
            x = super().hidden(ids)
            with torch.no_grad():
                gate = torch.sigmoid(self.gate(x))
            return x * gate + torch.zeros_like(self.lost(x))

    torch._dynamo.reset()
    model = Gated()
    assert_same(model, *inputs())
    assert model.gate.weight.grad is None and model.lost.weight.grad is None and model.head.weight.grad is not None


def test_frozen_weights_as_wide_as_a_response_of_fixed_length() -> None:
    """Nothing that a width is equal to says what runs along it."""

    def own(model: nn.Module, prompt: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
        ids = torch.cat([prompt.expand(len(responses), -1), responses], 1)
        logits = model.head(model.hidden(ids)[:, -17:-1])
        return (torch.log_softmax(logits, -1).gather(-1, ids[:, -16:, None]).squeeze(-1) * weights).sum()

    assert WIDTH == 16, "as long as the response"
    torch._dynamo.reset()
    model = Tiny()
    model.head.requires_grad_(False)
    assert_same(model, *inputs(9, 16, 3), function=own)
