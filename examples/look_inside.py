"""What a step is rewritten into: the summary, one stage as Python, and the comparison with eager.

python examples/look_inside.py
"""

import argparse

import torch
from quickstart import random_inputs, step
from transformers import Qwen3Config, Qwen3ForCausalLM

import longstraw


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
    inputs = random_inputs(vocabulary=512, group=4, prompt=200, response=12)
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
