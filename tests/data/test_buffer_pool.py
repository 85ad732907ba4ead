"""Memory comes again, and never to two at once."""

from __future__ import annotations

import pickle
import random
import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_perf.data import BufferPool
from lightning_perf.data.buffer_pool import Lease, _size_class


def test_released_memory_comes_again() -> None:
    pool = BufferPool()
    first = pool.lease((4, 8))
    address = first.tensor.data_ptr()
    assert (first.tensor.shape, first.tensor.dtype) == ((4, 8), torch.float32)
    first.release()
    first.release()
    second = pool.lease((32,))
    assert second.tensor.data_ptr() == address
    assert second.tensor.is_contiguous()
    found = pool.statistics
    assert (found.leases, found.reused, found.leased, found.abandoned) == (2, 1, 1, 0)
    assert (found.leased_bytes, found.idle_bytes) == (128, 0)
    second.release()
    assert (pool.statistics.leased_bytes, pool.statistics.idle_bytes) == (0, 128)


def test_shapes_of_about_one_size_share_other_types_do_not() -> None:
    pool = BufferPool()
    pool.lease((100, 10)).release()
    for arguments, reused in (
        (((990,),), True),
        (((10, 90),), True),
        (((500,),), False),
        (((1000,), torch.int32), False),
        (((1000,), torch.float32, "meta"), False),
    ):
        before = pool.statistics.reused
        pool.lease(*arguments).release()
        assert pool.statistics.reused - before == reused, arguments


@given(st.integers(0, 2**40))
def test_a_buffer_is_at_most_a_quarter_larger(numbers: int) -> None:
    size = _size_class(numbers)
    assert numbers <= size <= max(1, numbers * 1.25)
    assert _size_class(size) == size


def test_memory_that_somebody_still_holds_is_not_given_out() -> None:
    """A view, an array of NumPy, a graph that saved it."""
    pool = BufferPool()

    def held_by(hold: Any) -> None:
        lease = pool.lease((8,))
        lease.tensor.fill_(1)
        address, held = lease.tensor.data_ptr(), hold(lease.tensor)
        lease.release()
        other = pool.lease((8,))
        assert other.tensor.data_ptr() != address
        other.tensor.fill_(2)
        del held
        again = pool.lease((8,))
        assert again.tensor.data_ptr() == address
        again.release()
        other.release()
        pool.clear()

    held_by(lambda tensor: tensor)
    held_by(lambda tensor: tensor[2:4])
    held_by(lambda tensor: tensor.numpy())
    held_by(lambda tensor: torch.ones(8, requires_grad=True) * tensor)


def test_a_dropped_lease_keeps_its_memory() -> None:
    pool = BufferPool()
    kept = pool.lease((8,)).tensor
    assert pool.lease((8,)).tensor.data_ptr() != kept.data_ptr()
    found = pool.statistics
    assert (found.leased, found.abandoned, found.leased_bytes, found.idle_bytes) == (0, 2, 0, 0)


def test_a_released_lease_has_no_tensor() -> None:
    lease = BufferPool().lease((2,))
    lease.release()
    with pytest.raises(RuntimeError, match=r"after its release.*Copy what is needed before"):
        _ = lease.tensor


class Copy:
    """A copy on a device that is not done at once."""

    done = False

    def query(self) -> bool:
        return self.done


def test_memory_waits_for_its_device() -> None:
    pool, copy = BufferPool(), Copy()
    first = pool.lease((8,))
    address = first.tensor.data_ptr()
    first.release(after=copy)
    other = pool.lease((8,))
    assert other.tensor.data_ptr() != address
    copy.done = True
    assert pool.lease((8,)).tensor.data_ptr() == address
    other.release()


def test_idle_memory_has_a_limit() -> None:
    pool = BufferPool(max_idle_bytes=100)
    leases = [pool.lease((16,)) for _ in range(3)]
    for lease in leases:
        lease.release()
    assert pool.statistics.idle_bytes == 64
    pool.clear()
    assert pool.statistics.idle_bytes == 0
    with pool.lease((2, 3), torch.int64) as tensor:
        assert tensor.shape == (2, 3)
    assert pool.statistics.leased == 0


def test_an_empty_tensor_and_an_exception() -> None:
    pool = BufferPool()
    assert pool.lease((0, 3)).tensor.shape == (0, 3)

    def fails() -> None:
        with pool.lease((3,)):
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert pool.statistics.leased == 0
    with pytest.raises(RuntimeError, match="memory"):
        pool.lease((2**50,))
    assert pool.statistics.leased == 0


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="max_idle_bytes=-1"):
        BufferPool(max_idle_bytes=-1)
    pool = BufferPool()
    with pytest.raises(ValueError, match=r"shape \(-1,\)"):
        pool.lease((-1,))
    with pytest.raises(ValueError, match="only memory of the host is pinned"):
        pool.lease((1,), device="meta", pinned=True)
    if not torch.accelerator.is_available():
        with pytest.raises(RuntimeError, match="no device that copies from it"):
            pool.lease((1,), pinned=True)


def test_another_process_has_a_pool_of_its_own() -> None:
    pool = BufferPool(max_idle_bytes=7)
    pool.lease((1,)).release()
    other = pickle.loads(pickle.dumps(pool))
    assert other.max_idle_bytes == 7
    assert other.statistics.leases == 0
    assert other.lease((1,)).tensor.shape == (1,)


def test_threads_never_meet() -> None:
    """Each writes its number into what it leases, and must find it there until it releases it."""
    pool, wrong, rounds = BufferPool(max_idle_bytes=200_000), [], 400
    handed: list[tuple[int, Lease]] = []

    def work(number: int) -> None:
        chance = random.Random(number)
        mine: list[Lease] = []
        for _ in range(rounds):
            lease = pool.lease((chance.randrange(1, 300), chance.choice([1, 4, 16])))
            lease.tensor.fill_(number)
            mine.append(lease)
            chance.shuffle(mine)
            if len(mine) > 5:
                done = mine.pop()
                if not bool((done.tensor == number).all()):
                    wrong.append(number)
                if chance.random() < 0.1:
                    handed.append((number, done))  # released by another thread
                elif chance.random() < 0.9:
                    done.release()
            if handed and chance.random() < 0.2:
                try:
                    owner, done = handed.pop()
                except IndexError:
                    continue
                if not bool((done.tensor == owner).all()):
                    wrong.append(owner)
                done.release()
        for lease in mine:
            lease.release()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _, lease in handed:
        lease.release()
    handed.clear()
    assert not wrong
    found = pool.statistics
    assert found.leases == 8 * rounds
    assert (found.leased, found.leased_bytes) == (0, 0)
    assert 0 < found.abandoned < found.leases / 5
    assert found.reused > found.leases / 2
    assert found.idle_bytes <= 200_000
