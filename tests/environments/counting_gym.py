"""A stand-in for NeMo-Gym's ``example_session_state_mgmt``, run as a program with a port.

As that one, it takes the cookie of any predecessor, counts from 0 where it knows none, and grades 0.
"""

import sys
import uuid

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

COOKIE = "session"
counts: dict[str, int] = {}


async def answer(request: Request) -> JSONResponse:
    body, path = await request.json(), request.url.path
    session = request.cookies.get(COOKIE) or uuid.uuid4().hex
    content: dict[str, object] = {}
    if path == "/seed_session":
        counts[session] = body["initial_count"]
    elif path == "/increment_counter":
        counts[session] = counts.get(session, 0) + body["count"]
        content = {"success": True}
    elif path == "/get_counter_value":
        content = {"count": counts.get(session, 0)}
    elif path == "/verify":
        content = {"reward": float(counts.get(session) == body["expected_count"])}
    response = JSONResponse(content)
    response.set_cookie(COOKIE, session)
    return response


if __name__ == "__main__":
    routes = [Route("/{name}", answer, methods=["POST"])]
    uvicorn.run(Starlette(routes=routes), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
