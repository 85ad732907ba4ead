"""Distributed data parallel whose options act, everywhere, or say why not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from inspect import signature
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_perf import NoEffectWarning, _compat
from lightning_perf.strategies._ddp import hook_state
from lightning_perf.strategies._ddp.broken_runs import EndsAlone
from lightning_perf.strategies._ddp.loss_scale import LossScale
from lightning_perf.strategies._ddp.static_graph import Proof, static_graph_fails
from lightning_perf.strategies._ddp.traffic import count_plain, told
from lightning_perf.strategies._ddp.uneven import Uneven, even, require_batches
from lightning_perf.strategies._ddp.unused import UnusedSearch
from lightning_perf.strategies.comm_hooks import CommHook, Traffic
from lightning_perf.strategies.comm_hooks.base import ErrorFeedback
from lightning_perf.strategies.comm_hooks.named import named_hook, require_fitting

# The new name, where there is one; the old name makes PyTorch warn there.
_BROADCAST_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


class PerfDDPStrategy(EndsAlone):
    """Distributed data parallel with gradient compression on any backend, and honest options.

    All arguments that Lightning and PyTorch have too, have their names, meanings and defaults.

    Args:
        ddp_comm_hook: How gradients travel: ``"fp16"`` and ``"bf16"`` halve the bytes,
            ``"powersgd"`` sends thin matrices and ``"onebit"`` signs, which changes what is
            learned; or a function of PyTorch's form. ``None`` averages them as they are.
        matrix_approximation_rank: For ``"powersgd"``: columns of the thin matrices.
        start_powerSGD_iter: Backward passes that average gradients plainly before a named hook
            starts, whichever it is. By default 1000 for ``"powersgd"`` and ``"onebit"``, else 0.
        save_hook_state: Keep the state of the hook of every rank in checkpoints, and restore it.
            It is as large as the gradients of all ranks and is gathered on rank 0.
        uneven: What to do where ranks have different numbers of training batches, at which they
            would wait for each other for ever: ``"error"`` names them, ``"join"`` ends the epoch
            with the first rank that ends. Loaders without a length are compared at each batch;
            ``None`` spares that. Evaluation may be uneven, if each rank has a batch.
        ddp_comm_state: First argument of a hook that is a function.
        ddp_comm_wrapper: Applied to a hook that is a function.
        model_averaging_period: Steps between averaging, for PyTorch's post-local SGD.
        process_group_backend: ``"nccl"``, ``"gloo"``, ``"ccl"`` for oneCCL on CPUs, or ``None`` for
            that of the device.
        timeout: How long a collective may take.
        start_method: How processes start: ``"popen"``, ``"spawn"``, ``"fork"``, ``"forkserver"``.
        bucket_cap_mb: Size of the buckets that gradients travel in, in MiB; ``None`` is 25.
        gradient_as_bucket_view: Let gradients lie in the buckets, which saves their memory once.
        broadcast_buffers: Give all ranks the buffers of rank 0 before each forward pass.
        static_graph: The same parameters are used in each step.
        find_unused_parameters: Look in each step for parameters that got no gradient.

    Raises:
        ValueError: An unknown name, or arguments that do not belong together.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_perf.strategies import PerfDDPStrategy
        >>> strategy = PerfDDPStrategy("bf16", start_powerSGD_iter=100)
        >>> trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False)

    Source: tuning guide, sections on DDP; the hooks name their papers.
    """

    guide: ClassVar[str] = "T DDP, no_sync, find_unused_parameters; K 6.1; L 3"
    """Section of the tuning guides that the strategy implements."""

    def __init__(
        self,
        ddp_comm_hook: Literal["fp16", "bf16", "powersgd", "onebit"]
        | Callable[[Any, Any], Future[Tensor]]
        | None = None,
        *,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int | None = None,  # noqa: N803  # the name it has in PyTorch
        save_hook_state: bool = True,
        uneven: Uneven | None = "error",
        ddp_comm_state: Any = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        model_averaging_period: int | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        bucket_cap_mb: float | None = None,
        gradient_as_bucket_view: bool = False,
        broadcast_buffers: bool = True,
        static_graph: bool = False,
        find_unused_parameters: bool = False,
    ) -> None:
        buffers: dict[str, Any] = {} if broadcast_buffers else {_BROADCAST_BUFFERS: False}
        super().__init__(
            ddp_comm_state=ddp_comm_state,
            model_averaging_period=model_averaging_period,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
            bucket_cap_mb=bucket_cap_mb,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            find_unused_parameters=find_unused_parameters,
            **buffers,
        )
        if not callable(ddp_comm_hook) and not (ddp_comm_state is ddp_comm_wrapper is None):
            raise ValueError(
                "ddp_comm_state and ddp_comm_wrapper were given with ddp_comm_hook="
                f"{ddp_comm_hook!r}. They are for a hook that is a function."
            )
        require_fitting(ddp_comm_hook, matrix_approximation_rank, start_powerSGD_iter)
        if uneven not in (None, "error", "join"):
            raise ValueError(f"uneven={uneven!r} was asked for; it is 'error', 'join' or None.")
        if bucket_cap_mb is not None and bucket_cap_mb <= 0:
            raise ValueError(f"bucket_cap_mb={bucket_cap_mb} was asked for; it is more than 0.")
        self.ddp_comm_hook = ddp_comm_hook
        self.matrix_approximation_rank = matrix_approximation_rank
        self.start_powerSGD_iter = start_powerSGD_iter
        self.save_hook_state = save_hook_state
        self.ddp_comm_state = ddp_comm_state
        self.ddp_comm_wrapper = ddp_comm_wrapper
        self.uneven = uneven
        self.static_graph = static_graph
        self.comm_hook: CommHook | None = None
        """The hook of the current ``fit``, if it has a name."""
        self.gradient_traffic = Traffic()
        """What averaging gradients handed to collectives in the latest ``fit``, on this rank.

        Counted for named hooks and without a hook, not for one that is a function.
        """
        self._loaded: Mapping[str, Any] | None = None
        self._search: UnusedSearch | None = None
        self._proof: Proof | None = None
        self._loss_scale: LossScale | None = None

    @contextmanager
    def accumulate(self, *, sync: bool) -> Iterator[None]:
        """Let ``manual_backward`` average gradients only where a window ends.

        For manual optimization; in automatic optimization ``accumulate_grad_batches`` does it.

        Args:
            sync: Whether the optimizer steps after this backward pass.

        Raises:
            RuntimeError: With ``static_graph``, whose first backward pass must average.

        Example:
            In ``training_step``, with windows of four batches and a shorter last one::

                last = (batch_idx + 1) % 4 == 0 or self.trainer.is_last_batch
                with self.trainer.strategy.accumulate(sync=last):
                    self.manual_backward(loss / 4)
                if last:
                    optimizer.step()
                    optimizer.zero_grad()
        """
        if sync or not isinstance(self.model, DistributedDataParallel):
            yield
        elif self.model.static_graph:
            raise RuntimeError(
                "accumulate(sync=False) was called with static_graph=True, under which PyTorch "
                "does not average gradients afterwards. Pass static_graph=False."
            )
        else:
            with self.model.no_sync():
                yield

    def setup(self, trainer: Trainer) -> None:
        """Refuse what would learn something else in silence, then wrap the model."""
        fits = trainer.state.fn == TrainerFn.FITTING
        if fits and self.static_graph and self.world_size > 1:
            batches = _longest_window(trainer)
            reason = static_graph_fails(batches, self.root_device)
            if reason is not None:
                raise RuntimeError(
                    f"static_graph=True was asked for with windows of {batches} batches, and "
                    f"{reason} (tried on two layers with PyTorch {torch.__version__}). Pass "
                    "static_graph=False, or do not accumulate."
                )
            self._proof = Proof()
        super().setup(trainer)

    def configure_ddp(self) -> None:
        """Wrap the model, and register the hook, on every kind of device."""
        super().configure_ddp()
        model = self.model
        if not isinstance(model, DistributedDataParallel):  # a subclass wraps in its own way
            return
        self.comm_hook, self.gradient_traffic = None, Traffic()
        if model.find_unused_parameters:
            self._search = UnusedSearch(model)
        if self.ddp_comm_hook is None:
            return
        if self.world_size == 1:
            rank_zero_warn(
                f"ddp_comm_hook={self.ddp_comm_hook!r} has no effect here: one process has nobody "
                "to send gradients to.",
                category=NoEffectWarning,
            )
        elif callable(self.ddp_comm_hook):
            wrap = self.ddp_comm_wrapper or (lambda hook: hook)
            model.register_comm_hook(self.ddp_comm_state, wrap(self.ddp_comm_hook))
        else:
            rank, start = self.matrix_approximation_rank, self.start_powerSGD_iter
            self._register(named_hook(self.ddp_comm_hook, rank, start), model)

    def _register(self, hook: CommHook, model: DistributedDataParallel) -> None:
        if self._loaded is not None and self.save_hook_state:
            hook_state.restore(hook, self._loaded.get(hook_state.KEY))
        hook.register(model)
        self.comm_hook, self.gradient_traffic = hook, hook.traffic
        left = hook.start_iter - hook.iteration
        start = f", after {left} plain steps" if left > 0 else ""
        self._say(f"gradients are averaged by the hook '{hook.name}'{start}")

    def process_dataloader(self, dataloader: Any) -> Any:
        """Make training loaders end on all ranks at once, and all others begin on all ranks."""
        dataloader = super().process_dataloader(dataloader)
        module = self.lightning_module
        if self.uneven is None or self.world_size == 1 or module is None:
            return dataloader
        if module.trainer.training:
            return even(dataloader, self.uneven, module.trainer.limit_train_batches)
        require_batches(dataloader, module.trainer.state.stage)
        return dataloader

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Step; compare gradients under a static graph first; rescale what a hook keeps after."""
        if self._proof is not None and self.lightning_module is not None:
            closure = self._proof.around(closure, self.lightning_module)
        hook = self.comm_hook
        if not isinstance(hook, ErrorFeedback):
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._loss_scale is None:
            self._loss_scale = LossScale(self.precision_plugin)
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._loss_scale.follow(hook)
        return output

    def post_backward(self, closure_loss: Tensor) -> None:
        """Count what was averaged, and look which parameters got gradients."""
        super().post_backward(closure_loss)
        model = self.model
        if not isinstance(model, DistributedDataParallel) or not model.require_backward_grad_sync:
            return
        if self.comm_hook is None:
            self.gradient_traffic.steps += 1
        if self._search is not None and self._search.after_step():
            self._end_search()

    def _end_search(self) -> None:
        if self._search is None:
            return
        no_effect, lines = self._search.close()
        self._search = None
        for line in lines:
            self._say(f"find_unused_parameters=True: {line}")
        if no_effect:
            rank_zero_warn(
                f"find_unused_parameters=True has no effect here: {no_effect} Pass False.",
                category=NoEffectWarning,
            )

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Save a checkpoint, with the state of the hook of every rank in it."""
        # Without the state of the optimizers nobody will go on from it.
        if self.comm_hook and self.save_hook_state and "optimizer_states" in checkpoint:
            if self.is_alone():
                rank_zero_warn(
                    "The run broke off, so the checkpoint is saved without the state of the "
                    f"communication hook '{self.comm_hook.name}' of the other ranks."
                )
            else:
                state = hook_state.gathered(self.comm_hook)
                checkpoint = {**checkpoint, hook_state.KEY: state}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint, and keep the state of the hook until the model is wrapped."""
        # The arguments are not the same in all versions of Lightning.
        checkpoint = super().load_checkpoint(*args, **kwargs)
        self._loaded = {key: checkpoint[key] for key in (hook_state.KEY,) if key in checkpoint}
        return checkpoint

    def teardown(self) -> None:
        """Say what was sent, and let go of what belongs to the run."""
        model = self.model
        if isinstance(model, DistributedDataParallel):
            self._end_search()
            if self.ddp_comm_hook is None:
                count_plain(model, self.gradient_traffic)
            if self.gradient_traffic.steps and self.world_size > 1:
                self._say(told(self.gradient_traffic, model, hooked=self.comm_hook is not None))
        self._loaded = self._proof = self._loss_scale = None
        super().teardown()

    def _say(self, message: str) -> None:
        rank_zero_info(f"lightning_perf: {type(self).__name__}: {message}")


def _longest_window(trainer: Trainer) -> int:
    """Return the most micro-batches between two steps; manual optimization decides by itself."""
    if not trainer.lightning_module.automatic_optimization:
        return 1
    windows = [trainer.accumulate_grad_batches]
    for callback in _compat.callbacks(trainer):
        if isinstance(callback, GradientAccumulationScheduler):
            windows += callback.scheduling.values()
    return max(windows)
