"""Tools of ScienceWorld: `scienceworld_explorer(action)` acts, `scienceworld_get_actions()` is help and takes no move.

`SYSTEM` is a first line of the prompt (`agent.system`) for models that were not trained in this world.
"""

from __future__ import annotations

from ...tools import tool
from ...types import ToolResult
from .env import ScienceWorld

SYSTEM = (
    "You do science in a house, one action at a time. Actions: look around, inventory, task, open OBJ, close OBJ, go to PLACE, "
    "teleport to PLACE, look at OBJ, look in OBJ, focus on OBJ, pick up OBJ, put down OBJ, move OBJ to OBJ, pour OBJ in OBJ, "
    "mix OBJ, activate OBJ, deactivate OBJ, use OBJ on OBJ, connect OBJ to OBJ, read OBJ, eat OBJ, wait. Focus only on what "
    "the task asks for: focusing on anything else can end it."
)


@tool(stateful=True, register=False, timeout_s=120.0)
async def scienceworld_explorer(action: str, world: ScienceWorld) -> ToolResult:
    """Act in the house: look around, go to, focus on, pick up, move, use and more."""
    return await world.step(action)


@tool(stateful=True, register=False, timeout_s=120.0)
async def scienceworld_get_actions(world: ScienceWorld) -> str:
    """List the forms that actions have, and what can be named here and now."""
    return "\n".join(await world.admissible()) or "None: the task is over."
