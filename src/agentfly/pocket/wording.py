"""The English of the arithmetic tasks: tables of patterns, and nothing that draws or decides.

A pattern has the slots {a} {b} {c} for numbers and {name} {things} for colour. In patterns made from parts, {w1} is an infix
word ("times"), {s1} a sign, {i1} an instruction on what is already there ("multiply by 3"), {f1} a whole instruction
("Multiply 12 by 7") and {n1} a noun phrase ("the product of 12 and 7"); 2 in place of 1 is the second step.
"""

from __future__ import annotations

INFIX = {"add": "plus", "subtract": "minus", "multiply": "times"}
SIGN = {"add": "+", "subtract": "-", "multiply": "*"}
ONWARD = {
    "add": ("add {}", "add {} more"),
    "subtract": ("subtract {}", "take away {}"),
    "multiply": ("multiply by {}", "multiply the result by {}"),
}
FULL = {
    "add": ("add {} and {}", "add {} to {}"),
    "subtract": ("subtract {1} from {0}", "take {1} from {0}"),
    "multiply": ("multiply {} by {}", "multiply {} and {}"),
}
NOUN = {
    "add": "the sum of {} and {}",
    "subtract": "the difference of {} and {}",
    "multiply": "the product of {} and {}",
}
NAMES = ("Ann", "Tom", "Mia", "Ben", "Eva", "Sam", "Lea", "Max")
THINGS = ("apples", "books", "coins", "cards", "pens", "eggs", "stones", "shells")

ONE_STEP = (
    "What is {a} {w1} {b}?",
    "How much is {a} {w1} {b}?",
    "What is {a} {s1} {b}?",
    "Compute {a} {s1} {b}.",
    "Calculate {n1}.",
    "What is {n1}?",
    "{F1}.",
)
ONE_STEP_STORIES = {
    "add": (
        "{name} has {a} {things} and finds {b} more. How many {things} is that?",
        "There are {a} {things} here and {b} there. How many {things} in all?",
    ),
    "subtract": (
        "{name} has {a} {things} and loses {b}. How many {things} are left?",
        "{name} had {a} {things} and gave away {b}. How many remain?",
    ),
    "multiply": (
        "{name} has {a} boxes of {b} {things}. How many {things} is that?",
        "There are {a} bags with {b} {things} each. How many {things} in all?",
    ),
}

# The first step's result stands on the left of the second: (a op1 b) op2 c.
TWO_STEP = (
    "What is {a} {w1} {b}, {w2} {c}?",
    "How much is {a} {w1} {b}, then {w2} {c}?",
    "Take {a}, {i1}, then {i2}.",
    "Start with {a}, {i1} and {i2}.",
    "What is ({a} {s1} {b}) {s2} {c}?",
    "Compute ({a} {s1} {b}) {s2} {c}.",
    "What is {n1}, {w2} {c}?",
    "{F1}, then {i2}.",
    "First {f1}. Then {i2}. What do you get?",
)
# Patterns that fit one second operation only; "left" and "right" say where the first result goes.
TWO_STEP_BY_SECOND = {
    ("add", "left"): ("Add {c} to {n1}.", "What do you get when you add {c} to {n1}?"),
    ("subtract", "left"): ("Subtract {c} from {n1}.", "What is left of {n1} when you take away {c}?"),
    ("multiply", "left"): ("Multiply {n1} by {c}.", "What is {c} times {n1}?"),
    ("subtract", "right"): ("Subtract {n1} from {c}.", "What is {c} minus {n1}?"),
}
TWO_STEP_STORIES = {
    ("multiply", "add"): (
        "{name} has {a} boxes of {b} {things} and finds {c} more. How many {things} is that?",
        "There are {a} bags with {b} {things} each and {c} {things} beside them. How many {things} in all?",
    ),
    ("multiply", "subtract"): (
        "{name} has {a} boxes of {b} {things} and gives away {c}. How many {things} are left?",
        "{name} buys {a} bags with {b} {things} each and loses {c}. How many {things} remain?",
    ),
    ("add", "multiply"): (
        "A team has {a} girls and {b} boys. Each brings {c} {things}. How many {things} is that?",
        "{name} has {a} red and {b} blue bags with {c} {things} each. How many {things} in all?",
    ),
    ("subtract", "multiply"): (
        "{name} has {a} {things}, loses {b} and sells the rest for {c} coins each. How many coins is that?",
        "Of {a} boxes {b} are empty, the rest hold {c} {things} each. How many {things} in all?",
    ),
    ("add", "subtract"): (
        "{name} has {a} {things}, finds {b} more and then loses {c}. How many {things} are left?",
        "{a} birds sit in a tree, {b} more come and {c} fly off. How many birds are left?",
    ),
    ("subtract", "add"): (
        "{name} has {a} {things}, loses {b} and then finds {c}. How many {things} is that?",
        "{a} people are on a bus, {b} get off and {c} get on. How many people are on it now?",
    ),
}
