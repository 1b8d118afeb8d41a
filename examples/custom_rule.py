"""A model with an op that longstraw has never seen, and the rule that makes it run: what the op does along each dim.

    python examples/custom_rule.py

The op is a fused gated activation from somebody's kernel library: one opaque node in the graph. Without a rule
longstraw refuses the step and names the line; with the rule, loss and gradients equal eager's.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import library, nn

import longstraw


@library.custom_op("example::gated", mutates_args=())
def gated(x: torch.Tensor) -> torch.Tensor:
    """silu(left half) * right half of the last dim."""
    left, right = x.chunk(2, -1)
    return F.silu(left) * right


@gated.register_fake
def _(x):
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def gated_backward(ctx, grad):
    with torch.enable_grad():
        x = ctx.saved_tensors[0].detach().requires_grad_()
        left, right = x.chunk(2, -1)
        return torch.autograd.grad(F.silu(left) * right, x, grad)[0]


gated.register_autograd(gated_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


def gated_layout(reader, node):
    """All dims but the last are kept; the last must not run over tokens or rows."""
    source = reader.operand(node, node.args[0])
    reader.keep(node, source[-1], "it splits that dim")
    return (*source[:-1], (reader.shape(node)[-1],))


RULE = longstraw.Rule(torch.ops.example.gated.default, gated_layout)


class Model(nn.Module):
    def __init__(self, width=32, vocabulary=64):
        super().__init__()
        self.table, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.qkv, self.up, self.down = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, 4 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, ids):
        x = self.table(ids)
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.head(x + self.down(gated(self.up(x))))


def step(model, prompt, responses, advantages):
    ids = torch.cat([prompt.expand(len(responses), -1), responses], 1)
    logits = model(ids)[:, prompt.shape[1] - 1 : -1]
    logp = torch.log_softmax(logits, -1).gather(-1, responses[..., None]).squeeze(-1)
    return -(logp * advantages[:, None]).mean()


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a shorter prompt")
    prompt = 64 if parser.parse_args(argv).quick else 512
    torch.manual_seed(0)
    inputs = (torch.randint(64, (1, prompt)), torch.randint(64, (4, 16)), torch.randn(4))
    try:
        longstraw.explain(step, Model(), *inputs)
    except longstraw.LongstrawError as error:
        print(f"without the rule:\n{error}\n")
    parity = longstraw.verify(step, Model(), *inputs, options={"rules": (RULE,)})
    print(f"with the rule:\n{parity}")
    assert parity.ok
    print("checked: with its rule, the unknown op gives eager's loss and gradients")


if __name__ == "__main__":
    main()
