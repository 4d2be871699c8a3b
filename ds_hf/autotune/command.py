"""The user's command line: which script, where the configuration stands in it, and how it looks with other values.

Arguments may stand in a YAML file (LLaMA-Factory, axolotl, TRL's ``--config``): then each launch has a copy of it. Of a
loop of accelerate's the launcher names the configuration, which each launch is told anew, as its last option.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_hf.errors import ConfigError, Fault
from ds_hf.printable import harmless
from ds_hf.regular_files import read_regular, replace_file

__all__ = ["LENGTH", "Command", "choose_launcher", "found_program", "split_launcher"]

HF_MAPPINGS = {
    "train_micro_batch_size_per_gpu": "--per_device_train_batch_size",
    "gradient_accumulation_steps": "--gradient_accumulation_steps",
    "gradient_checkpointing": "--gradient_checkpointing",
    "dataloader_num_workers": "--dataloader_num_workers",
}
CONFIG_FLAGS = ("--deepspeed", "--deepspeed_config")
OF_ACCELERATE = "--deepspeed_config_file"  # an option of ``accelerate launch``
LAUNCHERS = (  # how a command line of theirs begins
    ("torchrun",),
    ("accelerate", "launch"),
    ("deepspeed",),
    ("python", "-m", "torch.distributed.run"),
    ("python", "-m", "torch.distributed.launch"),
    ("python", "-m", "accelerate.commands.launch"),
)
CLIENTS = {  # name and command -> the module that it starts on each process
    ("llamafactory-cli", "train"): "llamafactory.launcher",
    ("lmf", "train"): "llamafactory.launcher",
    ("axolotl", "train"): "axolotl.cli.train",
}
LONGEST_FILE = 1 << 20  # bytes
COPY = "arguments.yaml"
LENGTH = "sequence_length"  # in mappings: the option that sets it
TRUE = ("true", "1", "yes", "on", "y", "t")


def split_launcher(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The launcher of ``accelerate launch --num_processes 2 train.py ...``, and the script with its arguments.

    ``trl sft ...`` is the module that TRL's command line starts; so are LLaMA-Factory's and axolotl's ``train``.

    Raises:
        ConfigError: a launcher is there, and no script behind it.
    """
    words = list(words)
    name = Path(words[0]).name if words else ""
    if name == "trl" and len(words) > 1:
        return [], ["-m", f"trl.scripts.{words[1].replace('-', '_')}", *words[2:]]
    if (module := CLIENTS.get((name, words[1] if len(words) > 1 else ""))) is not None:
        return [], ["-m", module, *words[2:]]
    found = ["python" if name.startswith("python") else name, *words[1:]]
    begin = next((len(each) for each in LAUNCHERS if tuple(found[: len(each)]) == each), 0)
    if not begin:
        return [], words
    for index, word in enumerate(words[begin:], begin):
        if word in ("-m", "--module") and index + 1 < len(words):
            return words[:index], ["-m", *words[index + 1 :]]
        if word.endswith(".py"):
            return words[:index], words[index:]
    raise ConfigError(f"no script behind {' '.join(words[:begin])}: it is what ends in .py, or follows -m")


def choose_launcher(words: Sequence[str], given: Sequence[str], processes: int | None) -> tuple[list[str], list[str]]:
    """As ``split_launcher``, or with the launcher that an option has ``given``.

    Raises:
        ConfigError: there are two launchers, or one beside ``processes``; there is no such program, or no script.
    """
    launcher, words = split_launcher(words)
    if launcher and given:
        raise ConfigError(f"--launcher, and {launcher[0]} before the script: give one of them")
    if launcher and processes:
        raise ConfigError(f"-n is for a script alone: {launcher[0]} says how many processes there are")
    launcher = launcher or list(given)
    found_program(launcher)  # so that its absence is told before anything starts
    return launcher, words


def found_program(words: Sequence[str]) -> list[str]:
    """``words``, whose first is a program. One that is not on the PATH is looked for beside this Python, whose
    environment need not be active.

    Raises:
        ConfigError: it is in neither place.
    """
    if not words or shutil.which(words[0]) is not None:
        return list(words)
    beside = Path(sys.executable).with_name(Path(words[0]).name)
    if str(Path(words[0]).parent) == "." and shutil.which(beside) is not None:
        return [str(beside), *words[1:]]
    raise ConfigError(f"there is no program {words[0]} on the PATH or in {beside.parent}")


@dataclass(frozen=True)
class Command:
    """A script with its arguments.

    Attributes:
        script: the Python file (or ``-m`` and a module, as two words).
        args: everything after it.
        config_at: index in ``args`` of the word that names the configuration, or the file of arguments that does;
            ``inline`` when it is ``--flag=FILE``.
        mappings: configuration keys to options of the script.
        file: the arguments in that file; empty where there is none.
        launched: the configuration that ``accelerate launch`` names, where the script does not; else empty.
    """

    script: tuple[str, ...]
    args: tuple[str, ...]
    config_at: int
    inline: bool
    mappings: Mapping[str, str]
    file: Mapping[str, Any] = field(default_factory=dict)
    launched: str = ""

    @classmethod
    def parse(
        cls, words: Sequence[str], mappings: Mapping[str, str] | None = None, launcher: Sequence[str] = ()
    ) -> Command:
        """Find the script and the configuration in ``train.py --lr 1 --deepspeed ds_config.json``.

        A script whose ``--deepspeed`` takes the file is a Trainer's: its batch options are known by their names.

        Raises:
            ConfigError: there is no script, it is not there, or no configuration is named.
        """
        words = list(words)
        if words and Path(words[0]).name.startswith("python"):
            words = words[1:]
        if not words:
            raise ConfigError("no script: ds-hf autotune [options] train.py <its arguments> --deepspeed ds_config.json")
        count = 2 if words[0] == "-m" else 1
        script, args = tuple(words[:count]), tuple(words[count:])
        if count == 1 and not Path(script[0]).is_file():
            why = "is no file" if os.path.lexists(script[0]) else "does not exist"
            raise ConfigError(f"the script {script[0]} {why}")
        for flag in CONFIG_FLAGS[::-1]:
            for index, word in reversed(list(enumerate(args))):  # of several the last one counts
                if word.startswith(flag + "="):
                    return cls(script, args, index, True, _mappings(flag, mappings))
                if word == flag and index + 1 < len(args) and not args[index + 1].startswith("--"):
                    return cls(script, args, index + 1, False, _mappings(flag, mappings))
        for index, word in enumerate(args):
            path = Path(word.split("=", 1)[1] if word.startswith("--config=") else word)
            if path.suffix in (".yaml", ".yml") and path.is_file():
                values = _read(path)
                if isinstance(values.get("deepspeed"), str):
                    known = _mappings_of_file(values, script, mappings)
                    return cls(script, args, index, word != str(path), known, values)
        if launched := _launched(launcher):
            shown = {key: option for key, option in HF_MAPPINGS.items() if _place(args, option) is not None}
            return cls(script, args, -1, False, {**shown, **_mappings("", mappings)}, launched=launched)
        fault = Fault(
            "",
            "the command names no configuration, so there is nothing to tune",
            "add --deepspeed ds_config.json (Trainer scripts) or --deepspeed_config ds_config.json after the script, "
            "or deepspeed: ds_config.json to a YAML file of arguments"
            + (f", or {OF_ACCELERATE} ds_config.json after accelerate launch" if "accelerate" in str(launcher) else ""),
        )
        raise ConfigError([fault], shlex.join(words))

    @property
    def config(self) -> str:
        """What the user named as configuration."""
        return self.launched or (str(self.file["deepspeed"]) if self.file else self._named)

    @property
    def _named(self) -> str:
        word = self.args[self.config_at]
        return word.split("=", 1)[1] if self.inline else word

    @property
    def signature(self) -> list[str]:
        """All but the configuration's name: what must be alike in two runs of one search."""
        words = [word for index, word in enumerate(self.args) if index != self.config_at]
        file = {key: value for key, value in self.file.items() if key != "deepspeed"}
        return [*words, json.dumps(file, sort_keys=True, default=str)] if file else words

    def words(self, config: str | Path, values: Mapping[str, object] | None = None) -> list[str]:
        """Script and arguments with another configuration, and mapped keys set to ``values``; what the launcher is to
        be told stands in front.

        A file of arguments is written anew, beside the configuration.

        Raises:
            ConfigError: that would be the user's own file.
        """
        args, options = list(self.args), {self.mappings[k]: v for k, v in (values or {}).items() if k in self.mappings}
        if self.file:
            config = self._copy(Path(config), {option[2:]: value for option, value in options.items()})
            options = {option: value for option, value in options.items() if _place(args, option) is not None}
        before = [OF_ACCELERATE, str(config)] if self.launched else []
        if not before:
            flag = args[self.config_at].split("=", 1)[0]
            args[self.config_at] = f"{flag}={config}" if self.inline else str(config)
        for option, value in options.items():
            _put(args, option, str(value))
        return [*before, *self.script, *args]

    def _copy(self, config: Path, values: Mapping[str, object]) -> Path:
        import yaml  # type: ignore[import-untyped]  # with optuna, which a search needs

        path = config.with_name(COPY)
        if path.exists() and path.samefile(self._named):
            raise ConfigError(
                f"{path} is your own file, and this is where the search would write: give another --output"
            )
        tree = {**self.file, "deepspeed": str(config), **values}
        replace_file(path, yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))
        return path

    def given(self, key: str) -> str | None:
        """The value that the command line gives to a mapped key; "True" for a bare flag."""
        place = _place(self.args, self.mappings[key]) if key in self.mappings else None
        if place is None:
            value = self.file.get(self.mappings[key][2:]) if key in self.mappings else None
            return None if value is None else str(value)
        if "=" in self.args[place]:
            return self.args[place].split("=", 1)[1]
        following = self.args[place + 1] if place + 1 < len(self.args) else "--"
        return "True" if following.startswith("--") else following

    def given_flag(self, key: str) -> bool | None:
        """``given`` as a truth value."""
        found = self.given(key)
        return None if found is None else found.lower() in TRUE

    @property
    def loads_as_it_is(self) -> bool:
        """Whether its micro-batch is the one of a loader that no file and no option is known to change."""
        return bool(self.launched) and "train_micro_batch_size_per_gpu" not in self.mappings

    @property
    def is_trainer(self) -> bool:
        """Whether the script takes the options of transformers' TrainingArguments."""
        return self.mappings.get("dataloader_num_workers") == HF_MAPPINGS["dataloader_num_workers"]


def _launched(launcher: Sequence[str]) -> str:
    """The configuration that ``accelerate launch`` has: its option's, or the one in its own file; empty without."""
    if "accelerate" not in " ".join(launcher[:3]):
        return ""
    if (named := _value(launcher, OF_ACCELERATE)) is not None:
        return named
    home = Path(os.environ.get("HF_HOME", Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"))
    own = Path(_value(launcher, "--config_file") or home / "accelerate" / "default_config.yaml").expanduser()
    section = _read(own).get("deepspeed_config") if own.is_file() else None
    return str(section.get(OF_ACCELERATE[2:]) or "") if isinstance(section, dict) else ""


def _value(words: Sequence[str], option: str) -> str | None:
    place = _place(words, option)
    if place is None or "=" in words[place]:
        return None if place is None else words[place].split("=", 1)[1]
    return words[place + 1] if place + 1 < len(words) else None


def _mappings(flag: str, mappings: Mapping[str, str] | None) -> dict[str, str]:
    known = dict(HF_MAPPINGS) if flag == "--deepspeed" else {}
    return {
        **known,
        **{key: option if option.startswith("-") else f"--{option}" for key, option in (mappings or {}).items()},
    }


def _mappings_of_file(
    values: Mapping[str, Any], script: tuple[str, ...], mappings: Mapping[str, str] | None
) -> dict[str, str]:
    """Of the file's arguments; LLaMA-Factory has another name for checkpointing, which says the opposite."""
    known = dict(HF_MAPPINGS)
    if "micro_batch_size" in values:  # axolotl's
        known["train_micro_batch_size_per_gpu"] = "--micro_batch_size"
    if "llamafactory" in " ".join(script):
        del known["gradient_checkpointing"]
    return {**known, **_mappings("", mappings)}


def _read(path: Path) -> dict[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(read_regular(path, LONGEST_FILE).decode("utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"the file of arguments cannot be read: {error!s:.300}", source=str(path)) from harmless(
            error
        )
    if not isinstance(found, dict):
        return {}
    return found


def _place(args: Sequence[str], option: str) -> int | None:
    """Where ``option`` is given, also with dashes in its name, which transformers takes; of several the last counts."""

    def name(word: str) -> str:
        return "--" + word[2:].replace("-", "_") if word.startswith("--") else word

    def is_it(word: str) -> bool:
        found = name(word.split("=", 1)[0])
        return found == name(option) or ("=" in word and f"--{found}" == name(option))  # key=value: OmegaConf's

    places = [index for index, word in enumerate(args) if is_it(word)]
    return places[-1] if places else None


def _put(args: list[str], option: str, value: str) -> None:
    place = _place(args, option)
    if place is None:
        args += [option, value]
    elif "=" in args[place]:
        args[place] = f"{args[place].split('=', 1)[0]}={value}"
    else:
        bare = place + 1 >= len(args) or args[place + 1].startswith("--")
        args[place + 1 : place + (1 if bare else 2)] = [value]
