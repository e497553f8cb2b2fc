"""What a backend can do. The client asks before a call: a difference between engines is an error, never quiet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rollout.sampling import SamplingParams
from rollout.update_modes import InFlight, KVMode
from storage.promises import SlotOrder


@dataclass(frozen=True)
class Capabilities:
    """The defaults are those of this project's own engine.

    >>> Capabilities(engine="SGLang", refused={"top_p": "its logprobs ignore it"}).check(SamplingParams(top_p=0.9), "p")
    Traceback (most recent call last):
    ValueError: p: SGLang cannot do top_p=0.9: its logprobs ignore it

    Attributes:
        engine: name and version, for messages and for the dataset.
        per_request_capture: routes can be asked for by request, not only for the whole engine. Told, not asked: this
            client records all.
        abort_routes: a request aborted after its first token comes back with the rows computed so far. Told as well.
        inplace_update: weights can be replaced without a restart; False once an engine was found not to survive it.
        update_in_flight: requests under way can go on through an update, `in_flight="keep"`.
        version_spans: an answer says which of its rows belong to which version; without it the engine's version is
            compared when a call ends.
        start_offset: rows can be asked for from a position on.
        prompt_logprobs: logprobs of prompt tokens can be recorded.
        prompt_only: `max_tokens=0` computes the prompt.
        frozen_recompute: recomputed rows keep the routes of sampling time. False is noted in the dataset.
        slot_order: whether the ids of one row come in the order that transformers returns them; "differs" for an engine
            that returns the same ids in another order for some families, "unmeasured" for one never compared.
        refused: sampling parameters that must keep their defaults, with the reason.
    """

    engine: str = "moe-rollout"
    per_request_capture: bool = False
    abort_routes: bool = True
    inplace_update: bool = True
    update_in_flight: bool = True
    version_spans: bool = True
    start_offset: bool = True
    prompt_logprobs: bool = True
    prompt_only: bool = True
    frozen_recompute: bool = True
    slot_order: SlotOrder = "transformers"
    refused: Mapping[str, str] = field(default_factory=dict)

    def check(self, params: SamplingParams, name: str) -> None:
        """Raise ValueError when `params` ask for something that this backend cannot do; `name` says whose they are."""
        if params.prompt_logprobs is not None and not self.prompt_logprobs:
            raise ValueError(f"{name}: {self.engine} cannot record prompt_logprobs here; leave prompt_logprobs out")
        if params.max_tokens == 0 and not self.prompt_only:
            raise ValueError(f"{name}: {self.engine} cannot compute a prompt alone; max_tokens must be at least 1")
        for key, why in self.refused.items():
            value = getattr(params, key)
            if value != SamplingParams.model_fields[key].get_default(call_default_factory=True):
                raise ValueError(f"{name}: {self.engine} cannot do {key}={value!r}: {why}")

    def check_start(self, first_row: int, name: str) -> None:
        """Raise ValueError when rows from a later one on are asked for, and this backend sends all."""
        if first_row and not self.start_offset:
            raise ValueError(f"{name}: {self.engine} sends all rows; leave routed_experts_start_len out")

    def check_update(self, in_flight: InFlight, kv: KVMode) -> None:
        """Raise ValueError for an update in mid-flight that a served engine cannot do: it drops every key and value."""
        if in_flight == "keep" and not self.update_in_flight:
            raise ValueError(
                f"in_flight='keep': {self.engine} would not say which rows are of which weights; use 'wait' or 'abort'"
            )
        if in_flight == "keep" and kv == "keep":
            raise ValueError(
                f"kv='keep': {self.engine} drops every key and value with the weights; use kv='recompute', or "
                "in_flight='wait'"
            )
