"""The trees of programs that a replica knows: a program, and the programs that it started and whose end it waits for.

A program that names a parent is its child from its first turn, if the parent pauses then, or is not known here. A
program that starts while its parent has a turn in flight (a side call, a fork) is none: no pause waits for it. The
children are those of one pause. When the parent's next turn arrives, it waits for none of them any more. Nor does it
wait for a child whose turn was aborted, as the child's client may be gone, until the child has a turn again.

Each program has the work that is expected of it, and each node the sums over all programs below it, so that the work of
a whole tree is known at once. All is pure: the caller gives the time in seconds, and lengths are in tokens.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from cluster.core.errors import IntegrityError
from replicas.policy import Forecast, LoadView, TreeView, Work

LEAST_S = 1e-3
"""Least seconds that a pause is expected to last."""
MAX_DEPTH = 32
"""Largest number of programs above a program. A deeper one counts as the root of a tree."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """What is ahead of a program: the turn or the pause that it is in, and the turns after it."""

    since_s: float
    """Time at which the turn arrived or the pause began."""
    paused: bool = False
    missing_tokens: float = 0.0
    """Prompt tokens that the turn has to compute."""
    output_tokens: float = 0.0
    """Tokens that the turn generates."""
    pause_s: float = 0.0
    """Seconds of a pause."""
    later_turns: float = 0.0
    later_missing: float = 0.0
    """Prompt tokens of the later turns that have to be computed."""
    later_outputs: float = 0.0
    context_tokens: float = 0.0
    """Length of the context, halfway to the program's end."""

    @classmethod
    def of_turn(cls, since_s: float, tokens: int, missing: int, forecast: Forecast) -> "Ahead":
        """Return what is ahead of a program whose turn has arrived.

        Args:
            since_s: its arrival.
            tokens: length of its prompt.
            missing: those of the prompt that have to be computed.
            forecast: the forecast of the turn.
        """
        output, later, outputs = _later(forecast)
        return cls(
            since_s=since_s,
            missing_tokens=missing,
            output_tokens=output,
            pause_s=max(0.0, forecast.pause_s),
            later_turns=max(0.0, forecast.later_turns),
            later_missing=later - outputs,
            later_outputs=outputs,
            context_tokens=tokens + (output + later) / 2,
        )

    @classmethod
    def of_pause(cls, since_s: float, context_tokens: int, forecast: Forecast) -> "Ahead":
        """Return what is ahead of a program that pauses.

        Args:
            since_s: the beginning of the pause.
            context_tokens: length of its context.
            forecast: the forecast of the turn before.
        """
        _, later, outputs = _later(forecast)
        return cls(
            since_s=since_s,
            paused=True,
            pause_s=max(0.0, forecast.pause_s),
            later_turns=max(0.0, forecast.later_turns),
            later_missing=later - outputs,
            later_outputs=outputs,
            context_tokens=context_tokens + later / 2,
        )

    @property
    def work(self) -> Work:
        """The work of the turn and of all later ones."""
        outputs = self.output_tokens + self.later_outputs
        return Work(self.missing_tokens + self.later_missing, outputs, outputs * self.context_tokens)

    def left_s(self, load: LoadView) -> float:
        """Return the seconds that are left of the turn or of the pause, if the turn does not wait."""
        expected_s = self.pause_s
        if not self.paused:
            expected_s = self.missing_tokens * load.facts.cost.token_s + self.output_tokens * load.joined_iteration_s
        return max(0.0, expected_s - (load.now_s - self.since_s))

    def after_s(self, load: LoadView) -> float:
        """Return the seconds of the turns and pauses after it, one after the other."""
        pauses = max(0.0, self.later_turns - self.paused)
        computed_s = self.later_missing * load.facts.cost.token_s
        return pauses * self.pause_s + computed_s + self.later_outputs * load.joined_iteration_s


def _later(forecast: Forecast) -> tuple[float, float, float]:
    """Return the output of a turn, the tokens of all later turns, and the outputs among these."""
    output, later = max(0.0, forecast.output_tokens), max(0.0, forecast.later_tokens)
    return output, later, min(later, max(0.0, forecast.later_turns) * output)


NOTHING_AHEAD = Ahead(0.0)
NO_WORK = Work()


@dataclass(slots=True, eq=False)
class _Node:
    key: str
    parent: "_Node | None" = None
    children: "dict[str, _Node]" = field(default_factory=dict)
    """Children whose end the pause waits for."""
    ahead: Ahead = NOTHING_AHEAD
    own: Work = NO_WORK
    total: Work = NO_WORK
    """Work of the program and of all below it."""
    last_end_s: float | None = None
    """Time at which the last child of this pause ended. None: none has."""
    turn_ids: set[str] = field(default_factory=set)
    """Ids of the turns that have arrived and have not ended."""
    arrivals: int = 0
    """Number of turns that have arrived."""
    left: tuple[str, int] | None = None
    """The parent from which it was detached because its turn was aborted, and ``arrivals`` of the parent then."""
    is_here: bool = False
    """Whether the program has had a turn here. Else only its children are known."""


class ProgramTrees:
    """The trees of the programs of one replica, most of which have one program."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        self._changed: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    # --- events -------------------------------------------------------------------------------------------------------

    def turn_arrived(
        self, key: str, turn_id: str, ahead: Ahead, parent: str | None = None, *, starts: bool = True
    ) -> None:
        """Record a turn. The program waits for none of its children any more.

        It becomes a child if it starts, or is one again after an abort if its parent has had no turn since.

        Args:
            key: its program.
            turn_id: its request.
            ahead: what is ahead of the program from now on.
            parent: the parent that its request names.
            starts: whether it is the program's first turn here.
        """
        node = self._nodes.setdefault(key, _Node(key))
        node.is_here, node.last_end_s = True, None
        node.arrivals += 1
        for child in list(node.children.values()):
            self._detach(child)
        node.turn_ids.add(turn_id)
        self._expect(node, ahead)
        left, node.left = node.left, None
        if parent is not None and (starts or self._waits_still(left, parent)):
            self._attach(node, parent)

    def _waits_still(self, left: tuple[str, int] | None, parent: str) -> bool:
        """Return whether a parent from which a program was detached has had no turn since, as far as it is known."""
        above = self._nodes.get(parent)
        return left is not None and left == (parent, left[1] if above is None else above.arrivals)

    def turn_ended(self, key: str, turn_id: str) -> None:
        """Record the end of a turn."""
        if (node := self._nodes.get(key)) is not None:
            node.turn_ids.discard(turn_id)

    def paused(self, key: str, ahead: Ahead) -> None:
        """Record what is ahead of a program whose last turn in flight has ended."""
        if (node := self._nodes.get(key)) is not None:
            self._expect(node, ahead)

    def answered(self, key: str, now_s: float) -> str | None:
        """Record that a program has called no tool: nobody but its parent is there to answer it, so that it has ended.

        A program with another turn in flight has not ended.

        Returns:
            The parent, if this was the last of its children. None: there is none, or it waits for others.
        """
        node = self._nodes.get(key)
        above = node.parent if node is not None else None
        if node is None or above is None or node.turn_ids:
            return None
        above.last_end_s = now_s
        self._detach(node)
        return above.key if above.is_here and not above.children else None

    def aborted(self, key: str, now_s: float) -> None:
        """Record that a turn of a program was aborted. Its parent does not wait for it until it has a turn again.

        This is no answer. The parent may have to wait for the same work once more.
        """
        if (node := self._nodes.get(key)) is None or node.parent is None or node.turn_ids:
            return
        node.left = (node.parent.key, node.parent.arrivals)
        self.answered(key, now_s)

    def forget(self, key: str, now_s: float) -> str | None:
        """Remove a program that has ended. Return its parent as :meth:`answered` does."""
        if (node := self._nodes.get(key)) is not None:
            node.turn_ids.clear()
        parent = self.answered(key, now_s)
        if node is not None:
            for child in list(node.children.values()):
                self._detach(child)
            self._nodes.pop(key, None)
        return parent

    # --- what is known ------------------------------------------------------------------------------------------------

    def view(self, key: str) -> TreeView | None:
        """Return what a policy sees of a program's tree. None: it is alone."""
        node = self._nodes.get(key)
        if node is None or (node.parent is None and not node.children):
            return None
        return TreeView(_root(node).total - node.own)

    def children_s(self, key: str, load: LoadView) -> float | None:
        """Return the seconds that the children of a pause are expected to take from now on. None: it has none.

        After the end of the last child, the pause is expected to last as long again as it has lasted since.
        """
        node = self._nodes.get(key)
        if node is None:
            return None
        if node.children:
            return max(LEAST_S, *(_left_s(child, load) for child in node.children.values()))
        return None if node.last_end_s is None else max(LEAST_S, load.now_s - node.last_end_s)

    def take_changed_turns(self) -> Collection[str]:
        """Return the turns in flight whose trees have changed since the last call, as their ranks depend on them."""
        changed, self._changed = self._changed, {}
        return changed

    def check_integrity(self) -> None:
        """Raise IntegrityError unless sums, links and nodes agree."""
        for key, node in self._nodes.items():
            total = node.own
            for child in node.children.values():
                if child.parent is not node or self._nodes.get(child.key) is not child:
                    raise IntegrityError(f"{child.key} is a child of {key}, but not linked to it")
                total += child.total
            if not (node.is_here or node.children):
                raise IntegrityError(f"{key} has a node, but neither turns nor children")
            if not total.is_close(node.total):
                raise IntegrityError(f"{key}: {total} is ahead of it and of those below it, but it counts {node.total}")

    # --- nodes --------------------------------------------------------------------------------------------------------

    def _expect(self, node: _Node, ahead: Ahead) -> None:
        self._add(node, ahead.work - node.own)
        node.ahead, node.own = ahead, ahead.work

    def _add(self, node: _Node, work: Work) -> None:
        for each in _upwards(node):
            each.total += work
        root = _root(node)
        if root.children:
            self._changed.update((turn_id, None) for each in _family(root) for turn_id in each.turn_ids)

    def _attach(self, node: _Node, parent: str) -> None:
        """Make a program a child, if its parent has no turn in flight. Its own descendants cannot be its parent."""
        self._detach(node)
        above = self._nodes.setdefault(parent, _Node(parent))
        line = list(_upwards(above))
        if above.turn_ids or node in line or len(line) >= MAX_DEPTH:
            return
        node.parent, above.children[node.key] = above, node
        self._add(above, node.total)

    def _detach(self, node: _Node) -> None:
        above, node.parent = node.parent, None
        if above is None:
            return
        del above.children[node.key]
        self._add(above, NO_WORK - node.total)
        self._changed.update(dict.fromkeys(node.turn_ids))
        if not above.is_here and not above.children:
            self._detach(above)
            self._nodes.pop(above.key, None)


def _left_s(node: _Node, load: LoadView) -> float:
    """Return the seconds until a program ends, on the longest way through those below it."""
    below_s = max((_left_s(child, load) for child in node.children.values()), default=None)
    return (node.ahead.left_s(load) if below_s is None else below_s) + node.ahead.after_s(load)


def _upwards(node: _Node) -> Iterator[_Node]:
    above: _Node | None = node
    while above is not None:
        yield above
        above = above.parent


def _root(node: _Node) -> _Node:
    *_, root = _upwards(node)
    return root


def _family(node: _Node) -> Iterator[_Node]:
    yield node
    for child in node.children.values():
        yield from _family(child)
