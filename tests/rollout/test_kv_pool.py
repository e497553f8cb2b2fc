"""Token slots: never handed out twice, all returned, and a write goes exactly to the step's slots."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout.kv_pool import KVPool, SlotAllocator


@given(size=st.integers(1, 60), actions=st.lists(st.tuples(st.booleans(), st.integers(1, 20)), max_size=60))
def test_no_slot_has_two_owners_and_all_come_back(size, actions):
    """Against a plain list of owners, one per slot."""
    slots, owner, runs = SlotAllocator(size), [None] * size, {}
    for number, (allocate, value) in enumerate(actions):
        if allocate:
            start = slots.allocate(value)
            gaps = [i for i in range(size - value + 1) if not any(o is not None for o in owner[i : i + value])]
            assert start == (gaps[0] if gaps else None), "first fit"
            if start is not None:
                owner[start : start + value] = [number] * value
                runs[number] = (start, value)
        elif runs:
            start, count = runs.pop(sorted(runs)[value % len(runs)])
            slots.release(start, count)
            owner[start : start + count] = [None] * count
        assert slots.free_slots == owner.count(None)
    for start, count in runs.values():
        slots.release(start, count)
    assert slots.free_slots == size
    assert slots.allocate(size) == 0, "neighbouring free runs must merge"


@pytest.mark.parametrize(("start", "count"), [(0, 1), (2, 3), (3, 4), (-1, 1), (9, 2)])
def test_releasing_what_is_free_or_outside_fails(start, count):
    slots = SlotAllocator(10)
    slots.allocate(4)
    slots.allocate(4)
    slots.release(0, 4)
    with pytest.raises(AssertionError, match=f"\\[{start}, {start + count}\\) were released twice"):
        slots.release(start, count)


def pool_at(size, slots) -> KVPool:
    pool = KVPool(size)
    begin(pool, slots)
    return pool


def begin(pool, slots) -> None:
    pool.begin(SimpleNamespace(out_cache_loc=torch.tensor(slots), gathered=None), torch.arange(len(slots)))


def test_keys_and_values_land_in_the_slots_of_the_step():
    pool = pool_at(8, [6, 0, 3])
    key = torch.arange(2 * 3 * 4.0).view(1, 2, 3, 4)  # [1, heads, tokens, dim]
    value = torch.arange(1 * 3 * 2.0).view(1, 1, 3, 2)  # values may have another shape
    returned = pool.update(key, value, 5)
    assert returned[0] is key
    assert returned[1] is value
    assert (pool.keys[5].shape, pool.values[5].shape) == ((9, 2, 4), (9, 1, 2))
    for token, slot in enumerate([6, 0, 3]):
        assert torch.equal(pool.keys[5][slot], key[0, :, token])
        assert torch.equal(pool.values[5][slot], value[0, :, token])


def test_a_write_touches_no_other_slot_and_no_other_layer():
    pool = pool_at(4, [0, 1, 2, 3])
    for layer in (0, 1):
        pool.update(torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4, 2), layer)
    begin(pool, [2])
    pool.update(torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2), 1)
    assert pool.keys[1].sum(dim=(1, 2)).tolist() == [0, 0, 2, 0, 0]
    assert not pool.keys[0].any()


def test_padding_rows_behind_the_step_are_not_written():
    pool = pool_at(3, [0, 1, 2])
    pool.update(torch.zeros(1, 1, 3, 1), torch.zeros(1, 1, 3, 1), 0)
    begin(pool, [1])
    pool.update(torch.ones(1, 1, 16, 1), torch.ones(1, 1, 16, 1), 0)
    assert pool.keys[0].flatten().tolist() == [0, 1, 0, 0]


def test_a_write_outside_of_a_step_is_an_error():
    states = torch.zeros(1, 1, 1, 1)
    with pytest.raises(RuntimeError, match="written outside of a step"):
        KVPool(2).update(states, states, 0)


def test_positions_are_the_ones_of_the_step_whatever_the_batch():
    """llama4 adds the cache's length to 0, 1, 2, ... to scale queries by position; here two requests share a step."""
    pool = KVPool(8)
    positions = torch.tensor([5, 0, 1, 2])
    pool.begin(SimpleNamespace(out_cache_loc=torch.arange(4), gathered=None), positions)
    assert torch.equal(torch.arange(4) + pool.get_seq_length(0), positions)
