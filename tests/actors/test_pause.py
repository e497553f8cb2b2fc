"""Pause, abort and continue over Ray: the same as in process."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from rollout import RolloutClient, SamplingParams

MODEL = str(Path(__file__).parents[2] / "rollout" / "tiny_moe")
OPTIONS = {"dtype": "float32", "batch_invariant": True, "max_running_requests": 4}
PROMPTS = [[4, 5, 13, 6, 14], [7, 13, 8, 14], [9, 9, 13, 4, 14]]
LONG = SamplingParams(max_tokens=60, ignore_eos=True, seed=0)


@pytest.mark.usefixtures("cluster")
@pytest.mark.full
def test_pause_abort_and_resume_over_ray():
    with RolloutClient.local(MODEL, **OPTIONS) as local:
        whole = local.sample(PROMPTS, num_samples=2, sampling_params=LONG, step=0)
    with RolloutClient.ray(MODEL, num_actors=1, **OPTIONS) as client:
        client.pause()
        found: list = []
        call = threading.Thread(
            target=lambda: found.extend(client.sample(PROMPTS, num_samples=2, sampling_params=LONG, step=0))
        )
        call.start()
        call.join(0.5)
        assert call.is_alive()
        client.abort(["run/0/0-0/1", "run/0/0-2/0"])
        with pytest.raises(ValueError, match=r"abort of \['run/0/0-9/0'\]: no such samples wait or run"):
            client.abort(["run/0/0-1/1", "run/0/0-9/0"])
        client.resume()
        call.join()
        ended = [index for index, trace in enumerate(found) if trace.finish_reason == "abort"]
        assert ended == [1, 4]
        found[1], found[4] = client.sample(resume=[found[1], found[4]])
        with pytest.raises(ValueError, match="pause mode 'now'"):
            client.pause("now")
    for trace, expected in zip(found, whole, strict=True):
        assert trace.token_ids == expected.token_ids
        assert trace.raw_logprobs.tobytes() == expected.raw_logprobs.tobytes()
        assert trace.routed_experts.tolist() == expected.routed_experts.tolist()
