"""Train the model in rollout/tiny_moe from scratch: one thread of a CPU, about a minute or two.

    python examples/train_tiny_moe.py OUT_DIR

A Qwen3-MoE of 0.9 M parameters learns to complete `a+b=` one character at a time. Training stops early on
purpose, so that reinforcement learning has something left to teach. Only sums of the train split are used,
also for the decision to stop; the default of --stop-at was chosen so that about half of the held-out sums
end up right. The table at the end is measured on those. They score lower than other draws of the train
split, whose short sums repeat often enough to be remembered.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rollout.tiny_moe import MAX_ANSWER_TOKENS, Problem, exact_match, problems

VOCABULARY = ["<pad>", "<eos>", "<unk>", *"0123456789+="]
MAX_POSITIONS = 128
TRAIN_SEED, STOP_SEED, TEST_SEED = 0, 1, 2
BATCH = 256
WARMUP_STEPS = 50
CHECK_EVERY = 10
AUX_LOSS = 0.003
IGNORED = -100


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; batches are padded on the left, as generation needs."""
    ids = {token: i for i, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=MAX_POSITIONS,
    )


def build_model(seed: int) -> Qwen3MoeForCausalLM:
    """8 layers, 16 experts, 2 per token; routers start with large weights, so experts specialise early."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=16,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        router_aux_loss_coef=AUX_LOSS,
        tie_word_embeddings=True,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.05,
        pad_token_id=VOCABULARY.index("<pad>"),
        eos_token_id=VOCABULARY.index("<eos>"),
    )
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.mul_(3.0)
    return model


def training_batch(tokenizer: PreTrainedTokenizerFast, batch: Sequence[Problem]) -> dict[str, torch.Tensor]:
    """Right-padded ids, mask and labels [batch, tokens]; only the answer and its <eos> are learned."""
    prompts = [tokenizer.encode(problem.prompt) for problem in batch]
    answers = [[*tokenizer.encode(problem.answer), tokenizer.eos_token_id] for problem in batch]
    width = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    ids = torch.full((len(batch), width), tokenizer.pad_token_id)
    labels = torch.full_like(ids, IGNORED)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return {"input_ids": ids, "attention_mask": (ids != tokenizer.pad_token_id).long(), "labels": labels}


def train(model: Any, tokenizer: PreTrainedTokenizerFast, stop_at: float, max_steps: int) -> None:
    """AdamW until greedy answers to `stop_at` of 500 other sums are right; RuntimeError after `max_steps`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.05)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARMUP_STEPS, total_iters=WARMUP_STEPS)
    data = problems(BATCH * max_steps, TRAIN_SEED)
    others = problems(500, STOP_SEED)
    for step in range(1, max_steps + 1):
        batch = training_batch(tokenizer, data[(step - 1) * BATCH : step * BATCH])
        loss = model(**batch, use_cache=False, output_router_logits=True).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        optimizer.zero_grad(set_to_none=True)
        if step % CHECK_EVERY == 0:
            solved = accuracy(model, tokenizer, others)
            print(f"step {step:4d}  loss {loss.item():.3f}  greedy accuracy {solved:.3f}", flush=True)
            if solved >= stop_at:
                return
    raise RuntimeError(f"accuracy stayed below {stop_at} for {max_steps} steps: raise --max-steps")


@torch.inference_mode()
def accuracy(model: Any, tokenizer: Any, asked: Sequence[Problem], do_sample: bool = False) -> float:
    """Share of sums answered exactly, greedily or sampled at temperature 1."""
    inputs = tokenizer([problem.prompt for problem in asked], padding=True, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=MAX_ANSWER_TOKENS, do_sample=do_sample)
    texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(exact_match(text, p.answer) for text, p in zip(texts, asked, strict=True)) / len(asked)


@torch.inference_mode()
def expert_load(model: Any, tokenizer: Any, asked: Sequence[Problem]) -> torch.Tensor:
    """Share of routed slots that each expert received, [sites, experts], over prompts with right answers."""
    batch = training_batch(tokenizer, asked)
    batch.pop("labels")
    logits = torch.stack(model(**batch, use_cache=False, output_router_logits=True).router_logits)
    real = batch["attention_mask"].flatten().bool()
    chosen = logits[:, real].topk(model.config.num_experts_per_tok).indices.flatten(1)
    return torch.stack([ids.bincount(minlength=logits.shape[-1]) for ids in chosen]) / chosen.shape[1]


def save(model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write bf16 safetensors, configurations and tokenizer; the versions that wrote them are left out."""
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.to(torch.bfloat16).save_pretrained(out)
    build_tokenizer().save_pretrained(out)
    for name in ("config.json", "generation_config.json"):
        saved = json.loads((out / name).read_text())
        saved.pop("transformers_version", None)
        (out / name).write_text(json.dumps(saved, indent=2) + "\n")


def print_table(out: Path) -> None:
    """Measure what was saved, as users load it, on held-out sums."""
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    held_out = problems(1000, TEST_SEED, split="test")
    torch.manual_seed(TEST_SEED)
    print(f"parameters                     {model.num_parameters():,}")
    print(f"model.safetensors, bytes       {(out / 'model.safetensors').stat().st_size:,}")
    print(f"greedy accuracy, bf16          {accuracy(model, tokenizer, held_out):.3f}")
    print(f"sampled accuracy, bf16, T=1    {accuracy(model, tokenizer, held_out, do_sample=True):.3f}")
    print("site  load entropy / log E  largest load  smallest load")
    for site, load in enumerate(expert_load(model, tokenizer, held_out)):
        entropy = torch.special.entr(load).sum().item() / math.log(len(load))
        print(f"{site:4d}  {entropy:20.3f}  {load.max().item():12.3f}  {load.min().item():13.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the small adding Qwen3-MoE from scratch.")
    parser.add_argument("out", type=Path, help="directory for the model and its tokenizer")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial weights")
    parser.add_argument("--stop-at", type=float, default=0.55, help="greedy accuracy that ends training")
    parser.add_argument("--max-steps", type=int, default=400)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    tokenizer, model = build_tokenizer(), build_model(arguments.seed)
    train(model, tokenizer, arguments.stop_at, arguments.max_steps)
    save(model, tokenizer, arguments.out)
    print(f"trained in {time.monotonic() - started:.0f} s, saved in {arguments.out}")
    print_table(arguments.out)


if __name__ == "__main__":
    main()
