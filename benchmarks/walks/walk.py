"""Counts what is entered between two moments of a process."""

import json
import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

# Bodies of modules and classes, and what only walks over values, are no steps of a walk.
_NO_STEPS = ("<module>", "<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "<lambda>")


class Walk:
    """The calls of the package's functions between `begin` and `end`, each pair of caller and called once, in order."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, str, str, str], None] = {}
        self._package = ""
        self._names: dict[str, str | None] = {}

    def begin(self) -> None:
        """Begin to count, in this thread."""
        import shoal

        self._package = str(Path(shoal.__file__).parent) + os.sep
        sys.setprofile(self._note)

    def end(self) -> None:
        """End, and write what was counted to the file that WALK_OUT names."""
        if not self._package:
            return
        sys.setprofile(None)
        modules: dict[str, None] = {}
        returns = 0
        for caller, _, module, _ in self._calls:
            if module in modules and module != caller:
                returns += 1
            modules[module] = None
        packages = {(a.partition("/")[0], b.partition("/")[0]) for a, _, b, _ in self._calls}
        counted = {
            "modules": len(modules),
            "returns": returns,
            "functions": len({call[2:] for call in self._calls}),
            "calls_between_modules": sum(call[0] != call[2] for call in self._calls),
            "calls_between_packages": sum(a.partition("/")[0] != b.partition("/")[0] for a, _, b, _ in self._calls),
            "packages": len({part for pair in packages for part in pair if part}),
            "walk": list(modules),
        }
        Path(os.environ["WALK_OUT"]).write_text(json.dumps(counted), encoding="utf-8")
        self._package = ""

    def _module(self, frame: FrameType) -> str | None:
        file = frame.f_code.co_filename
        if file not in self._names:
            self._names[file] = file.removeprefix(self._package) if file.startswith(self._package) else None
        return self._names[file]

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or frame.f_code.co_name in _NO_STEPS:
            return
        module = self._module(frame)
        if module is None:
            return
        caller, function, before = "", "", frame.f_back
        while before is not None:
            home, name = self._module(before), before.f_code.co_name
            if home not in (None, "__main__.py") and name == "<module>":
                return  # what an import runs
            if home is not None and not caller and name not in _NO_STEPS:
                caller, function = home, before.f_code.co_qualname
            before = before.f_back
        self._calls[caller, function, module, frame.f_code.co_qualname] = None


walk = Walk()
