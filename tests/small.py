"""The smallest steps that reach a pass: one attention layer written with plain functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longstraw import explain
from longstraw.errors import LongstrawError

VOCABULARY, WIDTH, HEADS, KEY_HEADS = 50, 16, 4, 2


class Tiny(nn.Module):
    """Embedding, grouped-query attentions of the same weights, a feed-forward of a given width, a head.

    Attributes:
        attentions: how many; the second reads what tokens of the prompt saw in the first.
    """

    attentions = 2

    def __init__(self, inner: int = 24) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.value = nn.Linear(WIDTH, WIDTH // 2), nn.Linear(WIDTH, WIDTH // 2)
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.double()

    def heads(self, x: Tensor, count: int) -> Tensor:
        """`[G, S, W]` to `[G, count, S, W / count]`."""
        return x.view(*x.shape[:2], count, -1).transpose(1, 2)

    def attend(self, x: Tensor) -> Tensor:
        """Causal attention; tests override it with other spellings."""
        q, k, v = self.heads(self.query(x), HEADS), *(self.heads(f(x), KEY_HEADS) for f in (self.key, self.value))
        k, v = (t.repeat_interleave(HEADS // KEY_HEADS, 1) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def hidden(self, ids: Tensor) -> Tensor:
        """Hidden states `[G, S, W]`."""
        x = self.table(ids)
        for _ in range(self.attentions):
            x = x + self.out(self.attend(x).transpose(1, 2).reshape(x.shape))
        return x + self.down(torch.tanh(self.up(x)))

    def forward(self, ids: Tensor) -> Tensor:
        """Logits `[G, S, V]`."""
        return self.head(self.hidden(ids))


def step(model: nn.Module, prompt: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
    """A weighted sum of the responses' log-probabilities."""
    ids = torch.cat([prompt.expand(responses.shape[0], -1), responses], 1)
    logits = model(ids)[:, prompt.shape[1] - 1 : -1]
    logp = torch.log_softmax(logits, -1).gather(-1, responses[..., None]).squeeze(-1)
    return (logp * weights).sum()


def inputs(prompt: int = 9, response: int = 4, group: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Random prompt `[1, P]`, responses `[G, R]`, weights `[G, R]`."""
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(VOCABULARY, (rows, n), generator=generator) for rows, n in ((1, prompt), (group, response))]
    return (*tokens, torch.randn(group, response, generator=generator, dtype=torch.float64))


def records(function: Callable[..., Any] = step, *args: Any, **options: Any) -> dict[str, Any]:
    """The record of every stage of a step (by default on a fresh `Tiny`); a `Tiny` has one attention there."""
    args = args or (Tiny(), *inputs())
    for model in args:
        if isinstance(model, Tiny):
            model.attentions = 1
    return dict(explain(function, *args, options=options).records[0])


def gradients(function: Callable[..., Any], model: nn.Module, *args: Any) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Loss and gradients of one call."""
    model.zero_grad()
    loss = function(model, *args)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def assert_same(model: nn.Module, *args: Any, function: Callable[..., Any] = step, **options: Any) -> None:
    """Compiled loss and gradients equal eager's to 1e-11."""
    expected, eager = gradients(function, model, *args)
    eager = {name: None if g is None else g.clone() for name, g in eager.items()}
    compiled = torch.compile(function, backend="longstraw", options={"span_tokens": 4, "page_tokens": 2, **options})
    found, ours = gradients(compiled, model, *args)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    for name, grad in eager.items():
        if grad is None:
            assert ours[name] is None, name
        else:
            assert ours[name] is not None, name
            torch.testing.assert_close(ours[name], grad, rtol=1e-10, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


def assert_refused(why: str, model: nn.Module) -> None:
    """Expect the compiled step on a model to be refused with a text that matches `why`."""
    torch._dynamo.reset()
    with pytest.raises(LongstrawError, match=why):
        assert_same(model, *inputs())
