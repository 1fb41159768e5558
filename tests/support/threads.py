"""Running the same work in several threads."""

from concurrent.futures import ThreadPoolExecutor


def run_in_threads(work, count=4):
    """Run `work(number)` in `count` threads at once, and wait for all of them; raises what one of them raised."""
    with ThreadPoolExecutor(count) as threads:
        done = [threads.submit(work, number) for number in range(count)]
    for one in done:
        one.result()
