"""Tiny models, made once a session."""

from __future__ import annotations

from tests.engine.conftest import tiny

__all__ = ["tiny"]
