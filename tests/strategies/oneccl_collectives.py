"""Every collective of the backend `ccl`, compared with what it must give, for any ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
TYPES = (*FLOATS, *INTEGERS, torch.bool)
MOVED = (*TYPES, torch.complex64, torch.float8_e4m3fn)
"""What only travels may have any type."""


def values(rank: int, dtype: torch.dtype, *shape: int) -> Tensor:
    """Small numbers of a rank, that any type holds, and sums of which too."""
    generator = torch.Generator().manual_seed(100 * rank + len(shape))
    low = 0 if dtype in (torch.uint8, torch.bool) else -3
    numbers = torch.randint(low, 4, shape, generator=generator)
    return (numbers > 1) if dtype == torch.bool else numbers.to(dtype)


def same(found: Tensor, expected: Tensor, *what: object) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), what
    if found.dtype == torch.float8_e4m3fn:
        found, expected = found.view(torch.uint8), expected.view(torch.uint8)
    assert torch.equal(found, expected), (*what, dist.get_rank(), found, expected)


def reduced(op: ReduceOp, tensors: list[Tensor]) -> Tensor:
    """What PyTorch itself says."""
    stack = torch.stack(tensors)
    if op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
        name = {ReduceOp.BAND: "and", ReduceOp.BOR: "or", ReduceOp.BXOR: "xor"}[op]
        result = stack[0]
        for other in stack[1:]:
            result = getattr(torch, f"bitwise_{name}")(result, other)
        return result
    if stack.dtype == torch.bool:
        return stack.any(0) if op in (ReduceOp.SUM, ReduceOp.MAX) else stack.all(0)
    if op == ReduceOp.AVG:
        total = stack.sum(0)
        if stack.dtype in INTEGERS:
            return total.div(len(tensors), rounding_mode="trunc").to(stack.dtype)
        return total / len(tensors)
    if op == ReduceOp.SUM:
        return stack.sum(0).to(stack.dtype)
    if op == ReduceOp.PRODUCT:
        return stack.prod(0).to(stack.dtype)
    return stack.amin(0) if op == ReduceOp.MIN else stack.amax(0)


def operations(dtype: torch.dtype) -> list[ReduceOp]:
    found = [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX]
    if dtype != torch.bool:
        found.append(ReduceOp.AVG)
    if dtype not in FLOATS:
        found += [ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR]
    return found


def check_reductions() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in TYPES:
        for op in operations(dtype):
            all_ = [values(r, dtype, 5, 3) for r in range(size)]
            mine = all_[rank].clone()
            dist.all_reduce(mine, op=op)
            same(mine, reduced(op, all_), "all_reduce", dtype, op)

            mine = all_[rank].clone()
            dist.reduce(mine, size - 1, op=op)
            expected = reduced(op, all_) if rank == size - 1 else all_[rank]
            same(mine, expected, "reduce", dtype, op)

            wide = [values(r, dtype, size * 4, 3) for r in range(size)]
            out = torch.empty(4, 3, dtype=dtype)
            dist.reduce_scatter_tensor(out, wide[rank], op=op)
            part = reduced(op, wide)[4 * rank : 4 * rank + 4]
            same(out, part, "reduce_scatter_tensor", dtype, op)
            out = torch.empty(4, 3, dtype=dtype)
            dist.reduce_scatter(out, list(wide[rank].chunk(size)), op=op)
            same(out, part, "reduce_scatter", dtype, op)
    z = [torch.complex(torch.arange(4.0) + r, torch.ones(4)) for r in range(size)]
    mine = z[rank].clone()
    dist.all_reduce(mine)
    same(mine, sum(z[1:], z[0]), "all_reduce of complex numbers")
    empty = torch.empty(0)
    dist.all_reduce(empty)
    tensors = [torch.full((3,), float(rank)), torch.full((2, 2), rank)]
    dist.all_reduce_coalesced(tensors[:1])
    same(tensors[0], torch.full((3,), float(sum(range(size)))), "all_reduce_coalesced")
    big = torch.arange(3_000_000, dtype=torch.float32) + rank
    dist.all_reduce(big)
    same(big, size * torch.arange(3_000_000, dtype=torch.float32) + sum(range(size)), "large")


def check_movement() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in MOVED:
        all_ = [values(r, torch.int8, 4, 3).to(dtype) for r in range(size)]
        mine = all_[rank].clone()
        dist.broadcast(mine, size - 1)
        same(mine, all_[-1], "broadcast", dtype)

        out = [torch.empty(4, 3, dtype=dtype) for _ in range(size)]
        dist.all_gather(out, all_[rank])
        for r in range(size):
            same(out[r], all_[r], "all_gather", dtype)

        # Parts of different sizes, one of them of none.
        parts = [values(r, torch.int8, r, 2).to(dtype) for r in range(size)]
        out = [torch.empty_like(part) for part in parts]
        dist.all_gather(out, parts[rank])
        for r in range(size):
            same(out[r], parts[r], "uneven all_gather", dtype)

        one = torch.empty(size * 4, 3, dtype=dtype)
        dist.all_gather_into_tensor(one, all_[rank])
        same(one.view(torch.uint8), torch.cat([t.view(torch.uint8) for t in all_]), "into_tensor")

        out = [torch.empty(4, 3, dtype=dtype) for _ in range(size)] if rank == 0 else None
        dist.gather(all_[rank], out, dst=0)
        for r in range(size if rank == 0 else 0):
            same(out[r], all_[r], "gather", dtype)

        received = torch.empty(4, 3, dtype=dtype)
        dist.scatter(received, all_ if rank == size - 1 else None, src=size - 1)
        same(received, all_[rank], "scatter", dtype)

        # To rank r go r + 1 rows with the sender's number.
        sent = [torch.full((r + 1, 2), rank + 1).to(dtype) for r in range(size)]
        out = [torch.empty(rank + 1, 2, dtype=dtype) for _ in range(size)]
        dist.all_to_all(out, sent)
        for r in range(size):
            same(out[r], torch.full((rank + 1, 2), r + 1).to(dtype), "all_to_all", dtype)
        flat = torch.empty(size * (rank + 1), 2, dtype=dtype)
        rows = [r + 1 for r in range(size)]
        source = torch.cat([t.view(torch.uint8) for t in sent]).view(dtype)
        dist.all_to_all_single(flat, source, [rank + 1] * size, rows)
        same(flat.view(torch.uint8), torch.cat([t.view(torch.uint8) for t in out]), "splits", dtype)
        even = torch.empty(size, 2, dtype=dtype)
        dist.all_to_all_single(even, torch.full((size, 2), rank + 1).to(dtype))
        expected = torch.arange(1, size + 1)[:, None].expand(size, 2).to(dtype)
        same(even, expected, "all_to_all_single", dtype)


def check_layouts() -> None:
    """Memory that is not in one piece, and what is refused."""
    rank, size = dist.get_rank(), dist.get_world_size()
    total = sum(range(size))
    column = torch.zeros(6, 4)
    column[:, 1] = rank
    dist.all_reduce(column[:, 1])
    same(column, torch.zeros(6, 4).index_fill(1, torch.tensor(1), total), "a column")
    image = torch.full((2, 3, 4, 5), float(rank)).to(memory_format=torch.channels_last)
    dist.broadcast(image, size - 1)
    assert image.is_contiguous(memory_format=torch.channels_last)
    same(image, torch.full((2, 3, 4, 5), float(size - 1)), "channels_last")
    out = torch.zeros(3, 2 * size).t()  # 2 * size rows of three, not in one piece
    dist.all_gather_into_tensor(out, torch.full((3, 2), float(rank)).t())
    same(out.clone(), torch.arange(float(size)).repeat_interleave(2)[:, None].expand(-1, 3), "t()")
    leaf = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        dist.all_reduce(leaf)
    same(leaf.detach(), torch.full((3,), float(size)), "a leaf")
    for call, words in (
        (lambda: dist.all_reduce(torch.eye(2).to_sparse()), "(?i)sparse"),
        (lambda: dist.all_reduce(torch.ones(2).to(torch.float8_e4m3fn)), "cannot add up"),
        (lambda: dist.all_reduce(torch.ones(2, dtype=torch.bool), op=ReduceOp.AVG), "(?i)bool"),
        (lambda: dist.all_reduce(torch.ones(2), op=ReduceOp.BAND), "those of integers"),
        (lambda: dist.send(torch.ones(2), (rank + 1) % size, tag=3), "tag 3"),
        (lambda: dist.reduce_scatter(torch.ones(1), [torch.ones(2)] * size), "pad them"),
    ):
        with pytest.raises((ValueError, RuntimeError, NotImplementedError), match=words):
            call()


def check_async() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = [torch.full((1000,), float(rank + n)) for n in range(40)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for n, work in reversed(list(enumerate(works))):
        assert work.wait()
        assert work.is_completed()
        same(tensors[n], torch.full((1000,), float(sum(range(size)) + size * n)), "async", n)

    def nested(future):
        # As PyTorch's PowerSGD does: waits for another collective in a callback.
        inner = future.value()[0].clone()
        return dist.all_reduce(inner, async_op=True).get_future().wait()[0]

    tensor = torch.full((10,), float(rank))
    future = dist.all_reduce(tensor, async_op=True).get_future().then(nested)
    same(future.wait(), torch.full((10,), float(size * sum(range(size)))), "nested")

    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * (rank * 1000)})
    assert [len(o["text"]) for o in objects] == [1000 * r for r in range(size)]
    one = [{"from": rank}]
    dist.broadcast_object_list(one, src=size - 1)
    assert one == [{"from": size - 1}]
    gathered = [None] * size if rank == 0 else None
    dist.gather_object(rank, gathered, dst=0)
    assert gathered == (list(range(size)) if rank == 0 else None)
    mine = [None]
    dist.scatter_object_list(mine, list(range(size)) if rank == 0 else [None] * size, src=0)
    assert mine == [rank]
    dist.barrier()


def check_transfers() -> None:
    """Sends and receives in their order, in none with collectives, large ones both ways at once."""
    rank, size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    sizes = (2_000_000, 2_000_000, 3, 1_000_000)
    got = [torch.empty(size) for size in sizes]
    # A receive that waits, with a collective after it that must not.
    works = [dist.irecv(tensor, left) for tensor in got[:1]]
    dist.barrier()
    sent = [torch.full((size,), rank + 10.0 * n) for n, size in enumerate(sizes)]
    works += [dist.isend(tensor, right) for tensor in sent]
    works += [dist.irecv(tensor, left) for tensor in got[1:]]
    for work in works:
        work.wait()
    for n, tensor in enumerate(got):
        same(tensor, torch.full_like(tensor, left + 10.0 * n), "transfer", n)
    pair = [torch.full((3,), rank), torch.empty(3, dtype=torch.int64)]
    ops = [dist.P2POp(dist.isend, pair[0], right), dist.P2POp(dist.irecv, pair[1], left)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    same(pair[1], torch.full((3,), left), "batch_isend_irecv")


def check_groups() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    pending = torch.full((100_000,), float(rank))
    work = dist.all_reduce(pending, async_op=True)
    first, last = dist.new_group([0, 1]), dist.new_group([size - 1])
    if rank < 2:
        tensor = torch.full((3,), float(rank))
        dist.all_reduce(tensor, group=first)
        same(tensor, torch.ones(3), "sub-group")
    if rank == size - 1:
        tensor = torch.full((3,), 7)
        dist.all_reduce(tensor, group=last)
        dist.broadcast(tensor, rank, group=last)
        out = [torch.empty(3, dtype=torch.int64)]
        dist.all_gather(out, tensor, group=last)
        same(out[0], torch.full((3,), 7), "group of one")
        dist.destroy_process_group(last)
    work.wait()
    same(pending, torch.full((100_000,), float(sum(range(size)))), "pending")
    mixed = dist.new_group(backend="gloo")
    dist.barrier(group=mixed)


def check_functional() -> None:
    import torch.distributed._functional_collectives as functional
    from torch.distributed.nn.functional import all_reduce

    rank, size = dist.get_rank(), dist.get_world_size()
    ranks, total = dist.group.WORLD, float(sum(range(size)))
    mine = torch.full((4,), float(rank))
    same(functional.all_reduce(mine, "sum", ranks) + 0, torch.full((4,), total), "functional")
    gathered = functional.all_gather_tensor(mine, 0, ranks) + 0
    same(gathered, torch.arange(float(size)).repeat_interleave(4), "functional all_gather")
    wide = torch.full((2 * size,), float(rank))
    out = functional.reduce_scatter_tensor(wide, "sum", 0, ranks) + 0
    same(out, torch.full((2,), total), "functional reduce_scatter")
    both = functional.all_reduce_coalesced([mine, wide], "sum", ranks)
    same(both[1] + 0, torch.full((2 * size,), total), "functional all_reduce_coalesced")
    both = functional.all_gather_into_tensor_coalesced([mine, wide], ranks)
    same(both[0] + 0, gathered, "functional all_gather_coalesced")
    both = functional.reduce_scatter_tensor_coalesced([wide, 2 * wide], "sum", [0, 0], ranks)
    same(both[1] + 0, torch.full((2,), 2 * total), "functional reduce_scatter_coalesced")
    leaf = torch.full((3,), float(rank), requires_grad=True)
    all_reduce(leaf).sum().backward()
    same(leaf.grad, torch.full((3,), float(size)), "autograd")


def check_all() -> None:
    for check in (
        check_reductions,
        check_movement,
        check_layouts,
        check_async,
        check_transfers,
        check_groups,
        check_functional,
    ):
        check()
