"""Repeated blocks of a network, and modules by their name."""

from __future__ import annotations

import difflib

from torch import nn


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the members of lists and sequences of at least two blocks of one class, by name.

    Only the outermost are taken: a block's own repeated parts are not. Of stages, sequences whose
    members are sequences of blocks, the blocks are taken. Single layers of PyTorch are no blocks,
    and neither is anything without weights or without a forward.

    Args:
        model: Any module; names are those of ``model.named_modules()``.

    Example:
        >>> layer = nn.TransformerEncoderLayer(8, 2)
        >>> list(repeated_blocks(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)))
        ['layers.0', 'layers.1', 'layers.2']
    """
    inner: dict[str, nn.Module] = {}
    for child_name, child in model.named_children():
        inner |= {f"{child_name}.{name}": block for name, block in repeated_blocks(child).items()}
    if not is_list_of_blocks(model):
        return inner
    members = dict(model.named_children())
    if inner and type(next(iter(members.values()))) is nn.Sequential:
        # Stages: the blocks in them share code, the stages do not.
        return inner
    return members


def is_list_of_blocks(module: nn.Module) -> bool:
    """Say whether a module is a list or a sequence of at least two blocks of one class."""
    members = list(module.children())
    return (
        isinstance(module, nn.ModuleList | nn.Sequential)
        and len(members) >= 2
        and len({type(member) for member in members}) == 1
        and all(
            has_forward(member) and any(True for _ in member.parameters()) for member in members
        )
        and not is_single_layer(members[0])
    )


def named_module(model: nn.Module, name: str, *, argument: str) -> nn.Module:
    """Return the module of a name.

    Args:
        model: Where to look.
        name: As in ``model.named_modules()``, with all names of a shared module.
        argument: The argument that holds the name, for the message.

    Raises:
        ValueError: There is no module of that name.
    """
    modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    modules.pop("")
    if name not in modules:
        close = difflib.get_close_matches(name, modules, n=1, cutoff=0.3)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"{argument} names {name!r}, but {type(model).__name__} has no such module.{hint} "
            "`model.named_modules()` lists the names."
        )
    return modules[name]


def has_forward(module: nn.Module) -> bool:
    """Say whether a module computes anything itself: lists and dicts of modules do not."""
    return type(module).forward is not nn.Module.forward


def is_single_layer(module: nn.Module) -> bool:
    """Say whether it is one layer of PyTorch: alone, it has nothing to fuse or to recompute."""
    return type(module).__module__.startswith("torch.nn.") and not list(module.children())
