"""Latent attention to selected keys, and experts (GLM-5.2's layers, small): what each layer keeps, the same gradients.

    python examples/sparse_moe_model.py

Every layer keeps the latents that its keys and values are built from. Every second layer also keeps the keys of its
indexer, which says for each query which keys it attends to; the layer after it takes the same choice and keeps nothing
more.
"""

import argparse

import torch
from quickstart import load_model, random_inputs, step

import longstraw


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a shorter prompt")
    prompt = 130 if parser.parse_args(argv).quick else 500
    model = load_model(None, "glm_moe_dsa")
    torch.manual_seed(0)
    inputs = random_inputs(vocabulary=256, group=4, prompt=prompt, response=16)
    explanation = longstraw.explain(step, model, *inputs)
    print(explanation)

    branch = explanation.programs[0].step.branches[0]
    latents = sum(branch.slots[site.key_slot].bytes_per_token for site in branch.sites)
    indexers = sum(branch.slots[slot].bytes_per_token for chooser in branch.choosers for slot in chooser.key_slots)
    expansions = [site.expansion for site in branch.sites]
    built = sum(4 * (e.key_heads * e.key_width + e.value_heads * e.value_width) for e in expansions)  # float32
    print(
        f"\nstate of {prompt} prompt tokens: {prompt * latents} bytes of latents (their keys and values would be "
        f"{prompt * built}) and {prompt * indexers} of indexers' keys\n"
    )
    parity = longstraw.verify(step, model, *inputs)
    print(parity)
    assert [site.chooser for site in branch.sites] == [0, 0, 1, 1]  # two layers share a choice
    assert all(chooser.k == 64 < prompt for chooser in branch.choosers)  # so that something is left out
    assert latents == 4 * 4 * (48 + 16) and indexers == 2 * 4 * 32  # layers x bytes of a number x numbers
    # Far below what one key selected instead of another would do: both sides made the same choices.
    assert parity.ok and max(parity.loss_error, parity.relative_l2, parity.worst[1]) < 1e-5
    print("checked: four layers keep latents, two of them an indexer's keys; loss and gradients are eager's to 1e-5")


if __name__ == "__main__":
    main()
