"""A stand-in for a cluster's API server, for the real ``kubectl``: pods are local processes, as in `stand_in_kubectl`,
which also checks them. Streams pass by WebSocket (``v5.channel.k8s.io``).
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import stand_in_kubectl
from aiohttp import WSMsgType, web
from local_server import LocalServer
from stand_in_docker import MARK, remove

_PODS = "/api/v1/namespaces/trials/pods"
_POLICIES = "/apis/networking.k8s.io/v1/namespaces/trials/networkpolicies"
_STDIN, _STDOUT, _STDERR, _STATUS, _CLOSE = 0, 1, 2, 3, 255
_VERBS = ["create", "delete", "get", "list", "patch", "watch"]


class StandInCluster(LocalServer):
    """Pods of one namespace."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pods: dict[str, dict[str, Any]] = {}
        self.policies: dict[str, dict[str, Any]] = {}
        self._changed = asyncio.Condition()

    def write_config(self, path: Path) -> None:
        cluster = {"name": "c", "cluster": {"server": self.url}}
        context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
        users = [{"name": "u", "user": {"token": "t"}}]
        config = {"clusters": [cluster], "contexts": [context], "users": users, "current-context": "c"}
        path.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", **config}))

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/api", self._answer({"kind": "APIVersions", "versions": ["v1"]})),
            web.get("/apis", self._groups),
            web.get("/api/v1", self._resources("v1", "pods", "Pod")),
            web.get(
                "/apis/networking.k8s.io/v1",
                self._resources("networking.k8s.io/v1", "networkpolicies", "NetworkPolicy"),
            ),
            web.post(_PODS, self._create),
            web.get(_PODS, self._list),
            web.get(_PODS + "/{name}", self._get),
            web.delete(_PODS + "/{name}", self._delete),
            web.get(_PODS + "/{name}/attach", self._attach),
            web.get(_POLICIES, self._list_policies),
            web.get(_POLICIES + "/{name}", self._policy),
            web.post(_POLICIES, self._create_policy),
        ]

    @staticmethod
    def _answer(body: Any) -> Any:
        async def handle(_: web.Request) -> web.Response:
            return web.json_response(body)

        return handle

    async def _groups(self, _: web.Request) -> web.Response:
        version = {"groupVersion": "networking.k8s.io/v1", "version": "v1"}
        group = {"name": "networking.k8s.io", "versions": [version], "preferredVersion": version}
        return web.json_response({"kind": "APIGroupList", "apiVersion": "v1", "groups": [group]})

    def _resources(self, version: str, name: str, kind: str) -> Any:
        resource = {"name": name, "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": _VERBS}
        return self._answer({"kind": "APIResourceList", "groupVersion": version, "resources": [resource]})

    async def _create(self, request: web.Request) -> web.Response:
        pod = await request.json()
        name = pod["metadata"]["name"]
        status = {"name": name, "ready": True, "state": {"running": {}}}
        ready = {"type": "Ready", "status": "True"}
        pod["metadata"] |= {"namespace": "trials", "uid": name, "resourceVersion": "1"}
        pod["status"] = {"phase": "Running", "containerStatuses": [status], "conditions": [ready]}
        self._pods[name] = pod
        (self._folder / name).mkdir()
        return web.json_response(pod, status=201)

    async def _list(self, request: web.Request) -> web.StreamResponse:
        name = request.query.get("fieldSelector", "").rpartition("=")[2]
        found = [pod for pod in self._pods.values() if name in ("", pod["metadata"]["name"])]
        if "watch" not in request.query:
            items = {"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": found}
            return web.json_response(items)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        for pod in found:
            await response.write(json.dumps({"type": "MODIFIED", "object": pod}).encode() + b"\n")
        async with self._changed:
            await self._changed.wait_for(lambda: any(pod["metadata"]["name"] not in self._pods for pod in found))
        for pod in found:
            await response.write(json.dumps({"type": "DELETED", "object": pod}).encode() + b"\n")
        return response

    async def _get(self, request: web.Request) -> web.Response:
        return _found(self._pods.get(request.match_info["name"]))

    async def _delete(self, request: web.Request) -> web.Response:
        pod = self._pods.pop(request.match_info["name"], None)
        await asyncio.to_thread(remove, self._folder / request.match_info["name"])
        async with self._changed:
            self._changed.notify_all()
        return _found(pod)

    async def _list_policies(self, _: web.Request) -> web.Response:
        kind = {"kind": "NetworkPolicyList", "apiVersion": "networking.k8s.io/v1"}
        items = list(self.policies.values())
        return web.json_response({**kind, "metadata": {"resourceVersion": "1"}, "items": items})

    async def _policy(self, request: web.Request) -> web.Response:
        return _found(self.policies.get(request.match_info["name"]))

    async def _create_policy(self, request: web.Request) -> web.Response:
        policy = await request.json()
        self.policies[policy["metadata"]["name"]] = policy
        return web.json_response(policy, status=201)

    async def _attach(self, request: web.Request) -> web.WebSocketResponse:
        pod = self._pods[request.match_info["name"]]
        name = pod["metadata"]["name"]
        socket = web.WebSocketResponse(protocols=["v5.channel.k8s.io"])
        await socket.prepare(request)
        environment = {"PATH": os.environ["PATH"], MARK: name}
        environment |= {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": "1"}
        process = await asyncio.create_subprocess_exec(
            *stand_in_kubectl.command_of(self._folder / name, pod["spec"]),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
        )
        assert process.stdin
        assert process.stdout
        assert process.stderr

        async def pass_on(reader: asyncio.StreamReader, channel: int) -> None:
            while data := await reader.read(1 << 15):
                await socket.send_bytes(bytes([channel]) + data)

        async def receive(stdin: asyncio.StreamWriter) -> None:
            async for message in socket:
                if message.type is WSMsgType.BINARY and message.data[0] == _STDIN:
                    stdin.write(message.data[1:])
                elif message.type is WSMsgType.BINARY and message.data == bytes([_CLOSE, _STDIN]):
                    break
            stdin.close()  # stdinOnce

        receiving = asyncio.ensure_future(receive(process.stdin))
        await asyncio.gather(pass_on(process.stdout, _STDOUT), pass_on(process.stderr, _STDERR))
        await process.wait()
        terminated = {"exitCode": process.returncode, "reason": "Completed"}
        pod["status"]["phase"] = "Succeeded"
        pod["status"]["containerStatuses"][0]["state"] = {"terminated": terminated}
        if not socket.closed:
            await socket.send_bytes(bytes([_STATUS]) + json.dumps({"status": "Success"}).encode())
        receiving.cancel()
        await socket.close()
        return socket


def _found(body: dict[str, Any] | None) -> web.Response:
    if body is None:
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
        return web.json_response({**status, "message": "not found"}, status=404)
    return web.json_response(body)
