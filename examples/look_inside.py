"""What a step is rewritten into: the summary, one stage as Python, and the comparison with eager.

python examples/look_inside.py
"""

import argparse

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import longstraw


def step(model, prompt, responses, mask, old_logp, advantages):
    ids = torch.cat([prompt.expand(len(responses), -1), responses], 1)
    logits = model(input_ids=ids, use_cache=False).logits[:, prompt.shape[1] - 1 : -1]
    logp = torch.log_softmax(logits.float(), -1).gather(-1, responses[..., None]).squeeze(-1)
    ratio, advantages = (logp - old_logp).exp(), advantages[:, None]
    loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return (loss * mask).sum() / mask.sum()


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two layers instead of four")
    parser.add_argument("--stage", default="insert_state", help="which stage to print")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2 if args.quick else 4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    model = Qwen3ForCausalLM(config)
    group, prompt, response = 4, 200, 12
    inputs = (
        torch.randint(512, (1, prompt)),
        torch.randint(512, (group, response)),
        torch.ones(group, response),
        torch.randn(group, response) * 0.1 - 6,
        torch.randn(group),
    )
    explanation = longstraw.explain(step, model, *inputs)
    print(explanation)
    print(f"\nthe first lines after {args.stage}:\n")
    print("\n".join(explanation.stage(args.stage).splitlines()[:30]))
    print()
    parity = longstraw.verify(step, model, *inputs)
    print(parity)
    assert parity.ok and "bytes per token" in str(explanation)
    print("checked: the rewritten step equals eager")


if __name__ == "__main__":
    main()
