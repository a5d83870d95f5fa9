"""Modules that are loaded already, for processes that are forked, and that look as if they were not."""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType


class Hidden(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules that are loaded and look as if they were not, until one of them is imported: then all are there."""

    def __init__(self, *names: str) -> None:
        before = dict(sys.modules)
        for name in names:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        self._modules = {name: module for name, module in sys.modules.items() if name not in before}
        for name in self._modules:
            del sys.modules[name]
            parent, _, own = name.rpartition(".")
            if parent in before:
                vars(before[parent]).pop(own, None)

    @classmethod
    def of(cls, modules: dict[str, ModuleType]) -> Hidden:
        """Modules that somebody has taken out of sys.modules."""
        hidden = cls()
        hidden._modules = modules
        return hidden

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        """All are put back, and this one is found."""
        module = self._modules.get(fullname)
        if module is None:
            return None
        absent = {name: found for name, found in self._modules.items() if name not in sys.modules}
        absent.pop(fullname, None)  # who imports it sets it, and would load it anew if it were there
        sys.modules.update(absent)
        for name, found in absent.items():
            parent, _, own = name.rpartition(".")
            if parent and parent not in self._modules:
                setattr(sys.modules[parent], own, found)
        return ModuleSpec(
            fullname, self, origin=getattr(module, "__file__", None), is_package=hasattr(module, "__path__")
        )

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The one that was loaded."""
        return self._modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """It was executed when it was loaded."""
