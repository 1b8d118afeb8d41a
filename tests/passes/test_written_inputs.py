"""Buffers of the model and inputs of the step that a step writes to: their numbers afterwards are eager's, too."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import Tensor, nn

from longstraw.errors import BadInput, LongstrawError, UnsupportedOp
from tests.models import zoo
from tests.small import WIDTH, Tiny, gradients, inputs, step
from tests.steps import STEPS


class Counting(Tiny):
    """Scales hidden values by a buffer, before and after writing to it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 2, WIDTH, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def hidden(self, ids: Tensor) -> Tensor:
        self.calls.add_(1)
        x = super().hidden(ids) * self.scale.clone() / self.calls
        self.scale[:4].mul_(0.9)
        self.scale.view(4, 4)[1] += ids.shape[1]
        return x * self.scale


def compiled(function=step):
    torch._dynamo.reset()
    return torch.compile(function, backend="longstraw", options={"span_tokens": 4, "page_tokens": 2})


def test_a_model_may_write_to_its_buffers() -> None:
    model, expected = Counting(), Counting()
    run = compiled()
    for prompt in (9, 12, 7):
        args = inputs(prompt=prompt)
        loss, grads = gradients(run, model, *args)
        eager_loss, eager_grads = gradients(step, expected, *args)
        torch.testing.assert_close(loss, eager_loss, rtol=1e-12, atol=0)
        torch.testing.assert_close(grads, eager_grads, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(dict(model.named_buffers()), dict(expected.named_buffers()), rtol=1e-12, atol=0)
    assert model.calls == 3


def test_a_step_may_write_to_its_inputs() -> None:
    def forget_first(model: nn.Module, prompt: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
        weights[:, 0] = 0
        loss = step(model, prompt, responses, weights * 1)
        weights.mul_(2)
        return loss

    prompt, responses, weights = inputs()
    changed, model = weights.clone(), Tiny()
    loss, grads = gradients(compiled(forget_first), model, prompt, responses, changed)
    eager_loss, eager_grads = gradients(forget_first, model, prompt, responses, weights)
    torch.testing.assert_close(changed, weights, rtol=0, atol=0)
    torch.testing.assert_close(loss, eager_loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(grads, eager_grads, rtol=1e-10, atol=1e-12)


def clone_and_write(model, prompt, responses, weights):
    loss = step(model, prompt, responses, weights.clone())
    weights.mul_(2)
    loss.backward()
    return loss.detach()


def moving_baseline(model, prompt, responses, weights):
    loss = step(model, prompt, responses, weights - weights[0, 0].clone())
    weights[0].mul_(0.9).add_(0.1 * weights.mean())
    total = weights.sum()
    loss.backward()
    return loss.detach() + total


def write_what_the_model_says(model, prompt, responses, weights):
    loss = step(model, prompt, responses, weights.clone())
    weights.add_(loss.detach())
    (loss * weights.clone().mean()).backward()
    return loss.detach()


def write_between_two(model, prompt, responses, weights):
    step(model, prompt, responses, weights.clone()).backward()
    weights.mul_(3)
    loss = step(model, prompt, responses, weights.clone())
    loss.backward()
    return loss.detach() + weights.sum()


@pytest.mark.parametrize("function", [clone_and_write, moving_baseline, write_what_the_model_says, write_between_two])
def test_writes_keep_their_place_before_a_backward_inside(function) -> None:
    outcomes = []
    for run in (function, compiled(function)):
        model, (prompt, responses, weights) = Tiny(), inputs()
        losses = [run(model, prompt, responses, weights).clone() for _ in range(2)]
        outcomes.append([*losses, weights, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(outcomes[1], outcomes[0], rtol=1e-10, atol=1e-11)


def test_a_write_whose_place_is_lost_is_refused() -> None:
    def reads_before_the_gradients_write(model, prompt, responses, weights):
        step(model, prompt, responses, weights).backward()
        old = weights.clone()
        weights.add_(model.head.bias.grad.mean())
        step(model, prompt, responses, old + weights.clone()).backward()

    with pytest.raises(UnsupportedOp, match="the order of the two would not be kept"):
        compiled(reads_before_the_gradients_write)(Tiny(), *inputs())


def test_nothing_is_written_by_a_step_that_fails() -> None:
    class Later(Counting):
        def attend(self, x: Tensor) -> Tensor:
            q = self.heads(self.query(x), 4)
            seen = self.seen[: x.shape[1], : x.shape[1]]
            return torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=seen)

    model = Later()
    model.seen = torch.ones(40, 40, dtype=torch.bool).tril()
    run = compiled()
    run(model, *inputs())
    before = copy.deepcopy(dict(model.named_buffers()))
    model.seen[3, 5] = True
    with pytest.raises(LongstrawError):
        run(model, *inputs())
    torch.testing.assert_close(dict(model.named_buffers()), before, rtol=0, atol=0)


def test_what_learns_and_what_shares_memory_is_refused() -> None:
    def to_parameter(model: nn.Module, *args: Tensor) -> Tensor:
        with torch.no_grad():
            model.head.bias.mul_(0.5)
        return step(model, *args)

    def to_view(model: nn.Module, prompt: Tensor, responses: Tensor, weights: Tensor, part: Tensor) -> Tensor:
        part.zero_()
        return step(model, prompt, responses, weights)

    with pytest.raises(UnsupportedOp, match="one of the step's inputs"):
        compiled(to_parameter)(Tiny(), *inputs())
    prompt, responses, weights = inputs()
    with pytest.raises(UnsupportedOp, match="one of the step's inputs"):
        compiled(to_view)(Tiny(), prompt, responses, weights, weights[0])
    with pytest.raises(BadInput, match="shares its memory"):
        compiled(to_view)(Tiny(), prompt, responses, weights, torch.from_numpy(weights.numpy()))
    assert weights[0].abs().min() > 0


def test_rotary_frequencies_that_the_length_of_the_row_chooses() -> None:
    """longrope writes them to a buffer: the short ones up to 16 tokens here, the long ones for longer rows."""
    model = zoo.build("phi3-longrope")
    expected = copy.deepcopy(model)
    function = STEPS["grpo"].function
    run = compiled(function)
    seen = set()
    for prompt in (19, 7, 30, 9):
        args = [
            STEPS["grpo"].inputs(model, prompt=prompt)[name]
            for name in inspect.signature(function).parameters
            if name != "model"
        ]
        loss, grads = gradients(run, model, *args)
        eager_loss, eager_grads = gradients(function, expected, *args)
        torch.testing.assert_close(loss, eager_loss, rtol=1e-12, atol=0)
        torch.testing.assert_close(grads, eager_grads, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(dict(model.named_buffers()), dict(expected.named_buffers()), rtol=0, atol=0)
        seen.add(tuple(model.model.rotary_emb.inv_freq.tolist()))
    assert len(seen) == 2
