"""RouterReplay: the trainer's forward takes the recorded experts, the router's weights stay live."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch._dynamo.eval_frame import OptimizedModule

from rollout.calibrate import check_mode, plans_of
from rollout.forcing import ForcedSelection, native_choice
from rollout.packing import check_packable
from rollout.replay_batch import batches_of, missing_share, rows_of
from rollout.replay_counts import ReplayCounts, ReplayReport, load_balancing_loss
from rollout.replay_rows import FixedRows, OncePerForward, Rows, RowsOfForward, RowSource, in_order
from rollout.route_table import RouteTable, table_of
from rollout.router import RouterForward, returned_ids, wrapped_forwards
from storage.batch import ReplayBatch
from storage.sites import FoundRouter, find_routers
from storage.trace import RoutingSpec, Trace


class Recorded:
    """What `RouterReplay.record` saw."""

    def __init__(self, spec: RoutingSpec) -> None:
        self._spec = spec
        self._ids: list[list[torch.Tensor]] = [[] for _ in spec.sites]

    def add(self, site: int, ids: torch.Tensor) -> None:
        """Append one forward's ids `[rows, K]` of a site."""
        self._ids[site].append(ids.detach())

    @property
    def routed_experts(self) -> np.ndarray:
        """`[rows, sites, K]` of the spec's dtype, the rows of all forwards in order."""
        counts = {sum(len(part) for part in parts) for parts in self._ids}
        if counts == {0} or len(counts) != 1:
            raise RuntimeError(
                f"sites recorded {sorted(counts)} rows; run whole forwards inside `with replay.record()`"
            )
        out = np.zeros((counts.pop(), *self._spec.row_shape), self._spec.dtype)
        for site, parts in enumerate(self._ids):
            out[:, site, : self._spec.sites[site].top_k] = torch.cat(parts).cpu().numpy()
        return out


class RouterReplay:
    """Forces the routers of one model instance; other models in the process are untouched.

    How each router selects is found by trying it on two tokens (rollout/calibrate.py). Layers that look experts up by
    token id (deepseek_v4's first) choose nothing: they are no sites and run as they are. A router that takes maxima
    (phimoe) replays in eval mode only. Make it of the model itself, before `torch.compile`.

    >>> replay = RouterReplay(model)
    >>> with replay(ReplayBatch.collate(traces, spec=replay.spec)) as batch:
    ...     loss(model(**batch.model_inputs())).backward()      # open through backward, for checkpointing
    >>> replay.report().flipped_share
    0.0142

    Raises:
        ValueError: at construction, naming a router that cannot be forced exactly and why.
    """

    def __init__(self, model: Any) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"RouterReplay takes a loaded model, got {type(model).__name__}")
        self._model = model
        self._routers = find_routers(model)
        _check_not_compiled(model, self._routers)
        self._plans = plans_of(model, self._routers)
        self.spec = RoutingSpec(tuple(router.site for router in self._routers))
        self._counts = ReplayCounts(self.spec)
        self._packable = False

    @contextlib.contextmanager
    def __call__(self, batch: ReplayBatch | np.ndarray | Sequence[ReplayBatch]) -> Iterator[Any]:
        """Force `batch`, or ids `[rows, sites, K]`, in every forward inside. Yields its argument.

        Rows of a ReplayBatch are its `[B, S]` positions, flattened; those outside `route_mask` keep the native choice.
        Of a list of micro-batches the n-th forward takes the n-th, each once; their backwards may run in any order.

        Raises:
            ValueError: before any forward, for ids of another shape, out of range, or twice in a row, for a batch of
                another spec, and for a packed batch of which `check_packable` refuses the model; in the forward, for a
                number of tokens not its rows.
            RuntimeError: in the forward, when a router runs twice; on leaving, when not every site ran or not every
                micro-batch was forwarded: the forward was cut short, or was another model's.
        """
        if isinstance(batch, (ReplayBatch, np.ndarray)):
            source: RowSource = FixedRows(self._rows_of(batch))
            missing = missing_share([batch])
        else:
            batches = batches_of(batch)
            source = RowsOfForward(self._model, self._routers, *in_order([self._rows_of(part) for part in batches]))
            missing = missing_share(batches)
        with self._replaying(source, missing):
            yield batch

    @contextlib.contextmanager
    def lookup(self, source: RouteTable | Iterable[Trace]) -> Iterator[RouteTable]:
        """Force, in every forward inside, the routes that were recorded for each row's tokens.

        For trainers that shuffle, split and pad in code we do not own. The model must be called with `input_ids` and,
        if padded, `attention_mask`, both `[B, S]`, padding on either side; they are read on the host once per forward.
        Yields the table, to which more traces can be added.

        >>> with replay.lookup(traces):
        ...     model(input_ids=shuffled, attention_mask=mask)

        Raises:
            ValueError: for traces that `RouteTable.add` refuses; in the forward, for a row that is no trace's.
            RuntimeError: as for a batch.
        """
        table = table_of(source, self.spec)
        if table.spec != self.spec:
            raise ValueError("this RouteTable was made for another spec; make it with RouteTable(replay.spec)")
        with self._replaying(RowsOfForward(self._model, self._routers, table.rows)):
            yield table

    @contextlib.contextmanager
    def _replaying(self, source: RowSource, missing: float = 0.0) -> Iterator[None]:
        _check_not_compiled(self._model, self._routers)
        counts = self._counts = ReplayCounts(self.spec, missing)
        once = OncePerForward([site.name for site in self.spec.sites])
        wrap = lambda site, forward: self._forced(site, forward, source, once)  # noqa: E731
        with wrapped_forwards(self._routers, wrap), once.watching(self._model), source.open():
            yield
        counts.check_all_ran()

    @contextlib.contextmanager
    def record(self) -> Iterator[Recorded]:
        """Record the model's own choice in every forward inside; no logit changes.

        Raises:
            ValueError: with gradient checkpointing and gradients on, which would run each router twice.
        """
        _check_not_compiled(self._model, self._routers)
        if torch.is_grad_enabled() and _is_checkpointing(self._model):
            raise ValueError("gradient checkpointing runs each router twice: record under torch.no_grad()")
        recorded = Recorded(self.spec)

        def wrap(site: int, forward: RouterForward) -> RouterForward:
            def recording(*args: Any, **kwargs: Any) -> Any:
                check_mode(self._routers[site], self._plans[site])
                out, ids = native_choice(self._plans[site], partial(forward, *args, **kwargs))
                recorded.add(site, ids)
                return out

            return recording

        with wrapped_forwards(self._routers, wrap):
            yield recorded

    def report(self) -> ReplayReport:
        """Figures of the last replay context. Reads the device's counters, so call it outside the hot path."""
        return self._counts.report()

    def expert_counts(self) -> torch.Tensor:
        """Tokens that each expert executed in the last replay context, int64 `[sites, E]`; padding is left out.

        >>> replay.expert_counts().sum(1)           # tokens * K per site
        """
        return self._counts.expert_counts()

    def load_balancing_loss(self) -> torch.Tensor:
        """Switch's loss `E * sum_e f_e * P_e` of the last replayed forward, f from the *executed* experts.

        P is the mean probability of the live router, so gradients flow to it. The loss of transformers selects from the
        router logits once more, so under replay its f are of experts that did not run: leave it out
        (`output_router_logits=False`, `router_aux_loss_coef=0`) and add this one. Equal to it when nothing is forced.
        Source: Fedus et al. 2021, equations 4 to 6.

        >>> (policy_loss + 0.001 * replay.load_balancing_loss()).backward()

        Raises:
            ValueError: for routers that return no logits, or probabilities in their place (gemma4, afmoe), for sites
                with different numbers of experts, and under reentrant checkpointing, which leaves routers no graph.
        """
        return load_balancing_loss(self.spec, self._counts.balance)

    @torch.no_grad()
    def update_selection_bias(self, rate: float) -> None:
        """Add `rate` to the selection bias of experts that executed fewer tokens than the mean, else subtract it.

        From the counts of the last replay context: DeepSeek-V3's balancing without a loss (2024, section 2.1.2).

        Raises:
            ValueError: for a router without `e_score_correction_bias`, by name.
        """
        biases = [_selection_bias(self._model, router) for router in self._routers]
        for bias, counts, site in zip(biases, self.expert_counts().float(), self.spec.sites, strict=True):
            load = counts[: site.num_experts].to(bias.device)
            bias.add_(rate * torch.sign(load.mean() - load).to(bias.dtype))

    def _rows_of(self, batch: ReplayBatch | np.ndarray) -> Rows:
        if isinstance(batch, ReplayBatch) and batch.cu_seqlens is not None and not self._packable:
            check_packable(self._model)
            self._packable = True
        return rows_of(self.spec, batch)

    def _forced(self, site: int, forward: RouterForward, source: RowSource, once: OncePerForward) -> RouterForward:
        (name, _, _, top_k), plan = self.spec.sites[site], self._plans[site]

        def replaying(*args: Any, **kwargs: Any) -> Any:
            rows = source.rows(site, args[0].device if args else next(iter(kwargs.values())).device)
            wide = rows.ids[:, site, :top_k].long()  # one site at a time: int64 ids of all would be 8 times as large
            check_mode(self._routers[site], plan)
            with ForcedSelection(wide, rows.forced, name, plan) as selection:
                out = forward(*args, **kwargs)
            selection.check_selected()
            native = selection.native
            if native is None:  # what it would have chosen is lost once an earlier choice is answered
                with torch.no_grad():
                    _, native = native_choice(plan, partial(forward, *args, **kwargs))
            if once.first_time(site):
                logits = out[0] if returned_ids(out) is not None else None
                self._counts.add(site, native, wide, rows, logits, once.cut())
            return out

        return replaying


def _selection_bias(model: Any, router: FoundRouter) -> torch.Tensor:
    parent = model.get_submodule(router.site.name.rpartition(".")[0])
    for owner in (router.module, parent):
        bias = getattr(owner, "e_score_correction_bias", None)
        if isinstance(bias, torch.Tensor):
            return bias
    raise ValueError(f"router {router.site.name} ({type(router.module).__name__}) has no e_score_correction_bias")


def _check_not_compiled(model: Any, routers: Sequence[FoundRouter]) -> None:
    """A compiled forward was traced with its own selection, and may not see that a router was wrapped since."""
    names = dict.fromkeys(name for router in routers for name in _around(router.site.name))
    compiled = [name or type(model).__name__ for name in names if _is_compiled(model.get_submodule(name))]
    if compiled:
        raise ValueError(
            f"RouterReplay cannot force a compiled model: {compiled[0]!r} is compiled by torch.compile; replay the "
            "plain model, or compile parts that hold no router, such as each layer's self_attn"
        )


def _around(name: str) -> Iterator[str]:
    """The names of all that hold a module, from the model's, which is empty, to its own."""
    parts = name.split(".")
    return (".".join(parts[:count]) for count in range(len(parts) + 1))


def _is_compiled(module: Any) -> bool:
    return isinstance(module, OptimizedModule) or getattr(module, "_compiled_call_impl", None) is not None


def _is_checkpointing(model: Any) -> bool:
    """transformers 5.24 renamed the property; the old one warns."""
    names = ("is_activation_checkpointing", "is_gradient_checkpointing")
    return bool(next((getattr(model, name) for name in names if hasattr(type(model), name)), False))
