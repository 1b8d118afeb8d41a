"""A hybrid of recurrent and full-attention layers (Qwen3.5): which layer keeps which state, and the same gradients.

    python examples/hybrid_model.py

Layers of full attention keep keys and values of every token. Layers with a gated delta rule keep one matrix a head and
the last inputs of a short convolution, however long the prompt is: replaying a response restores these.
"""

import argparse

import torch
from quickstart import load_model, random_inputs, step

import longstraw


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a shorter prompt")
    prompt = 130 if parser.parse_args(argv).quick else 1000
    model = load_model(None, "qwen3_5")
    torch.manual_seed(0)
    inputs = random_inputs(vocabulary=256, group=4, prompt=prompt, response=16)
    explanation = longstraw.explain(step, model, *inputs)
    print(explanation)
    branch = explanation.programs[0].step.branches[0]
    per_token = sum(slot.bytes_per_token for slot in branch.slots)
    fixed = sum(carry.num_bytes for carry in branch.carries)
    print(
        f"\nstate of {prompt} prompt tokens: {prompt * per_token} bytes of keys and values in {len(branch.sites)} of "
        f"{model.config.num_hidden_layers} layers, {fixed} bytes in the others at any length\n"
    )
    parity = longstraw.verify(step, model, *inputs)
    print(parity)
    assert parity.ok
    assert len(branch.sites) == 1 and {carry.kind for carry in branch.carries} == {"gated_delta_rule", "causal_conv"}
    assert fixed == 3 * 4 * (4 * 32 * 32 + 3 * (4 + 4 + 4) * 32)  # three layers, float32: a matrix a head, three inputs
    print("checked: one layer keeps keys and values, three a matrix and a tail; loss and gradients are eager's")


if __name__ == "__main__":
    main()
