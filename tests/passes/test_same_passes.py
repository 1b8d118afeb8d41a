"""merge_same_passes: two passes that compute the same become one, others stay, and the numbers are eager's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import longstraw
from longstraw.runtime import transaction
from tests.small import HEADS, Tiny, assert_same, inputs, records
from tests.sweeps import sweep


def logp(model: nn.Module, prompt: Tensor, responses: Tensor) -> Tensor:
    ids = torch.cat([prompt.expand(responses.shape[0], -1), responses], 1)
    logits = model(ids)[:, prompt.shape[1] - 1 : -1]
    return torch.log_softmax(logits, -1).gather(-1, responses[..., None]).squeeze(-1)


def old_first(model, prompt, responses, weights):
    with torch.no_grad():
        old = logp(model, prompt, responses)
    return ((logp(model, prompt, responses) - old).exp() * weights).sum()


def old_last(model, prompt, responses, weights):
    new = logp(model, prompt, responses)
    with torch.no_grad():
        old = logp(model, prompt, responses)
    return ((new - old).exp() * weights).sum()


def old_detached(model, prompt, responses, weights):
    return ((logp(model, prompt, responses) - logp(model, prompt, responses).detach()).exp() * weights).sum()


def both_learn(model, prompt, responses, weights):
    return (logp(model, prompt, responses) * weights + logp(model, prompt, responses) ** 2).sum()


def other_heads(model, prompt, responses, weights):
    """The same pass, used in another way."""
    with torch.no_grad():
        ids = torch.cat([prompt.expand(responses.shape[0], -1), responses], 1)
        all_logp = torch.log_softmax(model(ids)[:, prompt.shape[1] - 1 : -1] / 2, -1)
        bonus = -(all_logp.exp() * all_logp).sum(-1)
    return (logp(model, prompt, responses) * weights * bonus).sum()


def logits_of(model: nn.Module, prompt: Tensor, responses: Tensor) -> Tensor:
    ids = torch.cat([prompt.expand(responses.shape[0], -1), responses], 1)
    return model(ids)[:, prompt.shape[1] - 1 : -1]


def chosen(logits: Tensor, responses: Tensor) -> Tensor:
    return torch.log_softmax(logits, -1).gather(-1, responses[..., None]).squeeze(-1)


def old_logits_first(model, prompt, responses, weights):
    """What isn't to learn is wide where it is cut off, and goes on outside of no_grad."""
    with torch.no_grad():
        old = logits_of(model, prompt, responses)
    return ((logp(model, prompt, responses) - chosen(old, responses)).exp() * weights).sum()


def detached_entropy_first(model, prompt, responses, weights):
    logs = torch.log_softmax(logits_of(model, prompt, responses).detach(), -1)
    return (logp(model, prompt, responses) * -(logs.exp() * logs).sum(-1) * weights).sum()


def largest_of_detached_first(model, prompt, responses, weights):
    """An op with two results, of which one is read outside."""
    with torch.no_grad():
        values, places = logits_of(model, prompt, responses).max(-1)
    return ((logp(model, prompt, responses) - values) * weights * (places != responses)).sum()


def three_passes(model, prompt, responses, weights):
    with torch.no_grad():
        logs = torch.log_softmax(logits_of(model, prompt, responses) / 2, -1)
        entropy = -(logs.exp() * logs).sum(-1)
    new = logp(model, prompt, responses)
    with torch.no_grad():
        old = logp(model, prompt, responses)
    return ((new - old).exp() * weights * entropy).sum()


def three_temperatures(model, prompt, responses, weights):
    found = [chosen(logits_of(model, prompt, responses) / t, responses) for t in (1.0, 2.0, 3.0)]
    return ((found[0] * weights) + found[1] ** 2 + found[2] ** 3).sum()


def frozen_between(model, prompt, responses, weights):
    new = logp(model, prompt, responses)
    with torch.no_grad():
        old = logits_of(model, prompt, responses)
    return (new * weights + chosen(old, responses) ** 2 + logp(model, prompt, responses) ** 3).sum()


def frozen_temperature_beside_one_that_learns(model, prompt, responses, weights):
    """Two that are equal but for their gradients, and a third pass between them."""
    with torch.no_grad():
        warm = logits_of(model, prompt, responses) / 2
    cold = logp(model, prompt, responses)
    learned = chosen(logits_of(model, prompt, responses) / 2, responses)
    return (chosen(warm, responses) * cold * weights + learned**2).sum()


TWICE = [old_logits_first, detached_entropy_first, largest_of_detached_first]
THRICE = [three_passes, three_temperatures, frozen_between, frozen_temperature_beside_one_that_learns]


@pytest.mark.parametrize(
    ("step", "passes"),
    [*((step, 2) for step in TWICE), *((step, 3) for step in THRICE)],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_gradients_end_where_they_did_before_passes_were_joined(step: Callable[..., Tensor], passes: int) -> None:
    torch._dynamo.reset()
    (segment,) = records(step, Tiny(), *inputs())["partition"].segments
    assert segment.passes == passes
    assert_same(Tiny(), *inputs(), function=step)


class Island(Tiny):
    """Has a part without gradient, which gradients must not enter when the pass around it is merged."""

    def hidden(self, ids: Tensor) -> Tensor:
        x = super().hidden(ids)
        with torch.no_grad():
            gate = torch.sigmoid(self.up(x))
        return x + self.down(gate)


class DetachedIsland(Tiny):
    def hidden(self, ids: Tensor) -> Tensor:
        x = super().hidden(ids)
        return x + self.down(torch.sigmoid(self.up(x)).detach())


MERGED = [old_first, old_last, old_detached, both_learn, other_heads]


@pytest.mark.parametrize(
    ("step", "model"),
    sweep(
        [(step, model) for step in MERGED for model in (Tiny, Island, DetachedIsland)],
        always=[*((step, Tiny) for step in MERGED[:-1]), (old_first, Island), (MERGED[-1], DetachedIsland)],
    ),
)
def test_passes_that_compute_the_same_are_one(step: Callable[..., Tensor], model: type[Tiny]) -> None:
    torch._dynamo.reset()
    (segment,) = records(step, model(), *inputs())["partition"].segments
    assert segment.passes == 2
    assert_same(model(), *inputs(), function=step)


def test_explain_says_that_passes_share_a_capture() -> None:
    assert "one capture for 2 passes that compute the same" in str(longstraw.explain(old_first, Tiny(), *inputs()))


def other_tokens(model, prompt, responses, weights):
    with torch.no_grad():
        old = logp(model, prompt, responses.flip(0))
    return ((logp(model, prompt, responses) - old).exp() * weights).sum()


def scaled_by(constant):
    def step(model, prompt, responses, weights):
        with torch.no_grad():
            old = logp(model, prompt, responses)
        model.scale, before = constant, model.scale
        new = logp(model, prompt, responses)
        model.scale = before
        return ((new - old).exp() * weights).sum()

    return step


class Scaled(Tiny):
    scale: float = 1.0

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads(f(x), n) for f, n in ((self.query, HEADS), (self.key, 2), (self.value, 2)))
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v * self.scale, is_causal=True)


class Pair(Tiny):
    """Two models, for a reference that has weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.reference = Tiny()
        self.reference.head = nn.Linear(16, 50).double()


def other_weights(model, prompt, responses, weights):
    with torch.no_grad():
        reference = logp(model.reference, prompt, responses)
    return ((logp(model, prompt, responses) - reference).exp() * weights).sum()


@pytest.mark.parametrize(
    ("step", "model"),
    [(other_tokens, Tiny), (other_weights, Pair), (scaled_by(2.0), Scaled), (scaled_by(1 + 1e-12), Scaled)],
    ids=["tokens", "weights", "a constant", "nearly the same constant"],
)
def test_passes_that_differ_stay_apart(step: Callable[..., Tensor], model: type[Tiny]) -> None:
    torch._dynamo.reset()
    segments = records(step, model(), *inputs())["partition"].segments
    assert [segment.passes for segment in segments] == [1, 1]
    assert_same(model(), *inputs(), function=step)


@pytest.mark.parametrize(("policy_first", "most"), [(False, 1), (True, 2)])
def test_the_state_of_a_reference_goes_when_its_scores_are_there(
    monkeypatch: pytest.MonkeyPatch, policy_first: bool, most: int
) -> None:

    class References(Pair):
        def __init__(self) -> None:
            super().__init__()
            self.second = Tiny(inner=20)

    def step(model, prompt, responses, weights):
        new = logp(model, prompt, responses) if policy_first else None
        with torch.no_grad():
            one, two = (logp(m, prompt, responses) for m in (model.reference, model.second))
        new = logp(model, prompt, responses) if new is None else new
        return ((new - one).exp() * weights - two).sum()

    alive: list[int] = []
    stores = []
    make = transaction.Store

    def watched(*args, **kwargs):
        stores.append(make(*args, **kwargs))
        alive.append(sum(not s.released for s in stores if s.stop - s.start > 4))
        return stores[-1]

    monkeypatch.setattr(transaction, "Store", watched)
    assert_same(References(), *inputs(prompt=12), function=step)
    assert max(alive) == most
    assert all(store.released for store in stores)
