"""The one error a user of `quant` sees. Misuse by a caller in code is a ValueError or TypeError instead."""


class QuantError(Exception):
    """Something the user can act on: `problem` says what, where, expected and got; `remedy` what to do about it."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem, remedy)
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.problem}. {self.remedy}"
