"""Rows that share prefixes in any way: a system prompt, prompts, turns that branch later. Equal to eager."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from longstraw.runtime import row_comparison, transaction
from longstraw.runtime.plan import Plan
from longstraw.runtime.prefix_tree import walk
from longstraw.runtime.state import Store
from tests import small
from tests.small import HEADS, KEY_HEADS, VOCABULARY, Tiny, assert_same, inputs

Tree = tuple[int, list["Tree"]]


def trees(depth: int) -> st.SearchStrategy[Tree]:
    """A number of tokens, and what continues from there; a leaf is one row."""
    below = st.just([]) if depth == 0 else st.one_of(st.just([]), st.lists(trees(depth - 1), min_size=1, max_size=3))
    return st.tuples(st.integers(1, 6), below)


def rows(tree: Tree, generator: torch.Generator) -> list[list[int]]:
    """The rows of a tree, one for each leaf."""
    length, children = tree
    own = torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()
    return [own + row for child in children for row in rows(child, generator)] or [own]


def step(model: nn.Module, ids: Tensor, weights: Tensor) -> Tensor:
    """A weighted sum of all log-probabilities; ids `[B, S]`, weights `[B, S - 1]`, zero at padding."""
    logp = torch.log_softmax(model(ids)[:, :-1], -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return (logp * weights).sum()


@pytest.fixture(scope="module")
def compiled() -> object:
    torch._dynamo.reset()
    return torch.compile(step, backend="longstraw", options={"span_tokens": 5, "page_tokens": 2, "replay_rows": 2})


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trees(3), st.integers(0, 2**31), st.booleans())
def test_rows_that_branch_anywhere_equal_eager(
    compiled: object, monkeypatch: pytest.MonkeyPatch, tree: Tree, seed: int, last_only: bool
) -> None:
    alive: list[int] = []
    stores: list[transaction.Store] = []
    make = Store

    def watched(*args: object, **kwargs: object) -> transaction.Store:
        stores.append(make(*args, **kwargs))  # type: ignore[arg-type]
        alive.append(sum(not store.released for store in stores))
        return stores[-1]

    monkeypatch.setattr(transaction, "Store", watched)
    monkeypatch.setattr(row_comparison, "_TILE", 1 + seed % 40)
    generator = torch.Generator().manual_seed(seed)
    found = rows((max(tree[0], 5), tree[1]), generator)
    longest = max(map(len, found))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in found])
    weights = torch.randn(len(found), longest - 1, generator=generator, dtype=torch.float64)
    for i, row in enumerate(found):
        weights[i, len(row) - 1 :] = 0
        if last_only:
            weights[i, : len(row) - 3] = 0
    model = Tiny()
    losses, gradients = [], []
    for function in (step, compiled):
        model.zero_grad()
        losses.append(function(model, ids, weights))  # type: ignore[operator]
        losses[-1].backward()
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-11, atol=1e-11)
    for got, want in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    assert max(alive) <= depth(tree)  # one path from the root to a leaf
    assert all(store.released for store in stores)


def depth(tree: Tree) -> int:
    return 1 + max(map(depth, tree[1]), default=0)


def test_prompts_that_share_a_system_prompt_share_its_capture(compiled: object, monkeypatch) -> None:
    """Two prompts of two responses each: the tree has the system prompt, two prompts, and leaves."""
    generator = torch.Generator().manual_seed(0)
    tree: Tree = (12, [(8, [(4, []), (4, [])]), (8, [(4, []), (4, [])])])
    built = []
    build = transaction.prefix_tree.build
    monkeypatch.setattr(
        transaction.prefix_tree, "build", lambda *args, **kwargs: built.append(build(*args, **kwargs)) or built[-1]
    )
    ids = torch.tensor(rows(tree, generator))
    compiled(Tiny(), ids, torch.ones(4, ids.shape[1] - 1, dtype=torch.float64)).backward()  # type: ignore[operator]
    (root,) = built
    assert (root.start, root.stop, root.shared) == (0, 11, True)
    assert [(n.rows, n.start, n.stop, n.shared) for n in root.children] == [
        ([0, 1], 11, 19, True),
        ([2, 3], 11, 19, True),
    ]
    assert all(not leaf.children for prompt in root.children for leaf in prompt.children)


@pytest.mark.parametrize("response", [1, 2])
def test_rows_share_a_prompt_before_responses_of_any_length(monkeypatch: pytest.MonkeyPatch, response: int) -> None:
    """Dynamo takes one token for a constant, so what is read of such responses has no token dim."""
    trees: list[transaction.Node] = []
    take = transaction.BranchRun.take

    def watched(self: transaction.BranchRun, plan: Plan) -> None:
        take(self, plan)
        trees.append(self.tree)

    monkeypatch.setattr(transaction.BranchRun, "take", watched)
    torch._dynamo.reset()
    model, given = Tiny(), small.inputs(prompt=20, response=response, group=3)
    small.step(model, *given).backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    torch.compile(small.step, backend="longstraw", options={"page_tokens": 2, "span_tokens": 5})(
        model, *given
    ).backward()
    assert next((node.start, node.stop, node.shared) for node in walk(trees[-1])) == (0, 19, True)
    for p, wanted in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, wanted, rtol=1e-10, atol=1e-13)


def test_zeros_of_either_sign_are_not_equal() -> None:
    def signed(model: nn.Module, ids: Tensor, signs: Tensor) -> Tensor:
        logits = torch.copysign(model(ids), signs[:, None, None])
        return torch.log_softmax(logits, -1).gather(-1, ids[..., None]).sum()

    torch._dynamo.reset()
    ids = torch.randint(VOCABULARY, (1, 9)).expand(4, -1).contiguous()
    small.assert_same(Tiny(), ids, torch.tensor([0.0, -0.0, 0.0, -0.0]).double(), function=signed)


# --- rows of differentiable inputs ------------------------------------------------------------------------------------


class Embedded(Tiny):
    """A model that is given embeddings."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self.attend(x).transpose(1, 2).reshape(x.shape))
        return self.head(x + self.down(torch.tanh(self.up(x))))


def _halves(a: Tensor, b: Tensor, gain: Tensor, responses: Tensor) -> Tensor:
    prompts = [p.expand(2, -1, -1) for p in (a, b)]
    return torch.cat([torch.cat(prompts, 0), responses], 1)


def _features(a: Tensor, b: Tensor, gain: Tensor, responses: Tensor) -> Tensor:
    parts = (a[..., :8].expand(4, -1, -1), b[..., 8:].expand(4, -1, -1) * gain)
    return torch.cat([torch.cat(parts, -1), responses], 1)


def _shared_features(a: Tensor, b: Tensor, gain: Tensor, responses: Tensor) -> Tensor:
    parts = (a[..., :8].expand(4, -1, -1), b[..., 8:].expand(4, -1, -1))
    return torch.cat([torch.cat(parts, -1), responses * gain], 1)


def _two_parts(a: Tensor, b: Tensor, gain: Tensor, responses: Tensor) -> Tensor:
    parts = (a.expand(4, -1, -1), b[0].expand(4, -1, -1), responses * gain)
    return torch.cat(parts, 1)


@pytest.mark.parametrize(("join", "shared"), [(_halves, 0), (_features, 0), (_shared_features, 8), (_two_parts, 17)])
def test_rows_of_equal_values_share_only_what_is_one_value(
    monkeypatch: pytest.MonkeyPatch, join: object, shared: int
) -> None:
    """Two learned prompts with equal values are two, and so are gains of 1 for each row: each has its gradient."""
    trees: list[transaction.Node] = []
    take = transaction.BranchRun.take
    monkeypatch.setattr(transaction.BranchRun, "take", lambda run, plan: (take(run, plan), trees.append(run.tree)))
    torch._dynamo.reset()

    def step(model: nn.Module, a: Tensor, b: Tensor, gain: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        x = join(a, b, gain, model.table(ids))  # type: ignore[operator]
        logp = torch.log_softmax(model(x)[:, -ids.shape[1] - 1 : -1], -1).gather(-1, ids[..., None]).squeeze(-1)
        return (logp * weights).sum()

    model, generator = Embedded(), torch.Generator().manual_seed(0)
    prompt = torch.randn(1, 9, 16, generator=generator, dtype=torch.float64)
    ids = torch.randint(VOCABULARY, (4, 4), generator=generator)
    weights = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    compiled = torch.compile(step, backend="longstraw", options={"page_tokens": 2, "span_tokens": 4})
    found = []
    for function in (step, compiled):
        model.zero_grad()
        given = [x.clone().requires_grad_() for x in (prompt, prompt, torch.ones(4, 1, 1, dtype=torch.float64))]
        function(model, *given, ids, weights).backward()
        found.append([x.grad for x in (*given, *model.parameters())])
    for got, want in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-13)
    assert trees[-1].stop == shared  # a prompt's last token predicts another token in each row


class SeenBySegments(Tiny):
    """Two attentions under a mask `[2, G, S, S + 5]` of an input `[2, G, S + 5]`, the second half of which counts."""

    def forward(self, ids: Tensor, seen: Tensor) -> Tensor:
        self.seen = seen
        return self.head(self.hidden(ids))

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for _ in range(2):
            x = x + self.out(self.attend(x).transpose(1, 2).reshape(x.shape))
        return x

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(self.query(x), HEADS), *(self.heads(f(x), KEY_HEADS) for f in (self.key, self.value))
        k, v = (t.repeat_interleave(HEADS // KEY_HEADS, 1) for t in (k, v))
        of_query, of_key = torch.arange(x.shape[1])[:, None], torch.arange(self.seen.shape[-1])
        mask = (of_key <= of_query) & ((self.seen[:, :, None, :] > 0) | (of_key == of_query))
        mask = mask.view(2, self.seen.shape[1], x.shape[1], self.seen.shape[2])[..., : x.shape[1]]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[1][:, None])


def test_rows_whose_masks_differ_share_no_prompt_wherever_the_masks_have_their_rows() -> None:
    def step(model: nn.Module, prompt: Tensor, responses: Tensor, weights: Tensor, seen: Tensor) -> Tensor:
        logits = model(torch.cat([prompt.expand(len(responses), -1), responses], 1), seen)[:, prompt.shape[1] - 1 : -1]
        return (torch.log_softmax(logits, -1).gather(-1, responses[..., None]).squeeze(-1) * weights).sum()

    torch._dynamo.reset()
    seen = (torch.rand(3, 18, generator=torch.Generator().manual_seed(3)) < 0.5).long()
    assert_same(SeenBySegments(), *inputs(9, 4, 3), torch.stack([seen.flip(-1), seen]), function=step)
