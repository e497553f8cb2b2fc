"""Small models and routes for the tests of RouterReplay."""

import numpy as np
import torch
from transformers import AutoModelForCausalLM

TOKENS = torch.tensor([[5, 9, 21, 40, 3, 66, 17], [30, 31, 5, 5, 80, 12, 2]])


def load(path, dtype=torch.float32):
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


def logits(model, tokens=TOKENS):
    return model(input_ids=tokens, use_cache=False).logits


@torch.no_grad()
def own_routes(model, tokens=TOKENS) -> np.ndarray:
    """What the routers choose by themselves, seen by plain forward hooks: `[tokens, sites, K]`."""
    seen, routers = [], [module for module in model.modules() if type(module).__name__.endswith("Router")]
    handles = [router.register_forward_hook(lambda _m, _a, out: seen.append(out[2])) for router in routers]
    logits(model, tokens)
    for handle in handles:
        handle.remove()
    return torch.stack(seen, 1).numpy().astype(np.uint8)


def random_routes(spec, rows: int, seed: int = 0) -> np.ndarray:
    """Distinct ids, drawn uniformly: routes that no model would choose."""
    rng = np.random.default_rng(seed)
    out = np.zeros((rows, *spec.row_shape), spec.dtype)
    for index, site in enumerate(spec.sites):
        out[:, index, : site.top_k] = rng.random((rows, site.num_experts)).argsort(-1)[:, : site.top_k]
    return out
