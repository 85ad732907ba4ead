"""A result as a comparison could have returned it, without a comparison."""

from __future__ import annotations

import math
import random
from dataclasses import asdict
from typing import Any

from lightning_perf.benchmark.launch import Turn
from lightning_perf.benchmark.learning import LearningVerdict
from lightning_perf.benchmark.result import Result
from lightning_perf.benchmark.variant import Variant


def result(**changes: Any) -> Result:
    """Return a result in which B is 1.25 times as fast, with ``changes`` to its fields."""
    fields = {
        "a": "none",
        "b": "cpu",
        "quick": True,
        "speedup": 1.25,
        "interval": (1.21, 1.291),
        "level": 0.95,
        "verdict": "1.250x faster, 95% interval 1.210 to 1.291 (1 launch, stopped: quick mode)",
        "stop_reason": "quick mode",
        "launches": 1,
        "pairs": 12,
        "launches_dropped": 0,
        "pairs_dropped": 1,
        "launch_speedups": [1.25],
        "speedup_of_minimum": 1.24,
        "foreign_share": 0.03,
        "steps_per_turn": 23,
        "discarded_steps": 3,
        "window": 5,
        "frozen": True,
        "step_seconds_a": 0.050,
        "step_seconds_b": 0.040,
        "samples_per_s_a": 640.0,
        "samples_per_s_b": 800.0,
        "batch_size_a": 32,
        "batch_size_b": 32,
        "startup_seconds_a": 4.1,
        "startup_seconds_b": 4.6,
        "first_step_seconds_a": 0.09,
        "first_step_seconds_b": 9.04,
        "compile_seconds_a": 0.04,
        "compile_seconds_b": 9.0,
        "peak_memory_a": 800 * 2**20,
        "peak_memory_b": 1700 * 2**20,
        "peak_device_memory_a": None,
        "peak_device_memory_b": None,
        "data_wait_a": 0.013,
        "data_wait_b": 0.016,
        "minor_faults_a": 2.0,
        "minor_faults_b": 3.0,
        "losses_agree": True,
        "learning_summary": "losses drift by -0.01% on average (0.2% allowed)",
        "learning_steps": 60,
        "loss_difference_max": 0.01,
        "loss_difference_mean": -0.0001,
        "learning": asdict(learning()),
        "statuses_a": [],
        "statuses_b": [
            {"item": "ChannelsLast", "active": True, "text": "20 convolutions"},
            {"item": "Compile", "active": False, "text": "brings nothing here " * 8},
        ],
        "environment_a": environment("32-true"),
        "environment_b": environment("bf16-mixed"),
        "environment_difference": {"precision": ["32-true", "bf16-mixed"]},
        "seed": 0,
        "budget_s": 120.0,
        "seconds": 64.0,
        "created": "2030-01-01T12:00:00+00:00",
        "warnings": ["Thread counts differ: 1 in A, 2 in B."],
        "turns": turns(),
        "task": "train.py:make",
        "variant_a": variant("none", preset=None),
        "variant_b": variant("cpu", preset="cpu"),
    }
    return Result(**fields | changes)


BUSY: dict[str, Any] = {
    "speedup": None,
    "interval": None,
    "verdict": "machine busy: 38% of the CPU was used by others; no number can be given",
    "stop_reason": "machine busy",
    "launches": 0,
    "pairs": 0,
    "launch_speedups": [],
    "speedup_of_minimum": None,
    "step_seconds_a": None,
    "step_seconds_b": None,
    "samples_per_s_a": None,
    "samples_per_s_b": None,
    "compile_seconds_a": None,
    "compile_seconds_b": None,
    "data_wait_a": None,
    "data_wait_b": None,
}
"""What is different when there is no number."""


def variant(name: str, preset: str | None, **sections: Any) -> dict[str, Any]:
    """Return one side as a result holds it."""
    return asdict(Variant(name, preset=preset, **sections))


def environment(precision: str) -> dict[str, Any]:
    """Return what a variant ran in."""
    return {
        "versions": {"python": "3.12.1", "torch": "2.9.0", "lightning": "2.6.0"},
        "system": "Linux-6.1-x86_64-with-glibc2.36",
        "hardware": {
            "device": "cpu",
            "device_name": "Some CPU",
            "capability": None,
            "isa": ["avx", "avx2", "fma"],
            "cpu_name": "Some CPU",
            "cores": 8,
            "memory": 32 * 2**30,
        },
        "device": "cpu",
        "precision": precision,
        "threads": 2,
        "knobs": {"cudnn_benchmark": False},
        "variables": {"TORCHINDUCTOR_CACHE_DIR": f"/somewhere/{precision}"},
    }


def turns(launches: int = 1, pairs: int = 12, steps: int = 23) -> list[dict[str, Any]]:
    """Return noisy turns with a stall now and then; in each launch one pair does not count."""
    noise = random.Random(0)

    def turn(launch: int, pair: int, key: str) -> dict[str, Any]:
        step = {"a": 0.050, "b": 0.040}[key] * noise.lognormvariate(0, 0.01)
        times = [step * noise.lognormvariate(0, 0.03) for _ in range(steps)]
        times[7] *= noise.choice([1, 1, 1, 3])
        return asdict(
            Turn(
                launch=launch,
                pair=pair,
                variant=key,
                first=key == "a",
                times=times,
                seconds=sum(times),
                gap=0.01,
                foreign_share=0.0,
                faults=40,
                switches=0,
                compiled=False,
                counts=pair > 1 or key == "b",
            )
        )

    return [
        turn(launch, pair, key)
        for launch in range(1, launches + 1)
        for pair in range(1, pairs + 2)
        for key in ("a", "b")
    ]


def learning(**changes: Any) -> LearningVerdict:
    """Return a verdict on two runs that learn the same up to rounding."""
    noise = random.Random(1)
    losses = [2.3 * math.exp(-i / 25) + noise.uniform(0, 0.3) for i in range(60)]
    fields = {
        "agree": True,
        "summary": "losses drift by -0.01% on average (0.2% allowed)",
        "first_difference": 1,
        "max_relative_difference": 0.01,
        "mean_relative_difference": -0.0001,
        "allowed_max": 0.03,
        "allowed_mean": 0.002,
        "metrics_a": {"val_accuracy": 0.931},
        "metrics_b": {"val_accuracy": 0.934},
        "losses_a": losses,
        "losses_b": [loss * noise.uniform(0.99, 1.01) for loss in losses],
    }
    return LearningVerdict(**fields | changes)
