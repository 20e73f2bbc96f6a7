"""Made-up programs whose turns can be foretold from what the statistics do not look at."""

import random
from collections.abc import Iterator

from predictor_service.examples import ProgramExample, TurnExample
from predictor_service.model import NO_TOOL, PauseContext, PauseOutcome, TurnContext, TurnOutcome

WORDS = ["alpha", "bravo", "charlie", "delta", "echo", "foxtrot", "golf", "hotel", "india", "juliet", "kilo", "lima"]
SHORT, LONG = "please answer briefly", "write the whole report"


def programs(count: int, turns: int = 6, seed: int = 0) -> list[ProgramExample]:
    """A turn is long where its text asks for a report, a call slow where its arguments say `--all`."""
    return [
        ProgramExample(f"p{n}", "made", f"g{n}", tuple(_turns(random.Random(f"{seed}/{n}"), turns)))
        for n in range(count)
    ]


def turn(rng: random.Random, long: bool, position: int = 0) -> TurnContext:
    """Among other words, at a place that differs."""
    words = rng.choices(WORDS, k=10)
    words.insert(rng.randrange(10), LONG if long else SHORT)
    return TurnContext(source="made", position=position, prompt_tokens=100, new_tokens=20, text=" ".join(words))


def pause(rng: random.Random, slow: bool) -> PauseContext:
    """Likewise."""
    return PauseContext(
        turn(rng, False), "bash:make", 30, " ".join(["make", *rng.choices(WORDS, k=4), "--all" if slow else "-n"])
    )


def _turns(rng: random.Random, count: int) -> Iterator[TurnExample]:
    for position in range(count):
        long, slow, last = rng.random() < 0.5, rng.random() < 0.5, position == count - 1
        left = count - 1 - position
        yield TurnExample(
            turn(rng, long, position),
            TurnOutcome(rng.randint(900, 1100) if long else rng.randint(15, 25), NO_TOOL if last else "bash:make"),
            (100 * left, left),
            None if last else pause(rng, slow),
            None if last else PauseOutcome(rng.uniform(40, 50) if slow else rng.uniform(0.2, 0.3), 20),
        )
