"""One policy step, end to end: sample with rewards, replay the routes in the trainer's forward, step, push the weights.

    python examples/policy_step.py traces/

REINFORCE with a group baseline on the built-in model; the whole algorithm is `main`.
"""

import sys

import torch
from transformers import AutoModelForCausalLM

from rollout import RolloutClient, RouterReplay, SamplingParams
from rollout.tiny_moe import MODEL_PATH, exact_match, problems
from storage import ReplayBatch, Trace


def reward(trace: Trace) -> float:
    return exact_match(trace.text, trace.metadata["answer"])


def policy_loss(model: torch.nn.Module, batch: ReplayBatch, advantages: torch.Tensor) -> torch.Tensor:
    logprobs = batch.token_logprobs(model(**batch.model_inputs()).logits)
    return -(advantages[:, None] * logprobs).sum() / batch.completion_mask.sum()


def main(directory: str, num_prompts: int = 32, num_samples: int = 4) -> list[Trace]:
    torch.set_num_threads(1)
    trainer = AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype=torch.float32)
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-4)
    replay = RouterReplay(trainer)
    sums = problems(num_prompts, seed=1)
    arguments = {
        "num_samples": num_samples,
        "sampling_params": SamplingParams(temperature=1.0, max_tokens=5, seed=0),
        "metadata": [{"answer": problem.answer} for problem in sums],
    }
    with RolloutClient.local(MODEL_PATH, dtype="float32", traces=directory, reward_fn=reward) as client:
        traces = client.sample([problem.prompt for problem in sums], **arguments)
        batch = ReplayBatch.collate(traces, spec=replay.spec)
        rewards = torch.from_numpy(batch.rewards).view(num_prompts, num_samples)
        advantages = (rewards - rewards.mean(1, keepdim=True)).view(-1)
        with replay(batch):
            policy_loss(trainer, batch, advantages).backward()
        optimizer.step()
        client.update_weights(trainer.state_dict(), version=1)
        after = client.sample([problem.prompt for problem in sums], **arguments)
    print(f"reward {rewards.mean():.3f}, live choices that replay overruled {replay.report().flipped_share:.2%}")
    print(f"weight versions: first step {traces[0].weight_version}, second step {after[0].weight_version}")
    return after


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "traces")
