"""verify: equal where it is equal, and different where it is not."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

import longstraw
from tests.small import Tiny, inputs, step


def test_verify_finds_a_step_equal() -> None:
    parity = longstraw.verify(step, Tiny(), *inputs())
    assert parity.ok and parity.loss_error < 1e-12 and parity.relative_l2 < 1e-12 and parity.cosine > 1 - 1e-12
    assert parity.worst[1] < 1e-11 and "verdict" in str(parity)


def test_verify_of_a_compiled_step_is_of_the_step_itself() -> None:
    compiled = torch.compile(step, backend="longstraw", options={"prompt_grad": "none"})
    assert longstraw.verify(compiled, Tiny(), *inputs(prompt=20)).ok
    assert not longstraw.verify(compiled, Tiny(), *inputs(prompt=20), options={"prompt_grad": "none"}).ok


def test_verify_shows_the_price_of_response_only_gradients() -> None:
    parity = longstraw.verify(step, Tiny(), *inputs(prompt=20), options={"prompt_grad": "none"})
    assert not parity.ok and parity.loss_error < 1e-12
    assert 0 < parity.cosine < 1 - 1e-6
    assert 'prompt_grad="none"' in str(parity)


def test_verify_leaves_everything_as_it_was() -> None:
    model = Tiny()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = torch.get_rng_state()
    longstraw.verify(step, model, *inputs())
    assert torch.equal(model.head.weight.grad, torch.ones_like(model.head.weight))
    assert model.table.weight.grad is None
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    assert torch.equal(state, torch.get_rng_state())


def test_verify_takes_steps_that_call_backward() -> None:
    def own_backward(model: nn.Module, *args: Tensor) -> dict[str, Tensor]:
        loss = step(model, *args)
        loss.backward()
        return {"loss": loss.detach()}

    assert longstraw.verify(own_backward, Tiny(), *inputs()).ok


def test_verify_needs_a_loss() -> None:
    with pytest.raises(ValueError, match="must return its loss"):
        longstraw.verify(lambda model, *args: {"value": 1}, Tiny(), *inputs())


def test_numbers_are_checked_at_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    from longstraw.errors import NumbersDiffer
    from longstraw.runtime.leaves import Leaves

    compiled = torch.compile(step, backend="longstraw", options={"check": "numbers"})
    compiled(Tiny(), *inputs(prompt=150)).backward()
    torch._dynamo.reset()
    gradient = Leaves.gradient
    monkeypatch.setattr(Leaves, "gradient", lambda self, node: gradient(self, node) * 1.001)
    with pytest.raises(NumbersDiffer, match="differs from eager"):
        torch.compile(step, backend="longstraw", options={"check": "numbers"})(Tiny(), *inputs())


def test_verify_tells_models_apart_that_have_the_same_names() -> None:
    policy, reference = Tiny(), Tiny().requires_grad_(False)

    def with_reference(policy, reference, prompt, responses, weights):
        return step(policy, prompt, responses, weights) - step(reference, prompt, responses, weights)

    assert longstraw.verify(with_reference, policy, reference, *inputs()).ok
    assert all(p.grad is None for p in policy.parameters())
    assert longstraw.verify(with_reference, policy, Tiny(inner=20), *inputs()).ok


def test_verify_finds_models_that_the_step_holds() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model = Tiny()

        def loss(self, *args):
            return step(self.model, *args)

    model = Tiny()
    assert longstraw.verify(Trainer().loss, *inputs()).ok
    assert longstraw.verify(lambda *args: step(model, *args), *inputs()).ok
    assert longstraw.verify(functools.partial(step, model), *inputs()).ok
    with pytest.raises(ValueError, match="Pass the model as an argument"):
        longstraw.verify(lambda weights: weights.sum().requires_grad_(), inputs()[2])


def test_verify_gives_both_sides_the_same_buffers_and_inputs() -> None:
    class Baseline(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("baseline", torch.ones((), dtype=torch.float64))

    def moving(model, prompt, responses, weights):
        loss = step(model, prompt, responses, weights - model.baseline.clone())
        model.baseline.mul_(0.9).add_(0.1 * weights.mean())
        weights.zero_()
        return loss

    model, args = Baseline(), inputs()
    before = args[2].clone()
    assert longstraw.verify(moving, model, *args).ok
    assert model.baseline == 1 and torch.equal(args[2], before)
