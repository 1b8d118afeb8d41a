"""Differentiable inputs of a step, wherever they reach the model: eager's gradient, or a refusal."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from longstraw import errors
from longstraw.runtime.layouts import Place
from longstraw.runtime.leaves import Leaves, Where
from longstraw.runtime.spans import Runner, SpanGraph
from tests.small import HEADS, KEY_HEADS, Tiny, inputs

GROUP, TOKENS = 3, 13


class Reading(Tiny):
    """A model that is given one more value."""

    given: Tensor

    def forward(self, ids: Tensor, given: Tensor) -> Tensor:  # type: ignore[override]
        self.given = given
        return super().forward(ids)


class Attending(Reading):
    """Attention by a function of queries, keys, values, the causal mask and the given value."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(self.query(x), HEADS), *(self.heads(f(x), KEY_HEADS) for f in (self.key, self.value))
        k, v = (t.repeat_interleave(HEADS // KEY_HEADS, 1) for t in (k, v))
        at = torch.arange(x.shape[1])
        return self.function(q, k, v, at[None] <= at[:, None], self.given)


def step(model: Tiny, prompt: Tensor, responses: Tensor, weights: Tensor, given: Tensor) -> Tensor:
    ids = torch.cat([prompt.expand(responses.shape[0], -1), responses], 1)
    logits = model(ids, given)[:, prompt.shape[1] - 1 : -1]
    logp = torch.log_softmax(logits, -1).gather(-1, responses[..., None]).squeeze(-1)
    return (logp * weights).sum()


def compile_step(function: Callable[..., Tensor] = step, **options: object) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    options = {"span_tokens": 4, "page_tokens": 2, "grad_dtype": "float64", **options}
    return torch.compile(function, backend="longstraw", options=options)


def assert_same(model: Tiny, given: Tensor, **options: object) -> None:
    """Loss and gradients equal eager's, of parameters and of what is given, by either way to ask for them."""
    args, compiled = inputs(), compile_step(**options)
    found = []
    for function in (step, compiled):
        model.zero_grad()
        given = given.detach().clone().requires_grad_()
        loss = function(model, *args, given)
        loss.backward()
        found.append([loss.detach(), given.grad, *(p.grad for p in model.parameters())])
    wanted = [given.detach().clone().requires_grad_(), model.head.bias]
    found[0] += torch.autograd.grad(step(model, *args, wanted[0]), wanted)
    found[1] += torch.autograd.grad(compiled(model, *args, wanted[0]), wanted)
    assert wanted[0].grad is None
    for got, want in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


# --- masks and biases ------------------------------------------------------------------------------------------------


def by_sdpa(bias: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, given: Tensor) -> Tensor:
        at = torch.arange(seen.shape[0], dtype=q.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias(given, at).masked_fill(~seen, -math.inf))

    return attend


def written(scored: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, given: Tensor) -> Tensor:
        return scored(q @ k.mT * 0.5, given, seen).masked_fill(~seen, -math.inf).softmax(-1) @ v

    return attend


BIASES: dict[str, tuple[Callable[..., Tensor], Tensor]] = {
    "of each key": (by_sdpa(lambda b, at: b[:, None, None, :]), random(GROUP, TOKENS)),
    "by distance, a slope for each row": (by_sdpa(lambda b, at: b[:, None, None, None] * at), random(GROUP)),
    "whole": (by_sdpa(lambda b, at: b), random(GROUP, 1, TOKENS, TOKENS)),
    "added to scores": (written(lambda s, b, seen: s + b[:, None, None, :]), random(GROUP, TOKENS)),
    "subtracted": (written(lambda s, b, seen: s - b.exp()[:, None, None, :]), random(GROUP, TOKENS)),
}


@pytest.mark.parametrize("name", BIASES)
def test_a_learned_mask_or_bias_is_refused(name: str) -> None:
    function, given = BIASES[name]
    with pytest.raises(errors.UnsupportedMask, match=r"computed from given, which needs a gradient(.|\n)*test_inputs"):
        assert_same(Attending(function), given)


def test_a_learned_factor_that_masks_is_refused() -> None:
    """`scores * b + (1 - b) * -1e9` is a mask where b is 0 or 1, and b has a gradient all the same."""

    def mask(scores: Tensor, given: Tensor, seen: Tensor) -> Tensor:
        factor = given[:, None, None, :]
        return scores * factor + (1 - factor) * -1e9

    with pytest.raises(errors.LongstrawError):
        assert_same(Attending(written(mask)), torch.ones(GROUP, TOKENS, dtype=torch.float64))


@pytest.mark.parametrize(
    "scored",
    [
        lambda scores, given, seen: scores + (given[:, None, None, :] * torch.arange(len(seen))[:, None]).detach(),
        lambda scores, given, seen: scores.masked_fill(given[:, None, None, :] < -9, -math.inf),
        lambda scores, given, seen: scores + torch.zeros_like(given)[:, None, None, :],
    ],
    ids=["detached", "compared", "made like it"],
)
def test_a_mask_that_no_gradient_flows_through_may_read_what_learns(scored: Callable[..., Tensor]) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, given: Tensor) -> Tensor:
        return written(scored)(q, k, v, seen, given) * given[:, None, :, None]

    assert_same(Attending(attend), random(GROUP, TOKENS))


# --- values without tokens -------------------------------------------------------------------------------------------


class Scaling(Reading):
    """Changes hidden values by the given value before the attention, in the body, and before the head."""

    def __init__(self, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.change(self.table(ids), self.given)
        x = x + self.out(self.attend(x).transpose(1, 2).reshape(x.shape))
        return self.change(x, self.given)


CHANGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda x, given: x * given.sum(),
    "saves its operand": lambda x, given: x * given.exp().mean() + given.mean().sin() * 0.5,
    "one entry": lambda x, given: torch.tanh(x) + given[0] * 0.1,
    "a vector": lambda x, given: x * given.sum().expand(16).cumsum(0).softmax(0),
    "detached": lambda x, given: x * given.sum().detach(),
}


@pytest.mark.parametrize("span_tokens", [4, 64])
@pytest.mark.parametrize("name", CHANGES)
def test_a_number_computed_from_an_input_of_rows_has_its_gradient(name: str, span_tokens: int) -> None:
    model = Scaling(lambda x, given: CHANGES[name](x, given) + given[:, None, None])  # which says that these are rows
    assert_same(model, random(GROUP), span_tokens=span_tokens)


def test_an_input_that_only_numbers_are_computed_from_has_its_gradient() -> None:
    assert_same(Scaling(CHANGES["saves its operand"]), random(GROUP))


def test_a_number_computed_from_an_input_of_tokens_has_its_gradient() -> None:
    assert_same(Scaling(lambda x, given: x * given.mean() + given.mean(0)[:, None]), random(GROUP, TOKENS))


@pytest.mark.parametrize(
    "scored",
    [
        lambda scores, given, seen: torch.tanh(scores * given.exp().sum()),
        lambda scores, given, seen: torch.tanh(scores) * given.softmax(0).cumsum(0)[0],
    ],
)
def test_an_operand_of_scores_computed_from_an_input_has_its_gradient(scored: Callable[..., Tensor]) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, given: Tensor) -> Tensor:
        return written(scored)(q, k, v, seen, given) * given[:, None, None, None]

    assert_same(Attending(attend), random(GROUP))


@pytest.mark.parametrize(
    "change",
    [
        lambda model, x, given: x * (model.out.weight / model.out.weight.norm()).sum(0),
        lambda model, x, given: x @ model.value.weight.flatten().softmax(0).view(8, 16).sum(0).diag(),
        lambda model, x, given: x * (model.out.bias.softmax(0) * given.exp().sum()),
    ],
    ids=["norm", "softmax", "with an input"],
)
def test_a_value_computed_from_parameters_has_their_gradient(change: Callable[..., Tensor]) -> None:
    model = Scaling(lambda x, given: change(model, x, given) + given[:, None, None])
    assert_same(model, random(GROUP))


def test_numbers_read_whole_and_by_rows_add_up() -> None:
    node, value = fx.Graph().placeholder("given"), torch.ones(3, dtype=torch.bfloat16)
    leaves = Leaves({node: value}, [node], dtype=torch.float32, num_rows=3)
    place = Place((-1,), (1,), 0, None, 0, 0)
    part = leaves.token_input(node, value[1:2], place, Where((1,), (1,), 0, 4, ()), 0, 4)
    assert part is not None
    (leaves.whole(node).sum() + 2 * part.leaf.sum()).backward()
    leaves.collect([part])
    found = leaves.gradient(node)
    assert found is not None and found.dtype == torch.bfloat16 and found.tolist() == [1, 3, 1]


# --- all or nothing ---------------------------------------------------------------------------------------------------


class Broken(Exception):
    """Raised in the middle of a backward."""


@pytest.mark.parametrize("call", [1, 2])
def test_a_backward_that_fails_in_any_pass_writes_no_gradient(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """Also none of what the other pass, the objective or the numbers before the model have finished with."""
    first, second = Scaling(CHANGES["saves its operand"]), Scaling(lambda x, given: x * given[:, None, None])
    given, gain = random(GROUP).requires_grad_(), torch.ones((), dtype=torch.float64, requires_grad=True)

    def both(first: Tiny, second: Tiny, given: Tensor, gain: Tensor, *args: Tensor) -> Tensor:
        return step(first, *args, given) * 2 + step(second, *args, given).exp() + gain.exp() * 3

    compiled, calls = compile_step(both), 0
    send = Runner.send

    def failing(self: Runner, graph: SpanGraph, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        last = graph.where.lo == 0
        calls += last
        if last and calls == call:
            raise Broken
        return send(self, graph, *args, **kwargs)

    learned = [given, gain, *first.parameters(), *second.parameters()]
    with monkeypatch.context() as patch:
        patch.setattr(Runner, "send", failing)
        loss = compiled(first, second, given, gain, *inputs())
        with pytest.raises(Broken):
            loss.backward()
    assert all(x.grad is None for x in learned)
    compiled(first, second, given, gain, *inputs()).backward()
    found = [x.grad for x in learned]
    for x in learned:
        x.grad = None
    both(first, second, given, gain, *inputs()).backward()
    for got, x in zip(found, learned, strict=True):
        torch.testing.assert_close(got, x.grad, rtol=1e-10, atol=1e-12)


def test_an_input_changed_before_backward_writes_no_gradient() -> None:
    """A number was computed from it before the model, and its derivative needs the input as it was."""
    model, given = Scaling(lambda x, given: x * (given * given).sum() + given.exp()[:, None, None]), random(GROUP)
    loss = compile_step()(model, *inputs(), given.requires_grad_())
    with torch.no_grad():
        given.mul_(2)
    with pytest.raises(errors.ParametersChanged, match="given was changed"):
        loss.backward()
    assert all(x.grad is None for x in (given, *model.parameters()))
