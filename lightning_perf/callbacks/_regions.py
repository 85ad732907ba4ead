"""Which modules of a model are compiled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import MethodType
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn
from torch._dynamo import OptimizedModule
from torchmetrics import Metric, MetricCollection

from lightning_perf.callbacks._blocks import (
    has_forward,
    is_list_of_blocks,
    is_single_layer,
    named_module,
    repeated_blocks,
)

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
        found = [
            region
            for name in regions
            for region in _called(named_module(model, name, argument="regions"), name)
        ]
    once = {id(module): (name, module) for name, module in reversed(found)}
    return dict(reversed(once.values()))


def compilable_regions(
    model: nn.Module, regions: str | Sequence[str] = "auto"
) -> tuple[Regions, dict[str, str]]:
    """Return the modules to compile, and those that somebody has decided about with the reason.

    Args:
        model: As for `find_regions`.
        regions: As for `find_regions`.
    """
    compiled = compiled_modules(model)
    alone = dict.fromkeys(compiled, "already compiled")
    targets: Regions = {}
    for name, module in find_regions(model, regions).items():
        if getattr(module.forward, "_torchdynamo_disable", False):
            alone[name] = "excluded by torch.compiler.disable"
        elif not overlaps(module, compiled):
            targets[name] = module
    return targets, alone


def compiled_modules(model: nn.Module) -> Regions:
    """Return the modules inside ``model`` that somebody has compiled already."""
    return {n: m for n, m in model.named_modules() if m is not model and is_compiled(m)}


def inside_compiled(model: nn.Module) -> set[nn.Module]:
    """Return the modules of ``model`` that run in compiled code: compiled ones, and all in them."""
    compiled = [module for module in model.modules() if is_compiled(module)]
    return {part for module in compiled for part in module.modules()}


def is_compiled(module: nn.Module) -> bool:
    """Say whether a module is compiled, by ``torch.compile(module)`` or ``module.compile()``."""
    return isinstance(module, OptimizedModule) or module._compiled_call_impl is not None


def overlaps(region: nn.Module, others: Regions) -> bool:
    """Say whether a module holds, or is held by, one of the others."""
    taken = {id(module) for other in others.values() for module in other.modules()}
    return any(id(module) in taken for module in region.modules())


def kinds(regions: Regions) -> int:
    """Count the regions that differ; alike ones share compiled code."""
    return len({(_kind(module), *_own_forwards(module)) for module in regions.values()})


def staged(regions: Regions) -> Regions:
    """Return the regions of one forward that differ, as do the blocks of a ResNet's stages.

    Dynamo learns for each function which sizes change. It would take those that differ from stage
    to stage for changing ones, and make slower code for any size.
    """
    found: dict[Any, set[Any]] = {}
    for module in regions.values():
        found.setdefault(_function(module), set()).add(_kind(module))
    return {name: m for name, m in regions.items() if len(found[_function(m)]) > 1}


def _own_forwards(module: nn.Module) -> Iterator[int]:
    """Yield what inside a module runs an object of its own, whose code no other module shares."""
    for inner in module.modules():
        forward = vars(inner).get("forward")
        if forward is not None and not isinstance(forward, MethodType):
            yield id(forward)


def _function(module: nn.Module) -> Any:
    """Return what the code of a module belongs to; other items may have put one for many there."""
    return getattr(module.forward, "__func__", type(module.forward))


def _kind(module: nn.Module) -> Any:
    return repr(module), tuple(parameter.shape for parameter in module.parameters())


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
    blocks = {_join(name, inner): block for inner, block in repeated_blocks(module).items()}
    if isinstance(module, nn.ModuleList) and is_list_of_blocks(module):
        yield from blocks.items()
    elif not has_forward(module):
        for child_name, child in module.named_children():
            yield from _chosen(child, _join(name, child_name))
    elif blocks and _weight(*blocks.values()) >= _LEAST_SHARE * _weight(module):
        yield from blocks.items()
    elif not is_single_layer(module):
        yield name, module


def _called(module: nn.Module, name: str) -> Iterator[Region]:
    """Yield a module that has a forward, or the members of one that only holds others."""
    if _is_left_out(module):
        return
    if has_forward(module):
        yield name, module
    else:
        for child_name, child in module.named_children():
            yield from _called(child, _join(name, child_name))


def _is_left_out(module: nn.Module) -> bool:
    """Say whether a module is a metric, a loss, or anything else that learns nothing."""
    return isinstance(module, Metric | MetricCollection) or not any(
        True for _ in module.parameters()
    )


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
