"""Speaks the worker's protocol with scripted step times, and misbehaves on request.

The variant's environment holds the script, as JSON in FAKE:

    steps      step time for each launch, the last one for all further launches
    jitter     share by which the step times of a turn may differ from that
    batch_size, threads, device, precision, faults, inexact   what it reports about itself
    losses     what its learning record holds
    at, does   when to misbehave (begin, fit, turn, learn, stop) and how (raise, exit, kill, hang,
               ignore)
    pids       folder in which to note the process and a child of it that never ends
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

SCRIPT = json.loads(os.environ["FAKE"])


def main() -> None:
    note_processes()
    launch, chance = 0, random.Random()
    for line in sys.stdin:
        command = json.loads(line)
        misbehave(command["do"])
        if command["do"] == "begin":
            name = Path(command["folder"]).name
            launch = int(name.split("-")[1])
            chance.seed(name)
            answer(event="imported")
        elif command["do"] == "fit":
            answer(event="ready", device=get("device", "cpu"), batch_size=get("batch_size", 32))
        elif command["do"] == "turn":
            steps = get("steps", [0.001])
            change = 1 + get("jitter", 0.0) * chance.uniform(-1, 1)
            times = [steps[min(launch, len(steps)) - 1] * change] * command["steps"]
            answer(
                event="turn",
                times=times,
                seconds=sum(times),
                gap=0.1 * sum(times),
                faults=get("faults", 0) * len(times),
                switches=0,
                graphs=0,
            )
        elif command["do"] == "describe":
            answer(event="description", **description())
        elif command["do"] == "finish":
            answer(event="finished")
        elif command["do"] == "learn":
            answer(event="learned", record=record(command["perturb"], command["steps"]))
        elif command["do"] == "stop":
            return


def description() -> dict:
    return {
        "statuses": [{"item": "Item", "active": True, "text": ""}],
        "inexact": get("inexact", []),
        "callbacks": [],
        "left_out": get("left_out", []),
        "accumulate": 1,
        "loader_workers": 0,
        "prefetched": get("prefetched", 0),
        "epoch_batches": get("epoch_batches", 1000),
        "peak_memory": 1000,
        "peak_device_memory": None,
        "environment": {
            "threads": get("threads", 1),
            "precision": get("precision", "32-true"),
            "device": get("device", "cpu"),
            "versions": {"torch": "2.6"},
        },
    }


def record(perturb: float, steps: int) -> dict:
    losses = get("losses", [1.0, 0.5])
    return {
        "losses": [loss * (1 + perturb) for loss in losses],
        "initial_weights": "w",
        "batches": ["b"] * len(losses),
        "metrics": {"steps": steps},
        "update": None,
        "threads": 1,
        "device": "cpu",
        "error": None,
    }


def misbehave(event: str) -> None:
    if event != SCRIPT.get("at"):
        return
    deed = SCRIPT["does"]
    print("last words", file=sys.stderr, flush=True)
    if deed == "raise":
        answer(event="failed", reason="ValueError: no good", traceback="Traceback: its own line")
        sys.exit(1)
    if deed == "exit":
        sys.exit(3)
    if deed == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if deed == "hang":
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        time.sleep(1000)
    if deed == "ignore":
        time.sleep(1000)


def note_processes() -> None:
    if "pids" in SCRIPT:
        # It inherits the pipes, as a forked loader worker does.
        child = subprocess.Popen(["sleep", "1000"])
        for pid in (os.getpid(), child.pid):
            (Path(SCRIPT["pids"]) / str(pid)).touch()


def get(name: str, default: object) -> object:
    return SCRIPT.get(name, default)


def answer(**report: object) -> None:
    print(json.dumps(report), flush=True)


main()
