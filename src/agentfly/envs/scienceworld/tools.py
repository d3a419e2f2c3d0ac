"""`scienceworld_explorer(action)`: the model's way into the chain's `ScienceWorld`; `scienceworld_get_actions()`: its help.

In: an action as the model wrote it. Out: an observation; the chain ends when the task does. Asking for help is no move.
`SYSTEM` is a first line of the prompt (`agent.system`) for models that do not know this world yet.
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
