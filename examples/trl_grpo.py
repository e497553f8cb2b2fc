"""GRPO with TRL's trainer on the built-in model: rollouts from RolloutClient, replayed in every forward of the policy.

    pip install "moe-rollout[trl]"
    python examples/trl_grpo.py --steps 20 --traces traces/

What a TRL user adds is `Rollouts` (TRL's `rollout_func`) and `ReplayTrainer`. TRL hands extra fields of a rollout to
reward functions only, so the routes are found by each row's token ids: shuffled, split and re-padded batches, gradient
checkpointing (TRL's default) and the old-logprob forward need nothing else, and a reference model is not touched.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from rollout import RolloutClient, RouterReplay, SamplingParams
from rollout.route_table import RouteTable
from rollout.tiny_moe import MAX_ANSWER_TOKENS, MODEL_PATH, exact_match, problems


class Rollouts:
    """TRL's `rollout_func`: samples with the current weights and notes the routes of every sequence."""

    def __init__(self, client: RolloutClient, replay: RouterReplay) -> None:
        self.client = client
        # bfloat16 samples of equal tokens may differ in a route; either is one that a sample took
        self.routes = RouteTable(replay.spec, duplicates="first")
        self._version = 0

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        """One sample per prompt: TRL repeats each prompt `num_generations` times."""
        self._version += 1
        self.client.update_weights(trainer.accelerator.unwrap_model(trainer.model).state_dict(), self._version)
        params = SamplingParams(temperature=1.0, max_tokens=MAX_ANSWER_TOKENS, seed=trainer.args.seed)
        traces = self.client.sample(prompts, sampling_params=params)
        self.routes.clear()
        self.routes.add(traces)
        return {
            "prompt_ids": [trace.prompt_ids for trace in traces],
            "completion_ids": [trace.completion_ids for trace in traces],
            "logprobs": [trace.logprobs.tolist() for trace in traces],
        }


class ReplayTrainer(GRPOTrainer):
    """GRPOTrainer whose policy takes the sampler's experts, from the rollout to the end of the backward."""

    def __init__(self, *args: Any, client: RolloutClient, **kwargs: Any) -> None:
        self.replay = RouterReplay(kwargs["model"])
        self.rollouts = Rollouts(client, self.replay)
        super().__init__(*args, rollout_func=self.rollouts, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """TRL samples, computes old log-probabilities, the loss and its gradients in here."""
        with self.replay.lookup(self.rollouts.routes):
            return super().training_step(*args, **kwargs)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """The sampler's log-probabilities are the old ones; TRL uses them with vLLM only."""
        return super()._compute_loss(model, {**inputs, "old_per_token_logps": inputs["sampling_per_token_logps"]})


def reward(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [exact_match(completion, right) for completion, right in zip(completions, answer, strict=True)]


def config(directory: str, steps: int, **overrides: Any) -> GRPOConfig:
    settings: dict[str, Any] = dict(  # noqa: C408
        output_dir=directory,
        max_steps=steps,
        per_device_train_batch_size=128,
        num_generations=8,
        max_completion_length=MAX_ANSWER_TOKENS,
        learning_rate=1.5e-4,
        lr_scheduler_type="constant",
        beta=0.0,
        bf16=False,
        use_cpu=True,
        # transformers' balancing loss selects from the router logits once more, not from the executed experts
        router_aux_loss_coef=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        dataloader_pin_memory=False,
    )
    return GRPOConfig(**{**settings, **overrides})


def main(steps: int, traces: str | None, sampler_dtype: str = "bfloat16", **overrides: Any) -> ReplayTrainer:
    torch.set_num_threads(1)
    sums = problems(4096, seed=1)
    data = Dataset.from_list([{"prompt": problem.prompt, "answer": problem.answer} for problem in sums])
    with (
        tempfile.TemporaryDirectory() as scratch,
        RolloutClient.local(MODEL_PATH, dtype=sampler_dtype, traces=traces, max_running_requests=128) as client,
    ):
        trainer = ReplayTrainer(
            model=AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(MODEL_PATH),
            args=config(scratch, steps, **overrides),
            reward_funcs=reward,
            train_dataset=data,
            client=client,
        )
        trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    report = trainer.replay.report()
    print(f"reward {rewards[0]:.3f} -> {rewards[-1]:.3f}, last step: {report.forced_rows} rows replayed")
    print(f"live choices that replay overruled {report.flipped_share:.2%}")
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--traces", help="directory of the dataset; none is kept by default")
    chosen = parser.parse_args()
    main(chosen.steps, chosen.traces)
