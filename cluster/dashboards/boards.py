"""All dashboards, in the order in which one reads them."""

from cluster.dashboards import agents, engine, memory, overview, predictor, ray_cluster, routing
from cluster.dashboards.board import Board

BOARDS: tuple[Board, ...] = tuple(
    module.BOARD for module in (overview, agents, memory, routing, predictor, engine, ray_cluster)
)
