"""Routes about where sessions are computed: nodes, and the engines that they use."""

from __future__ import annotations

from starlette.responses import Response
from starlette.routing import Route

from bridle.errors import ConfigError
from bridle.gateway.weights import AddReplica
from bridle.server.answering import Asked, Refusal, Served, reply, route
from bridle.server.auth import Role


def routes(served: Served) -> list[Route]:
    drain_s = {"type": "integer", "minimum": 0, "maximum": 3600, "default": 0}
    return [
        route(served, "GET", "/v1/nodes", Role.READ, show_nodes),
        route(served, "POST", "/v1/nodes/{name}/drain", Role.ADMIN, drain_node),
        route(served, "POST", "/v1/replicas", Role.ADMIN, add_replica, body=AddReplica),
        route(
            served,
            "DELETE",
            "/v1/replicas",
            Role.ADMIN,
            remove_replica,
            query={"name": {"type": "string"}, "drain_s": drain_s},
        ),
    ]


async def show_nodes(asked: Asked) -> Response:
    """`GET /v1/nodes`: which nodes there are, their slots, and what they do."""
    return reply({"nodes": asked.service.workers.nodes()})


async def drain_node(asked: Asked) -> Response:
    """`POST /v1/nodes/{name}/drain`: no further session there; it leaves when its last has ended.

    `name` is its name or its `node_id`.
    """
    try:
        await asked.service.workers.drain_node(asked.path("name"))
    except ConfigError as error:
        raise Refusal(404, "not_found", str(error), param="name") from error
    return await show_nodes(asked)


async def add_replica(asked: Asked) -> Response:
    """`POST /v1/replicas`: a server joins the policy's engines, on every node."""
    wanted = await asked.body(AddReplica)
    await asked.service.workers.add_replica(wanted.engine)
    return await show_nodes(asked)


async def remove_replica(asked: Asked) -> Response:
    """`DELETE /v1/replicas?name=&drain_s=`: a server leaves them, its calls after `drain_s`."""
    name = asked.query("name")
    if not name:
        raise Refusal(422, "invalid", "name: the replica to remove", param="name")
    drain_s = asked.number("drain_s", 0, most=3600)
    try:
        await asked.service.workers.remove_replica(name, float(drain_s))
    except ConfigError as error:
        raise Refusal(404, "not_found", str(error), param="name") from error
    return await show_nodes(asked)
