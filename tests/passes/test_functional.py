"""In-place ops, written through every kind of view, against eager; what autograd would not see is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longstraw.errors import UnsupportedOp
from tests.small import Tiny, assert_same, inputs, step

LEARNED = nn.Parameter(torch.tensor([0.3, -0.2], dtype=torch.float64))

WRITES: dict[str, Callable[[Tensor], object]] = {
    "itself": lambda x: x.mul_(1.5),
    "fill a slice with a learned number": lambda x: x[..., 0].fill_(LEARNED[0]),
    "fill a slice with a number": lambda x: x[..., 1:3].fill_(0.25),
    "set a slice": lambda x: x.__setitem__((Ellipsis, 0), x[..., 1] * 2),
    "set a slice to a learned number": lambda x: x.__setitem__((Ellipsis, slice(0, 2)), LEARNED[1]),
    "reshape": lambda x: x.reshape(-1, 4)[:, 1].mul_(3),
    "flatten": lambda x: x.flatten(1, 2).mul_(1.5),
    "view_as": lambda x: x.view_as(x.detach().clone()).add_(1),
    "unflatten": lambda x: x.unflatten(-1, (4, 4))[..., 2].mul_(2),
    "transposed": lambda x: x.mT.mul_(2),
    "movedim": lambda x: x.movedim(-1, 0)[3].mul_(2),
    "swapaxes": lambda x: x.swapaxes(1, 2)[:, 3:5].mul_(2),
    "permute": lambda x: x.permute(2, 0, 1)[1].add_(1),
    "narrow": lambda x: x.narrow(-1, 2, 5).mul_(2),
    "expand_as": lambda x: x.expand_as(x).mul_(2),
    "squeeze and unsqueeze": lambda x: x.unsqueeze(0).squeeze(0).mul_(2),
    "dropout that is off": lambda x: F.dropout(x, 0.5, training=False).mul_(2),
    "a cast that changes nothing": lambda x: x.double().mul_(2),
    "index_put": lambda x: x.masked_fill_(x > 0.5, 0.5),
    "scatter": lambda x: x.scatter_(-1, torch.zeros_like(x[..., :1], dtype=torch.long), x[..., 3:4] * 2),
    "a comparison": lambda x: x[..., 0].gt_(0.1),
    "unsqueeze in place": lambda x: x.view(x.shape).unsqueeze_(0).mul_(2),
    "two writes": lambda x: (x.narrow(-1, 0, 4).mul_(2), x[..., 3:9].add_(1), x.mul_(0.5)),
}

PIECES: dict[str, Callable[[Tensor], object]] = {
    "chunk": lambda x: x.chunk(4, -1)[1].mul_(2),
    "split": lambda x: x.split(5, -1)[-1].mul_(2),
    "split by sizes": lambda x: x.split([3, 13], -1)[0].mul_(2),
    "tensor_split": lambda x: x.tensor_split((2, 7), -1)[1].mul_(2),
    "unbind": lambda x: x.unbind(-1)[3].add_(1),
    "two writes": lambda x: (x.chunk(4, -1)[1].mul_(2), x.split(5, -1)[1].add_(1), x.unbind(-1)[5].zero_()),
}
"""Autograd allows writes to one of several views of constants only."""


class Writes(Tiny):
    """Writes to the attention's output, and reads it and a view taken before."""

    def __init__(self, write: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.write, self.learned = write, LEARNED

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        y = self.out(self.attend(x).transpose(1, 2).reshape(x.shape)) * 1.0
        before = y[..., :5]
        self.write(y)
        return x + y + F.pad(before, (0, 11)) * 0.3


@pytest.mark.parametrize("name", list(WRITES))
def test_make_functional_of_hidden_values(name: str) -> None:
    torch._dynamo.reset()
    assert_same(Writes(WRITES[name]), *inputs())


@pytest.mark.parametrize("name", list(PIECES))
def test_make_functional_of_pieces(name: str) -> None:
    class Pieces(Tiny):
        def hidden(self, ids: Tensor) -> Tensor:
            x = super().hidden(ids)
            factors = torch.ones_like(x)
            before = factors[..., 2:4]
            PIECES[name](factors)
            return x * factors * before.sum(-1, keepdim=True)

    torch._dynamo.reset()
    assert_same(Pieces(), *inputs())


MASK_WRITES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "the last column": lambda m, w: m.__setitem__((slice(None), -1), 0),
    "a row": lambda m, w: m[0].zero_(),
    "one of unbind": lambda m, w: m.unbind(0)[1].add_(1),
    "a piece of chunk": lambda m, w: m.chunk(2, 1)[1].mul_(3),
    "the diagonal": lambda m, w: m.diagonal().mul_(3),
    "transposed": lambda m, w: m.t()[0].mul_(3),
    "flattened": lambda m, w: m.view(-1)[::2].mul_(3),
    "through data": lambda m, w: m.data.mul_(3),
    "through detach": lambda m, w: m.detach().mul_(3),
    "from another dtype": lambda m, w: m.add_(w.float()),
    "copied": lambda m, w: m.copy_(w.float()),
    "with numbers of the input": lambda m, w: m[:, 1:].copy_(w[:, :-1]),
}


@pytest.mark.parametrize("name", list(MASK_WRITES))
def test_make_functional_in_the_objective(name: str) -> None:
    def weighted(model: nn.Module, prompt: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
        mask = torch.ones_like(weights)
        before = mask[:, 1:]
        MASK_WRITES[name](mask, weights)
        return step(model, prompt, responses, weights * mask) * before.sum()

    torch._dynamo.reset()
    assert_same(Tiny(), *inputs(), function=weighted)


def test_writes_to_a_new_tensor_under_no_grad() -> None:
    """Its sizes are those of a value that learns, its numbers are not."""

    class Buffer(Tiny):
        def hidden(self, ids: Tensor) -> Tensor:
            x = super().hidden(ids)
            factors = torch.zeros_like(x)
            with torch.no_grad():
                factors[..., :4] = x[..., :4] * 2
                factors.mul_(3)
            return x * factors

    torch._dynamo.reset()
    assert_same(Buffer(), *inputs())


def test_a_write_in_a_narrower_dtype_stays_in_it() -> None:
    class Narrow(Tiny):
        def hidden(self, ids: Tensor) -> Tensor:
            x = super().hidden(ids)
            y = x.to(torch.bfloat16) * 1
            y.add_(x)
            return y.double()

    torch._dynamo.reset()
    assert_same(Narrow(), *inputs())


def _through_detach(x: Tensor) -> None:
    x.detach().mul_(1.5)


def _through_data(x: Tensor) -> None:
    x.data[..., 0].mul_(1.5)


def _under_no_grad(x: Tensor) -> None:
    with torch.no_grad():
        x.mul_(1.5)


def _under_no_grad_through_a_cast(x: Tensor) -> None:
    with torch.no_grad():
        x.double().mul_(1.5)


def _through_a_diagonal_of_windows(x: Tensor) -> None:
    x.unfold(-1, 2, 2).mul_(1.5)


@pytest.mark.parametrize(
    "write",
    [
        _through_detach,
        _through_data,
        _under_no_grad,
        _under_no_grad_through_a_cast,
        _through_a_diagonal_of_windows,
    ],
)
def test_make_functional_refuses_what_it_cannot_follow(write: Callable[[Tensor], None]) -> None:
    torch._dynamo.reset()
    with pytest.raises(UnsupportedOp, match="in-place op") as refused:
        assert_same(Writes(write), *inputs())
    assert "test_functional.py" in str(refused.value)


UNCHANGED: dict[str, Callable[[Tensor], Tensor]] = {
    "type_as": lambda p: p.type_as(p),
    "positive": lambda p: +p,
    "flatten of one dim": lambda p: p.flatten(0, 0),
    "conj_physical": lambda p: p.conj_physical(),
    "atleast_1d": lambda p: torch.atleast_1d(p),
    "real": lambda p: p.real,
    "resolve_conj": lambda p: p.resolve_conj(),
    "resolve_neg": lambda p: p.resolve_neg(),
    "sum_to_size": lambda p: p.sum_to_size(p.shape),
    "broadcast_tensors": lambda p: torch.broadcast_tensors(p, p)[0],
    "feature_alpha_dropout": lambda p: F.feature_alpha_dropout(p, 0.5, training=False),
    "double": lambda p: p.double(),
}


@pytest.mark.parametrize(
    ("name", "mode"), [*((name, torch.no_grad) for name in UNCHANGED), ("double", torch.inference_mode)]
)
def test_an_op_that_returns_its_operand_keeps_the_gradient(name: str, mode: Callable[[], object]) -> None:
    def with_norm(model: nn.Module, prompt: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
        with mode():  # type: ignore[attr-defined]
            norm = sum(UNCHANGED[name](p).square().sum() for p in model.parameters())
        return step(model, prompt, responses, weights) + 1.5 * norm

    torch._dynamo.reset()
    assert_same(Tiny(), *inputs(), function=with_norm)


def _scores(model: nn.Module, prompt: Tensor, responses: Tensor) -> Tensor:
    ids = torch.cat([prompt.expand(responses.shape[0], -1), responses], 1)
    logits = model(ids)[:, prompt.shape[1] - 1 : -1]
    return torch.log_softmax(logits, -1).gather(-1, responses[..., None]).squeeze(-1)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_scores_in_inference_mode_carry_no_gradient(mode: Callable[[], object]) -> None:
    def kl(model: nn.Module, prompt: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
        with mode():  # type: ignore[attr-defined]
            old = _scores(model, prompt, responses)
            with torch.enable_grad():
                scale = model.head.weight.sum()  # type: ignore[union-attr, operator]
        logp = _scores(model, prompt, responses)
        # inference tensors may not be saved for backward, so they are only added
        return ((logp - old).exp() * weights).sum() + logp.sum() + (scale if mode is torch.inference_mode else 0)

    torch._dynamo.reset()
    assert_same(Tiny(), *inputs(), function=kl)


def test_inference_mode_switched_off_lets_gradients_flow() -> None:
    def outside(model: nn.Module, prompt: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
        with torch.no_grad(), torch.inference_mode(False):
            return step(model, prompt, responses, weights)

    torch._dynamo.reset()
    assert_same(Tiny(), *inputs(), function=outside)
