"""From a dataset on disk to a training step: no engine, no Ray, only the traces and a model.

moe-rollout demo --out traces/
python examples/offline_replay.py traces/
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM

from rollout import RouterReplay
from rollout.tiny_moe import MODEL_PATH
from storage import ReplayBatch, TraceDataset


def main(directory: str, model: str = str(MODEL_PATH)) -> float:
    """One step of reward-weighted likelihood on the newest step of the dataset; returns the loss."""
    torch.set_num_threads(1)
    dataset = TraceDataset(directory)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5)
    replay = RouterReplay(policy)
    traces = list(dataset.iter(step=dataset.steps[-1]))
    batch = ReplayBatch.collate(traces, spec=dataset.spec)
    weight = torch.from_numpy(batch.rewards).nan_to_num(0.0)[:, None] * torch.from_numpy(batch.loss_mask)
    with replay(batch):
        loss = -(weight * batch.token_logprobs(policy(**batch.model_inputs()).logits)).sum() / weight.sum().clamp_min(1)
        loss.backward()
    optimizer.step()
    print(f"{len(traces)} traces of step {dataset.steps[-1]}, loss {loss.item():.4f}")
    print(f"live choices that replay overruled {replay.report().flipped_share:.2%}")
    return float(loss)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "traces")
