"""Running the same work in several threads."""

import threading


def run_in_threads(work, count=4):
    """Run `work(number)` in `count` threads at once, and wait for all of them."""
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
