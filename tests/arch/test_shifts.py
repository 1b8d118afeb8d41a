"""Token shifts: every token also gets the value of the token before, or of one some tokens before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.small import WIDTH, Tiny, assert_refused, assert_same, inputs, records, step

Shift = Callable[[Tensor], Tensor]


class Shifted(Tiny):
    """Mixes hidden values with shifted ones before an attention and before the feed-forward."""

    def __init__(self, shift: Shift) -> None:
        super().__init__()
        self.shift = shift
        self.mix = nn.Parameter(torch.rand(2, WIDTH).double())

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        x = torch.lerp(x, self.shift(x), self.mix[0])
        x = x + self.out(self.attend(x).transpose(1, 2).reshape(x.shape))
        return x + self.down(torch.tanh(self.up(torch.lerp(x, self.shift(x), self.mix[1]))))


SHIFTS: dict[str, Shift] = {
    "padded and cut": lambda x: F.pad(x, (0, 0, 1, -1)),
    "cut and padded": lambda x: F.pad(x[:, :-1], (0, 0, 1, 0)),
    "ZeroPad2d": nn.ZeroPad2d((0, 0, 1, -1)),
    "joined": lambda x: torch.cat([torch.zeros(x.shape[0], 1, WIDTH, dtype=x.dtype), x[:, :-1]], 1),
    "joined with zeros like it": lambda x: torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1),
    "joined with new zeros": lambda x: torch.cat((x.new_zeros(x.shape[0], 1, x.shape[2]), x[:, :-1]), dim=-2),
    "by three": lambda x: F.pad(x, (0, 0, 3, -3)),
    "by two, tokens last": lambda x: F.pad(x.mT, (2, -2)).mT,
    "twice": lambda x: F.pad(F.pad(x, (0, 0, 1, -1)), (0, 0, 1, -1)),
    "cut short twice": lambda x: F.pad(x[:, :-2], (0, 0, 2, 0)),
}


@pytest.mark.parametrize("name", SHIFTS)
@pytest.mark.parametrize("options", [{}, {"span_tokens": 1}, {"span_tokens": 100, "prompt_grad": "exact"}], ids=str)
def test_shifted_tokens_are_exact(name: str, options: dict[str, object]) -> None:
    torch._dynamo.reset()
    assert_same(Shifted(SHIFTS[name]), *inputs(), **options)


def test_what_is_kept_of_a_shift_are_the_last_values() -> None:
    carries = records(step, Shifted(SHIFTS["by three"]), *inputs())["lower"].step.branches[0].carries
    assert [(carry.kind, carry.shape) for carry in carries] == [("shift", (3, WIDTH))] * 2


def convolved(x: Tensor) -> Tensor:
    """`[G, W, S - 1]` to `[G, S, W]`: with the three values before, and a zero in front."""
    weight = torch.linspace(-1, 1, 4).double().repeat(WIDTH, 1, 1)
    return F.pad(F.conv1d(x, weight, padding=3, groups=WIDTH)[..., :-3], (1, 0)).mT


REFUSED: dict[str, tuple[str, Shift]] = {
    "later": ("combines one token's values with those of a token at another", lambda x: F.pad(x, (0, 0, -1, 1))),
    "later, joined": ("joins values", lambda x: torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], 1)),
    "around": ("roll mixes tokens", lambda x: torch.roll(x, 1, 1)),
    "ones": ("something else than zeros", lambda x: F.pad(x, (0, 0, 1, -1), value=1.0)),
    "same place": ("pads a part of the tokens", lambda x: F.pad(x[:, 1:], (0, 0, 1, 0))),
    "zeros at the end": ("pads a part of the tokens", lambda x: F.pad(x[:, :-2], (0, 0, 1, 1))),
    "more zeros at the end": ("pads a part of the tokens", lambda x: F.pad(x[:, :-4], (0, 0, 1, 3))),
    "convolved without the first token": ("begin with the first token", lambda x: convolved(F.pad(x.mT, (-1, 0)))),
    "convolved without the first token, channels padded": (
        "begin with the first token",
        lambda x: convolved(F.pad(x.mT[..., 1:], (0, 0, 1, -1))),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_shifts_are_refused(name: str) -> None:
    why, shift = REFUSED[name]
    assert_refused(why, Shifted(shift))


# --- in the loss: of numbers of each token, computed of all tokens at once ---


def rows(prompt: Tensor, responses: Tensor) -> Tensor:
    return torch.cat([prompt.expand(responses.shape[0], -1), responses], 1)


def log_probs(model: Tiny, ids: Tensor) -> Tensor:
    """Of every token but the first, `[G, S - 1]`."""
    return torch.log_softmax(model(ids)[:, :-1], -1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def lined_up(model: Tiny, ids: Tensor) -> Tensor:
    return F.pad(log_probs(model, ids), (1, 0))


def joined_with_zeros(model: Tiny, ids: Tensor) -> Tensor:
    found = log_probs(model, ids)
    return torch.cat([found.new_zeros(found.shape[0], 1), found], 1)


def differences(model: Tiny, ids: Tensor) -> Tensor:
    found = lined_up(model, ids)
    return found - F.pad(found, (1, -1))


def shifted_logits(model: Tiny, ids: Tensor) -> Tensor:
    return torch.log_softmax(F.pad(model(ids), (0, 0, 1, -1)), -1).gather(-1, ids[..., None]).squeeze(-1)


def running_values(model: Tiny, ids: Tensor) -> Tensor:
    return model.up(model.hidden(ids))[..., 0].cumsum(1)


def shifted_values(model: Tiny, ids: Tensor) -> Tensor:
    return F.pad(model.up(model.hidden(ids))[..., 0], (1, -1))


def convolved_values(model: Tiny, ids: Tensor) -> Tensor:
    values = model.up(model.hidden(ids))[..., :1].mT
    return F.conv1d(F.pad(values, (1, 0)), torch.tensor([[[0.3, 1.0]]]).double())[:, 0]


def hidden_convolved_to_one(model: Tiny, ids: Tensor) -> Tensor:
    return F.conv1d(F.pad(model.hidden(ids).mT, (1, 0)), torch.ones(1, WIDTH, 2).double())[:, 0]


def of_pairs_of_tokens(model: Tiny, ids: Tensor) -> Tensor:
    found = lined_up(model, ids)
    return (found[:, :, None] * found[:, None]).tril().sum(-1)


def matrix_of_pairs_of_tokens(model: Tiny, ids: Tensor) -> Tensor:
    found = lined_up(model, ids)
    return (found[:, :, None] @ found[:, None]).tanh().tril().sum(-1)


def written_pairs_of_tokens(model: Tiny, ids: Tensor) -> Tensor:
    found = lined_up(model, ids)
    return torch.einsum("gi,gj->gij", found, found).tanh().mean(1)


def matrix_of_pairs_of_rows(model: Tiny, ids: Tensor) -> Tensor:
    found = lined_up(model, ids)
    return (found.T[:, :, None] @ found.T[:, None]).tanh().mean(1).T


def of_pairs_of_rows(model: Tiny, ids: Tensor) -> Tensor:
    found = lined_up(model, ids)
    return (found[:, None] * found).mean(1)


@pytest.mark.parametrize(
    "values",
    [
        of_pairs_of_tokens,
        of_pairs_of_rows,
        matrix_of_pairs_of_tokens,
        matrix_of_pairs_of_rows,
        written_pairs_of_tokens,
        lined_up,
        joined_with_zeros,
        differences,
        shifted_logits,
        running_values,
        shifted_values,
        convolved_values,
        hidden_convolved_to_one,
    ],
)
@pytest.mark.parametrize("span_tokens", [1, 4, 100])
def test_numbers_of_each_token_may_be_shifted_and_summed(
    values: Callable[[Tiny, Tensor], Tensor], span_tokens: int
) -> None:
    def loss(model: Tiny, prompt: Tensor, responses: Tensor, weights: Tensor) -> Tensor:
        return (values(model, rows(prompt, responses))[:, prompt.shape[1] :] * weights).sum()

    torch._dynamo.reset()
    assert_same(Tiny(), *inputs(), function=loss, span_tokens=span_tokens)
