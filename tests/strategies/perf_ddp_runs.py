"""Training with `PerfDDPStrategy` on several ranks with gloo, and what it sends."""

from __future__ import annotations

from pathlib import Path

from ranks import TORCHRUN, run_ranks

START = """
import copy, os, sys, warnings
from pathlib import Path
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from models import Classifier, images, mlp, conv_net, trainer
from torch import nn
from strategies.traffic import Wire
from lightning_perf.strategies import PerfDDPStrategy
from lightning_perf.strategies.comm_hooks import Traffic

RANKS = int(os.environ.get("WORLD_SIZE", 2))

class Record(Callback):
    '''What each optimizer step sent, and whether the ranks' parameters are bit-identical.'''
    def on_train_start(self, trainer, module):
        self.wire, self.steps, self.equal = Wire(), [], []
        self.wire.__enter__()
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step > len(self.steps):
            wire = self.wire
            self.steps.append({name: (wire.calls[name], wire.bytes[name]) for name in wire.calls})
            mine = torch.cat([p.detach().flatten() for p in module.parameters()])
            all_ = [torch.empty_like(mine) for _ in range(RANKS)]
            dist.all_gather(all_, mine)
            self.equal.append(all(torch.equal(mine, other) for other in all_))
            wire.clear()
    def on_train_end(self, trainer, module):
        self.wire.__exit__(None, None, None)

def fit(module, hook=None, samples=80, ckpt_path=None, callbacks=(), strategy=None, **kwargs):
    torch.manual_seed(0)
    record = Record()
    if strategy is None:
        start = 0 if hook else None
        strategy = PerfDDPStrategy(hook, bucket_cap_mb=0.002, start_powerSGD_iter=start)
    t = trainer(
        **{"devices": RANKS, "strategy": strategy, "callbacks": [record, *callbacks], **kwargs}
    )
    t.fit(module, images(samples=samples), ckpt_path=ckpt_path)
    t.record = record
    assert all(record.equal)
    return t
"""


def ran(script: str, folder: Path, ranks: int = 2) -> None:
    """All ranks reach the end of a script."""
    script += "\nprint(f'held on rank {dist.get_rank()}', flush=True)\n"
    launcher = (*TORCHRUN[:-1], f"--nproc-per-node={ranks}")
    output = run_ranks(START + script, folder, launcher=launcher, environ={"OMP_NUM_THREADS": "1"})
    for rank in range(ranks):
        assert f"held on rank {rank}" in output
