"""Which modules of a model are recomputed."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from lightning.pytorch import LightningModule
from torch import nn

from lightning_perf.callbacks._blocks import has_forward, named_module, repeated_blocks
from lightning_perf.callbacks._checkpoint.forward import Block, recomputing

# In a transformer, that is room for all products but one.
_SHARES = {"full": 0.0, "selective": 0.6}


def require_policy(policy: float | str, every_n: int) -> None:
    """Refuse what is no policy.

    Raises:
        ValueError: The policy is unknown, or ``every_n`` is below 1.
    """
    known = policy in _SHARES if isinstance(policy, str) else 0 <= policy <= 1
    if not known or isinstance(policy, bool):
        raise ValueError(
            f"policy={policy!r} was asked for; it is 'full', 'selective', or the share of "
            "activations to keep, a number from 0 to 1."
        )
    if every_n < 1:
        raise ValueError(f"every_n={every_n} was asked for; it is at least 1.")


def kept_share(policy: float | str) -> float:
    """Return the share of its activations that a block may keep."""
    return _SHARES[policy] if isinstance(policy, str) else float(policy)


def chosen_blocks(
    model: nn.Module, blocks: str | Sequence[str] = "auto", every_n: int = 1
) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Return the modules to recompute, and those left alone with the reason, by name.

    Args:
        model: Any module.
        blocks: As for `ActivationCheckpointing`.
        every_n: Take the first of each n blocks.

    Raises:
        ValueError: There is no module of that name or class, or it is a LightningModule.
    """
    if blocks == "auto":
        found = repeated_blocks(model)
    elif isinstance(blocks, str):
        raise ValueError(
            f"blocks={blocks!r} was asked for; it is 'auto' or a list of names of modules or of "
            f"their classes, such as blocks=[{blocks!r}]."
        )
    else:
        found = {name: block for entry in blocks for name, block in _meant(model, entry).items()}
    # The wrapper that torch.compile returns holds the block itself.
    found = {name: getattr(block, "_orig_mod", block) for name, block in found.items()}
    outermost = _outermost(found)
    chosen = {name: outermost[name] for name in list(outermost)[::every_n]}
    left = {name: reason for name, block in chosen.items() if (reason := _replaced(block))}
    return {name: block for name, block in chosen.items() if name not in left}, left


@contextmanager
def all_recomputing(
    chosen: dict[str, nn.Module], policy: float | str
) -> Iterator[dict[str, Block]]:
    """Recompute modules in each backward pass, for the length of a block of code."""
    share = kept_share(policy)
    blocks = {name: Block(module, share=share) for name, module in chosen.items()}
    with ExitStack() as stack:
        for block in blocks.values():
            stack.enter_context(recomputing(block))
        yield blocks


def required_blocks(
    model: nn.Module, blocks: str | Sequence[str], policy: float | str, every_n: int
) -> dict[str, nn.Module]:
    """Return the modules to recompute, by name.

    Raises:
        ValueError: There are none, or an argument is wrong.
    """
    require_policy(policy, every_n)
    chosen, left = chosen_blocks(model, blocks, every_n)
    if not chosen:
        raise ValueError(none_found(model, left))
    return chosen


def none_found(model: nn.Module, left: dict[str, str]) -> str:
    """Return what to say of a model without a module to recompute."""
    if left:
        return "; ".join(f"{name}: {reason}" for name, reason in left.items())
    repeated = _repeated_class(model)
    example = f", such as blocks=[{repeated!r}]" if repeated else ""
    return (
        f"{type(model).__name__} has no repeated blocks, lists of at least two modules of one "
        f"class with several layers. Name modules or their classes{example}."
    )


def _repeated_class(model: nn.Module) -> str | None:
    """Return the class, used more than once, that holds most of the weights."""
    weights: dict[str, list[int]] = {}
    for module in list(model.modules())[1:]:
        if type(module) is not nn.Sequential and has_forward(module) and list(module.children()):
            count = sum(parameter.numel() for parameter in module.parameters())
            weights.setdefault(type(module).__name__, []).append(count)
    repeated = {name: sum(counts) for name, counts in weights.items() if len(counts) > 1}
    return max(repeated, key=lambda name: repeated[name], default=None)


def _meant(model: nn.Module, entry: str) -> dict[str, nn.Module]:
    """Return the modules that an entry means: all of a class, or one by its name."""
    modules = {name: module for name, module in model.named_modules() if name}
    of_class = {name: m for name, m in modules.items() if type(m).__name__ == entry}
    if of_class:
        return of_class
    classes = {type(module).__name__ for module in modules.values()}
    if entry[:1].isupper() and (close := difflib.get_close_matches(entry, classes, n=1)):
        raise ValueError(
            f"blocks names {entry!r}, but {type(model).__name__} has no module of that class. "
            f"Did you mean {close[0]!r}?"
        )
    module = named_module(model, entry, argument="blocks")
    if isinstance(module, LightningModule):
        raise ValueError(f"blocks names {entry!r}, a LightningModule. Name the networks in it.")
    if has_forward(module):
        return {entry: module}
    # A list of modules is not called; its members are.
    return {f"{entry}.{name}": member for name, member in module.named_children()}


def _outermost(blocks: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Leave out blocks inside of others, and second names of a block."""
    inside = {id(part) for block in blocks.values() for part in list(block.modules())[1:]}
    once = {id(block): (name, block) for name, block in reversed(blocks.items())}
    return {name: block for name, block in reversed(once.values()) if id(block) not in inside}


def _replaced(block: nn.Module) -> str | None:
    if "forward" in vars(block):
        return "its `forward` was replaced on the object, and is left as it is"
    return None
