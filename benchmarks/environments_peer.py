"""Play episodes with a package's own client. Run by an interpreter that has the package; prints steps a second, and the
CPU time of this process for a step in milliseconds.

Arguments: name of the package, address of its server, row or action as JSON, episodes at once, rounds, steps.
"""

# mypy: ignore-errors
import asyncio
import json
import sys
import time


async def openenv(url, row, steps):
    from openenv.core.generic_client import GenericEnvClient

    async with GenericEnvClient(base_url=url) as client:
        await client.reset(seed=row["seed"])
        for _ in range(steps):
            await client.step({"guess": "x"})


async def nemo_gym(url, row, steps):
    from nemo_gym import server_utils

    if not server_utils.is_global_aiohttp_client_setup():
        server_utils.set_global_aiohttp_client(server_utils.GlobalAIOHTTPAsyncClientConfig())
    cookies = None

    async def post(path, body):
        nonlocal cookies
        response = await server_utils.request("POST", f"{url}{path}", _internal=True, json=body, cookies=cookies)
        await response.read()
        cookies = {**(cookies or {}), **{name: morsel.value for name, morsel in response.cookies.items()}}

    await post("/seed_session", row["row"])
    for _ in range(steps):
        await post("/increment_counter", {"count": 1})


async def measure(play, url, row, episodes, rounds, steps):
    await play(url, row, 1)
    began, used = time.perf_counter(), time.process_time()
    for _ in range(rounds):
        await asyncio.gather(*(play(url, row, steps) for _ in range(episodes)))
    total = episodes * rounds * steps
    return total / (time.perf_counter() - began), 1000 * (time.process_time() - used) / total


if __name__ == "__main__":
    name, url, row, *numbers = sys.argv[1:]
    play = {"openenv": openenv, "nemo_gym": nemo_gym}[name]
    print(*asyncio.run(measure(play, url, json.loads(row), *map(int, numbers))), flush=True)
