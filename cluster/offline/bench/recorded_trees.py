"""Trees of recorded programs: a program with the programs that run in its pauses (sub-agents)."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from cluster.core.errors import TraceError
from cluster.core.recorded_turn import RecordedProgram


@dataclass(slots=True)
class RecordedTree:
    """A program and its children."""

    where: str
    """Position of the program in the trace, ``file:line``."""
    program: RecordedProgram
    children: dict[int, list["RecordedTree"]] = field(default_factory=dict)
    """The programs that run in the pause after a turn, by the index of the turn, in the order of the file."""

    def family(self) -> Iterator["RecordedTree"]:
        """Yield the tree and all trees below it."""
        yield self
        for children in self.children.values():
            for child in children:
                yield from child.family()


def trees_of(programs: Iterable[tuple[str, RecordedProgram]]) -> list[RecordedTree]:
    """Return the trees of a trace by their roots, in the order of the file.

    A program without ``parent_turn`` is a root, since it is not known when it ran.

    Raises:
        TraceError: a parent is not in the trace, lacks the turn or a turn after it, or is below its own child. The
            message names the line and the key.
    """
    trees = {program.program_id: RecordedTree(where, program) for where, program in programs}
    roots: list[RecordedTree] = []
    for tree in trees.values():
        if tree.program.parent_turn is None:
            roots.append(tree)
        else:
            _parent(tree, trees).children.setdefault(tree.program.parent_turn, []).append(tree)
    reached = {tree.where for root in roots for tree in root.family()}
    for tree in trees.values():
        if tree.where not in reached:
            raise TraceError(f"{tree.where}: parent_program_id: {tree.program.program_id!r} is below its own child")
    return roots


def _parent(tree: RecordedTree, trees: Mapping[str, RecordedTree]) -> RecordedTree:
    name, turn = tree.program.parent_program_id, tree.program.parent_turn
    if name is None:
        raise TraceError(f"{tree.where}: parent_turn: there is no parent_program_id")
    parent = trees.get(name)
    if parent is None:
        raise TraceError(f"{tree.where}: parent_program_id: {name!r} is not in the trace")
    turns = len(parent.program.turns)
    assert turn is not None
    if turn > turns - 2:
        raise TraceError(
            f"{tree.where}: parent_turn: {turn}, but {name!r} has {turns} turns and no pause after its last"
        )
    return parent
