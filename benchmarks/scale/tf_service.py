"""tf.data service on the same work: a dispatcher, and a worker process for each node with as many streams.

It runs under the interpreter of ``--tensorflow``. A wait is an operation of TensorFlow's own, and takes no CPU.
"""

import json
import os
import subprocess
import sys
import time
from typing import Any

os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
BATCH = 16


def serve(dispatcher: str) -> None:
    """Be a worker of the service until this process is ended."""
    import tensorflow as tf

    service = tf.data.experimental.service
    service.WorkerServer(service.WorkerConfig(dispatcher_address=dispatcher)).join()


def measure(nodes: int, streams: int, wait_s: float, seconds: float) -> dict[str, Any]:
    """Return first batch, rate of the second half, and CPU of this thread, as `benchmarks.scale.course`."""
    import tensorflow as tf
    from tensorflow.python.data.experimental.ops import testing

    service = tf.data.experimental.service
    dispatcher = service.DispatchServer()
    address = dispatcher.target.split("://")[1]
    workers = [subprocess.Popen([sys.executable, __file__, "serve", address]) for _ in range(nodes)]
    try:
        while dispatcher._num_workers() < nodes:
            time.sleep(0.1)
        began = time.perf_counter()

        def batches(_: Any) -> Any:
            made = tf.data.Dataset.range(10**6).apply(testing.sleep(int(wait_s * 1e6)))
            return made.map(lambda number: tf.fill((BATCH, 8), number))

        data = tf.data.Dataset.range(10**6).interleave(
            batches, cycle_length=streams, num_parallel_calls=streams, deterministic=False
        )
        mode = service.ShardingPolicy.DYNAMIC
        data = data.apply(service.distribute(processing_mode=mode, service=dispatcher.target))
        taken, half, count = data.prefetch(tf.data.AUTOTUNE).as_numpy_iterator(), (0.0, 0, 0.0), 1
        next(taken)
        first_s = time.perf_counter() - began
        while (now := time.perf_counter() - began) < seconds:
            next(taken)
            count += 1
            if not half[1] and now > seconds / 2:
                half = (now, count, time.thread_time())
        rate, cpu_s = (count - half[1]) / (now - half[0]), time.thread_time() - half[2]
        return {"first_s": first_s, "full_s": None, "rate": rate, "thread_us": 1e6 * cpu_s / (count - half[1])}
    finally:
        for worker in workers:
            worker.kill()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        print(json.dumps(measure(*json.loads(sys.argv[1]))), flush=True)
        os._exit(0)
