"""The file of a benchmark's results: what was found, on which machine, with which versions."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import lightning
import torch

from lightning_perf._hardware import detect


def write(folder: Path, name: str, **found: Any) -> None:
    """Write a dated file into a folder, replacing that of the same day, and print its path."""
    hardware = detect()
    record = {
        **found,
        "hardware": {**asdict(hardware), "isa": sorted(hardware.isa)},
        "torch": torch.__version__,
        "lightning": lightning.__version__,
    }
    path = folder / f"{date.today().isoformat()}_{name}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(path)
