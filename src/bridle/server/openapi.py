"""The description of the routes (OpenAPI 3.1), made from what serves them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from starlette.routing import Route

from bridle import __version__
from bridle.server.answering import Endpoint
from bridle.types import JSON

ERROR: Final[JSON] = {
    "type": "object",
    "required": ["error", "detail"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["code", "message", "param"],
            "properties": {
                "code": {"type": "string"},
                "message": {"type": "string"},
                "param": {"type": ["string", "null"]},
            },
        },
        "detail": {"type": "string"},
    },
}

REFUSALS: Final = {
    "400": "the body is no JSON",
    "401": "no known token",
    "403": "the token lacks the role",
    "404": "there is none of that name",
    "406": "none of the accepted types can be had",
    "409": "the id is taken by another body, or the session has nothing to score",
    "413": "the body is too large",
    "422": "a field is wrong; `param` names it",
    "429": "the owner has too many unfinished sessions, or this address sent too many wrong tokens",
    "502": "the engines did not do their part",
    "503": "the database or a file cannot be used now; try again",
}


def describe(routes: Sequence[Route]) -> JSON:
    schemas: JSON = {"Error": ERROR}
    paths: JSON = {}
    for one in routes:
        path = re.sub(r":path}", "}", one.path)
        for method in sorted((one.methods or set()) - {"HEAD"}):
            paths.setdefault(path, {})[method.lower()] = _operation(one, path, method, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Bridle rollout server", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "polar": {"type": "apiKey", "in": "header", "name": "x-polar-control-token"},
            },
        },
    }


def _operation(one: Route, path: str, method: str, schemas: JSON) -> JSON:
    endpoint = one.endpoint
    assert isinstance(endpoint, Endpoint)
    name = re.sub(r"\W+", "_", f"{method.lower()}{path}").strip("_")
    refused = {
        status: {"description": text, "content": _content({"$ref": "#/components/schemas/Error"})}
        for status, text in REFUSALS.items()
    }
    operation: JSON = {
        "operationId": name,
        "summary": endpoint.about,
        "security": [] if endpoint.is_open else [{"bearer": []}, {"polar": []}],
        "parameters": [*_in_path(path), *_in_query(endpoint)],
        "responses": {"200": {"description": "done"}, **refused},
    }
    if endpoint.body is not None:
        schema = endpoint.body.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(schema.pop("$defs", {}))
        schemas[endpoint.body.__name__] = schema
        ref = {"$ref": f"#/components/schemas/{endpoint.body.__name__}"}
        operation["requestBody"] = {"required": True, "content": _content(ref)}
    return operation


def _in_path(path: str) -> list[JSON]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", path)
    ]


def _in_query(endpoint: Endpoint) -> list[JSON]:
    return [
        {"name": name, "in": "query", "schema": schema} for name, schema in endpoint.query.items()
    ]


def _content(schema: JSON) -> JSON:
    return {"application/json": {"schema": schema}}
