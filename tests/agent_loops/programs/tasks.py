"""The work that every program of this folder does: two questions, two tools."""

import os

QUESTIONS = ("How many people live in Oslo and Bergen together?", "And in Oslo alone?")
SYSTEM = "Answer questions about cities. Use the tools."
MODEL = "policy"
OPENAI = {"base_url": os.environ["URL_OPENAI"], "api_key": os.environ["KEY"]}
ANTHROPIC = {"base_url": os.environ["URL_ANTHROPIC"], "api_key": os.environ["KEY"]}
GOOGLE = {"base_url": os.environ["URL_GOOGLE"], "api_key": os.environ["KEY"]}


def population(city: str) -> str:
    """Return the number of people in a city.

    Args:
        city: The name of the city.
    """
    return {"Oslo": "717710", "Bergen": "291940"}[city]


def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return str(a + b)
