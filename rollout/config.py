"""Options of the engine, checked by name before torch is imported."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from rollout.sampling import StrictModel


class EngineOptions(StrictModel):
    """How the engine runs a model.

    >>> EngineOptions(dtype="float32", max_running_requests=8).max_batch_tokens
    2048

    Attributes:
        device: "cpu", "cuda" or "cuda:N"; one that is not there is refused when the engine starts.
        dtype: of weights and activations; "auto" is the checkpoint's own. A torch.dtype is fine too.
        max_running_requests: sequences decoded together.
        max_batch_tokens: tokens of one forward; longer prompts are computed in chunks.
        kv_tokens: size of the key/value pool in tokens. Default: `max_running_requests` full sequences, at most 2 GiB.
        disable_overlap_schedule: finish each step before the next is launched. The results do not differ.
        disable_cuda_graph: run every decode step without a graph. On a CPU, in a group of ranks, and for models with
            states or caches of their own, there are no graphs and the option changes nothing.
        cuda_graph_batch_sizes: batch sizes that get a graph; smaller batches are padded to the next one, larger ones
            run without. Default: powers of two up to `max_running_requests`, and that. Recorded when first used.
        enable_return_routed_experts: record routes; off, `Trace.routed_experts` is None.
        batch_invariant: results do not depend, in any bit, on batch, chunks or neighbours. Slower.
        prefix_cache: keep keys and values of ended requests while there is room; prompts that begin alike, such as the
            samples of one prompt, are computed once. The traces do not differ.
        trust_remote_code: let a checkpoint run Python code that it ships; said in the log. Not with `dp_size`.
        num_threads: compute threads inside the engine; "auto" measures a few steps at start, takes the fastest number
            and logs it. For an engine that has the machine to itself. With more than one, it is measured too whether
            torch's operations gain from them in steps of few tokens; our own kernels do.
        experts_implementation: "hit_experts" (ours), or one of transformers: "eager", "grouped_mm", "batched_mm".
            "auto" is "hit_experts" on a CPU, and "grouped_mm", which never waits for the device, elsewhere.
        pack_weights: keep a second copy of bfloat16 and large float32 expert weights, and without batch_invariant of
            linear layers, in the order that products on a CPU read fastest, if it takes at most half of the memory that
            is left, else a warning, with batch_invariant an error; packed again when weights change. Only with
            "hit_experts", and never in a group of ranks.
        native_kernels: on a CPU, compute attention of decodes, RMS norms, with "hit_experts" experts of few rows and,
            but with batch_invariant, linear layers of few rows, with kernels of our own where they compute the same;
            with batch_invariant attention and experts of whole prompts too. In a group all but linear layers. The
            machine's C++ compiler makes them when the first engine of a process starts. Where that fails, "auto" does
            without, with a warning; with True, batch_invariant or dp_size it is an error, since there engines must
            compute alike.
        dp_size: ranks of a group that serves one model together: each has its own requests and pool, and a part of the
            experts. Must divide their number. The other sizes here count per rank. On CPUs only.
        moe_dispatch: what travels between ranks. "alltoall": each token's row to the ranks of its experts. "allgather":
            all rows to all ranks; there requests do not yield, and recorded routes cannot be forced or continued.
        collective_timeout_s: seconds until a rank that waits for another one gives up, or one that does not answer is
            given up, and the group is started anew.
    """

    device: str = "cpu"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_running_requests: int = Field(64, ge=1, le=65536)
    max_batch_tokens: int = Field(2048, ge=1)
    kv_tokens: int | None = Field(None, ge=2)
    disable_overlap_schedule: bool = False
    disable_cuda_graph: bool = False
    cuda_graph_batch_sizes: tuple[int, ...] | None = None
    enable_return_routed_experts: bool = True
    batch_invariant: bool = False
    prefix_cache: bool = False
    trust_remote_code: bool = False
    num_threads: Annotated[int, Field(ge=1, le=256)] | Literal["auto"] = 1
    experts_implementation: Literal["auto", "hit_experts", "eager", "grouped_mm", "batched_mm"] = "auto"
    pack_weights: bool = True
    native_kernels: bool | Literal["auto"] = "auto"
    dp_size: int = Field(1, ge=1, le=1024)
    moe_dispatch: Literal["alltoall", "allgather"] = "alltoall"
    collective_timeout_s: float = Field(60, gt=0)

    @field_validator("dtype", mode="before")
    @classmethod
    def _torch_dtype(cls, value: Any) -> Any:
        return value if isinstance(value, str) else str(value).removeprefix("torch.")

    @model_validator(mode="after")
    def _graphs_fit(self) -> EngineOptions:
        sizes = self.cuda_graph_batch_sizes
        if sizes is not None and (not sizes or any(not 1 <= size <= self.max_running_requests for size in sizes)):
            raise ValueError(
                f"cuda_graph_batch_sizes={sizes}: need sizes from 1 to "
                f"max_running_requests={self.max_running_requests}; for no graphs use disable_cuda_graph=True"
            )
        return self

    @model_validator(mode="after")
    def _threads_keep_bits(self) -> EngineOptions:
        if self.num_threads == "auto":
            if self.dp_size > 1:
                raise ValueError(
                    "num_threads='auto' measures one engine alone, and the ranks of a group share the cores; "
                    f"with dp_size={self.dp_size} give a number"
                )
        elif self.batch_invariant and self.num_threads > 2:
            raise ValueError(
                f"batch_invariant=True with num_threads={self.num_threads}: element-wise kernels split rows between "
                "more than 2 threads, which changes last bits; use num_threads=1 or 2"
            )
        return self
