"""A load of HTTP requests, for benchmarks of servers: clients that send their next request when they have an answer.

`python -m benchmarks.load PORT CLIENTS SECONDS FILE` reads the bodies of the requests from a pickle, and prints the
milliseconds of all. It is a process of its own, so that clients take no time of a server, and imports nothing large.
"""

import argparse
import json
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any


class Client:
    """Sends one request after another, over one connection."""

    def __init__(self, port: int) -> None:
        self.connection = HTTPConnection("127.0.0.1", port, timeout=120)

    def post(self, body: bytes) -> Any:
        """Return the answer to a request."""
        self.connection.request("POST", "/", body)
        response = self.connection.getresponse()
        answer = json.loads(response.read())
        if response.status != 200:
            raise RuntimeError(f"status {response.status}")
        return answer


def send(port: int, clients: int, seconds: float, bodies: list[bytes]) -> list[float]:
    """Send requests for so long, and return the milliseconds of each."""
    end = time.perf_counter() + seconds

    def run(number: int) -> list[float]:
        client, times = Client(port), []
        while (start := time.perf_counter()) < end:
            client.post(bodies[(number + len(times)) % len(bodies)])
            times.append((time.perf_counter() - start) * 1e3)
        return times

    with ThreadPoolExecutor(clients) as threads:
        return [one for part in threads.map(run, range(clients)) for one in part]


def main() -> None:
    """Send requests, and print their milliseconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("clients", type=int)
    parser.add_argument("seconds", type=float)
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    bodies = pickle.loads(options.file.read_bytes())
    print(json.dumps(send(options.port, options.clients, options.seconds, bodies)))


if __name__ == "__main__":
    main()
