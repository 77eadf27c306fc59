"""Guess the number, as gem's ``game:GuessTheNumber-v0-easy`` (gem-llm 0.1, Apache-2.0) plays it.

The texts and the rewards are the same, and for a seed the numbers are. Standard library only, so that the recipe needs
no further package.
"""

from __future__ import annotations

import random
import re

GUESS = re.compile(r"\\boxed{(\d+)}")
SUFFIX = "Enter your next guess."


class GuessTheNumber:
    """A game with gymnasium's interface. A guess stands in ``\\boxed{}``, the last one of a turn counts."""

    def __init__(self, min_number: int = 1, max_number: int = 10, max_turns: int = 4) -> None:
        self.min_number, self.max_number, self.max_turns = min_number, max_number, max_turns

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, str]]:
        rng = random.Random(seed)
        self._number = rng.randint(self.min_number, self.max_number)
        self._guesses: set[int] = set()
        self._turn = 0
        example = rng.randint(self.min_number, self.max_number)
        return (
            "You are playing Guess The Number.\n"
            f"You have to guess the number between {self.min_number} and {self.max_number} (inclusive) within "
            f"{self.max_turns} turns.\n"
            "As you enter your guess, the game will provide you with hints such as the target number is 'higher' or "
            "'lower'.\n"
            "You may provide your response in any manner. Only the number that is wrapped inside \\boxed{} will be "
            f"considered as your guess, for example, \\boxed{{{example}}}.\n"
            "As you play, the history of your guesses will be appended below. Use the information to complete the game "
            "before you run out of guesses.\n"
            f"Enter your first guess to start the game.\n{SUFFIX}"
        ), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, str]]:
        self._turn += 1
        found = GUESS.findall(action)
        guess = int(found[-1]) if found else 0
        if not guess:
            return f"At turn {self._turn}, you did not provide a valid guess.", -0.1, True, False, {}
        if guess == self._number:
            words = f"Congratulations! You guessed the correct number {guess} in {self._turn} turns."
            return words, 1.0, True, False, {}
        outside = not self.min_number <= guess <= self.max_number
        reward, hint = self._hint(guess, outside)
        if self._turn >= self.max_turns:
            if not outside:
                reward = 1 - abs(guess - self._number) / (self.max_number - self.min_number)
            return "You have reached the maximum number of turns.", reward, True, True, {}
        return f"At turn {self._turn}, you guessed {guess}, {hint}\n{SUFFIX}", reward, False, False, {}

    def _hint(self, guess: int, outside: bool) -> tuple[float, str]:
        if outside:
            return 0.0, "which is outside the range specified."
        if guess in self._guesses:
            return 0.0, "which has been already guessed before."
        self._guesses.add(guess)
        hint = "lower" if guess > self._number else "higher"
        return 0.0, f"and the target number is {hint} than {guess}."
