"""The two decorators of the plugin API, and its number.

A plugin author needs this module alone: ``from ksana import hookimpl``. It loads nothing but pluggy.
"""

from __future__ import annotations

import pluggy

PROJECT_NAME = "ksana"

API_NUMBER = 1
"""Raised when a hook specification changes incompatibly. A plugin states the number it was written for as a module
attribute ``ksana_api``; see ``docs/plugins.md`` for the deprecation path."""

hookspec = pluggy.HookspecMarker(PROJECT_NAME)
hookimpl = pluggy.HookimplMarker(PROJECT_NAME)
