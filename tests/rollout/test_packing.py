"""check_packable says of every family what a comparison of logits says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout import RouterReplay
from rollout.families import measured_table
from rollout.packing import check_packable
from rollout.tiny_moe import MODEL_PATH
from storage import ReplayBatch, Trace
from tests.families import VOCAB, save_tiny
from tests.rollout.routes import load, random_routes

REPRESENTATIVE = {"mixtral": True, "deepseek_v3": True, "gpt_oss": False, "llama4_text": False, "qwen3_next": False}
OTHERS = [row.family for row in measured_table().rows if not row.served.startswith("refused")]
FAMILIES = [*REPRESENTATIVE, *(pytest.param(f, marks=pytest.mark.full) for f in OTHERS if f not in REPRESENTATIVE)]
SEQUENCES = [np.random.default_rng(n).integers(3, VOCAB, n).tolist() for n in (23, 1, 40, 9)]


@torch.no_grad()
def packed_error(model) -> float:
    """Largest difference between logits of packed sequences and of each sequence in a forward of its own."""
    ids = torch.tensor([[token for sequence in SEQUENCES for token in sequence]])
    positions = torch.cat([torch.arange(len(sequence)) for sequence in SEQUENCES])[None]
    packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
    alone = [model(input_ids=torch.tensor([sequence]), use_cache=False).logits[0] for sequence in SEQUENCES]
    return (packed - torch.cat(alone)).abs().max().item()


def is_packable(model) -> bool:
    try:
        check_packable(model)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("family", FAMILIES)
def test_the_check_agrees_with_the_logits(family, tmp_path):
    model = load(save_tiny(family, tmp_path))
    error = packed_error(model)
    assert error < 1e-4 or error > 1e-2
    assert is_packable(model) == (error < 1e-4)
    assert REPRESENTATIVE.get(family, error < 1e-4) == (error < 1e-4)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_check_is_exact_in_every_precision_and_leaves_no_gradient(attention, dtype):
    model = AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype=dtype, attn_implementation=attention)
    model.requires_grad_(True).train()
    with torch.no_grad():
        check_packable(model)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.get_input_embeddings()._forward_hooks


def test_replay_refuses_a_packed_batch_that_the_model_would_mix(tmp_path):
    model = load(save_tiny("gpt_oss", tmp_path))
    replay = RouterReplay(model)
    routes = random_routes(replay.spec, 4)
    trace = Trace("run/0/0/0", 0, [5, 6, 7], [8, 9], [-1.0, -1.0], routes, "length")
    with pytest.raises(ValueError, match="GptOssForCausalLM lets the sequences of a packed batch see each other"):
        with replay(ReplayBatch.collate([trace], spec=replay.spec, padding="packed")):
            pytest.fail("the context must not open")
    batch = ReplayBatch.collate([trace], spec=replay.spec, padding="right")
    with replay(batch), torch.no_grad():
        model(**batch.model_inputs())
