"""Which modules of a model are compiled."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

from lightning.pytorch import LightningModule
from torch import nn
from torch._dynamo import OptimizedModule
from torchmetrics import Metric, MetricCollection

# Repeated blocks that hold less than this share of a network's weights (two small heads, say) are
# not what its time goes into: then the whole network is compiled. Low, because an untied output
# layer outweighs the blocks of a small language model.
_LEAST_SHARE = 1 / 3

_CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
_MATRICES = (*_CONVOLUTIONS, nn.Linear, nn.RNNBase)

Region = tuple[str, nn.Module]
Regions = dict[str, nn.Module]


def find_regions(model: nn.Module, regions: str | Sequence[str] = "auto") -> Regions:
    """Return the modules to compile, by their name in ``model``.

    Args:
        model: A network, which is one region itself, or a LightningModule, which never is: its
            steps log and read the trainer, so only the networks it calls are.
        regions: ``"auto"``: the repeated blocks of each network, or the network where it has none;
            ``"whole"``: each network; or names of modules of ``model``.

    Raises:
        ValueError: There is no module of that name, or ``regions`` is another string.
    """
    tops = dict(model.named_children()) if isinstance(model, LightningModule) else {"": model}
    if regions == "auto":
        found = [region for name, top in tops.items() for region in _chosen(top, name)]
    elif regions == "whole":
        found = [region for name, top in tops.items() for region in _called(top, name)]
    elif isinstance(regions, str):
        raise ValueError(
            f"regions={regions!r} was asked for; it is 'auto', 'whole' or a list of module names, "
            f"such as regions=[{regions!r}]."
        )
    else:
        found = [region for name in regions for region in _called(_named(model, name), name)]
    once = {id(module): (name, module) for name, module in reversed(found)}
    return dict(reversed(once.values()))


def compiled_modules(model: nn.Module) -> Regions:
    """Return the modules inside ``model`` that somebody has compiled already."""
    return {n: m for n, m in model.named_modules() if m is not model and is_compiled(m)}


def is_compiled(module: nn.Module) -> bool:
    """Say whether a module is compiled, by ``torch.compile(module)`` or ``module.compile()``."""
    return isinstance(module, OptimizedModule) or module._compiled_call_impl is not None


def overlaps(region: nn.Module, others: Regions) -> bool:
    """Say whether a module holds, or is held by, one of the others."""
    taken = {id(module) for other in others.values() for module in other.modules()}
    return any(id(module) in taken for module in region.modules())


def kinds(regions: Regions) -> int:
    """Count the regions that differ; alike ones share compiled code."""
    return len({(repr(m), tuple(p.shape for p in m.parameters())) for m in regions.values()})


def convolution_share(model: nn.Module) -> float:
    """Return the share of convolutions among the layers that multiply matrices.

    Layers are counted, not weights: a convolution uses each weight at every position.
    """
    layers = [isinstance(m, _CONVOLUTIONS) for m in model.modules() if isinstance(m, _MATRICES)]
    return sum(layers) / max(1, len(layers))


def _chosen(module: nn.Module, name: str) -> Iterator[Region]:
    """Yield the repeated blocks of a network, or the network if they are too little of it."""
    if _is_left_out(module):
        return
    blocks = _repeated_blocks(module, name)
    if isinstance(module, nn.ModuleList) and _are_blocks(list(module.children())):
        yield from blocks.items()
    elif not _has_forward(module):
        for child_name, child in module.named_children():
            yield from _chosen(child, _join(name, child_name))
    elif blocks and _weight(*blocks.values()) >= _LEAST_SHARE * _weight(module):
        yield from blocks.items()
    elif not _is_single_layer(module):
        yield name, module


def _called(module: nn.Module, name: str) -> Iterator[Region]:
    """Yield a module that has a forward, or the members of one that only holds others."""
    if _is_left_out(module):
        return
    if _has_forward(module):
        yield name, module
    else:
        for child_name, child in module.named_children():
            yield from _called(child, _join(name, child_name))


def _repeated_blocks(module: nn.Module, name: str) -> Regions:
    """Find lists and sequences of at least two blocks of one class, the outermost ones."""
    inner: Regions = {}
    for child_name, child in module.named_children():
        inner |= _repeated_blocks(child, _join(name, child_name))
    members = list(module.children())
    if not isinstance(module, nn.ModuleList | nn.Sequential) or not _are_blocks(members):
        return inner
    if inner and type(members[0]) is nn.Sequential:
        # Stages: the blocks in them share code, the stages do not.
        return inner
    return {_join(name, child_name): child for child_name, child in module.named_children()}


def _are_blocks(members: list[nn.Module]) -> bool:
    return (
        len(members) >= 2
        and len({type(member) for member in members}) == 1
        and all(_has_forward(member) and _weight(member) for member in members)
        and not _is_single_layer(members[0])
    )


def _named(model: nn.Module, name: str) -> nn.Module:
    # With all names of shared modules.
    modules: Regions = {n: m for n, m in model.named_modules(remove_duplicate=False) if n}
    if name not in modules:
        close = difflib.get_close_matches(name, modules, n=1, cutoff=0.3)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"regions names {name!r}, but {type(model).__name__} has no such module.{hint} "
            "`model.named_modules()` lists the names."
        )
    return modules[name]


def _is_left_out(module: nn.Module) -> bool:
    """Say whether a module is a metric, a loss, or anything else that learns nothing."""
    return isinstance(module, Metric | MetricCollection) or not any(
        True for _ in module.parameters()
    )


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _is_single_layer(module: nn.Module) -> bool:
    """Say whether it is one layer of PyTorch: alone, it has nothing to fuse."""
    return type(module).__module__.startswith("torch.nn.") and not list(module.children())


def _weight(*modules: nn.Module) -> int:
    """Count the parameters, embeddings apart: looking up rows takes no time."""
    parameters = {
        id(parameter): parameter.numel()
        for module in modules
        for layer in module.modules()
        if not isinstance(layer, nn.Embedding | nn.EmbeddingBag)
        for parameter in layer.parameters(recurse=False)
    }
    return sum(parameters.values())


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
