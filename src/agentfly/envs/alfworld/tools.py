"""Tools of ALFWorld: act, list possible actions, read the objective, start again.

The environment is leased to the chain because the tools ask for one. `SYSTEM` is a first line of the prompt for models that
were not trained in this world.
"""

from __future__ import annotations

from ...tools import tool
from ...types import ToolResult
from .env import AlfWorld

SYSTEM = (
    "You are in a house and do a task there, one action at a time. Actions: go to PLACE, open PLACE, close PLACE, take THING "
    "from PLACE, move THING to PLACE, clean THING with PLACE, heat THING with PLACE, cool THING with PLACE, use THING, examine "
    "THING, look, inventory. Names have numbers, such as mug 1. Go to a place to see what is there; open it if it is closed. "
    "You can hold one thing. Clean at a sink, heat at a microwave, cool at a fridge, with the thing in your hand. The task "
    "ends by itself when everything is as it asks."
)


@tool(stateful=True, register=False)
async def alfworld_step(action: str, world: AlfWorld) -> ToolResult:
    """Act in the house: go to, open, take, move, clean, heat, cool, use; or help."""
    return await world.step(action)


@tool(stateful=True, register=False)
async def alfworld_get_admissible_commands(world: AlfWorld) -> str:
    """List the actions that are possible now."""
    return "\n".join(await world.admissible()) or "None: the game is over."


@tool(stateful=True, register=False)
async def alfworld_get_task_objective(world: AlfWorld) -> str:
    """Read the task again."""
    return await world.objective()


@tool(stateful=True, register=False)
async def alfworld_reset(world: AlfWorld) -> ToolResult:
    """Put everything back and begin the task again."""
    return await world.restart()
