"""The table from opcode to semantics, and what the semantics are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .decode import Instruction
from .state import Group

if TYPE_CHECKING:
    from .machine import Machine

Step = Callable[[Group], None]
Compiler = Callable[["Machine", Instruction], Step]

OPCODES: dict[str, Compiler] = {}


def opcode(*names: str) -> Callable[[Compiler], Compiler]:
    """Registers a function that turns an instruction of these names into a step."""

    def register(function: Compiler) -> Compiler:
        for name in names:
            if name in OPCODES:
                raise ValueError(f"{name} is defined twice")
            OPCODES[name] = function
        return function

    return register
