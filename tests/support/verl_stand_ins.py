"""verl without its dependencies: verl's own classes for saves and loads, and stand-ins for their other imports.

The modules in ``REAL`` come from an unpacked wheel. All other modules of verl, Ray, and other missing packages are
stand-ins: their names are classes that take any arguments and do nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

REAL = (
    "verl.base_config",
    "verl.plugin.platform",
    "verl.trainer.config",
    "verl.trainer.ppo.checkpoint_callback",
    "verl.trainer.ppo.ray_trainer",
    "verl.trainer.ppo.v1.trainer_base",
    "verl.utils.checkpoint",
    "verl.utils.device",
    "verl.utils.fs",
    "verl.utils.fsdp_utils",
    "verl.utils.hdfs_io",
    "verl.utils.import_utils",
    "verl.utils.logger",
    "verl.utils.megatron.dist_checkpointing",
    "verl.utils.megatron_utils",
    "verl.utils.torch_dtypes",
    "verl.utils.transformers_compat",
    "verl.workers.engine.fsdp.transformer_impl",
    "verl.workers.engine.megatron.transformer_impl",
    "verl.workers.engine.torchtitan",
    "verl.workers.engine.veomni.transformer_impl",
)
STAND_INS = ("verl", "ray", "tensordict", "omegaconf", "transfer_queue", "veomni")


class _Anything(type):
    """Metaclass of stand-ins. Their attributes are stand-ins, too, and they work in type annotations."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _anything(name)

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__

    def __getitem__(cls, item: Any) -> Any:
        return cls


def _anything(name: str) -> Any:
    def init(self: Any, *args: Any, **options: Any) -> None:
        pass

    def decorate(self: Any, decorated: Any = None, *args: Any, **options: Any) -> Any:
        return decorated

    return _Anything(name, (), {"__init__": init, "__call__": decorate})


class _StandIns(MetaPathFinder, Loader):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        top = fullname.partition(".")[0]
        is_real = top == "verl" and any(f"{fullname}.".startswith(f"{real}.") for real in REAL)
        is_missing = top in STAND_INS or (top == "torchdata" and PathFinder.find_spec(top) is None)
        return ModuleSpec(fullname, self, is_package=True) if is_missing and not is_real else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        module: Any = types.ModuleType(spec.name)
        module.__path__ = [str(self._folder.joinpath(*spec.name.split(".")))]

        def named(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return _KNOWN.get((spec.name, name)) or _anything(name)

        module.__getattr__ = named
        return module  # type: ignore[no-any-return]

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class Role:
    """verl's names of worker roles."""

    Critic = "critic"


class Tree(dict[str, Any]):
    """A configuration with access by attributes and keys, like omegaconf's."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def tree(values: dict[str, Any]) -> Tree:
    return Tree({name: tree(value) if isinstance(value, dict) else value for name, value in values.items()})


_KNOWN = {
    ("omegaconf", "open_dict"): contextlib.nullcontext,
    ("omegaconf", "OmegaConf"): types.SimpleNamespace(create=tree),
    ("verl.trainer.ppo.utils", "Role"): Role,
}


def install() -> None:
    """Install the stand-ins. verl has to be on the path."""
    folder = Path(next(path for path in sys.path if (Path(path) / "verl").is_dir()))
    sys.meta_path.insert(0, _StandIns(folder))


def import_external(name: str) -> None:
    """Import modules through verl, as for ``VERL_USE_EXTERNAL_MODULES``."""
    importlib.import_module("verl.utils.import_utils").import_external_libs(name.split(","))
