"""Running the same work in several threads."""

from concurrent.futures import ThreadPoolExecutor

import torch


def run_in_threads(work, count=4):
    """Run `work(number)` in `count` threads at once without grad, and wait for all; raises what one of them raised."""
    with ThreadPoolExecutor(count) as threads:
        done = [threads.submit(torch.no_grad()(work), number) for number in range(count)]
    for one in done:
        one.result()
