"""TRL's GRPOTrainer with LoRA adapters: its log-probabilities go through longstraw, and it logs the same losses.

    python examples/trl_grpo.py

Nothing in TRL is changed. The one method that runs the model, `_get_per_token_logps_and_entropies`, is compiled: TRL
calls it for the policy, for the old policy, and with the adapters switched off for the reference. It is one graph with
two things set aside, both of which Dynamo can't trace:

- `profiling_decorator` around the method calls `time.perf_counter`: what it wraps is compiled;
- `trl.kernels.ChunkedLogProbFunction`, TRL's head that never holds all logits, multiplies into a part of a buffer
  (`torch.mm(..., out=tile)`). While the compiled method runs, plain log-softmax stands in its place: longstraw runs a
  head in tiles by itself.

`gradient_checkpointing=False`: TRL's default would keep one layer's graph instead of all, and longstraw keeps that of
one short span anyway. With it on, the losses are the same, but every time that TRL has sampled and switches
checkpointing on again, one more hook is put on the embeddings, for which Dynamo compiles anew.
"""

import argparse
import os
import tempfile
import time
import warnings
from unittest import mock

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import datasets
import torch
import torch.nn.functional as F
import trl.trainer.utils
from peft import LoraConfig
from quickstart import load_text
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast, PrinterCallback, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

TOLERANCE = 3e-6  # of a logged loss, in float32
FULL = {"steps": 10, "layers": 2, "iterations": 2}


class PlainLogProb:
    """`trl.kernels.ChunkedLogProbFunction` written out: [N, W], [V, W], [V], [N] -> five of [N], or None."""

    @staticmethod
    def apply(hidden, weight, bias, targets, temperature, chunk_size, softcap, scale, outputs):
        logits = F.linear(hidden, weight, bias).float() * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logp = torch.log_softmax(logits / temperature, -1)
        chosen = logp.gather(-1, targets[:, None]).squeeze(-1)
        entropy = -(logp.exp() * logp).sum(-1) if "entropy" in outputs else None
        return chosen, entropy, None, None, None


def through_longstraw(trainer):
    """Compile what runs the model in a trainer."""
    method = type(trainer)._get_per_token_logps_and_entropies.__wrapped__.__get__(trainer)
    compiled = torch.compile(method, backend="longstraw", fullgraph=True)

    def logps_and_entropies(*args, **kwargs):
        with mock.patch.object(trl.trainer.utils, "_ChunkedLogProbFunction", PlainLogProb):
            return compiled(*args, **kwargs)

    trainer._get_per_token_logps_and_entropies = logps_and_entropies


def byte_tokenizer():
    """A token is a byte: nothing has to be downloaded."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *alphabet])}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def small_model(vocabulary, layers):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=8192,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    return Qwen3ForCausalLM(config)


def vowels(completions, **_):
    """The reward: how many vowels a completion has."""
    return [float(sum(character in "aeiou" for character in completion)) for completion in completions]


def train(prompts, *, steps, layers, iterations, prepare=lambda trainer: None):
    """Train for some steps, several on the same completions; return what was logged for each."""
    tokenizer = byte_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=8,
            num_generations=4,
            num_iterations=iterations,
            beta=0.05,
            max_completion_length=12,
            max_steps=steps,
            gradient_checkpointing=False,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            log_level="error",
            seed=1,
        )
        trainer = GRPOTrainer(
            model=small_model(len(tokenizer), layers),
            reward_funcs=vowels,
            args=arguments,
            train_dataset=datasets.Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
            processing_class=tokenizer,
            peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False),
        )
        trainer.remove_callback(PrinterCallback)
        prepare(trainer)
        start = time.perf_counter()
        trainer.train()
        print(f"{steps} steps took {time.perf_counter() - start:.1f} s")
        return [entry for entry in trainer.state.log_history if "loss" in entry]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="shorter prompts, fewer steps, one layer, no old policy")
    quick = parser.parse_args(argv).quick
    warnings.filterwarnings("ignore")
    length, sizes = (200, {"steps": 3, "layers": 1, "iterations": 1}) if quick else (1500, FULL)
    source = load_text()
    prompts = [source[i * length : (i + 1) * length - 7 * i] for i in range(8)]
    plain = train(prompts, **sizes)
    ours = train(prompts, **sizes, prepare=through_longstraw)
    print(f"\n{'step':>4} {'loss, TRL':>12} {'longstraw':>12} {'gradient norm':>14} {'longstraw':>12} {'KL':>10}")
    for number, (one, other) in enumerate(zip(plain, ours, strict=True), start=1):
        print(
            f"{number:>4} {one['loss']:>12.7f} {other['loss']:>12.7f} {one['grad_norm']:>14.6f} "
            f"{other['grad_norm']:>12.6f} {other['kl']:>10.6f}"
        )
    worst = max(abs(one["loss"] - other["loss"]) for one, other in zip(plain, ours, strict=True))
    assert worst < TOLERANCE, worst
    assert any(abs(one["loss"]) > 100 * TOLERANCE for one in plain), "the losses are not all zero"
    print(f"\nchecked: over {len(plain)} steps TRL logs the same losses with longstraw, to {worst:.0e}")


if __name__ == "__main__":
    main()
