"""Things that once went wrong in a way no other test would see: one test each, of the right behaviour."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout import RolloutClient, SamplingParams
from rollout.tiny_moe import MODEL_PATH
from storage import TraceDataset
from tests.rollout.probes import parts_of

Checkpoint = Callable[..., Path]
SHORT = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, seed=0)
ROPE = {"rope_theta": 10000.0, "original_max_position_embeddings": 32, "factor": 4.0}


def test_dynamic_rope_is_refused_by_name(checkpoint: Checkpoint) -> None:
    """Its frequencies depend on the longest position that any request ever had."""
    path = checkpoint("qwen3_moe", rope_parameters=_frozen({**ROPE, "rope_type": "dynamic"}))
    with pytest.raises(ValueError, match=r"rope_type 'dynamic'.*Use a checkpoint with rope_type 'default'"):
        RolloutClient.local(path)


def test_longrope_does_not_depend_on_neighbours(checkpoint: Checkpoint) -> None:
    """Long and short requests have other frequencies: in one flattened forward all would get the long ones."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    path = checkpoint("qwen3_moe", rope_parameters=_frozen({**ROPE, **factors, "rope_type": "longrope"}))
    short, long = [5, 6, 7], [(7 * i) % 90 + 3 for i in range(100)]
    with RolloutClient.local(path) as client:
        (alone,) = client.sample([short], sampling_params=SHORT)
        beside, _ = client.sample([short, long], sampling_params=SHORT)
    assert beside.completion_ids == alone.completion_ids
    assert beside.raw_logprobs.tolist() == alone.raw_logprobs.tolist()


def _frozen(values: dict) -> dict:
    class Hashable(dict):
        def __hash__(self) -> int:  # the checkpoint fixture caches by its arguments
            return hash(repr(sorted(self.items())))

    return Hashable(values)


def test_a_tokenizer_that_fails_ends_its_request_alone() -> None:
    with RolloutClient.local(MODEL_PATH, dtype="float32") as client:
        engine = parts_of(client)[0]
        decode = engine._tokenizer.decode

        def failing(*args: object, **kwargs: object) -> str:
            if kwargs.get("skip_special_tokens") is False:
                raise ValueError("byte 0xff is no character")
            return decode(*args, **kwargs)

        engine._tokenizer.decode = failing
        params = [SamplingParams(max_tokens=4, stop="9", seed=0), SamplingParams(max_tokens=4, seed=0)]
        bad, good = client.sample(["1+2=", "3+4="], sampling_params=params)
        (again,) = client.sample(["3+4="], sampling_params=params[1])
    assert (bad.finish_reason, bad.error) == ("error", "ValueError: byte 0xff is no character")
    assert good.finish_reason == again.finish_reason == "stop"


def test_a_prompt_only_request_with_logits_that_are_not_finite_is_an_error(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Its routes would be the top-k of NaN."""
    path = _with_nan_embedding(checkpoint("qwen3_moe"), tmp_path, token=8)
    with RolloutClient.local(path, traces=tmp_path / "traces") as client:
        bad, good = client.sample([[5, 8, 9], [5, 7]], sampling_params=SamplingParams(max_tokens=0, seed=0))
    assert (bad.finish_reason, good.finish_reason) == ("error", "length")
    assert "not finite" in str(bad.error)
    assert good.routed_experts.shape == (2, 2, 2)
    assert [trace.sample_id for trace in TraceDataset(tmp_path / "traces").iter()] == [good.sample_id]


def _with_nan_embedding(source: Path, directory: Path, token: int) -> Path:
    target = directory / "model"
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    weights = load_file(target / "model.safetensors")
    weights["model.embed_tokens.weight"][token] = torch.nan
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_cancelling_a_coroutine_aborts_and_commits_nothing(checkpoint: Checkpoint, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=200, ignore_eos=True, seed=0)

    async def cancelled(client: RolloutClient) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.sample_async([[5, 6]] * 100, sampling_params=params), 0.2)

    with RolloutClient.local(checkpoint("qwen3_moe"), traces=tmp_path / "t", max_running_requests=2) as client:
        asyncio.run(cancelled(client))
        engine, deadline = parts_of(client)[0], time.monotonic() + 60
        while not engine.idle and time.monotonic() < deadline:
            time.sleep(0.01)
        assert engine.idle, "the requests of a cancelled call still run"
        (trace,) = client.sample([[5, 6]], sampling_params=SHORT)
    assert trace.step == 0
    assert len(TraceDataset(tmp_path / "t")) == 1


def test_coroutines_are_numbered_in_the_order_they_start(checkpoint: Checkpoint) -> None:
    async def gathered(client: RolloutClient) -> list[int]:
        calls = [client.sample_async([[5 + i]], sampling_params=SHORT) for i in range(8)]
        return [traces[0].step for traces in await asyncio.gather(*calls)]

    with RolloutClient.local(checkpoint("qwen3_moe")) as client:
        assert asyncio.run(gathered(client)) == list(range(8))


def test_two_clients_on_one_dataset_number_on_after_each_other(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path, root = checkpoint("qwen3_moe"), tmp_path / "traces"
    with RolloutClient.local(path, traces=root) as first, RolloutClient.local(path, traces=root) as second:
        steps = [c.sample([[5]], sampling_params=SHORT)[0].step for c in (first, second, second, first)]
    assert steps == [0, 1, 2, 3]


def test_a_stream_made_inside_a_step_cannot_be_read_outside(checkpoint: Checkpoint) -> None:
    with RolloutClient.local(checkpoint("qwen3_moe")) as client:
        with client.step(7):
            stream = client.stream([[5]], sampling_params=SHORT)
        with pytest.raises(RuntimeError, match=r"made inside `with client.step\(7\)` and is first read elsewhere"):
            next(stream)


def test_more_threads_than_keep_the_bits_are_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(ValueError, match="batch_invariant=True with num_threads=3"):
        RolloutClient.local(checkpoint("qwen3_moe"), batch_invariant=True, num_threads=3)


@pytest.mark.parametrize("num_threads", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_long_prompt_in_a_full_batch_keeps_its_bits(checkpoint: Checkpoint, num_threads: int) -> None:
    """Element-wise kernels split tensors of more than 32,768 elements between threads."""
    path = checkpoint("qwen3_moe", max_position_embeddings=2048)
    prompts = [[(13 * i + j) % 90 + 3 for i in range(700)] for j in range(3)]
    options = {"batch_invariant": True, "dtype": "float32"}
    with RolloutClient.local(path, **options) as client:
        (alone,) = client.sample(prompts[:1], sampling_params=SHORT)
    with RolloutClient.local(path, num_threads=num_threads, max_batch_tokens=2048, **options) as client:
        together = client.sample(prompts, sampling_params=SHORT)[0]
    assert together.completion_ids == alone.completion_ids
    assert together.raw_logprobs.tolist() == alone.raw_logprobs.tolist()
    assert (together.routed_experts == alone.routed_experts).all()


# --- found by trying to break it ---------------------------------------------------------------------------------


def test_a_call_that_outlives_its_step_takes_no_part_in_the_retry(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=4, seed=0)
    with RolloutClient.local(MODEL_PATH, dtype="float32", traces=tmp_path / "t") as client:
        with pytest.raises(RuntimeError, match="1 calls still run"), client.step(7):
            stream = client.stream(["1+2="] * 100, sampling_params=params)
            next(stream)
        with pytest.raises(RuntimeError, match="step 7 has ended; this call is no longer a part of it"):
            list(stream)
        with client.step(7):
            client.sample(["3+4="] * 3, sampling_params=params)
    assert len(TraceDataset(tmp_path / "t")) == 3


def test_what_a_user_does_to_a_trace_is_not_what_is_committed(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=4, seed=0)
    with RolloutClient.local(MODEL_PATH, dtype="float32", traces=tmp_path / "t") as client:
        for trace in client.stream(["1+2="], num_samples=20, sampling_params=params, metadata={"task": "sum"}):
            trace.reward, trace.metadata["task"] = 1.0, "changed"
            trace.completion_ids.clear()
            with pytest.raises(ValueError, match="read-only"):
                trace.routed_experts[...] = 0
    stored = list(TraceDataset(tmp_path / "t").iter())
    assert {(t.reward, t.metadata["task"], len(t.completion_ids) > 0) for t in stored} == {(None, "sum", True)}


@pytest.mark.parametrize("broken", ["meta", "sparse"])
def test_weights_that_cannot_be_copied_leave_all_old_ones(broken: str) -> None:
    from transformers import AutoModelForCausalLM

    state = AutoModelForCausalLM.from_pretrained(MODEL_PATH).state_dict()
    changed = {name: tensor * 3 for name, tensor in state.items()}
    last = list(changed)[-1]
    changed[last] = changed[last].to("meta") if broken == "meta" else changed[last].to_sparse()
    with RolloutClient.local(MODEL_PATH, dtype="float32") as client:
        (before,) = client.sample(["1+2="], sampling_params=SHORT, step=0)
        with pytest.raises(ValueError, match=f"weight '{last}' is .*nothing was changed"):
            client.update_weights(changed, version=1)
        (after,) = client.sample(["1+2="], sampling_params=SHORT, step=0)
    assert after == before


def test_a_prompt_key_that_is_no_text_is_refused_and_the_engine_lives() -> None:
    with RolloutClient.local(MODEL_PATH, dtype="float32") as client:
        with pytest.raises(ValueError, match="unprintable characters"):
            client.sample(["1+2="], sampling_params=SHORT, prompt_keys=["a\ud800"])
        assert len(client.sample(["1+2="], sampling_params=SHORT)) == 1


@pytest.mark.parametrize("wrong", [1.5, True, "7", 2**70])
def test_a_step_or_version_that_is_no_integer_is_refused_before_sampling(wrong: object) -> None:
    with RolloutClient.local(MODEL_PATH, dtype="float32") as client:
        with pytest.raises(ValueError, match=r"step is .*, need an integer"):
            client.sample(["1+2="], sampling_params=SHORT, step=wrong)
        with pytest.raises(ValueError, match=r"weight version is .*, need an integer"):
            client.update_weights({}, version=wrong)
        assert client.backend.stats.forwards == 0


@pytest.mark.full
def test_a_process_that_forgets_to_close_ends_with_exit_code_0() -> None:
    """A daemon thread inside a kernel would abort the interpreter."""
    script = (
        "from rollout import RolloutClient, SamplingParams; from rollout.tiny_moe import MODEL_PATH\n"
        "client = RolloutClient.local(MODEL_PATH)\n"
        "next(client.stream(['1+2='] * 500, sampling_params=SamplingParams(max_tokens=100, ignore_eos=True)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, "terminate" in done.stderr) == (0, False), done.stderr


def test_a_temperature_that_overflows_and_a_reward_that_is_no_number_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="overflows float32; 0 is greedy"):
        SamplingParams(temperature=1e-40)
    options = {"traces": tmp_path / "t", "reward_fn": lambda trace: float("nan")}
    with RolloutClient.local(MODEL_PATH, **options) as client:
        with pytest.raises(ValueError, match="reward_fn returned nan for run/0/0-0/0, need a finite float"):
            client.sample(["1+2="], sampling_params=SHORT)
    assert len(TraceDataset(tmp_path / "t")) == 0
