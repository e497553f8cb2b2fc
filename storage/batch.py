"""ReplayBatch: sequences of different lengths in one array, for a trainer's forward under router replay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from storage import shard
from storage.collate import collate
from storage.trace import RoutingSpec, Trace, WeightSpan
from storage.turns import MergedTrace

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ReplayBatch:
    """B sequences in R rows of S columns; every per-token array is aligned to input_ids.

    R is B, and 1 in a packed batch.

    >>> batch = ReplayBatch.collate(traces, spec=ds.spec)  # prompts of 3 and 5, completions of 2 and 4
    >>> batch.input_ids.shape, batch.routed_experts.shape, batch.num_rows
    ((2, 9), (2, 9, 8, 2), 18)

    Attributes:
        spec: the sites of routed_experts.
        input_ids: int64 `[R, S]`, prompt and completion, else the pad token.
        attention_mask: int64 `[R, S]`, 1 at tokens.
        position_ids: int64 `[R, S]`, from 0 in each sequence; 0 at padding, but counted on in a packed batch.
        completion_mask: bool `[R, S]`, True at sampled tokens.
        loss_mask: float32 `[R, S]`, the weight of each sampled token in the loss, 0 elsewhere.
        logprobs: float32 `[R, S]`, of the sampled token in the same column, 0 elsewhere.
        raw_logprobs: the same of the model's own distribution; None when a trace has none.
        advantages: float32 `[R, S]`, at sampled tokens, 0 elsewhere; None when none were given.
        routed_experts: `[R, S, sites, K]` of the spec's dtype, the routing of the token in the same column.
        route_mask: bool `[R, S]`, True where replay forces a row. Elsewhere (native padding, rows not recorded, the
            last sampled token, which was no input of the rollout) routed_experts must not be read.
        input_mask: bool `[R, S]`, True at tokens that were inputs of the rollout, recorded or not.
        rewards: float32 `[B]`, nan when a trace has none.
        truncated: bool `[B]`, True where `max_length` cut tokens off.
        sample_ids: B ids.
        weight_versions: B lists of spans, as in Trace, over the rows that were kept.
        prompt_width: the column where completions start, in a batch padded with "split".
        cu_seqlens: int32 `[B + 1]`, the columns where sequences start and the last one ends, in a packed batch.
        cp_size: ranks that share the columns.
    """

    spec: RoutingSpec
    input_ids: np.ndarray
    attention_mask: np.ndarray
    position_ids: np.ndarray
    completion_mask: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    raw_logprobs: np.ndarray | None
    advantages: np.ndarray | None
    routed_experts: np.ndarray
    route_mask: np.ndarray
    input_mask: np.ndarray
    rewards: np.ndarray
    truncated: np.ndarray
    sample_ids: list[str]
    weight_versions: list[list[WeightSpan]]
    prompt_width: int | None = None
    cu_seqlens: np.ndarray | None = None
    cp_size: int = 1

    @classmethod
    def collate(
        cls,
        traces: Iterable[Trace | MergedTrace],
        *,
        spec: RoutingSpec,
        padding: str = "right",
        pad_token_id: int = 0,
        pad_routes: str = "native",
        pad_to_multiple_of: int = 1,
        max_length: int | None = None,
        advantages: Sequence[Any] | None = None,
        loss_masks: Sequence[Any] | None = None,
    ) -> ReplayBatch:
        """Lay out `traces`, or conversations of `merge_turns`, side by side.

        Args:
            padding: "right"; "left"; "split": prompts end and completions start at one column, the layout of TRL and
                verl; "packed": one row without padding.
            pad_routes: of padding: "native" leaves it to the router; "strided" forces distinct ids that load all
                experts equally, and RouterReplay then reports these rows as forced.
            pad_to_multiple_of: round S, in a packed batch each sequence, up to a multiple of it.
            max_length: cut completions off behind this many tokens of prompt and completion.
            advantages: one per trace: a number, or one number per token behind the (first) prompt.
            loss_masks: one per trace: bool or float per token behind the (first) prompt. Default: 1 where sampled.

        Raises:
            ValueError: for no traces or an unknown option, or, naming the sample, for a trace without routes, with
                routes that do not fit `spec`, with no prompt or one longer than `max_length`, and, naming the position,
                for advantages or masks that do not fit it.
        """
        return cls(
            **collate(
                list(traces),
                spec=spec,
                padding=padding,
                pad_token_id=pad_token_id,
                pad_routes=pad_routes,
                pad_to_multiple_of=pad_to_multiple_of,
                max_length=max_length,
                advantages=advantages,
                loss_masks=loss_masks,
            )
        )

    @property
    def num_rows(self) -> int:
        """R * S: the rows that a model's routers see in one forward of the batch."""
        return self.input_ids.size

    @overload
    def shard(
        self,
        *,
        dp: tuple[int, int] = ...,
        cp: tuple[int, int] = ...,
        pp: slice = ...,
        micro_batches: None = ...,
        layout: str = ...,
    ) -> ReplayBatch: ...

    @overload
    def shard(
        self,
        *,
        dp: tuple[int, int] = ...,
        cp: tuple[int, int] = ...,
        pp: slice = ...,
        micro_batches: int,
        layout: str = ...,
    ) -> list[ReplayBatch]: ...

    def shard(
        self,
        *,
        dp: tuple[int, int] = (0, 1),
        cp: tuple[int, int] = (0, 1),
        pp: slice = slice(None),
        micro_batches: int | None = None,
        layout: str = "zigzag",
    ) -> ReplayBatch | list[ReplayBatch]:
        """What one rank needs; with `micro_batches` a list of that many parts.

        Sequences, sites and micro-batches are cut as views before `cp` copies columns, so nothing of another rank is
        read. Ranks of a batch collated once are disjoint and together hold all of it.

        >>> batch.shard(dp=(1, 2)).sample_ids
        ['run/0/2-0/0', 'run/0/3-0/0']
        >>> parts = batch.shard(dp=(1, 2), cp=(0, 2), pp=slice(4, 8), micro_batches=2)
        >>> [part.routed_experts.shape for part in parts]  # 1 sequence, half of 12 columns, 4 sites, top 2
        [(1, 6, 4, 2), (1, 6, 4, 2)]

        Args:
            dp: rank and size; consecutive sequences, as many as on other ranks or one more.
            cp: rank and size; columns, see `cp()` for `layout`.
            pp: the sites of this pipeline stage, see `sites()`.
            micro_batches: see `micro_batches()`.
            layout: "zigzag" or "contiguous".

        Raises:
            ValueError: for a rank that does not exist, fewer sequences than parts, no site, or columns that do not
                divide.
        """
        part = shard.sequences(self, *shard.bounds(len(self.sample_ids), *dp, "dp"))
        if pp != slice(None):
            part = part.sites(pp)
        parts = [part] if micro_batches is None else part.micro_batches(micro_batches)
        if cp != (0, 1):
            parts = [each.cp(cp_rank=cp[0], cp_size=cp[1], layout=layout) for each in parts]
        return parts[0] if micro_batches is None else parts

    def micro_batches(self, n: int) -> list[ReplayBatch]:
        """`n` parts of consecutive sequences, of equal number or one more; views."""
        if n < 1:
            raise ValueError(f"cannot make {n} micro-batches, need 1 or more")
        count = len(self.sample_ids)
        return [shard.sequences(self, *shard.bounds(count, i, n, "micro-batches")) for i in range(n)]

    def sites(self, wanted: slice) -> ReplayBatch:
        """Routes of these sites only, for a pipeline stage whose model has no others; views.

        >>> batch.sites(slice(4, 8)).routed_experts.shape
        (2, 9, 4, 2)
        """
        return shard.sites(self, wanted)

    def cp(self, *, cp_rank: int, cp_size: int, layout: str = "zigzag") -> ReplayBatch:
        """The columns of one context-parallel rank, in a packed batch of each sequence.

        "contiguous" gives rank r chunk r of `cp_size`; "zigzag" chunks r and 2 * cp_size - 1 - r of 2 * cp_size, so
        that causal attention costs all ranks the same. A single range of columns is a view, several are copied. The
        token after a column may be on another rank: `token_logprobs` refuses such a shard.

        Raises:
            ValueError: when the columns are no multiple of the chunks; collate with `pad_to_multiple_of`.
        """
        return shard.context_parallel(self, cp_rank, cp_size, layout)

    def model_inputs(self, device: torch.device | str | None = None) -> dict[str, Any]:
        """Arguments of a transformers forward: `model(**batch.model_inputs())`.

        input_ids, attention_mask and position_ids; of a packed batch input_ids, position_ids and `use_cache=False`,
        because transformers keeps the sequences apart when positions restart and neither a mask nor a cache is there.
        Some families do not (linear attention, convolution, gpt_oss): RouterReplay refuses them a packed batch.
        """
        from storage.torch_view import model_inputs

        return model_inputs(self, device)

    def tensors(self, device: torch.device | str | None = None) -> dict[str, torch.Tensor]:
        """Every array as a tensor, by its name here; on the CPU they share memory with the arrays."""
        from storage.torch_view import array_names, tensors

        return tensors(self, array_names(self), device)

    def token_logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        """Log-softmax of `logits` `[R, S, V]` at the sampled tokens; see `storage.torch_view`."""
        from storage.torch_view import token_logprobs

        return token_logprobs(self, logits)
