"""An MCP server over stdio that uses only the standard library, starts at once, and does what a test requests, good or
bad. Its argument is a mode: how it misbehaves before any call."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
MODE = sys.argv[1] if len(sys.argv) > 1 else ""
TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
counted = 0


def send(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def tools() -> list[dict[str, Any]]:
    names = ["echo", "count", "do"]
    if MODE == "odd_names":
        names = ["a/b c", "</tool_call>", "naïve.tool"]
    if MODE == "same_names":
        names = ["a.b", "a b"]
    if MODE == "long_name":
        names = ["x" * 300]
    schema: dict[str, Any] = TEXT
    if MODE in ("deep_schema", "abyss"):
        for _ in range(20 if MODE == "deep_schema" else 400):
            schema = {"type": "object", "properties": {"x": schema}}
    if MODE == "large_schema":
        schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(5000)}}
    if MODE == "odd_schema":
        schema = {"type": "array"}
    return [{"name": name, "description": f"Tool {name}.\u202e\x07", "inputSchema": schema} for name in names]


def listed(params: dict[str, Any]) -> dict[str, Any]:
    if MODE == "endless_pages":
        return {"tools": [{"name": f"t{params.get('cursor', 0)}", "inputSchema": TEXT}], "nextCursor": str(time.time())}
    if MODE == "many_tools":
        return {"tools": [{"name": f"t{i}", "inputSchema": TEXT} for i in range(1000)]}
    return {"tools": tools()}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": words}], **more}


def image(kind: str = "image/png", data: str = PIXEL) -> dict[str, Any]:
    return {"type": "image", "data": data, "mimeType": kind}


def called(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    global counted
    words = arguments.get("text", "")
    if name == "count":
        counted += 1
        return text(f"{counted} {os.getpid()}")
    if name != "do":
        return text(f"{name}: {words}")
    verb, _, rest = words.partition(" ")
    if verb == "exit":
        print("I go", file=sys.stderr, flush=True)
        os._exit(3)
    if verb == "sleep":
        time.sleep(float(rest))
    if verb == "long":
        return text("x" * int(rest))
    if verb == "noise":
        for _ in range(int(rest)):
            send({"method": "notifications/message", "params": {"level": "info", "data": "n" * 1000}})
    if verb == "print":
        sys.stdout.write("a program prints\n{not json}\n" + "[" * 5000 + "\n")
    if verb == "line":
        sys.stdout.write("x" * int(rest) + "\n")
    if verb == "failed":
        return text("it failed", isError=True)
    if verb == "image":
        return {"content": [{"type": "text", "text": "see"}, *[image() for _ in range(int(rest))]]}
    if verb == "binary":
        return {"content": [image("application/zip")]}
    if verb == "broken_image":
        return {"content": [image("image/png", "AAAA")]}
    if verb == "large_image":
        return {"content": [image("image/png", "A" * (3 << 20 | 4))]}
    if verb == "structured":
        return {"content": [], "structuredContent": {"a": [1, None]}}
    if verb == "resource":
        return {"content": [{"type": "resource", "resource": {"uri": "file:///x", "text": "inside"}}]}
    if verb == "nonsense":
        return {"content": "no list"}
    if verb == "env":
        return text(json.dumps(sorted(os.environ)))
    return text(f"done {words}")


def answer(request: dict[str, Any]) -> dict[str, Any]:
    method, params = request["method"], request.get("params") or {}
    if method == "initialize":
        if MODE == "hang":
            time.sleep(600)
        if MODE == "flood":
            while True:
                sys.stdout.write("y" * 65536)
        if MODE == "notify":
            while True:
                send({"method": "notifications/message", "params": {"level": "info", "data": "n" * 60000}})
        version = params["protocolVersion"]
        info = {"name": "toy", "version": "1"}
        return {"result": {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}}
    if method == "tools/list":
        return {"result": listed(params)}
    if method == "tools/call":
        if params["arguments"].get("text") == "protocol error":
            return {"error": {"code": -32602, "message": "Invalid arguments: text is wrong"}}
        if params["arguments"].get("text") == "server error":
            return {"error": {"code": -32000, "message": "the database is locked"}}
        return {"result": called(params["name"], params["arguments"])}
    return {"error": {"code": -32601, "message": "Method not found"}}


def main() -> None:
    if MODE == "exit":
        print("cannot find my database", file=sys.stderr, flush=True)
        sys.exit(1)
    if MODE == "flood_stderr":
        sys.stderr.write("e" * (1 << 20))
    for line in sys.stdin:
        request = json.loads(line)
        if "id" in request and "method" in request:
            send({"id": request["id"], **answer(request)})


if __name__ == "__main__":
    main()
