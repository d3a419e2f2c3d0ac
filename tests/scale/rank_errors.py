"""What fails on one rank must fail on all, and leave the weights unchanged."""

from __future__ import annotations

from typing import Any

CHECKS: dict[str, Any] = {}
