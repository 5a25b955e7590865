"""Packages that only some parts need, imported when they are needed."""

from importlib import import_module
from typing import Any


def need(module: str, extra: str) -> Any:
    """Import a module, or say which extra brings it."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise ImportError(f"this needs {package}: pip install 'mslmn[{extra}]'") from error
