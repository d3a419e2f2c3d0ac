"""One playthrough of a game: commands are answered in the words of the original engine, to the letter.

A command is carried out if it is admissible as written; anything else gives "Nothing happens." and changes nothing.
`admissible` lists commands in the order of the original. Oddities of the original are kept: `look` never lists things, only the
held thing can be examined, `use` always turns on, and a thing in two receptacles stays in one when it is taken from the other.
"""

from __future__ import annotations

from hashlib import blake2b

from .game import KNIVES, PORTABLE, SLICEABLE, SWITCH, VESSEL, Game, listed
from .goal import CLEAN, COOL, HOT, SLICED, TOGGLED, WORDING

NOTHING = "Nothing happens."
HELP = "\n".join(WORDING["help"])
TREATMENTS = {"clean": CLEAN, "heat": HOT, "cool": COOL}
_VERB = {mark: verb for verb, mark in TREATMENTS.items()}
_LOOKS = {CLEAN | HOT: "hot and clean ", CLEAN | COOL: "cool and clean ", CLEAN: "clean ", HOT: "hot ", COOL: "cold "}


class State:
    """The place of the agent, what it holds, which receptacles are open, and where all things are."""

    __slots__ = ("contents", "game", "held", "lies_at", "marks", "opened", "place", "won")

    def __init__(self, game: Game) -> None:
        self.game = game
        self.place = game.start
        self.held = -1
        self.opened = set(game.opened)
        self.contents: list[tuple[int, ...]] = list(game.contents)
        """Things of each receptacle, in order. Rows are replaced, never changed, because they are shared with the game."""
        self.marks: dict[int, int] = {}
        """Of things whose marks have changed."""
        self.lies_at: dict[int, frozenset[int]] = {}
        self.won = False

    # ---- acting

    def step(self, command: str) -> str:
        """Carry out a command. Returns the feedback."""
        command = command.strip()
        verb, _, rest = command.partition(" ")
        if verb == "go" and rest.startswith("to "):
            said = self._go(rest[3:])
        elif verb == "take":
            said = self._take(*_two(rest, " from "))
        elif verb == "move":
            said = self._move(*_two(rest, " to "))
        elif verb == "open":
            said = self._open(rest)
        elif verb == "close":
            said = self._close(rest)
        elif verb in TREATMENTS:
            said = self._treat(verb, *_two(rest, " with "))
        elif verb == "use":
            said = self._use(rest)
        elif verb == "slice":
            said = self._slice(*_two(rest, " with "))
        elif verb == "examine":
            return self._examine(rest)
        else:
            return self._still(command)
        self.won = self.won or (said is not None and self.is_goal())
        return NOTHING if said is None else said

    def _still(self, command: str) -> str:
        """Commands that change nothing."""
        if command == "look":
            return self._look()
        if command == "inventory":
            return (
                f"You are carrying: a {self.game.things[self.held].name}."
                if self.held >= 0
                else "You are not carrying anything."
            )
        return HELP if command == "help" else NOTHING

    def _go(self, name: str) -> str | None:
        number = self.game.receptacle_at.get(name)
        if number is None or (place := self.game.receptacles[number].place) == self.place:
            return None
        self.place = place
        return f"You arrive at {name}. {self._shows(number)}"

    def _open(self, name: str) -> str | None:
        number = self._here(name)
        if number < 0 or not self.game.receptacles[number].openable or number in self.opened:
            return None
        self.opened.add(number)
        return f"You open the {name}. {self._shows(number)}"

    def _close(self, name: str) -> str | None:
        number = self._here(name)
        if number < 0 or not self.game.receptacles[number].openable or number not in self.opened:
            return None
        self.opened.remove(number)
        return f"You close the {name}."

    def _take(self, what: str, where: str) -> str | None:
        number, thing = self._here(where), self.game.thing_at.get(what, -1)
        if number < 0 or thing < 0 or self.held >= 0 or not self.reachable(number) or thing not in self.contents[number]:
            return None
        if not self.game.things[thing].abilities & PORTABLE:
            return None
        self.contents[number] = tuple(other for other in self.contents[number] if other != thing)
        self.held = thing
        if self.game.things[thing].abilities & SLICEABLE:
            self.lies_at[thing] = self._lies(thing) - {self.place}
        return f"You pick up the {what} from the {where}."

    def _move(self, what: str, where: str) -> str | None:
        number, thing = self._here(where), self.game.thing_at.get(what, -1)
        if number < 0 or thing < 0 or thing != self.held or not self.takes(number, thing):
            return None
        if thing not in self.contents[number]:
            self.contents[number] = tuple(sorted((*self.contents[number], thing)))
        self.held = -1
        if self.game.things[thing].abilities & SLICEABLE:
            self.lies_at[thing] = self._lies(thing) | {self.place}
        return f"You move the {what} to the {where}."

    def _treat(self, verb: str, what: str, where: str) -> str | None:
        number, thing, mark = self._here(where), self.game.thing_at.get(what, -1), TREATMENTS[verb]
        if number < 0 or thing < 0 or thing != self.held or self.game.receptacles[number].appliance != mark:
            return None
        if not self.game.things[thing].abilities & mark:
            return None
        opposite = {HOT: COOL, COOL: HOT}.get(mark, 0)
        self.marks[thing] = self.marks_of(thing) & ~opposite | mark
        return f"You {verb} the {what} using the {where}."

    def _use(self, what: str) -> str | None:
        thing = self.game.thing_at.get(what, -1)
        if thing < 0 or not self.game.things[thing].abilities & SWITCH:
            return None
        if not any(thing in self.contents[number] for number in self.here):
            return None
        self.marks[thing] = self.marks_of(thing) | TOGGLED
        return f"You turn on the {what}."

    def _slice(self, what: str, knife: str) -> str | None:
        thing, blade = self.game.thing_at.get(what, -1), self.game.thing_at.get(knife, -1)
        if thing < 0 or blade < 0 or blade != self.held or self.game.things[blade].kind not in KNIVES:
            return None
        if not self.game.things[thing].abilities & SLICEABLE or self.place not in self._lies(thing):
            return None
        self.marks[thing] = self.marks_of(thing) | SLICED
        return f"You sliced the {what} with the {knife}."

    def _examine(self, name: str) -> str:
        number = self._here(name)
        if number >= 0:
            return self._shows(number)
        if self.held < 0 or self.game.things[self.held].name != name:
            return NOTHING
        thing, marks = self.game.things[self.held], self.marks_of(self.held)
        if thing.abilities & VESSEL:
            return f"This is a normal {name}. In it, you see {listed([self.game.things[inner] for inner in thing.inside])}."
        sliced = "sliced " if marks & SLICED else ""
        for seen, words in _LOOKS.items():
            if marks & seen == seen:
                return f"This is a {'cool ' if sliced and seen == COOL else words}{sliced}{name}."
        if thing.abilities & SWITCH:
            return f"This {name} is {'on' if marks & TOGGLED else 'off'}."
        return f"This is a sliced {name}." if sliced else f"There's nothing special about {name}."

    def _look(self) -> str:
        if not self.here:
            return "You are in the middle of a room. Looking quickly around you, you see nothing."
        facing = listed([self.game.receptacles[number] for number in self.here], article="")
        return f"You are facing the {facing}. Next to it, you see nothing."

    def _shows(self, number: int) -> str:
        receptacle = self.game.receptacles[number]
        if receptacle.openable and number not in self.opened:
            return f"The {receptacle.name} is closed."
        seen = listed([self.game.things[thing] for thing in self.contents[number]])
        lead = f"The {receptacle.name} is open. In it" if receptacle.openable else f"On the {receptacle.name}"
        return f"{lead}, you see {seen}."

    # ---- reading

    @property
    def here(self) -> tuple[int, ...]:
        """Receptacles at the agent's place."""
        return self.game.at_place.get(self.place, ())

    def marks_of(self, thing: int) -> int:
        return self.marks[thing] if thing in self.marks else self.game.things[thing].marks

    def reachable(self, number: int) -> bool:
        return not self.game.receptacles[number].openable or number in self.opened

    def takes(self, number: int, thing: int) -> bool:
        """Whether a thing can be put into a receptacle now."""
        kinds = (self.game.receptacles[number].kind, self.game.things[thing].kind)
        return kinds in self.game.fits and self.reachable(number)

    def admissible(self) -> list[str]:
        """Every admissible command, in the order of the original."""
        game, held = self.game, self.held
        commands = ["help", "inventory", "look"]
        commands += [f"go to {item.name}" for item in game.receptacles if item.place != self.place]
        name = game.things[held].name if held >= 0 else ""
        if held >= 0:
            commands.append(f"examine {name}")
        for number in self.here:
            receptacle, open_now = game.receptacles[number], self.reachable(number)
            commands.append(f"examine {receptacle.name}")
            if receptacle.openable:
                commands.append(f"{'close' if open_now else 'open'} {receptacle.name}")
            for thing in self.contents[number]:
                item = game.things[thing]
                if held < 0 and open_now and item.abilities & PORTABLE:
                    commands.append(f"take {item.name} from {receptacle.name}")
                if item.abilities & SWITCH:
                    commands.append(f"use {item.name}")
            if held >= 0:
                if self.takes(number, held):
                    commands.append(f"move {name} to {receptacle.name}")
                if receptacle.appliance & game.things[held].abilities:
                    commands.append(f"{_VERB[receptacle.appliance]} {name} with {receptacle.name}")
        if held >= 0 and game.things[held].kind in KNIVES:
            near = [thing for thing in {*game.lies_at, *self.lies_at} if self.place in self._lies(thing)]
            commands += [f"slice {game.things[thing].name} with {name}" for thing in near]
        return sorted(set(commands))

    def is_goal(self) -> bool:
        """Whether the state satisfies the goal."""
        goal, (things, targets, lamps) = self.game.goal, self.game.goals
        if goal.lamp:
            lit = [lamp for lamp in lamps if self.marks_of(lamp) & TOGGLED] if self.held in things else []
            return any(lamp in self.contents[number] for number in self.here for lamp in lit)
        return any(sum(self.counts(thing, number) for thing in things) >= goal.count for number in targets)

    def counts(self, thing: int, number: int) -> bool:
        """Whether a thing is in the receptacle with all marks of the goal."""
        return thing in self.contents[number] and self.marks_of(thing) & self.game.goal.marks == self.game.goal.marks

    def progress(self) -> float:
        """The share of stages that the state has reached: thing in hand, treated, placed; 1 if the game is won."""
        if self.won:
            return 1.0
        goal, (things, targets, lamps) = self.game.goal, self.game.goals
        if goal.lamp:
            return ((self.held in things) + any(self.marks_of(lamp) & TOGGLED for lamp in lamps)) / 3
        stages = 3 if goal.marks else 2
        best = max((sum(self.counts(thing, number) for thing in things) for number in targets), default=0)
        if self.held in things:
            treated = goal.marks and self.marks_of(self.held) & goal.marks == goal.marks
            return min(best + (2 if treated else 1) / stages, goal.count) / goal.count
        treated_elsewhere = goal.marks and any(self.marks.get(thing, 0) & goal.marks == goal.marks for thing in things)
        return min(best + (1 / stages if treated_elsewhere else 0.0), goal.count) / goal.count

    def key(self) -> str:
        """A digest: equal for two playthroughs of one game exactly if their states are equal."""
        moved = [(number, row) for number, row in enumerate(self.contents) if row != self.game.contents[number]]
        marks = sorted((thing, marks) for thing, marks in self.marks.items() if marks != self.game.things[thing].marks)
        lies = sorted((o, sorted(at)) for o, at in self.lies_at.items() if at != self.game.lies_at.get(o, frozenset()))
        seen = (self.game.id, self.place, self.held, sorted(self.opened), moved, marks, lies)
        return blake2b(repr(seen).encode(), digest_size=12).hexdigest()

    def copy(self) -> State:
        other = State(self.game)
        other.place, other.held, other.won = self.place, self.held, self.won
        other.opened, other.contents = set(self.opened), list(self.contents)
        other.marks, other.lies_at = dict(self.marks), dict(self.lies_at)
        return other

    def _here(self, name: str) -> int:
        """The number of a receptacle at the agent's place, or -1."""
        number = self.game.receptacle_at.get(name, -1)
        return number if number >= 0 and self.game.receptacles[number].place == self.place else -1

    def _lies(self, thing: int) -> frozenset[int]:
        return self.lies_at[thing] if thing in self.lies_at else self.game.lies_at.get(thing, frozenset())


def _two(rest: str, between: str) -> tuple[str, str]:
    """The two names in `mug 1 from desk 1`; two empty names if the text has another form."""
    first, separator, second = rest.partition(between)
    return (first, second) if separator else ("", "")
