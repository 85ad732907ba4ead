"""A result as one HTML file, for people who did not run the comparison."""

from __future__ import annotations

import platform
import shlex
from datetime import datetime
from importlib.metadata import version
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from lightning_perf.benchmark import findings
from lightning_perf.benchmark.coordinator import QUICK
from lightning_perf.benchmark.picture import Picture
from lightning_perf.benchmark.process import VariantFailed
from lightning_perf.benchmark.result import Result

_KEYS = ("a", "b")
_PACKAGES = ("torch", "lightning", "lightning-perf")


def page(result: Result, pictures: list[Picture]) -> str:
    """Return the page that shows a result.

    Args:
        result: What was found.
        pictures: What `lightning_perf.benchmark.pictures.pictures` drew of it.
    """
    drawn = {picture.name: _drawn(picture) for picture in pictures}
    loss_picture = drawn.pop("losses", None)
    differences, same = _environments(result)
    return _render(
        "report.html",
        result=result,
        about=_about(result),
        headline=findings.headline(result),
        mood=_mood(result),
        alarm=_alarm(result),
        names={key: getattr(result, key) for key in _KEYS},
        figures=findings.figures(result),
        warnings=findings.warnings(result),
        ending=findings.ending(result),
        learning=findings.learning(result),
        speed_pictures=list(drawn.values()),
        loss_picture=loss_picture,
        memories=_memories(result),
        items=[
            (getattr(result, key), getattr(result, f"statuses_{key}"))
            for key in _KEYS
            if getattr(result, f"statuses_{key}")
        ],
        differences=differences,
        same=same,
        command=_words(bench_command(result)),
        files=_variant_files(result),
        facts=_facts(result),
        row=f"{findings.RESULTS_HEADER}\n{findings.results_row(result)}",
    )


def failure_page(error: VariantFailed, command: list[str]) -> str:
    """Return the page that shows why there is no result.

    Args:
        error: What happened.
        command: What was run.
    """
    now = datetime.now().astimezone()
    return _render(
        "failure.html",
        error=error,
        command=_words(command),
        about=["lightning-perf", _date(now), platform.platform()],
        versions=_listed({name: version(name) for name in _PACKAGES}),
    )


def bench_command(result: Result) -> list[str]:
    """Return the command that repeats a comparison; nothing if the result does not say of what."""
    if not result.task:
        return []
    words = ["lightning-perf", "bench", "--config", result.task]
    for key in _KEYS:
        words += [f"--{key}", _variant_argument(getattr(result, f"variant_{key}"))]
    words += ["--budget", f"{result.budget_s:g}", "--learning-steps", str(result.learning_steps)]
    words += ["--seed", str(result.seed)]
    words += ["--quick"] if result.stop_reason == QUICK else []
    words += ["--validate"] if result.learning and result.learning["metrics_a"] else []
    return words


def _render(template: str, **values: Any) -> str:
    environment = Environment(
        loader=PackageLoader("lightning_perf.benchmark"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**values)


def _words(command: list[str]) -> Markup:
    """Return a command for the shell that breaks between its words."""
    return Markup(" ").join(
        Markup('<span class="word">{}</span>').format(shlex.quote(word)) for word in command
    )


def _drawn(picture: Picture) -> dict[str, Any]:
    described = Markup('<svg role="img" aria-label="{}" ').format(picture.description)
    svg = Markup(picture.svg()[len("<svg ") :])
    return {"caption": picture.caption, "svg": described + svg}


def _about(result: Result) -> list[str]:
    created = datetime.fromisoformat(result.created)
    told = ["lightning-perf bench", result.task, _date(created), findings.machine(result)]
    return [text for text in told if text]


def _mood(result: Result) -> str:
    """Say whether the reader may be glad: ``good``, ``bad``, or something to think about."""
    if result.losses_agree is False:
        return "bad"
    glad = findings.is_faster(result) and result.losses_agree
    return "good" if glad and not findings.other_batch_size(result) else ""


def _alarm(result: Result) -> str:
    if not findings.other_batch_size(result):
        return ""
    sizes = f"A trains on batches of {result.batch_size_a}, B of {result.batch_size_b}"
    return f"Batch sizes differ: {sizes}. The speed-up compares steps, not samples."


def _memories(result: Result) -> list[dict[str, Any]]:
    memories = []
    for name, field in (
        ("Of the process, at its peak", "peak_memory"),
        ("Allocated on the GPU, at its peak", "peak_device_memory"),
    ):
        sizes = {key: getattr(result, f"{field}_{key}") for key in _KEYS}
        known = {key: size for key, size in sizes.items() if size is not None}
        if known:
            most = max(known.values()) or 1
            bars = [
                {"key": key, "text": findings.size(size), "percent": f"{100 * size / most:.1f}"}
                for key, size in known.items()
            ]
            memories.append({"name": name, "bars": bars})
    return memories


Rows = list[tuple[str, list[str]]]


def _environments(result: Result) -> tuple[Rows, Rows]:
    """Return the settings that differ, with both values, and those that do not, with one."""
    sides = [_flat(getattr(result, f"environment_{key}")) for key in _KEYS]
    differences: Rows = []
    same: Rows = []
    for name in {**sides[0], **sides[1]}:
        values = [side.get(name, "not set") for side in sides]
        if values[0] != values[1]:
            differences.append((name, values))
        else:
            same.append((name, values[:1]))
    return differences, same


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        elif not name.endswith("_CACHE_DIR"):  # ours, one folder for each variant
            flat[prefix + name] = _value(name, value)
    return flat


def _value(name: str, value: Any) -> str:
    if name == "memory" and isinstance(value, int):
        return findings.size(value)
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value))
    return "-" if value is None else str(value)


def _facts(result: Result) -> dict[str, str]:
    environment = result.environment_b
    hardware = environment.get("hardware", {})
    memory = f", {findings.size(hardware['memory'])} of memory" if hardware else ""
    facts = {
        "Date": _date(datetime.fromisoformat(result.created)),
        "Machine": f"{findings.machine(result)}{memory}",
        "System": environment.get("system", ""),
        "Versions": _listed(environment.get("versions", {})),
        "Seed": str(result.seed),
    }
    return {name: value for name, value in facts.items() if value}


def _variant_argument(variant: dict[str, Any]) -> str:
    return f"{variant['name']}.yaml" if _needs_file(variant) else str(variant["name"])


def _variant_files(result: Result) -> dict[str, str]:
    """Return the variants that no name stands for, as the files that ``bench`` reads."""
    variants = [getattr(result, f"variant_{key}") for key in _KEYS]
    return {
        _variant_argument(variant): yaml.safe_dump(
            {key: value for key, value in variant.items() if key != "name" and value},
            sort_keys=False,
        )
        for variant in variants
        if variant and _needs_file(variant)
    }


def _needs_file(variant: dict[str, Any]) -> bool:
    plain = variant["preset"] or "none"
    return bool(variant["trainer"] or variant["env"] or variant["name"] != plain)


def _listed(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in versions.items())


def _date(moment: datetime) -> str:
    return f"{moment.day} {moment:%B %Y, %H:%M %Z}"
