"""`moe-rollout bench --vllm` with live vLLM: one table with both engines. See make_vllm_env.sh."""

from __future__ import annotations

import json

import pytest

from rollout.__main__ import main

pytest.importorskip("vllm", reason="vLLM is not installed; see make_vllm_env.sh")
pytestmark = pytest.mark.peer


def test_vllm_is_measured_beside_our_own_engine(capfd):
    arguments = ["--prompt-len", "8", "--new-tokens", "8", "--batches", "4", "--repeats", "1", "--threads", "1"]
    arguments += ["--peers", ""]
    assert main(["bench", "--vllm", "--json", *arguments]) == 0
    (case,) = json.loads(capfd.readouterr().out.strip().splitlines()[-1]).values()
    (measured,) = case["rounds"]
    assert {"recording", "vLLM, recording"} <= measured.keys()
    assert case["threads"]["vLLM, recording"] == 1
    assert measured["vLLM, recording"]["tokens_per_second"] > 0
