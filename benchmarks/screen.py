"""A short look at many loaders in one process: `python -m benchmarks.screen REQUESTS`, JSON of a list of requests.

Prints a line of JSON for each, in their order and as soon as it is known: the batches per second, or why there are
none. It only serves to leave out those that cannot be the best, so that they need not have a process each.
"""

import gc
import json
import sys

from benchmarks.measure import Request, course


def screened(request: Request) -> float | str:
    """Batches per second, or the error."""
    try:
        return course(request).rate
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        gc.collect()


if __name__ == "__main__":
    for text in json.loads(sys.argv[1]):
        print(json.dumps(screened(Request.from_json(text))), flush=True)
