"""Start of the observer in each Python process of an observed script: installs it when the script imports torch.

Python imports this module because its directory is first on PYTHONPATH. A module of the same name that it hides runs
afterwards.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))


class AfterTorch(importlib.abc.MetaPathFinder):
    """Finder that lets the observer see torch as soon as torch is imported, before the script uses it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of torch, whose loader also loads the observer; None for other modules."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            path = os.path.join(os.path.dirname(HERE), "observer.py")
            beside: Any = importlib.util.spec_from_file_location("_shoal_observer", path)
            observer = sys.modules["_shoal_observer"] = importlib.util.module_from_spec(beside)
            beside.loader.exec_module(observer)
            observer.start()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if os.environ.get("SHOAL_OBSERVER"):
    sys.meta_path.insert(0, AfterTorch())

# A hidden module of the same name, such as a distribution's own.
others = [place for place in sys.path if os.path.abspath(place or ".") != HERE]
hidden = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
if hidden is not None and hidden.loader is not None:
    hidden.loader.exec_module(importlib.util.module_from_spec(hidden))
