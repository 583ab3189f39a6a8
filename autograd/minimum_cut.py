"""Minimum cuts of networks, by the algorithm of Dinitz.

SciPy has it, too, and takes a quarter of a second to import: longer than it takes to
compile most derivatives, of which each has networks of tens or hundreds of nodes.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise


def sink_side(
    capacities: Mapping[tuple[int, int], int], source: int, sink: int
) -> set[int]:
    """Return the nodes on the sink's side of a minimum cut: of all minimum cuts the one
    that has fewest of them.

    They are those from which the sink can be reached when no more flow can be added
    (L. R. Ford and D. R. Fulkerson, "Maximal Flow through a Network", 1956). Flow is
    added along shortest paths, all paths of one length at a time (E. A. Dinic, 1970).

    Args:
        capacities: By edge, as `(from, to)`, its capacity.
    """
    network = _Network(capacities)
    while (distance := network.distances(sink)).get(source) is not None:
        network.fill(source, sink, distance)
    return set(distance)


class _Network:
    """What can still flow along each edge, and back along it.

    left  by node, its neighbours, and what can still flow to them
    """

    def __init__(self, capacities: Mapping[tuple[int, int], int]) -> None:
        self.left: dict[int, dict[int, int]] = {}
        for (start, end), capacity in capacities.items():
            to, back = self.left.setdefault(start, {}), self.left.setdefault(end, {})
            to[end] = to.get(end, 0) + capacity
            back.setdefault(start, 0)

    def distances(self, sink: int) -> dict[int, int]:
        """Return how many edges lie between a node and the sink, of the nodes from
        which more can flow there."""
        distance = {sink: 0}
        for node in (reached := [sink]):
            for other in self.left.get(node, ()):
                if other not in distance and self.left[other][node] > 0:
                    distance[other] = distance[node] + 1
                    reached.append(other)
        return distance

    def fill(self, source: int, sink: int, distance: Mapping[int, int]) -> None:
        """Add as much flow as there can be along shortest paths to the sink."""
        untried = {node: [*self.left[node]] for node in distance}
        path = [source]
        while path:
            node = path[-1]
            if node == sink:
                del path[self._add(path) :]
                continue
            neighbours = untried[node]
            while neighbours:
                other = neighbours[-1]
                is_nearer = distance.get(other) == distance[node] - 1
                if is_nearer and self.left[node][other] > 0:
                    path.append(other)
                    break
                neighbours.pop()
            else:
                path.pop()
                if path:
                    untried[path[-1]].pop()

    def _add(self, path: Sequence[int]) -> int:
        """Add as much flow as there can be along a path; return the number of nodes
        before the first edge that is full then."""
        edges = [*pairwise(path)]
        flow = min(self.left[start][end] for start, end in edges)
        for start, end in edges:
            self.left[start][end] -= flow
            self.left[end][start] += flow
        return next(k for k, (a, b) in enumerate(edges, 1) if self.left[a][b] == 0)
