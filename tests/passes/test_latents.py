"""Latents: which models keep them, and that keys and values built from them are exact in every form."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longstraw.stages import Expansion, Stateful
from tests.small import HEADS, WIDTH, Tiny, assert_same, gradients, inputs, records, step
from tests.sweeps import sweep


class Latent(Tiny):
    """Keys and values of all heads from six numbers per token and two that all heads share."""

    latent, shared = 6, 2

    def __init__(self, *, bias: bool = False, change: Callable[..., tuple[Tensor, Tensor]] | None = None) -> None:
        super().__init__()
        self.change = change
        self.down_kv = nn.Linear(WIDTH, self.latent + self.shared).double()
        self.build = nn.Linear(self.latent, HEADS * 12, bias=bias).double()
        self.query = nn.Linear(WIDTH, HEADS * 8).double()
        self.out = nn.Linear(HEADS * 6, WIDTH).double()

    def attend(self, x: Tensor) -> Tensor:
        q = self.heads(self.query(x), HEADS)
        latent, shared = self.down_kv(x).split([self.latent, self.shared], -1)
        built = self.heads(self.build(F.rms_norm(latent, (self.latent,))), HEADS)
        k, v = built.split([6, 6], -1)
        k, v = (k, v) if self.change is None else self.change(k, v)
        k = torch.cat([k, shared[:, None].expand(-1, HEADS, -1, -1)], -1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        x = x + self.out(self.attend(x).transpose(1, 2).flatten(2))
        return x + self.down(torch.tanh(self.up(x)))


def branch(model: nn.Module) -> Stateful:
    found: Stateful = records(step, model, *inputs())["insert_state"].branches[0]
    return found


def test_find_latents_keeps_what_keys_and_values_are_built_from() -> None:
    found = branch(Latent())
    assert [(slot.heads, slot.width) for slot in found.slots] == [(1, 8)]
    expansion = found.sites[0].expansion
    assert expansion is not None and expansion.linear
    sizes = (expansion.key_heads, expansion.key_width, expansion.value_heads, expansion.value_width)
    assert sizes == (HEADS, 8, HEADS, 6)


CHANGED: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "curved": lambda k, v: (torch.tanh(k), v),
    "shifted values": lambda k, v: (k, v + 0.5),
    "shifted keys": lambda k, v: (k - 1.0, v),
    "squared values": lambda k, v: (k, v * v),
    "squared keys": lambda k, v: (k * k, v),
    "rounded": lambda k, v: (k, torch.div(v, 0.1, rounding_mode="floor") * 0.1 + v),
}


@pytest.mark.parametrize("kind", sweep(["bias", *CHANGED], always=["bias", "curved", "shifted keys", "squared values"]))
def test_find_latents_knows_what_is_not_linear(kind: str) -> None:
    model = Latent(bias=True) if kind == "bias" else Latent(change=CHANGED[kind])
    torch._dynamo.reset()
    expansion = branch(model).sites[0].expansion
    assert expansion is not None and not expansion.linear
    assert_same(model, *inputs(), span_tokens=1)


@pytest.mark.parametrize("absorbed_below", [0, 1 << 40], ids=["built", "absorbed where linear"])
def test_keys_and_values_without_a_gradient(monkeypatch: pytest.MonkeyPatch, absorbed_below: int) -> None:
    class Frozen(Latent):
        def attend(self, x: Tensor) -> Tensor:
            q = self.heads(self.query(x) + self.down_kv(x).repeat(1, 1, HEADS), HEADS)
            with torch.no_grad():
                latent, shared = self.down_kv(x).split([self.latent, self.shared], -1)
                k, v = self.heads(self.build(latent), HEADS).split([6, 6], -1)
                k = torch.cat([k, shared[:, None].expand(-1, HEADS, -1, -1)], -1)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    monkeypatch.setattr(Expansion, "absorbed_below", lambda self, heads, width: absorbed_below if self.linear else 0)
    torch._dynamo.reset()
    model = Frozen()
    model.build.requires_grad_(False)
    assert_same(model, *inputs(), span_tokens=3)


def test_find_latents_leaves_projections_of_the_hidden_state_alone() -> None:
    found = branch(Tiny())
    assert found.sites[0].expansion is None and len(found.slots) == 2


def test_find_latents_never_cuts_before_positions() -> None:
    """Keys that are turned after they were built can't be built again for other tokens: they stay the state."""

    class Turned(Latent):
        def attend(self, x: Tensor) -> Tensor:
            q = self.heads(self.query(x), HEADS)
            k, v = self.heads(self.build(self.down_kv(x)[..., :6]), HEADS).split([6, 6], -1)
            at = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * torch.arange(1, 7, dtype=x.dtype)
            return F.scaled_dot_product_attention(q[..., :6] * at.cos(), k * at.cos(), v, is_causal=True)

    assert branch(Turned()).sites[0].expansion is None
    assert_same(Turned(), *inputs(), span_tokens=3)


class Mixing(Latent):
    """Keys that read other tokens after they were built."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.conv = nn.Conv1d(HEADS * 6, HEADS * 6, 3, groups=HEADS * 6).double()

    def attend(self, x: Tensor) -> Tensor:
        q = self.heads(self.query(x), HEADS)
        built = self.build(self.down_kv(x)[..., :6])
        k, v = built.split(HEADS * 6, -1)
        if self.kind == "convolution":
            k = self.conv(F.pad(k.mT, (2, 0))).mT
        else:
            k = k.cumsum(1) / 8
        k, v = self.heads(k, HEADS), self.heads(v, HEADS)
        return F.scaled_dot_product_attention(F.pad(q, (0, -2)), k, v, is_causal=True)


@pytest.mark.parametrize("kind", ["convolution", "running sum"])
def test_find_latents_never_cuts_before_an_op_that_reads_other_tokens(kind: str) -> None:
    model = Mixing(kind)
    assert branch(model).sites[0].expansion is None
    torch._dynamo.reset()
    assert_same(model, *inputs(prompt=11, response=6), span_tokens=3)


def test_latents_in_two_dtypes_are_kept_in_the_wider_one() -> None:
    class Narrow(Latent):
        """A norm in single precision, as models have it, on the way from the hidden state."""

        def attend(self, x: Tensor) -> Tensor:
            q = self.heads(self.query(x), HEADS)
            latent, shared = self.down_kv(x).split([self.latent, self.shared], -1)
            normed = F.rms_norm(latent.float(), (self.latent,)).double()
            k, v = self.heads(self.build(normed), HEADS).split([6, 6], -1)
            k = torch.cat([k, shared[:, None].expand(-1, HEADS, -1, -1)], -1)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    (slot,) = branch(Narrow()).slots
    assert slot.width == 8 and slot.dtype == torch.float64
    torch._dynamo.reset()
    model = Narrow()
    expected, eager = gradients(step, model, *inputs())
    loss, ours = gradients(torch.compile(step, backend="longstraw", options={"span_tokens": 3}), model, *inputs())
    torch.testing.assert_close(loss, expected, rtol=1e-11, atol=1e-12)
    for name, grad in eager.items():  # gradients are rounded to single precision on the way
        torch.testing.assert_close(ours[name], grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("absorbed_below", [0, 10, 1 << 40], ids=["built", "by count", "absorbed"])
@pytest.mark.parametrize("span_tokens", sweep([1, 4, 64], always=[4]))
def test_every_form_is_exact(monkeypatch: pytest.MonkeyPatch, absorbed_below: int, span_tokens: int) -> None:
    monkeypatch.setattr(Expansion, "absorbed_below", lambda self, heads, width: absorbed_below)
    torch._dynamo.reset()
    assert_same(Latent(), *inputs(prompt=11, response=6), span_tokens=span_tokens)


def test_frozen_weights_that_build_keys_have_no_gradient() -> None:
    model = Latent()
    model.build.requires_grad_(False)
    torch._dynamo.reset()
    assert_same(model, *inputs())


def test_products_decide_between_forms() -> None:
    expansion = Expansion(torch.fx.GraphModule({}, torch.fx.Graph()), 64, 256, 64, 256, linear=True)
    assert expansion.absorbed_below(64, 576) == 576 * 64 * 512 // (64 * (2 * 576 - 512))
    assert Expansion(expansion.module, 64, 256, 64, 256, linear=False).absorbed_below(64, 576) == 0
