"""Start-up: torch's compiler is not loaded where nothing is compiled.

torch.optim.Optimizer imports torch._dynamo (more than a second, as long as torch itself) in its constructor and in
`step`, only to tell a compiler that is not running where not to look. Inside `compiler_deferred` these imports find a
stand-in that does just that. See docs/decisions/0006-start-up.md.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

_NAME = "torch._dynamo"


def _stand_in() -> ModuleType:
    module = ModuleType(_NAME)

    def disable(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return fn

    def load(name: str) -> Any:
        """Anything else is a real use: the real module takes the stand-in's place."""
        sys.modules.pop(_NAME, None)
        torch.__dict__.pop("_dynamo", None)
        return getattr(importlib.import_module(_NAME), name)

    module.__getattr__ = load  # type: ignore[method-assign]
    module.disable = disable  # type: ignore[attr-defined]
    module.graph_break = lambda *args: None  # type: ignore[attr-defined]
    return module


_STAND_IN = _stand_in()


@contextlib.contextmanager
def compiler_deferred() -> Iterator[None]:
    """A context in which `import torch._dynamo` loads nothing; without effect where the compiler is loaded already.

    For calls into torch.optim's own classes only: anything that really compiles needs the real module.
    """
    if _NAME in sys.modules:
        yield
        return
    sys.modules[_NAME] = torch._dynamo = _STAND_IN
    try:
        yield
    finally:
        if sys.modules.get(_NAME) is _STAND_IN:
            del sys.modules[_NAME]
        if torch.__dict__.get("_dynamo") is _STAND_IN:
            del torch._dynamo


def is_torch_optimizer(kind: type) -> bool:
    """Whether a class is one of torch.optim's own."""
    return kind.__module__.startswith("torch.optim.")
