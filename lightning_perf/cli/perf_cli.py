"""`PerfCLI`: LightningCLI with presets."""

from __future__ import annotations

import sys
from argparse import SUPPRESS
from pkgutil import resolve_name
from typing import Any, TypeAlias

from jsonargparse import Namespace
from lightning.pytorch import Callback
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities import rank_zero_warn

from lightning_perf import NoEffectWarning, __version__
from lightning_perf._hardware import detect
from lightning_perf.presets import Preset, resolve
from lightning_perf.presets._reader import NONE, check, kept, no_preset, trainer_section

_Entry: TypeAlias = Namespace | Callback  # a callback as the parser has it: described, or built


class PerfCLI(LightningCLI):
    """LightningCLI that knows presets: ``preset: NAME`` in a file, or ``--preset NAME``.

    A preset lies below what the user writes: files, environment variables and the command line win
    over it. The user's callbacks are added to the preset's, one of the same class replaces the
    preset's, and ``trainer.callbacks: null`` drops the preset's. ``preset: null`` turns it off. The
    arguments are those of LightningCLI.

    What ``--print_config`` prints and what is saved with a run holds the preset's name and all that
    it stands for, and can be given back as it is: a list of callbacks that holds the entry
    `lightning_perf.presets.Preset` is complete, and nothing is added to it.

    Example:
        >>> from lightning_perf.benchmark.demo_task import DigitClassifier, Digits
        >>> cli = PerfCLI(DigitClassifier, Digits, args=["--preset", "cpu"], run=False)
        >>> cli.config.trainer.accelerator
        'cpu'
    """

    def setup_parser(
        self, add_subcommands: bool, main_kwargs: dict[str, Any], subparser_kwargs: dict[str, Any]
    ) -> None:
        """Set up the parser, and one for each subcommand if there are any."""
        self._parsers_with_trainer: list[LightningArgumentParser] = []
        super().setup_parser(add_subcommands, main_kwargs, subparser_kwargs)

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add ``--preset`` above the arguments of trainer, model and data."""
        parser.add_argument(
            "--preset",
            type=str | None,
            # Absent unless given: only so does `preset: null` differ from saying nothing.
            default=SUPPRESS,
            help="Trainer settings for one kind of hardware, below your own: a name that "
            "`lightning-perf presets list` shows, auto for this machine, null for none.",
        )
        super().add_core_arguments_to_parser(parser)
        self._parsers_with_trainer.append(parser)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the arguments, and again on top of the preset if they name one."""
        self._parse(parser, args)
        preset = self._preset()
        if preset is not None:
            settings = trainer_section(preset)
            self._require_arguments(preset, settings)
            own = _as_list(self._section.trainer.callbacks)
            defaults = {f"trainer.{key}": value for key, value in settings.items()}
            for each in self._parsers_with_trainer:
                # The empty list tells `callbacks: null` from silence.
                each.set_defaults({"preset": None, **defaults, "trainer.callbacks": []})
            self._parse(parser, args)
            self._section.preset = preset
            items = _parsed(settings.pop("callbacks"))
            self._add_callbacks(items, own)
            self._explain(preset, settings, items)
        self._print_if_asked(parser, args)

    def instantiate_classes(self) -> None:
        """Build model, data and trainer, unless the preset is for hardware that is not there."""
        preset = self._section.get("preset") or NONE
        if preset != NONE:
            trainer = self._section.trainer
            settings = trainer_section(preset).items()
            unchanged = {key: value for key, value in settings if trainer.get(key) == value}
            try:
                drawback = check(preset, unchanged, detect())
            except RuntimeError as error:
                self.parser.error(str(error))
            if drawback:
                rank_zero_warn(drawback, category=NoEffectWarning)
        super().instantiate_classes()

    def _parse(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse without printing, which ends the process and has to wait for the preset."""
        if args is None:
            # `super` would take the command line for a second set of arguments, and warn.
            self.config = parser.parse_args([w for w in sys.argv[1:] if not _prints(w)])
        elif isinstance(args, list):
            super().parse_arguments(parser, [w for w in args if not _prints(w)])
        else:
            super().parse_arguments(parser, args)

    def _print_if_asked(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        words = sys.argv[1:] if args is None else args
        if isinstance(words, list) and any(map(_prints, words)):
            subcommand = self.config.get("subcommand")
            # The flag keeps its place: before the subcommand it prints more.
            order = dict.fromkeys(w for w in words if _prints(w) or w == subcommand)
            parser.parse_args(list(order), self.config, env=False, defaults=False)

    @property
    def _section(self) -> Namespace:
        """The configuration of the subcommand, or all of it where there are none."""
        section: Namespace = self.config.get(str(self.config.get("subcommand")), self.config)
        return section

    def _preset(self) -> str | None:
        """Return the preset to put below what was parsed, if any."""
        section = self._section
        if "preset" not in section:
            return None
        asked = NONE if section.preset is None else section.preset
        hardware = detect()
        try:
            preset = resolve(asked, hardware)
        except ValueError as error:
            self.parser.error(str(error))
        for written in map(_preset_written_out, _as_list(section.trainer.get("callbacks"))):
            if written not in (None, preset):
                self.parser.error(
                    f"Preset {asked!r} is asked for, but the callbacks hold preset {written!r} "
                    "written out, as a saved configuration does. Use the files that the saved "
                    f"one was made from, or take the lines of {written!r} out of it."
                )
        if preset != NONE:
            return preset
        if asked == "auto":
            section.preset = NONE
            rank_zero_warn(no_preset(hardware), category=NoEffectWarning)
        return None

    def _require_arguments(self, preset: str, settings: dict[str, Any]) -> None:
        missing = [key for key in settings if key not in self._section.trainer]
        if missing:
            self.parser.error(
                f"Preset {preset!r} sets {', '.join(missing)} of the Trainer, which the "
                f"`trainer_class` {self.trainer_class.__name__} of this program does not take. "
                "Give it these arguments, or name single items under `trainer.callbacks`."
            )

    def _add_callbacks(self, items: list[_Entry], own: list[_Entry]) -> None:
        """Put the preset's callbacks before the user's.

        Args:
            items: The preset's.
            own: The user's, as parsed without the preset.
        """
        trainer = self._section.trainer
        if trainer.callbacks is None:
            return
        if any(map(_preset_written_out, own)):
            items, own = [e for e in own if e in items], [e for e in own if e not in items]
        lasting = _as_list(self.trainer_defaults.get("callbacks"))
        trainer.callbacks = [*kept(items, [*own, *lasting], _kind), *own]

    def _explain(self, preset: str, settings: dict[str, Any], items: list[_Entry]) -> None:
        """Say at the head of what is printed or saved where the trainer's settings are from."""
        trainer = self._section.trainer
        origin = {key: _is(trainer[key], value) for key, value in settings.items()}
        for entry in _as_list(trainer.callbacks):
            origin[getattr(_kind(entry), "__name__", str(entry))] = entry in items
        if trainer.callbacks is None:
            origin["callbacks"] = False
        width = max(map(len, origin))
        head = [f"preset {preset} of lightning_perf {__version__}"]
        for name, from_preset in origin.items():
            head.append(f"  {name:<{width}}  {'from the preset' if from_preset else 'yours'}")
        for each in dict.fromkeys([self.parser, *self._parsers_with_trainer]):
            each.dump_header = [*(each.dump_header or []), *head]


def _is(parsed: Any, value: Any) -> bool:
    """Return whether a setting is still that of the preset; an object by its class."""
    if isinstance(value, dict):
        return bool(getattr(parsed, "class_path", None) == value["class_path"])
    return bool(parsed == value)


def _prints(word: str) -> bool:
    return word.partition("=")[0] == "--print_config"


def _parsed(described: list[dict[str, Any]]) -> list[_Entry]:
    """Return callbacks as the parser has them, all their arguments filled in."""
    parser = LightningArgumentParser()
    parser.add_argument("--callbacks", type=list[Callback])
    entries: list[_Entry] = parser.parse_object({"callbacks": described}).callbacks
    return entries


def _as_list(callbacks: Any) -> list[_Entry]:
    if callbacks is None:
        return []
    return list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]


def _kind(entry: _Entry) -> Any:
    """Return the class of a callback, or whatever function makes it."""
    return type(entry) if isinstance(entry, Callback) else resolve_name(entry.class_path)


def _preset_written_out(entry: _Entry) -> str | None:
    """Return the name of the preset if the entry is the one that marks a complete list."""
    if isinstance(entry, Callback):
        return entry.name if isinstance(entry, Preset) else None
    return str(entry.init_args.name) if _kind(entry) is Preset else None
