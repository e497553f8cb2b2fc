"""How each router of a model selects, found by trying it on two tokens; what cannot be forced exactly is refused.

The call that selects is the one whose answer the router returns: never one of the right size, since group-limited
routers call top-k two or three times. Nothing here knows a family by name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from rollout.forcing import ForcedSelection, Plan, native_choice
from rollout.parallel import CollectiveError
from rollout.router import RouterForward, SelectionLog, returned_ids, wrapped_forwards
from storage.sites import FoundRouter

_JITTER = ("jitter_noise", "router_jitter_noise", "input_jitter_noise", "moe_jitter_eps")
_FAILURES = (TypeError, ValueError, RuntimeError, IndexError)
Run = Callable[[], Any]


@torch.no_grad()
def plans_of(model: Any, routers: list[FoundRouter]) -> list[Plan]:
    """One plan per router; draws no random number.

    A router that takes hidden states alone is tried on arbitrary ones. If there is another one, two tokens are
    forwarded through the whole model: a sharded one needs this call on every rank.

    Raises:
        ValueError: by class name, with the reason and what helps.
    """
    forked = [model.device] if model.device.type == "cuda" else []  # dropout, if the model is in training mode
    with torch.random.fork_rng(forked):
        plans = {site: plan for site, router in enumerate(routers) if (plan := _tried_alone(router)) is not None}
        if len(plans) < len(routers):
            plans |= _tried_in_model(model, routers)
    for site, router in enumerate(routers):
        _check_jitter(router, model.get_submodule(router.site.name.rpartition(".")[0]), plans[site])
    return [plans[site] for site in range(len(routers))]


def name_of(router: FoundRouter) -> str:
    """`router model.layers.0.mlp.gate (MixtralTopKRouter)`."""
    return f"router {router.site.name} ({type(router.module).__name__})"


def check_mode(router: FoundRouter, plan: Plan) -> None:
    """A router that takes maxima (phimoe) draws its experts at random in training mode.

    Raises:
        ValueError: if it is in training mode.
    """
    if plan.by_max and router.module.training:
        raise ValueError(
            f"{name_of(router)} takes maxima, and in training mode samples its experts with jitter; replay it after "
            "model.eval()"
        )


def _tried_alone(router: FoundRouter) -> Plan | None:
    weight = next(router.module.parameters(), None)
    if weight is None:
        return None
    small = 0.1 * torch.randn(2, weight.shape[-1], generator=torch.Generator().manual_seed(0))  # no score underflows
    hidden = small.to(weight)
    run = partial(router.module.forward, hidden)
    try:
        run()
    except CollectiveError:
        raise
    except _FAILURES:
        return None
    return _plan(router, run)


def _tried_in_model(model: Any, routers: list[FoundRouter]) -> dict[int, Plan]:
    plans: dict[int, Plan] = {}

    def wrap(site: int, forward: RouterForward) -> RouterForward:
        def tried(*args: Any, **kwargs: Any) -> Any:
            run = partial(forward, *args, **kwargs)
            try:
                output = run()
            except CollectiveError:  # of a neighbour that is gone: nothing is wrong with the router
                raise
            except _FAILURES as error:
                raise ValueError(f"{name_of(routers[site])} fails on two tokens ({error}); check its config") from error
            plans[site] = _plan(routers[site], run)
            return output

        return tried

    with wrapped_forwards(routers, wrap):
        model(input_ids=torch.arange(2, device=model.device)[None], use_cache=False)
    unused = [name_of(router) for site, router in enumerate(routers) if site not in plans]
    if unused:
        raise ValueError(f"{unused[0]} was not used in a forward of two tokens; it cannot be replayed")
    return plans


def _plan(router: FoundRouter, run: Run) -> Plan:
    with SelectionLog() as log:
        output = run()
    if not log.indices:
        return _plan_by_max(router, run)
    fitting = [call for call, width in enumerate(log.widths) if _chooses(router, width, log.indices[call])]
    plans = [Plan(len(log.indices), call) for call in reversed(fitting)]
    if returned_ids(output) is None:
        plans = plans if len(log.indices) == 1 else []
    plan = next((plan for plan in plans if _follows(router, run, plan)), None)
    if plan is None:
        raise ValueError(
            f"{name_of(router)} selects in {len(log.indices)} top-k calls, and none of them alone decides which "
            f"{router.site.top_k} of {router.site.num_experts} experts it uses; it cannot be forced exactly. Train "
            "without replay, or use a family that `moe-rollout families` lists as replayed"
        )
    return plan if plan.calls == 1 else _with_groups(router, run, plan, log)


def _chooses(router: FoundRouter, width: int, ids: torch.Tensor) -> bool:
    """Whether a call can be answered with ids of experts at all: K of as many scores as there are experts."""
    return width == router.site.num_experts and ids.shape[-1] == router.site.top_k


def _plan_by_max(router: FoundRouter, run: Run) -> Plan:
    plan = Plan(router.site.top_k, 0, by_max=True)
    check_mode(router, plan)
    with SelectionLog(by_max=True) as log:
        output = run()
    if len(log.indices) != plan.calls or returned_ids(output) is None or not _follows(router, run, plan):
        raise ValueError(
            f"{name_of(router)} selects neither with top-k nor with {plan.calls} maxima in turn; it cannot be forced "
            "exactly. Train without replay, or use a family that `moe-rollout families` lists as replayed"
        )
    return plan


def _follows(router: FoundRouter, run: Run, plan: Plan) -> bool:
    """Whether answering as planned makes the router use other experts: those that it returns, or another output."""
    output, native = native_choice(plan, run)
    forced = torch.arange(router.site.top_k, device=native.device).repeat(len(native), 1)
    forced += forced >= native[:, :1]  # without the native first choice; not the last id, which may stand for none
    moved = _forced(router, run, plan, forced)
    ids = returned_ids(moved)
    return torch.equal(ids, forced) if ids is not None else _differ(output, moved)


def _forced(router: FoundRouter, run: Run, plan: Plan, ids: torch.Tensor) -> Any:
    with ForcedSelection(ids, None, router.site.name, plan):
        return run()


def _differ(one: Any, other: Any) -> bool:
    pairs = [(one, other)] if isinstance(one, torch.Tensor) else zip(one, other, strict=True)
    return any(isinstance(a, torch.Tensor) and not torch.equal(a, b) for a, b in pairs)


def _with_groups(router: FoundRouter, run: Run, plan: Plan, log: SelectionLog) -> Plan:
    """The plan under which the least likely experts, which are outside the live groups, still have a weight."""
    least = log.scores[plan.selecting].reshape(len(log.indices[plan.selecting]), -1)
    ids = least.topk(router.site.top_k, largest=False).indices
    for candidate in (plan, *_limited(router, plan, log)):
        if _forced(router, run, candidate, ids)[1].ne(0).all():
            return candidate
    raise ValueError(
        f"{name_of(router)} gives experts outside the groups it chose the weight 0, in a way that cannot be steered; "
        "forced experts would get no gradient. Train with one group (n_group=1), or without replay"
    )


def _limited(router: FoundRouter, plan: Plan, log: SelectionLog) -> list[Plan]:
    experts, rows = router.site.num_experts, len(log.indices[plan.selecting])
    return [
        plan._replace(limiting=call, per_group=experts // width)
        for call, width in enumerate(log.widths[: plan.selecting])
        if experts % width == 0 and log.indices[call].shape[:-1] == (rows,)
    ]


def _check_jitter(router: FoundRouter, block: torch.nn.Module, plan: Plan) -> None:
    """In some families the module that owns the router adds it. Where maxima are taken, check_mode refuses it."""
    if not plan.by_max and any(getattr(owner, key, None) for owner in (router.module, block) for key in _JITTER):
        raise ValueError(
            f"{name_of(router)} adds jitter to its input; set the jitter to 0 in the config before replaying"
        )
