"""Planning a run on more or larger devices: memory per device, expected seconds of a step, and what limits it.

    shapes      sizes of published models
    layout      which GPUs learn and which sample
    memory      what a device holds
    throughput  how long the parts of a step take, with parameters that are fitted on measured points (fitted.json)
    report      a recipe, a number of GPUs and a model -> the printed plan

`benchmarks/plan.py` makes fitted.json from benchmarks/results.
"""

from __future__ import annotations

from .layout import Layout
from .memory import DeviceMemory, memory_of
from .report import LayoutPlan, best_of_each_kind, find_plans, make_plan, show_plan
from .shapes import SHAPES, ModelShape, find_shape
from .throughput import CARDS, PUBLISHED, Card, Fit, StepSeconds, fitted, step_of

__all__ = [
    "CARDS", "PUBLISHED", "SHAPES", "Card", "DeviceMemory", "Fit", "Layout", "LayoutPlan", "ModelShape", "StepSeconds",
    "best_of_each_kind", "find_plans", "find_shape", "fitted", "make_plan", "memory_of", "show_plan", "step_of",
]  # fmt: skip
