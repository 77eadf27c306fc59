"""Episodes of MiniWoB's click-test by browsergym-miniwob, for `browser.py`: run by the Python that has it.

Arguments: folder of the pages, chromium, number of episodes, number of processes. Prints seconds and solved episodes of
each process as JSON; the clock starts when all are ready.
"""

import json
import multiprocessing
import os
import re
import sys
import time


def play(episodes, barrier, results):
    """One process: one environment, as BrowserGym has one Playwright a process."""
    import browsergym.miniwob  # noqa: F401 - registers the environments
    import gymnasium
    from browsergym.utils.obs import flatten_axtree_to_str
    from playwright.sync_api import BrowserType

    # BrowserGym starts a second chromium for its chat, whose program cannot be set otherwise.
    launch = BrowserType.launch
    BrowserType.launch = lambda self, **how: launch(self, **how, executable_path=os.environ["CHROMIUM"])
    env = gymnasium.make("browsergym/miniwob.click-test", headless=True)
    env.reset(seed=0)
    barrier.wait(120)
    began, solved = time.monotonic(), 0
    for seed in range(episodes):
        observation, _ = env.reset(seed=seed)
        button = re.search(r"\[(\d+)\] button", flatten_axtree_to_str(observation["axtree_object"]))
        _, reward, _, _, _ = env.step(f'click("{button[1]}")')
        solved += reward > 0
    results.put((time.monotonic() - began, solved))
    env.close()


def main():
    """Start the processes, and print what they did."""
    folder, chromium, episodes, processes = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    os.environ["CHROMIUM"] = chromium
    os.environ["MINIWOB_URL"] = f"file://{folder}/miniwob/"
    spawned = multiprocessing.get_context("spawn")
    barrier, results = spawned.Barrier(processes), spawned.Queue()
    share = [episodes // processes] * processes
    workers = [spawned.Process(target=play, args=(count, barrier, results)) for count in share]
    for worker in workers:
        worker.start()
    print(json.dumps([results.get(timeout=300) for _ in workers]))
    for worker in workers:
        worker.join(60)


if __name__ == "__main__":
    main()
